"""The blocks of a transformer as one device sees them under a recipe: products, attention, bytes and collectives.

Widths are divided by the tensor-parallel degree, tokens by the context-parallel one. What a stack does in a block
beside its products is counted in bytes that elementwise ops move and in kernels; see `stacks.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .stacks import Stack
from .transformers import Transformer

if TYPE_CHECKING:
    from .recipes import Recipe

__all__ = ["Block", "Collective", "Product", "model_blocks"]

_Shape = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`batch` products of (m, k) by (k, n), each with two of its size in the backward."""

    m: float
    n: float
    k: float
    batch: float = 1.0
    low_precision: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective of a block: how often in the forward and in the backward; `role` names what may hide it."""

    role: str
    kind: str
    size_bytes: float
    members: int
    stride: int
    forward: float
    backward: float
    count: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of block: `count` of them in the model. Bytes are of one forward pass on one device.

    `moved_bytes` is what elementwise ops pass through memory by count, `fixed_bytes` what no stack fuses, `cast_bytes`
    the operands that are cast to a low precision; `kernels` counts launches of a forward; `repeats`: whether
    recomputation covers it. `parameters` are per tensor-parallel device, `expert_parameters` per expert-parallel one.
    """

    name: str
    count: float
    products: tuple[Product, ...]
    moved_bytes: float
    kernels: float
    attention: _Shape | None = None
    attention_count: float = 1.0
    window_shape: _Shape | None = None
    fixed_bytes: float = 0.0
    cast_bytes: float = 0.0
    collectives: tuple[Collective, ...] = field(default=())
    parameters: float = 0.0
    expert_parameters: float = 0.0
    repeats: bool = True


def model_blocks(
    model: Transformer, recipe: Recipe, stack: Stack, devices_per_node: int
) -> tuple[list[Block], list[Block]]:
    """The blocks of the model and, apart, embedding and loss, which only one pipeline stage has."""
    extra = 0 if recipe.skip_mtp else model.mtp_layers
    blocks = [_attention(model, recipe, stack, model.attention_layers + extra)]
    if model.mamba_layers:
        blocks.append(_mamba(model, recipe, stack))
    if model.dense_layers:
        blocks.append(_dense(model, recipe, stack))
    if model.moe_layers:
        blocks.append(_experts(model, recipe, stack, model.moe_layers + extra, devices_per_node))
    return blocks, [_loss(model, recipe, stack, 1 + extra)]


def _elementwise(stack: Stack, recipe: Recipe) -> Mapping[str, float]:
    """Bytes per element of each kind of elementwise op."""
    return stack.elementwise["fused" if recipe.compiled else "eager"]


def _around(model: Transformer, recipe: Recipe, stack: Stack) -> float:
    """Bytes that a block's norm and residual addition move."""
    each = _elementwise(stack, recipe)
    rows = recipe.tokens / (recipe.tp if recipe.sequence_parallel else 1)
    return rows * model.hidden * (each["rms_norm" if model.gated else "layer_norm"] + each["residual"])


def _activation(model: Transformer, recipe: Recipe, stack: Stack) -> float:
    """Bytes per element of a feed-forward's inner width that its activation moves."""
    return _elementwise(stack, recipe)["gated" if model.gated else "gelu"]


def _split(recipe: Recipe, hidden: int) -> tuple[Collective, ...]:
    """One gather and one reduction per direction around a tensor-parallel pair of products."""
    if recipe.tp == 1:
        return ()
    size = recipe.tokens * hidden * 2.0
    if recipe.sequence_parallel:
        return (_over_tp("all_gather", size, recipe, 2), _over_tp("reduce_scatter", size, recipe, 1))
    return (_over_tp("all_reduce", size, recipe, 1),)


def _over_tp(kind: str, size: float, recipe: Recipe, backward: int) -> Collective:
    return Collective(role="tp", kind=kind, size_bytes=size, members=recipe.tp, stride=1, forward=1, backward=backward)


def _attention(model: Transformer, recipe: Recipe, stack: Stack, count: int) -> Block:
    tokens, tp, width = recipe.tokens, recipe.tp, model.heads * model.head_dim
    sequences = tokens * recipe.cp / recipe.seq_len
    if model.kv_rank:
        asked = model.heads * (model.nope_dim + model.rope_dim) / tp
        first = model.q_rank or asked  # small models have no latent of their queries
        products = (
            Product(m=tokens, n=first + model.kv_rank + model.rope_dim, k=model.hidden),
            *((Product(m=tokens, n=asked, k=model.q_rank),) if model.q_rank else ()),
            Product(m=tokens, n=model.heads * (model.nope_dim + model.value_dim) / tp, k=model.kv_rank),
            Product(m=tokens, n=model.hidden, k=model.heads * model.value_dim / tp),
        )
    else:
        inner = model.head_dim * (model.heads + 2 * model.kv_heads) / tp
        products = (Product(m=tokens, n=inner, k=model.hidden), Product(m=tokens, n=model.hidden, k=width / tp))
    heads = model.heads / tp
    shape = (sequences, heads, recipe.seq_len / recipe.cp, float(recipe.seq_len), float(model.head_dim))
    if recipe.cp > 1:  # zigzag halves: every rank sees half of all keys
        shape = (sequences, heads, float(recipe.seq_len), float(recipe.seq_len), float(model.head_dim))
    window = None
    if model.window:
        window = (sequences * recipe.seq_len / recipe.cp / model.window, heads, float(model.window), 1.5 * model.window,
                  float(model.head_dim))  # fmt: skip
    collectives = list(_split(recipe, model.hidden))
    if recipe.cp > 1:
        size = tokens * model.kv_heads * model.head_dim * 2.0 * 2.0 / tp * recipe.cp
        collectives.append(Collective(role="cp", kind="all_gather", size_bytes=size, members=recipe.cp, stride=tp,
                                      forward=1, backward=2))  # fmt: skip
    each, keys = _elementwise(stack, recipe), model.kv_heads * model.head_dim
    moved = _around(model, recipe, stack) + tokens / tp * each["heads"] * (2.0 * width + 2.0 * keys)
    moved += tokens / tp * each["rotary"] * (width + keys) if model.gated else 0.0
    return Block(
        name="attention", count=count, products=products, attention=shape, window_shape=window, moved_bytes=moved,
        attention_count=1.0 / recipe.cp if recipe.cp > 1 else 1.0, cast_bytes=_cast(products), kernels=14.0,
        collectives=tuple(collectives), parameters=model.attention_parameters() / tp,
    )  # fmt: skip


