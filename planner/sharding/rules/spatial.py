"""Rules of attention, convolutions, pooling, resampling and Fourier transforms: batch-like dims run apart.

Most of these kernels take no samples, but not samples without channels."""

from __future__ import annotations

from torch import fx

from ....passes.graph import argument, named_arguments, tensor_args, value_of, values_of
from ....passes.naming import op_name
from ....plans.layouts import PARTIAL, REPLICATE, shard
from .rule import Link, Rule, RuleFunction, from_links, replicated

__all__ = ["SPATIAL_RULES"]


def _mask_dim(mask: fx.Node | None, dim: int) -> int | None:
    """Dim of an attention mask that runs with dim `dim` (0 batch, 1 head, 2 query) of a 4-d query; None: broadcast."""
    if mask is None:
        return None
    shape = value_of(mask).shape
    here = dim - (4 - len(shape))
    return here if here >= 0 and shape[here] != 1 else None


def _attention(node: fx.Node) -> list[Rule]:
    inputs, given = tensor_args(node), named_arguments(node)
    rules = [replicated(len(values_of(node)), len(inputs), [v is not None for v in values_of(node)])]
    q, k = value_of(inputs[0]), value_of(inputs[1])
    if given.get("dropout_p"):
        return rules
    mask = given.get("attn_mask")
    for dim in (0, 1):
        extra = [] if mask is None else [_mask_dim(mask, dim)]
        links: list[Link] = [((dim, dim), (dim, dim, dim, *extra))]
        rules += from_links(links, [True, True], len(inputs), even=q.shape[dim] != k.shape[dim])[1:]
    if not given.get("is_causal"):
        extra = [] if mask is None else [_mask_dim(mask, 2)]
        rules += from_links([((2, 2), (2, None, None, *extra))], [True, True], len(inputs))[1:]
    elif mask is None and q.shape[2] == k.shape[2]:
        rows = shard(2)
        rules.append(Rule((rows, rows), (rows, REPLICATE, REPLICATE), local="causal_rows"))
    return rules


def _attention_backward(node: fx.Node) -> list[Rule]:
    inputs, given = tensor_args(node), named_arguments(node)
    rules = [replicated(3, len(inputs))]
    q, k = value_of(inputs[1]), value_of(inputs[2])
    if given.get("dropout_p"):
        return rules
    mask = given.get("attn_mask")
    for dim in (0, 1):
        extra = [] if mask is None else [_mask_dim(mask, dim)]
        links: list[Link] = [((dim,) * 3, (*(dim,) * 6, *extra))]
        rules += from_links(links, [True] * 3, len(inputs), even=q.shape[dim] != k.shape[dim])[1:]
    if not given.get("is_causal"):
        m = [] if mask is None else [_mask_dim(mask, 2)]
        ins = (2, 2, None, None, 2, 2, *m)
        rules.append(Rule((shard(2), PARTIAL, PARTIAL), tuple(REPLICATE if d is None else shard(d) for d in ins)))
    elif mask is None and q.shape[2] == k.shape[2]:
        rows = shard(2)
        ins = (rows, rows, REPLICATE, REPLICATE, rows, rows)
        rules.append(Rule((rows, PARTIAL, PARTIAL), ins, local="causal_rows"))
    return rules


def _convolution(node: fx.Node) -> list[Rule]:
    given = named_arguments(node)
    bias = given["bias"] is not None
    tail = (REPLICATE,) if bias else ()
    rules = [replicated(1, 2 + bias), Rule((shard(0),), (shard(0), REPLICATE, *tail))]
    if given["groups"] != 1:
        return rules
    out, into = (1, 0) if given["transposed"] else (0, 1)
    rules.append(Rule((shard(1),), (REPLICATE, shard(out), *((shard(0),) if bias else ())), filled=True))
    rules.append(Rule((PARTIAL,), (shard(1), shard(into), *((PARTIAL,) if bias else ())), filled=True))
    return rules


