"""What a node costs: seconds of its local computation for every strategy at once, from the prices of the target.

Local sizes are those of the fullest device. With a compiled target, chains of pointwise ops are one kernel: a value
that passes from one pointwise op to the next is neither written nor read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from ...cost_models.prices import Prices
from ...passes.canonical import VIEWS
from ...passes.graph import Captured, tensor_args, value_of, values_of
from ...passes.keeping import is_keep
from ...passes.naming import op_name
from .folding import Blocks
from .regions import region_seconds

__all__ = ["Fusion", "Local", "dtype_name", "family_of", "is_view", "op_seconds"]

_FREE = {"getitem", "empty", "select", "slice", "squeeze", "unsqueeze", "view_as_real", "view_as_complex"}
_FUSED_TAIL = {
    "sum",
    "amax",
    "amin",
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
}


@dataclass(frozen=True, slots=True)
class Local:
    """A tensor as one device holds it under each strategy: sizes [strategies, dims] in elements, and bytes
    [strategies]; numbers, or expressions of a workload's symbols (then objects)."""

    sizes: np.ndarray
    bytes: np.ndarray

    def dim(self, index: int) -> np.ndarray:
        """Local size of one dim under each strategy."""
        return self.sizes[:, index] if self.sizes.dtype == object else self.sizes[:, index].astype(np.float64)


def is_view(node: fx.Node) -> bool:
    """Whether the result of `node` lives on its input: a reshape across permuted dims does not, it copies."""
    if node.target not in VIEWS:
        return False
    if op_name(node) != "reshape":
        return True
    try:
        value_of(node.all_input_nodes[0]).view(value_of(node).shape)
    except (RuntimeError, ValueError):
        return False
    return True


def family_of(node: fx.Node) -> str:
    """The family of kernels whose prices an op pays: product, attention or memory."""
    short = op_name(node)
    if "scaled_dot_product" in short or short == "flex_attention":
        return "attention"
    return "product" if short in ("einsum", "mm", "bmm") or short.startswith("convolution") else "memory"


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 as 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


