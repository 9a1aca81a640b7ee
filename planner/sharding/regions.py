"""Strategies and prices of the regions that a user wrote for pieces (passes/regions.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ...cost_models.prices import Prices
from ...passes.graph import tensor_args, value_of
from ...passes.naming import op_name
from ...passes.regions import Alternative, Region, any_of
from ...plans.errors import CaptureError
from ...plans.layouts import Layout
from ...plans.meshes import Mesh
from .. import _torch

__all__ = ["any_of", "region_layouts", "region_seconds"]


def region_layouts(node: fx.Node, mesh: Mesh) -> list[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    """Layouts of the results and of the tensors that each alternative of the region `node` gives."""
    region: Region = node.meta["region"]
    found = []
    for one in region.alternatives:
        outs, ins = _forward(one) if op_name(node) == "meshwright.region" else _backward(one, node)
        if any(len(layout) != mesh.ndim for layout in (*outs, *ins)):
            raise CaptureError(
                f"'local_map' must give a placement for each of the {mesh.ndim} axes of the mesh, got "
                f"{[','.join(layout) for layout in one.ins]} at {node.name}; plan for its mesh"
            )
        found.append((tuple(_there(o, mesh) for o in outs), tuple(_there(i, mesh) for i in ins)))
    return found


def _forward(one: Alternative) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    return one.outs, one.ins


def _backward(one: Alternative, node: fx.Node) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The gradient of a result lies as the result; of a sum, every term has the whole gradient."""
    xs: Any = node.args[0]
    real = [value_of(x).is_floating_point() or value_of(x).is_complex() for x in xs]
    coming = tuple(tuple("R" if p[0] == "P" else p for p in layout) for layout in one.outs)
    return tuple(g for g, here in zip(one.grads, real, strict=True) if here), (*one.ins, *coming)


def _there(layout: Layout, mesh: Mesh) -> Layout:
    return tuple("R" if parts == 1 else p for p, parts in zip(layout, mesh.shape, strict=True))


def region_seconds(node: fx.Node, sizes: Sequence[np.ndarray], rules: Sequence[str], prices: Prices) -> np.ndarray:
    """Seconds of the region under each strategy, of which `rules` name the alternative: its function is run on meta
    tensors of the sizes of the pieces ([strategies, dims] per tensor), its products priced as such and its other ops by
    the bytes that they move."""
    region: Region = node.meta["region"]
    inputs = tensor_args(node)
    count = len(region.tree.names)
    seconds = []
    for row, rule in enumerate(rules):
        at = int(rule.partition(":")[2])
        made = [
            torch.empty(tuple(int(n) for n in size[row]), dtype=value_of(x).dtype, device="meta")
            for size, x in zip(sizes, inputs, strict=True)
        ]
        with _torch.ops_seen() as seen:
            try:
                if op_name(node) == "meshwright.region":
                    region.run(at, made)
                else:
                    region.differentiate(at, made[:count], made[count:])
            except Exception as error:
                raise CaptureError(
                    f"'local_map' must be given functions that run on meta tensors, to be priced, got "
                    f"{type(error).__name__}: {error} at {node.name}"
                ) from error
        seconds.append(sum(_seconds(op, values, results, prices) for op, values, results in seen))
    return np.array(seconds)


def _seconds(op: Any, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor], prices: Prices) -> float:
    if torch.Tag.inplace_view in op.tags or op.is_view:
        return 0.0
    moved = float(sum(t.numel() * t.element_size() for t in (*values, *results)))
    packet = str(op.overloadpacket)
    if packet in ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"):
        left, right = values[-2:]
        batch = left.shape[0] if left.dim() == 3 else 1
        name = str(left.dtype).removeprefix("torch.")
        known = name if name in ("float64", "float32", "bfloat16", "float16") else "float32"
        shape = (left.shape[-2], right.shape[-1], left.shape[-1], batch)
        return float(prices.gemm_s(*shape, known)) + prices.launch_s
    return float(prices.memory_s(moved)) + prices.launch_s if moved else 0.0
