"""Peak memory of a training recipe on one device, by parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .stacks import Stack
from .systems import System
from .transformers import Transformer

if TYPE_CHECKING:
    from .recipes import Recipe

__all__ = ["RecipeMemory", "recipe_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeMemory:
    """Bytes on the fullest device: weights, gradients and optimizer; saved activations; the loss; what is constant."""

    state_bytes: float
    gathered_bytes: float
    activation_bytes: float
    loss_bytes: float
    constant_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.state_bytes + self.gathered_bytes + self.activation_bytes + self.loss_bytes + self.constant_bytes


def recipe_memory(model: Transformer, recipe: Recipe, system: System, stack: Stack) -> RecipeMemory:
    """Peak bytes under `recipe`: Adam in float32, activations in bfloat16."""
    experts = model.moe_layers * model.expert_parameters()
    dense = (model.parameters() - experts) / (recipe.tp * recipe.pp)
    held = dense + experts / (recipe.ep * recipe.pp)
    replicas = recipe.dp * recipe.cp
    if recipe.shard == "full":
        state = 16.0 * held / (recipe.shard_group or replicas)
    elif recipe.shard == "none":
        state = 18.0 * held
    else:
        state = 6.0 * held + 12.0 * held / replicas
    gathered = 0.0
    if recipe.shard == "full":  # two layers at a time; under a pipeline weights and gradients stay whole for the step
        gathered = 6.0 * held if recipe.pp > 1 else 2.0 * 2.0 * held / model.layers
    return RecipeMemory(
        state_bytes=state,
        gathered_bytes=gathered,
        activation_bytes=_activations(model, recipe, stack),
        loss_bytes=recipe.tokens * model.vocab / recipe.tp * stack.loss_saved_bytes,
        constant_bytes=float(system.device.framework_constant_bytes),
    )


def _activations(model: Transformer, recipe: Recipe, stack: Stack) -> float:
    """What the forward keeps: of every layer its input; without full recomputation what its backward reads."""
    parallel = recipe.tp if recipe.sequence_parallel else 1
    tokens, width = recipe.tokens, model.heads * model.head_dim
    rows = 2.0 * tokens * model.hidden / parallel
    inner = 2.0 * tokens * (2 * width + 2 * model.kv_heads * model.head_dim) / recipe.tp
    ffn = 2.0 * tokens * model.ffn * (1 + model.ffn_products) / recipe.tp
    # Two norms keep what they read and write (arXiv:2205.05198, without dropout); RMSNorm of ops its float32 too.
    whole = (6.0 if model.gated else 4.0) * rows + inner + ffn
    layers = model.layers / recipe.pp
    flights = min(recipe.steps, recipe.pp) if recipe.pp > 1 else 1
    flights *= 1.0 + (recipe.pp - 1) / (recipe.pp * recipe.virtual) if recipe.virtual > 1 else 1.0
    held = flights * 2.0 * tokens * model.hidden if recipe.pp > 1 and recipe.shard == "full" else 0.0
    if recipe.recompute == "full":
        return layers * flights * rows + whole + held
    share = stack.selective_saved if recipe.recompute == "selective" else 1.0
    return layers * flights * whole * share + held