class Fusion:
    """Which reads and writes a compiled program leaves out. Without compilation, none.

    What one block hands to another is written: a sum that runs on through all blocks would grow with depth, and
    Inductor writes a value with several readers once it rests on more than a few buffers (`realize_reads_threshold`).
    """

    def __init__(self, captured: Captured, *, compiled: bool, blocks: Blocks) -> None:
        self.compiled = compiled
        self.backward = captured.backward
        self._block = {node: blocks.block(name) for node, name in captured.names.items()}
        self.kept = {n for n in captured.results()}
        self._writes: dict[fx.Node, bool] = {}

    def reads(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether `reader` reads `source` from memory."""
        source = _root(source)
        if not self.compiled or not _fusible(source) or not (_fusible(reader) or op_name(reader) in _FUSED_TAIL):
            return True
        if (source in self.backward) != (reader in self.backward):
            return True
        ours, other = self._block.get(source), self._block.get(reader)
        return ours is not None and other is not None and ours != other

    def writes(self, node: fx.Node) -> bool:
        """Whether the value of `node` reaches memory."""
        if not self.compiled or not _fusible(node):
            return True
        if node not in self._writes:
            self._writes[node] = node in self.kept or any(self._read_by(node, user) for user in node.users)
        return self._writes[node]

    def _read_by(self, node: fx.Node, user: fx.Node) -> bool:
        if user.op != "call_function" or user in self.kept:
            return True
        if user.target in VIEWS:
            return any(self._read_by(node, further) for further in user.users)
        return self.reads(node, user)


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _fusible(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node) in (
        "_to_copy",
        "full",
        "arange",
        "constant_pad_nd",
    )


def op_seconds(
    node: fx.Node,
    outs: Sequence[Local | None],
    ins: Sequence[Local],
    prices: Prices,
    fusion: Fusion,
    rules: Sequence[str],
) -> np.ndarray:
    """Seconds of `node` under each strategy, launch included. `rules[s]` is the special local program of strategy s."""
    count = len(ins[0].bytes) if ins else len(next(o for o in outs if o is not None).bytes)
    if is_view(node) or op_name(node) in _FREE:
        return np.full(count, 0.0 if fusion.compiled or is_keep(node) else prices.view_s)
    made = sum((out.bytes for out in outs if out is not None), np.zeros(count)) if fusion.writes(node) else 0.0
    return _kernel_s(node, outs, ins, prices, fusion, rules) + prices.fresh_s(made)


def _kernel_s(
    node: fx.Node,
    outs: Sequence[Local | None],
    ins: Sequence[Local],
    prices: Prices,
    fusion: Fusion,
    rules: Sequence[str],
) -> np.ndarray:
    short = op_name(node)
    if "region" in node.meta:
        return region_seconds(node, [local.sizes for local in ins], rules, prices)
    if "rule" in node.meta:
        return node.meta["rule"].seconds(node, outs, ins, prices) + prices.launch_s
    dtype = dtype_name(next(v for v in values_of(node) if v is not None).dtype)
    if short in ("einsum", "mm", "bmm"):
        return _product_s(node, ins, prices, dtype) + prices.launch_s
    if "scaled_dot_product" in short or short == "flex_attention":
        return _attention_s(node, ins, prices, dtype) + prices.launch_s
    if short.startswith("convolution"):
        return _convolution_s(node, outs, ins, prices, dtype) + prices.launch_s
    moved = _moved_bytes(node, outs, ins, fusion)
    seconds = prices.memory_s(moved) * np.array([2.0 if rule else 1.0 for rule in rules])
    launched = 0.0 if fusion.compiled and _fusible(node) and not fusion.writes(node) else prices.launch_s
    return np.where(moved > 0, seconds, 0.0) + launched


def _moved_bytes(node: fx.Node, outs: Sequence[Local | None], ins: Sequence[Local], fusion: Fusion) -> np.ndarray:
    short, inputs = op_name(node), tensor_args(node)
    total = np.zeros(len(ins[0].bytes) if ins else len(next(o for o in outs if o is not None).bytes))
    if fusion.writes(node):
        for out in outs:
            total = total + (out.bytes if out is not None else 0.0)
    if short in ("embedding", "index", "gather", "index_select", "_unsafe_index"):
        return total * 2  # rows are read as they are written, the table is not swept
    for source, local in zip(inputs, ins, strict=True):
        if fusion.reads(source, node):
            total = total + local.bytes
    return total


def _product_s(node: fx.Node, ins: Sequence[Local], prices: Prices, dtype: str) -> np.ndarray:
    short = op_name(node)
    equation = node.args[0] if short == "einsum" else {"mm": "mk,kn->mn", "bmm": "bmk,bkn->bmn"}[short]
    assert isinstance(equation, str)
    operands, result = equation.split("->")
    names = operands.split(",")
    if len(names) != 2:
        return prices.memory_s(sum((i.bytes for i in ins), np.zeros(len(ins[0].bytes))))
    left, right = names
    size: dict[str, np.ndarray] = {}
    for letters, local in zip(names, ins, strict=True):
        for at, letter in enumerate(letters):
            size[letter] = local.dim(at)
    one = np.ones(len(ins[0].bytes))

    def product(wanted: Any) -> np.ndarray:
        return math.prod((size[c] for c in size if wanted(c)), start=one)

    batch = product(lambda c: c in left and c in right and c in result)
    m = product(lambda c: c in left and c not in right)
    n = product(lambda c: c in right and c not in left)
    k = product(lambda c: c in left and c in right and c not in result)
    if "complex" in dtype:
        return 4 * prices.gemm_s(m, n, k, batch, "float32")
    return prices.gemm_s(m, n, k, batch, _matrix_dtype(dtype))


def _matrix_dtype(dtype: str) -> str:
    return dtype if dtype in ("float64", "float32", "bfloat16", "float16") else "float32"


def _attention_s(node: fx.Node, ins: Sequence[Local], prices: Prices, dtype: str) -> np.ndarray:
    backward = "backward" in op_name(node)
    q, k = (ins[1], ins[2]) if backward else (ins[0], ins[1])
    target: Any = node.target
    given = dict(zip([a.name for a in target._schema.arguments], node.args, strict=False)) | dict(node.kwargs)
    causal = bool(given.get("is_causal", False))
    return prices.attention_s(
        q.dim(0), q.dim(1), q.dim(2), k.dim(2), q.dim(3), dtype=_matrix_dtype(dtype), causal=causal, backward=backward
    )


def _convolution_s(
    node: fx.Node, outs: Sequence[Local | None], ins: Sequence[Local], prices: Prices, dtype: str
) -> np.ndarray:
    """A convolution as the matrix product that it is: output positions by output channels by receptive field."""
    backward = op_name(node) == "convolution_backward"
    result = ins[0] if backward else outs[0]
    weight = ins[2] if backward else ins[1]
    assert result is not None
    positions = result.sizes[:, 0] * np.prod(result.sizes[:, 2:], axis=1)
    field = np.prod(weight.sizes[:, 1:], axis=1)
    once = prices.gemm_s(positions, result.dim(1), field, 1, _matrix_dtype(dtype))
    return 2 * once if backward else once
