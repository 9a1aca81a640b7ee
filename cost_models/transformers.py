"""Shapes of the transformers that published recipes train, read strictly from `transformers.toml`."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..plans.errors import RequestError

__all__ = ["Transformer", "find_transformer", "load_transformers", "read_shape"]

# What follows the size in a name and changes no shape.
_TUNED = re.compile(r"([-_ ](instruct|base|chat|it|hf|pt|pretrain(ing)?|sft|v0\.\d))+$", re.IGNORECASE)
# How tables and configuration files call the counts of a shape.
_TOLD = {
    "layers": ("layers", "num_layers", "n_layers", "n_layer", "num_hidden_layers"),
    "hidden": ("hidden", "hidden_size", "d_model", "dim", "n_embd"),
    "heads": ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads"),
    "kv_heads": ("kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"),
    "head_dim": ("head_dim",),
    "ffn": ("ffn", "ffn_dim", "ffn_hidden_size", "intermediate_size"),
    "vocab": ("vocab", "vocab_size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """One decoder: widths and counts as in its configuration file.

    Fields that are 0 do not apply: `experts` of `expert_ffn` on `expert_hidden`, latent attention (`q_rank`, `kv_rank`,
    ...), mamba blocks, a sliding `window` in every `window_every`th layer, multi-token prediction (`mtp_layers`).
    """

    match: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    source: str
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    positions: bool = False
    attention_layers: int = -1
    dense_layers: int = -1
    moe_layers: int = 0
    mamba_layers: int = 0
    experts: int = 0
    experts_active: int = 0
    expert_ffn: int = 0
    expert_hidden: int = 0
    expert_bias: bool = False
    shared_ffn: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state: int = 0
    mamba_groups: int = 0
    window: int = 0
    window_every: int = 0
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "expert_hidden", self.expert_hidden or self.hidden)
        if self.attention_layers < 0:
            object.__setattr__(self, "attention_layers", self.layers)
        if self.dense_layers < 0:
            object.__setattr__(self, "dense_layers", self.layers)

    @property
    def is_moe(self) -> bool:
        """Whether some blocks have experts."""
        return self.moe_layers > 0

    @property
    def ffn_products(self) -> int:
        """Inner products of a feed-forward before the last one: 2 when gated."""
        return 2 if self.gated else 1

    def attention_parameters(self) -> int:
        """Weights of one attention block."""
        if self.kv_rank:
            asked = self.heads * (self.nope_dim + self.rope_dim)
            queries = self.q_rank * (self.hidden + asked) if self.q_rank else self.hidden * asked
            keys = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (
                self.nope_dim + self.value_dim
            )
            return queries + keys + self.heads * self.value_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def mamba_parameters(self) -> int:
        """Weights of one mamba block."""
        inner = self.mamba_heads * self.mamba_head_dim
        return self.hidden * (3 * inner + 2 * self.mamba_groups * self.mamba_state + self.mamba_heads)

    def ffn_parameters(self, width: int, hidden: int = 0) -> int:
        """Weights of one feed-forward of inner `width`."""
        return (self.ffn_products + 1) * (hidden or self.hidden) * width

    def expert_parameters(self) -> int:
        """Weights of all experts of one block."""
        return self.experts * self.ffn_parameters(self.expert_ffn, self.expert_hidden)

    def shared_parameters(self) -> int:
        """Weights of one expert block outside its experts."""
        latent = 2 * self.hidden * self.expert_hidden if self.expert_hidden != self.hidden else 0
        return self.hidden * self.experts + self.ffn_parameters(self.shared_ffn) + latent

    def block_parameters(self) -> int:
        """Weights of all blocks but the experts."""
        return (
            self.attention_layers * self.attention_parameters()
            + self.mamba_layers * self.mamba_parameters()
            + self.dense_layers * self.ffn_parameters(self.ffn)
            + self.moe_layers * self.shared_parameters()
        )

    def embedding_parameters(self) -> int:
        """Weights of the embedding and, where untied, of the output."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    def parameters(self) -> int:
        """All weights; norms, biases and positions are left out."""
        return self.block_parameters() + self.moe_layers * self.expert_parameters() + self.embedding_parameters()

    def flops_per_token(self, seq_len: int) -> float:
        """FLOP of a training step per token by the usual count: 6 per active weight, 12 per score, half masked."""
        active = self.block_parameters() + self.vocab * self.hidden
        if self.is_moe:
            active += self.moe_layers * self.experts_active * self.ffn_parameters(self.expert_ffn, self.expert_hidden)
        return 6.0 * active + 6.0 * self.attention_layers * seq_len * self.heads * self.head_dim


def load_transformers(text: str | None = None) -> tuple[Transformer, ...]:
    """The shapes in `text`, or the shipped ones; RequestError names the unknown or missing key."""
    if text is None:
        folder = resources.files(__package__ or "meshwright.cost_models")
        text = (folder / "transformers.toml").read_text(encoding="utf-8")
    known = {field.name: field for field in dataclasses.fields(Transformer)}
    needed = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    shapes: list[Transformer] = []
    for entry in tomllib.loads(text)["model"]:
        if not needed <= set(entry) <= set(known):
            wrong = sorted((set(entry) - set(known)) | (needed - set(entry)))
            raise RequestError(f"'model' must have the keys of Transformer, got {wrong} unknown or missing; correct it")
        shapes.append(Transformer(**entry))
    return tuple(shapes)


def find_transformer(shapes: tuple[Transformer, ...], name: str) -> Transformer | None:
    """The shape of the model called `name`, or None; who publishes it and what it was tuned for do not matter."""
    plain = re.sub(r"\(.*?\)", "", name).strip().rpartition("/")[2]
    plain = _TUNED.sub("", re.sub(r"\s+", " ", plain))
    return next((shape for shape in shapes if re.fullmatch(shape.match, plain, re.IGNORECASE)), None)


def read_shape(note: str, source: str) -> Transformer | None:
    """A shape told in words ('heads=16 hidden=2048 layers=24 vocab=131072'), ungated and four times as wide inside
    unless they say otherwise ('ffn=', 'gated')."""
    told = {key.lower(): int(value) for key, value in re.findall(r"(\w+)\s*[=:]\s*(\d{1,9})\b", note)}
    found = {name: next((told[key] for key in keys if told.get(key)), 0) for name, keys in _TOLD.items()}
    if not all(found[key] for key in ("layers", "hidden", "heads", "vocab")):
        return None
    if found["hidden"] % found["heads"] and not found["head_dim"]:
        return None
    gated = re.search(r"\b(gated|swiglu|geglu)\b", note, re.IGNORECASE) is not None
    found["ffn"] = found["ffn"] or 4 * found["hidden"]
    shape: dict[str, Any] = {**found, "gated": gated}
    return Transformer(match=".*", source=source, **shape)