def _mamba(model: Transformer, recipe: Recipe, stack: Stack) -> Block:
    tokens, tp = recipe.tokens, recipe.tp
    inner = model.mamba_heads * model.mamba_head_dim / tp
    state = model.mamba_groups * model.mamba_state / tp
    products = (
        Product(m=tokens, n=2 * inner + 2 * state + model.mamba_heads / tp, k=model.hidden),
        Product(m=tokens, n=model.hidden, k=inner),
        Product(m=tokens, n=model.mamba_state, k=inner, batch=4.0, low_precision=False),
    )
    moved = _around(model, recipe, stack)
    scanned = 2.0 * tokens * (inner + state) * stack.mamba_accesses
    return Block(
        name="mamba", count=model.mamba_layers, products=products, moved_bytes=moved, fixed_bytes=scanned,
        cast_bytes=_cast(products[:2]),
        kernels=16.0, collectives=_split(recipe, model.hidden), parameters=model.mamba_parameters() / tp,
    )  # fmt: skip


def _dense(model: Transformer, recipe: Recipe, stack: Stack) -> Block:
    tokens, tp = recipe.tokens, recipe.tp
    products = (
        Product(m=tokens, n=model.ffn_products * model.ffn / tp, k=model.hidden),
        Product(m=tokens, n=model.hidden, k=model.ffn / tp),
    )
    moved = _around(model, recipe, stack) + tokens * model.ffn / tp * _activation(model, recipe, stack)
    return Block(
        name="feed-forward", count=model.dense_layers, products=products, moved_bytes=moved, cast_bytes=_cast(products),
        kernels=9.0, collectives=_split(recipe, model.hidden), parameters=model.ffn_parameters(model.ffn) / tp,
    )  # fmt: skip


def _experts(model: Transformer, recipe: Recipe, stack: Stack, count: int, per_node: int) -> Block:
    tokens, ep, tp = recipe.tokens / recipe.tp, recipe.ep, recipe.tp
    local = model.experts / ep
    routed = tokens * model.experts_active
    rows, width, hidden = routed / local, model.expert_ffn, model.expert_hidden
    products = [
        Product(m=rows, n=model.ffn_products * width, k=hidden, batch=local),
        Product(m=rows, n=hidden, k=width, batch=local),
        Product(m=tokens, n=float(model.experts), k=model.hidden, low_precision=False),
    ]
    if model.shared_ffn:
        shared = model.shared_ffn / tp
        products += [Product(m=recipe.tokens, n=model.ffn_products * shared, k=model.hidden),
                     Product(m=recipe.tokens, n=model.hidden, k=shared)]  # fmt: skip
    if hidden != model.hidden:
        products += [Product(m=tokens, n=hidden, k=model.hidden), Product(m=tokens, n=model.hidden, k=hidden)]
    collectives: list[Collective] = []
    if ep > 1:
        sent = tokens * _copies(model.experts_active, ep / per_node if stack.sends_once_per_node else 1.0)
        collectives.append(Collective(role="ep", kind="all_to_all", size_bytes=sent * hidden * 2.0 * ep, members=ep,
                                      stride=1, forward=2, backward=2))  # fmt: skip
    if model.shared_ffn:
        collectives += _split(recipe, model.hidden)
    moved = _around(model, recipe, stack) + routed * width * _activation(model, recipe, stack)
    permuted = 2.0 * routed * hidden * stack.permute_accesses
    if model.expert_bias:
        permuted += 2.0 * routed * width * model.ffn_products * stack.biased_accesses
    return Block(
        name="experts", count=count, products=tuple(products), moved_bytes=moved, fixed_bytes=permuted,
        cast_bytes=_cast(products), kernels=30.0 + stack.expert_kernels * local, collectives=tuple(collectives),
        parameters=model.shared_parameters() / tp, expert_parameters=model.expert_parameters() / ep,
    )  # fmt: skip


def _copies(chosen: int, nodes: float) -> float:
    """How often a token is sent: to each of its experts, or once to each of the nodes that hold some of them."""
    return chosen if nodes <= 1 else nodes * (1.0 - (1.0 - 1.0 / nodes) ** chosen)


def _loss(model: Transformer, recipe: Recipe, stack: Stack, count: int) -> Block:
    tokens, shard = recipe.tokens, model.vocab / recipe.tp
    products = (Product(m=tokens, n=shard, k=model.hidden, low_precision=False),)
    return Block(
        name="loss", count=count, products=products, moved_bytes=0.0, kernels=12.0, repeats=False,
        fixed_bytes=tokens * shard * stack.loss_bytes / 2.0, collectives=_split(recipe, model.hidden),
    )  # fmt: skip


def _cast(products: tuple[Product, ...] | list[Product]) -> float:
    """Bytes of the operands of products in low precision, read once as bfloat16 and written once as one byte."""
    return sum(3.0 * p.batch * (p.m * p.k) for p in products if p.low_precision)