def _convolution_backward(node: fx.Node) -> list[Rule]:
    given = named_arguments(node)
    present = [v is not None for v in values_of(node)]

    def rule(dx: str, dw: str, db: str, *ins: str, filled: bool = True) -> Rule:
        outs = tuple(p if here else None for p, here in zip((dx, dw, db), present, strict=True))
        return Rule(outs, ins, filled=filled)

    rules = [replicated(3, 3, present), rule(shard(0), PARTIAL, PARTIAL, shard(0), shard(0), REPLICATE, filled=False)]
    if given["groups"] != 1:
        return rules
    out, into = (1, 0) if given["transposed"] else (0, 1)
    rules.append(rule(PARTIAL, shard(out), shard(0), shard(1), REPLICATE, shard(out)))
    rules.append(rule(shard(1), shard(into), REPLICATE, REPLICATE, shard(1), shard(into)))
    return rules


def _leading(dims: int | None = None) -> RuleFunction:
    """An op that works within each of its leading `dims` dims apart, all tensors having them; all but the spatial ones
    where it is None."""

    def rule(node: fx.Node) -> list[Rule]:
        inputs, present = tensor_args(node), [v is not None for v in values_of(node)]
        lead = value_of(inputs[0]).dim() - _SPATIAL.get(op_name(node), 2) if dims is None else dims
        rules = [replicated(len(present), len(inputs), present)]
        for d in range(lead):
            channels = dims is None and (d > 0 or lead == 1)
            link: Link = ((d,) * len(present), (d,) * len(inputs))
            rules += from_links([link], present, len(inputs), filled=channels)[1:]
        return rules

    return rule


# Spatial dims of the ops that have not two.
_SPATIAL = {
    "reflection_pad1d": 1,
    "reflection_pad1d_backward": 1,
    "replication_pad1d": 1,
    "replication_pad1d_backward": 1,
    "max_pool3d_with_indices": 3,
    "max_pool3d_with_indices_backward": 3,
    "avg_pool3d": 3,
    "avg_pool3d_backward": 3,
    "_adaptive_avg_pool3d": 3,
    "_adaptive_avg_pool3d_backward": 3,
    "adaptive_max_pool3d": 3,
    "adaptive_max_pool3d_backward": 3,
    "reflection_pad3d": 3,
    "reflection_pad3d_backward": 3,
    "replication_pad3d": 3,
    "replication_pad3d_backward": 3,
}


def _fourier(node: fx.Node) -> list[Rule]:
    ndim = value_of(node).dim()
    dims = {d % ndim for d in argument(node, 1)}
    rules = from_links([((d,), (d,)) for d in range(ndim) if d not in dims], [True], 1, filled=True)
    return [*rules, Rule((PARTIAL,), (PARTIAL,))]


SPATIAL_RULES: dict[str, RuleFunction] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _leading(),
    "max_pool2d_with_indices_backward": _leading(),
    "max_pool3d_with_indices": _leading(),
    "max_pool3d_with_indices_backward": _leading(),
    "avg_pool2d": _leading(),
    "avg_pool2d_backward": _leading(),
    "avg_pool3d": _leading(),
    "avg_pool3d_backward": _leading(),
    "_adaptive_avg_pool2d": _leading(),
    "_adaptive_avg_pool2d_backward": _leading(),
    "_adaptive_avg_pool3d": _leading(),
    "_adaptive_avg_pool3d_backward": _leading(),
    "adaptive_max_pool2d": _leading(),
    "adaptive_max_pool2d_backward": _leading(),
    "adaptive_max_pool3d": _leading(),
    "adaptive_max_pool3d_backward": _leading(),
    "reflection_pad1d": _leading(),
    "reflection_pad1d_backward": _leading(),
    "reflection_pad2d": _leading(),
    "reflection_pad2d_backward": _leading(),
    "reflection_pad3d": _leading(),
    "reflection_pad3d_backward": _leading(),
    "replication_pad1d": _leading(),
    "replication_pad1d_backward": _leading(),
    "replication_pad2d": _leading(),
    "replication_pad2d_backward": _leading(),
    "replication_pad3d": _leading(),
    "replication_pad3d_backward": _leading(),
    "grid_sampler_2d": _leading(1),
    "_fft_c2c": _fourier,
    "_fft_r2c": _fourier,
    "_fft_c2r": _fourier,
}
