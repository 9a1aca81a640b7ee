"""Small modules that exercise sharding rules: at least one for every entry of our own tables."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["CASES", "Case"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of one or a few ops and its inputs, made anew by `inputs()`."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Sequence[Any]]


class Function(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def positive(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()


def fixed(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def truth(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


def op(name: str, function: Callable[..., Any], *inputs: Callable[[], Any]) -> Case:
    return Case(name=name, model=lambda: Function(function), inputs=lambda: [make() for make in inputs])


def layer(name: str, model: Callable[[], nn.Module], *inputs: Callable[[], Any]) -> Case:
    return Case(name=name, model=lambda: model().double(), inputs=lambda: [make() for make in inputs])


def r(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: real(*shape)


def p(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: positive(*shape)


def c(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: fixed(*shape)


def i(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: ints(high, *shape)


def b(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: truth(*shape)


def z(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape, dtype=torch.complex128, requires_grad=True)


def attention(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda *inputs: F.scaled_dot_product_attention(*inputs, **options)


def grouped_product() -> nn.Module:
    """The CPU product of Hugging Face's mixtures of experts: rows sorted by expert, and where each expert's end."""
    importlib.import_module("transformers.integrations.moe")
    ends = torch.tensor([2, 2, 7])
    return Function(lambda x, w: torch.ops.transformers.grouped_mm_fallback(x, w, ends))


VIEWS = [
    op("reshape merges", lambda x: x.reshape(5, 24) * 2, r(5, 4, 6)),
    op("reshape splits", lambda x: x.view(3, 4, 2, 5) * 2, r(12, 10)),
    op("reshape regroups", lambda x: x.reshape(6, 4, 5) * 2, r(4, 6, 5)),
    op("reshape of ones", lambda x: x.reshape(6, 1, 5, 1) * 2, r(1, 6, 5)),
    op("squeeze", lambda x: x.squeeze(1) * 2, r(6, 1, 5)),
    op("squeeze of what is one", lambda x, y: (x.squeeze() * 2, y.squeeze(1) * 2), r(3, 1, 2), r(2, 3)),
    op("squeeze dims", lambda x: x.squeeze((1, 2)) * 2, r(6, 1, 1, 5)),
    op("unsqueeze", lambda x: x.unsqueeze(1) * 2, r(6, 5)),
    op("permute", lambda x: x.permute(2, 0, 1) * 2, r(5, 4, 6)),
    op("expand", lambda x, y: (x.expand(7, 5, 4, 6) * 2, y.expand(3, 4, 5)), r(5, 1, 6), r(4, 1)),
    op("slice", lambda x: x[1:4, ::2] * 2, r(6, 7, 5)),
    op("slice of all", lambda x: x[:, :7] * 2, r(6, 7)),
    op("select", lambda x: x[:, 2] * 2, r(6, 7, 5)),
    op("select last", lambda x: x[..., -1] * 2, r(6, 7, 5)),
    op("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 7, 2), r(5, 8), r(5, 3)),
    op("select_scatter", lambda x, y: torch.select_scatter(x, y, 1, 2), r(5, 6, 7), r(5, 7)),
    op("pad", lambda x: F.pad(x, (1, 2, 0, 0, 0, 1)), r(5, 6, 7)),
    op("pad with ones", lambda x: F.pad(x, (1, 2), value=1.0), r(5, 6)),
    op("crop", lambda x: F.pad(x, (-1, -2)), r(5, 7)),
    op("cat", lambda x, y: torch.cat([x, y, x], 1), r(5, 4, 6), r(5, 3, 6)),
    op("stack", lambda x, y: torch.stack([x, y], 1), r(5, 6), r(5, 6)),
    op("block_diag", torch.block_diag, r(2, 5), r(4, 3)),
    op("rot90", lambda x: x.rot90(1, (0, 2)), r(5, 4, 6)),
    op("flip", lambda x: x.flip(0, 2), r(5, 6, 7)),
    op("roll", lambda x: x.roll(2, 1), r(5, 6)),
    op("repeat", lambda x: x.repeat(2, 1, 3), r(5, 4)),
    op("unfold", lambda x: x.unfold(1, 3, 2), r(5, 9, 4)),
    op("diagonal", lambda x: x.diagonal(0, 0, 2), r(6, 5, 6)),
    op("trace", lambda x: x.trace(), r(6, 6)),
    op("complex views", lambda x: torch.view_as_real(torch.view_as_complex(x) * (1 + 2j)), r(5, 6, 2)),
    op("full", lambda x: x + torch.full((5, 6), 2.0, dtype=torch.float64), r(5, 6)),
    op("arange", lambda x: x + torch.arange(6), r(5, 6)),
    op("linspace", lambda x: x + torch.linspace(0, 1, 6, dtype=torch.float64), r(5, 6)),
    op("eye", lambda x: x + torch.eye(6, dtype=torch.float64), r(6, 6)),
    op("scalar_tensor", lambda x: torch.where(x > 0, x, 0.5), r(5, 6)),
    op("tril", lambda x: x.tril() + x.triu(1), r(5, 6)),
    op("movedim of split", lambda x: torch.cat([t * 2 for t in x.split(2, 1)], 0), r(5, 6)),
]

PRODUCTS = [
    layer("linear", lambda: nn.Linear(6, 5), r(4, 7, 6)),
    layer("linear of rows", lambda: nn.Linear(6, 5), r(7, 6)),
    layer("swapped linear", lambda: nn.Sequential(Function(lambda x: x.transpose(0, 1)), nn.Linear(6, 5)), r(4, 7, 6)),
    op("bmm", torch.bmm, r(4, 5, 6), r(4, 6, 7)),
    op("matmul", torch.matmul, r(4, 3, 5, 6), r(4, 3, 6, 7)),
    op("matmul broadcast", torch.matmul, r(4, 3, 5, 6), r(6, 7)),
    op("einsum", lambda x, y: torch.einsum("abc,adc->bda", x, y), r(4, 5, 6), r(4, 7, 6)),
    op("outer", torch.outer, r(5), r(6)),
    op("baddbmm", lambda x, y, w: torch.baddbmm(w, x, y, beta=2), r(4, 5, 6), r(4, 6, 7), r(4, 5, 7)),
    op("addmm", lambda x, y, w: torch.addmm(w, x, y, alpha=3), r(5, 6), r(6, 7), r(7)),
    op("mv", torch.mv, r(5, 6), r(6)),
    op("addr", torch.addr, r(5, 6), r(5), r(6)),
    layer("bilinear", lambda: nn.Bilinear(4, 5, 3), r(6, 2, 4), r(6, 2, 5)),
    op("distances", lambda x, y: (torch.cdist(x, y), torch.cdist(x, y, p=1.0)), r(3, 5, 4), r(3, 6, 4)),
    op("distances of rows", lambda x, y: torch.cdist(x, y, p=3.0), r(5, 4), r(6, 4)),
    Case(name="grouped product", model=grouped_product, inputs=lambda: [real(7, 6), real(3, 6, 5)]),
]

REDUCTIONS = [
    op("sum", lambda x: (x.sum(1), x.sum((0, 2), keepdim=True), x.sum()), r(5, 6, 7)),
    op("mean", lambda x: (x.mean(-1), x.mean((0, 1)), x.mean()), r(5, 6, 7)),
    op("amax", lambda x: (x.amax(1), x.amax((0, 2), keepdim=True)), r(5, 6, 7)),
    op("amin", lambda x: (x.amin(1), x.amin((0, 2), keepdim=True)), r(5, 6, 7)),
    op("prod", lambda x: (x.prod(1), x.prod(0, keepdim=True), x.prod()), r(5, 6)),
    op("any", lambda x: (x.any(1), x.any((0, 2)), x.any()), b(5, 6, 7)),
    op("all", lambda x: (x.all(1, keepdim=True), x.all()), b(5, 6, 7)),
    op("argmax", lambda x: (x.argmax(1), x.argmin(0, keepdim=True), x.argmax()), c(5, 6)),
    op("max", lambda x: (*x.max(1), *x.min(0, keepdim=True), *x.median(1)), r(5, 6)),
    op("max of all", lambda x: (x.max(), x.min()), r(5, 6)),
    op("var", lambda x: (x.var(1), x.std((0, 2)), x.var()), r(5, 6, 7)),
    op("norm", lambda x: (x.norm(), x.norm(dim=1), torch.linalg.vector_norm(x, 1, 0)), r(5, 6)),
    op("logsumexp", lambda x: x.logsumexp(1), r(5, 6)),
    op("cumsum", lambda x: (x.cumsum(1), x.cumprod(0), x.logcumsumexp(1)), p(5, 6)),
    op("cummax", lambda x: (*x.cummax(1), *x.cummin(0)), r(5, 6)),
    op("sort", lambda x: (*x.sort(1), *x.sort(dim=0, stable=True, descending=True)), r(5, 6)),
    op("extremes", lambda x: (*x.aminmax(dim=1), *x.kthvalue(2, 1)), r(5, 6)),
    op("renorm", lambda x: x.renorm(2, 0, 1.0), r(5, 6)),
    op("topk", lambda x: x.topk(3, 1), r(5, 6)),
    op("softmax", lambda x: (x.softmax(1), x.log_softmax(-1)), r(5, 6, 7)),
    op("safe softmax", lambda x: torch.ops.aten._safe_softmax(x, 1), r(5, 6, 7)),
]

NORMS = [
    layer("layer norm", lambda: nn.LayerNorm(7), r(5, 6, 7)),
    layer("layer norm of two dims", lambda: nn.LayerNorm((6, 7)), r(5, 6, 7)),
    layer("layer norm without weight", lambda: nn.LayerNorm(7, elementwise_affine=False), r(5, 6, 7)),
    layer("layer norm without bias", lambda: nn.LayerNorm(7, bias=False), r(5, 6, 7)),
    layer("rms norm", lambda: nn.RMSNorm(7), r(5, 6, 7)),
    layer("batch norm", lambda: nn.BatchNorm2d(6), r(5, 6, 4, 3)),
    layer("group norm", lambda: nn.GroupNorm(3, 6), r(5, 6, 4, 3)),
]

INDEXING = [
    layer("embedding", lambda: nn.Embedding(9, 6), i(9, 5, 7)),
    layer("embedding with padding", lambda: nn.Embedding(9, 6, padding_idx=2), i(9, 5, 7)),
    layer("embedding scaled", lambda: nn.Embedding(9, 6, scale_grad_by_freq=True), i(9, 5, 7)),
    layer("bag sum", lambda: nn.EmbeddingBag(9, 6, mode="sum"), i(9, 12), lambda: torch.tensor([0, 3, 3, 7, 10])),
    layer("bag mean", lambda: nn.EmbeddingBag(9, 6, mode="mean"), i(9, 12), lambda: torch.tensor([0, 3, 7, 10])),
    layer("bag max", lambda: nn.EmbeddingBag(9, 6, mode="max"), i(9, 12), lambda: torch.tensor([0, 3, 7, 10])),
    op("index", lambda x, k: x[k], r(6, 5), i(6, 7)),
    op("index inside", lambda x, k, j: x[:, k, j], r(6, 5, 4, 7), i(5, 3, 6), i(4, 6)),
    op("index apart", lambda x, k, j: x[k, :, j], r(6, 5, 4), i(6, 7), i(4, 7)),
    op("index by mask", lambda x, m: torch.where(m, x, 0.0).masked_fill(~m, 2.0), r(6, 5), b(6, 5)),
    op("unsafe index", lambda x, k: torch.ops.aten._unsafe_index(x, [None, k]), r(6, 5), i(5, 7)),
    op("index_put", lambda x, k, v: x.index_put((k,), v), r(6, 5), i(6, 4), r(4, 5)),
    op("index_put adds", lambda x, k, v: x.index_put((k,), v, accumulate=True), r(6, 5), i(6, 7), r(7, 5)),
    op("index_put broadcast", lambda x, k, v: x.index_put((k,), v, accumulate=True), r(6, 5), i(6, 7), r(5)),
    op("gather", lambda x, k: x.gather(1, k), r(5, 6), i(6, 5, 7)),
    op("gather less", lambda x, k: x.gather(0, k), r(5, 6), i(5, 4, 3)),
    op("gather a label", lambda x, k: x.gather(-1, k.unsqueeze(-1)), r(5, 6, 7), i(7, 5, 6)),
    op("scatter", lambda x, k, s: x.scatter(1, k, s), r(5, 6), lambda: torch.argsort(fixed(5, 6), 1)[:, :4], r(5, 4)),
    op("scatter a value", lambda x, k: x.scatter(1, k, 2.0), r(5, 6), i(6, 5, 3)),
    op("scatter_add", lambda x, k, s: x.scatter_add(1, k, s), r(5, 6), i(6, 5, 7), r(5, 7)),
    op("index_add", lambda x, k, s: x.index_add(1, k, s), r(5, 6), i(6, 7), r(5, 7)),
    op("index_add rows", lambda x, k, s: x.index_add(0, k, s), r(6, 5), i(6, 7), r(7, 5)),
    op("index_select", lambda x, k: x.index_select(1, k), r(5, 6), i(6, 7)),
    op("scatter_reduce", lambda x, k, s: x.scatter_reduce(1, k, s, "amax"), r(5, 6), i(6, 5, 7), r(5, 7)),
    op("scatter_reduce means", lambda x, k, s: x.scatter_reduce(0, k, s, "mean"), p(6, 5), i(6, 4, 5), p(4, 5)),
    op("searchsorted", lambda x: torch.searchsorted(torch.linspace(-1, 1, 5, dtype=torch.float64), x), c(5, 6)),
    op("searchsorted rows", lambda s, x: torch.searchsorted(s.sort(1).values, x), c(5, 7), c(5, 6)),
    op("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), r(6, 5), b(6, 5), r(7, 5)),
    op("masked_scatter rows", lambda x, m, s: x.masked_scatter(m.unsqueeze(1), s), r(6, 5), b(6), r(6, 5)),
    op("nonzero", lambda x, k: x[(k > 2).nonzero().flatten()], r(6, 5), i(6, 6)),
    op("masked_select", lambda k: k.masked_select(k > 2), i(6, 6, 5)),
    op("index by given mask", lambda x, k: x[k > 2], r(6, 5), i(6, 6)),
    op("unique", lambda x, k: x * torch.unique(k).sum(), r(6, 5), i(6, 6)),
    op("repeat_interleave", lambda k: torch.repeat_interleave(k), i(4, 6)),
    op("strided", lambda x: x.as_strided((3, 4, 2), (6, 2, 1), 1) * x.as_strided((3, 4, 1), (0, 2, 1)), r(4, 6)),
    op("strided permuted", lambda x: (x.T * 2).as_strided((5, 2), (3, 1)), r(4, 6)),
    op("filled", lambda x, m: x.masked_fill(m, torch.tensor(2.0)), r(5, 6), b(5, 6)),
    op(
        "ctc",
        lambda x, k: F.ctc_loss(x.log_softmax(-1), k, torch.tensor([7, 7, 7]), torch.tensor([3, 3, 3])),
        r(7, 3, 5),
        lambda: ints(4, 3, 3) + 1,
    ),
    op("cross entropy", F.cross_entropy, r(6, 7), i(7, 6)),
    op("one hot", lambda k: F.one_hot(k, 7), i(7, 6)),
    op("bucketize", lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=torch.float64)), c(5, 6)),
]

ATTENTION = [
    op("attention", F.scaled_dot_product_attention, r(4, 6, 5, 8), r(4, 6, 7, 8), r(4, 6, 7, 8)),
    op("causal", attention(is_causal=True), r(4, 6, 5, 8), r(4, 6, 5, 8), r(4, 6, 5, 8)),
    op("masked by batch", attention(), r(4, 6, 5, 8), r(4, 6, 7, 8), r(4, 6, 7, 8), c(4, 1, 5, 7)),
    op("masked by head", attention(), r(4, 6, 5, 8), r(4, 6, 7, 8), r(4, 6, 7, 8), c(1, 6, 1, 7)),
    op("masked by query", attention(), r(4, 6, 5, 8), r(4, 6, 7, 8), r(4, 6, 7, 8), b(5, 7)),
    op("grouped heads", attention(enable_gqa=True), r(4, 8, 5, 8), r(4, 4, 7, 8), r(4, 4, 7, 8)),
]

SPATIAL = [
    layer("conv2d", lambda: nn.Conv2d(6, 5, 3, padding=1), r(4, 6, 7, 5)),
    layer("conv2d without bias", lambda: nn.Conv2d(6, 5, 3, stride=2, bias=False), r(4, 6, 7, 5)),
    layer("conv1d", lambda: nn.Conv1d(6, 5, 3), r(4, 6, 7)),
    layer("conv3d", lambda: nn.Conv3d(3, 5, 2), r(4, 3, 4, 3, 4)),
    layer("grouped conv", lambda: nn.Conv2d(6, 6, 3, groups=3), r(4, 6, 7, 5)),
    layer("transposed conv", lambda: nn.ConvTranspose2d(6, 5, 3), r(4, 6, 4, 5)),
    op("max pool", lambda x: F.max_pool2d(x, 2), r(5, 4, 6, 7)),
    op("max pool without batch", lambda x: F.max_pool2d(x, 3, 2, 1), r(5, 6, 7)),
    op("max pool 3d", lambda x: F.max_pool3d(x, 2), r(5, 4, 4, 4, 5)),
    op("average pool", lambda x: F.avg_pool2d(x, 2), r(5, 4, 6, 7)),
    op("average pool 1d", lambda x: F.avg_pool1d(x, 2), r(5, 4, 6)),
    op("average pool 3d", lambda x: F.avg_pool3d(x, 2), r(5, 4, 4, 4, 5)),
    op("adaptive pool", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), r(5, 4, 6, 7)),
    op("adaptive pool 3d", lambda x: F.adaptive_avg_pool3d(x, (1, 2, 2)), r(5, 4, 3, 4, 5)),
    op("adaptive max pool", lambda x: F.adaptive_max_pool2d(x, (3, 2)), r(5, 4, 6, 7)),
    op("adaptive max pool 3d", lambda x: F.adaptive_max_pool3d(x, (1, 2, 2)), r(5, 4, 3, 4, 5)),
    op("nearest", lambda x: F.interpolate(x, scale_factor=2), r(5, 4, 3, 4)),
    op("bilinear", lambda x: F.interpolate(x, size=(6, 5), mode="bilinear"), r(5, 4, 3, 4)),
    op("bicubic", lambda x: F.interpolate(x, size=(6, 5), mode="bicubic"), r(5, 4, 3, 4)),
    op("antialias", lambda x: F.interpolate(x, (3, 2), mode="bilinear", antialias=True), r(5, 4, 5, 4)),
    op("max unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), r(5, 2, 4, 6)),
    op("nearest 1d", lambda x: F.interpolate(x, scale_factor=2), r(5, 4, 3)),
    op("linear 1d", lambda x: F.interpolate(x, size=7, mode="linear"), r(5, 4, 3)),
    op("reflection pad", lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"), r(5, 4, 6, 7)),
    op("replication pad", lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate"), r(5, 4, 6, 7)),
    op("reflection pad 1d", lambda x: F.pad(x, (1, 2), mode="reflect"), r(5, 4, 6)),
    op("replication pad 1d", lambda x: F.pad(x, (1, 2), mode="replicate"), r(5, 4, 6)),
    op("reflection pad 3d", lambda x: F.pad(x, (1, 1, 1, 1, 1, 0), mode="reflect"), r(5, 4, 2, 3, 4)),
    op("replication pad 3d", lambda x: F.pad(x, (1, 1, 1, 1, 1, 0), mode="replicate"), r(5, 4, 2, 3, 4)),
    op("grid sample", lambda x, g: F.grid_sample(x, g, align_corners=False), c(5, 4, 6, 7), c(5, 3, 2, 2)),
    op("fft", lambda x: torch.fft.ifft(torch.fft.fft(x, dim=1), dim=1), z(5, 6, 4)),
    op("real fft", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1), r(5, 6, 4)),
]

ELEMENTWISE = [
    op("activations", lambda x: (x.relu(), F.gelu(x), F.silu(x), x.tanh(), x.sigmoid(), F.softplus(x)), r(5, 6)),
    op("more activations", lambda x: (F.elu(x), F.leaky_relu(x), F.hardswish(x), F.mish(x), F.hardsigmoid(x)), r(5, 6)),
    op("tanh gelu", lambda x: F.gelu(x, approximate="tanh"), r(5, 6)),
    op("log sigmoid", lambda x: (F.logsigmoid(x), F.celu(x), F.hardtanh(x), F.softshrink(x)), r(5, 6)),
    op("prelu", F.prelu, r(5, 6, 4), r(6)),
    op("shrinks", lambda x: (F.hardshrink(x), F.tanhshrink(x), F.threshold(x, 0.1, 2.0), F.selu(x)), r(5, 6)),
    op(
        "monotonic",
        lambda x: (x.sinh(), x.asinh(), x.atan(), x.expm1(), x.exp2(), x.ceil(), x.erfc(), x.deg2rad(), x.nan_to_num()),
        r(5, 6),
    ),
    op("extremes of two", lambda x, y: (torch.logaddexp(x, y), torch.fmax(x, y), torch.fmin(x, y)), r(5, 6), r(6)),
    op("glu", lambda x: F.glu(x, 1), r(5, 6)),
    op("arithmetic", lambda x, y: ((x + 2 * y), x - y, x * y, x / y, x**2, x.neg()), p(5, 6), p(5, 6)),
    op("broadcasting", lambda x, y, w: x + y * w, r(5, 6, 7), r(6, 1), r(7)),
    op("functions", lambda x: (x.exp(), x.log(), x.sqrt(), x.rsqrt(), x.sin(), x.cos(), x.erf(), x.abs()), p(5, 6)),
    op("comparison", lambda x, y: ((x > y) & (x < 2), x == y, ~(x >= 1)), c(5, 6), c(5, 6)),
    op("choices", lambda x, y: (torch.where(x > y, x, y), torch.maximum(x, y), x.clamp(-1, 1)), r(5, 6), r(5, 6)),
    op("rounding", lambda x: (x.floor(), x.round(), x.sign(), x.trunc()), c(5, 6)),
    op("casts", lambda x: (x.float().double(), x.to(torch.int64), x.bool()), r(5, 6)),
    op("integers", lambda x: (x // 2, x % 3, x << 1, x.bitwise_and(3)), i(9, 5, 6)),
    op("powers", lambda x, y: (x**y, torch.atan2(x, y), torch.hypot(x, y), x.reciprocal()), p(5, 6), p(5, 6)),
    op("complex", lambda x, y: (torch.polar(x, y).abs(), torch.complex(x, y).conj() * 2j), p(5, 6), p(5, 6)),
    op("losses", lambda x, y: (F.mse_loss(x, y), F.smooth_l1_loss(x, y), F.l1_loss(x, y)), r(5, 6), r(5, 6)),
    op("kl", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), r(5, 6), r(5, 6)),
    op("logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), r(5, 6), c(5, 6)),
    op("fill", lambda x: torch.empty(5, 6, dtype=torch.float64).fill_(2.0) + x, r(5, 6)),
]


def regular(x: torch.Tensor) -> torch.Tensor:
    """Matrices that are symmetric and far from singular."""
    return x @ x.mT + 2 * torch.eye(x.shape[-1], dtype=x.dtype)


LINEAR = [
    op("singular values", lambda x: torch.linalg.svd(x, full_matrices=False), c(5, 3, 4)),
    op("eigenvalues", lambda x: (*torch.linalg.eigh(regular(x)), *torch.linalg.eig(x)), c(5, 3, 3)),
    op("qr", lambda x: torch.linalg.qr(x), r(5, 4, 3)),
    op("inverse", lambda x: torch.linalg.inv(regular(x)), r(5, 2, 3, 3)),
    op("cholesky", lambda x: torch.linalg.cholesky(regular(x)), r(5, 3, 3)),
    op("old cholesky", lambda x: torch.cholesky_inverse(torch.cholesky(regular(x))), c(5, 3, 3)),
    op("determinants", lambda x: (torch.linalg.det(x), torch.linalg.slogdet(regular(x))), r(5, 3, 3)),
    op("lu", lambda x: (*torch.linalg.lu(x), *torch.lu_unpack(*torch.linalg.lu_factor(x))), c(5, 3, 3)),
    op("matrix exponential", lambda x: torch.linalg.matrix_exp(x), c(5, 3, 3)),
    op("reflections", lambda x, t, y: (torch.linalg.householder_product(x, t), torch.ormqr(x, t, y)),
       c(5, 4, 3), c(5, 3), c(5, 4, 2)),
    op("qr in place", lambda x: torch.geqrf(x), c(5, 4, 3)),
    op("solve", lambda x, y: torch.linalg.solve(regular(x), y), r(5, 3, 3), r(5, 3, 2)),
    op("solve for vectors", lambda x, y: torch.linalg.solve(regular(x), y), r(5, 3, 3), r(5, 3)),
    op("solve for many", lambda x, y: torch.linalg.solve(regular(x), y), r(3, 3), r(5, 3, 4)),
    op("solve by factors", lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), y), c(5, 3, 3), c(5, 3, 2)),
    op("solve triangular", lambda x, y: torch.linalg.solve_triangular(regular(x).triu(), y, upper=True),
       r(5, 3, 3), r(5, 3, 4)),
    op("solve triangular for many", lambda x, y: torch.linalg.solve_triangular(x.triu() + 2, y, upper=True),
       c(3, 3), c(5, 3, 4)),
    op("solve by cholesky", lambda x, y: torch.cholesky_solve(y, regular(x)), c(5, 3, 3), c(5, 3, 4)),
]  # fmt: skip

CASES = [*VIEWS, *PRODUCTS, *REDUCTIONS, *NORMS, *INDEXING, *ATTENTION, *SPATIAL, *ELEMENTWISE, *LINEAR]
