"""What is run to learn the parameters of one device: few cases, each of which pins down what the others leave open.

Products take the three forms of a training step in turn (forward, gradient of the input, gradient of the weight).
Memory is measured on memory that is there, and in a chain that keeps what it makes and gives it back, as a forward and
its backward do: the difference is what the allocator takes for new memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .clock import Case

__all__ = ["attention", "attention_case", "compiled", "fresh", "launches", "memory", "product_case", "products",
           "small_kernels", "streamed_case"]  # fmt: skip

_CPU_PRODUCTS = (
    (512, 512, 512, 1), (1024, 512, 256, 1), (1024, 256, 1024, 1), (64, 1024, 1024, 1), (256, 256, 256, 1),
    (1024, 64, 256, 1), (128, 128, 128, 1), (16, 16, 16, 1), (64, 64, 64, 16), (512, 1024, 512, 1), (256, 128, 512, 1),
    (128, 256, 256, 4),
)  # fmt: skip
_CUDA_PRODUCTS = (
    (8192, 8192, 8192, 1), (4096, 4096, 4096, 1), (16384, 4096, 1024, 1), (4096, 14336, 4096, 1), (1024, 1024, 8192, 1),
    (2048, 2048, 2048, 1), (1024, 1024, 1024, 1), (128, 4096, 4096, 1), (512, 512, 512, 1), (2048, 64, 2048, 32),
    (8192, 1024, 8192, 1), (256, 256, 256, 64),
)  # fmt: skip
_FORMS = (("mk,nk->mn", "bmk,bnk->bmn"), ("mk,kn->mn", "bmk,bkn->bmn"), ("km,kn->mn", "bkm,bkn->bmn"))
# batch, heads, queries, keys, head size, causal
_CPU_ATTENTION = ((4, 4, 128, 128, 64, 1), (2, 4, 512, 512, 64, 1), (2, 4, 256, 256, 32, 0), (8, 4, 64, 64, 32, 1),
                  (1, 4, 1024, 1024, 64, 0))  # fmt: skip
_CUDA_ATTENTION = ((4, 32, 2048, 2048, 128, 1), (1, 32, 8192, 8192, 128, 1), (8, 32, 512, 512, 128, 0),
                   (2, 16, 4096, 4096, 64, 1), (32, 16, 256, 256, 64, 0))  # fmt: skip
_KEPT = 24


def launches(device: str) -> list[Case]:
    """The host's time of ops that do next to nothing, of the kinds that a step is made of, and of views."""
    x, y = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device)
    ops = torch.ops.aten
    runs: list[Callable[[], object]] = [
        lambda: ops.add.Tensor(x, y),
        lambda: ops.mul.Tensor(x, y),
        lambda: ops.sum.dim_IntList(x, [0]),
        lambda: ops.rsqrt.default(x),
        lambda: ops.gelu.default(x),
        lambda: ops.div.Scalar(x, 3.0),
        lambda: ops.cat.default([x, y], 1),
        lambda: ops.neg.default(x),
        lambda: ops.reshape.default(ops.permute.default(x, [1, 0]), [64]),
        lambda: ops.where.self(ops.ne.Scalar(x, 1.0), x, y),
    ]
    views: list[Callable[[], object]] = [
        lambda: ops.permute.default(x, [1, 0]),
        lambda: ops.reshape.default(x, [2, 4, 8]),
        lambda: ops.unsqueeze.default(x, 0),
        lambda: ops.slice.Tensor(x, 0, 2, 6),
        lambda: ops.expand.default(x, [2, 8, 8]),
    ]

    def all_of(parts: list[Callable[[], object]]) -> Callable[[], None]:
        def run() -> None:
            for part in parts:
                part()

        return run

    return [
        Case(kind="launch", sizes=(len(runs) + 1,), run=all_of(runs), host=True),
        Case(kind="view", sizes=(len(views),), run=all_of(views), host=True),
    ]


def products(device: str, dtype: str, *, quick: bool) -> list[Case]:
    """Matrix products."""
    shapes = _CPU_PRODUCTS if device == "cpu" else _CUDA_PRODUCTS
    return [product_case(device, dtype, *shape, form=at % 3) for at, shape in enumerate(shapes[: 9 if quick else None])]


def product_case(device: str, dtype: str, m: int, n: int, k: int, batch: int, *, form: int) -> Case:
    """One product; `form` 0 to 2 is that of the forward, the input's gradient and the weight's."""
    equation = _FORMS[form][batch > 1]
    size = {"m": m, "n": n, "k": k, "b": batch}
    left, right = equation.split("->")[0].split(",")
    a, b = (torch.randn([size[c] for c in part], device=device).to(getattr(torch, dtype)) for part in (left, right))
    einsum = torch.ops.aten.einsum.default
    return Case(kind="product", sizes=(m, n, k, batch), dtype=dtype, run=lambda: einsum(equation, [a, b]))


def attention(device: str, dtype: str, *, quick: bool) -> list[Case]:
    """Fused attention, forward and backward."""
    shapes = (_CPU_ATTENTION if device == "cpu" else _CUDA_ATTENTION)[: 3 if quick else None]
    return [case for shape in shapes for case in attention_case(device, dtype, shape)]


def attention_case(device: str, dtype: str, shape: tuple[int, int, int, int, int, int]) -> list[Case]:
    """The forward and the backward of one attention: batch, heads, queries, keys, head size, whether causal."""
    b, h, q, kv, d, causal = shape
    like = {"device": device, "dtype": getattr(torch, dtype)}
    x, y, z = (torch.randn(b, h, length, d, **like) for length in (q, kv, kv))
    inputs = [t.clone().requires_grad_() for t in (x, y, z)]
    out = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=bool(causal))
    tangent = torch.randn_like(out)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(x, y, z, is_causal=bool(causal))

    def backward() -> object:
        return torch.autograd.grad(out, inputs, tangent, retain_graph=True)

    return [
        Case(kind="attention", sizes=(*shape, is_backward), dtype=dtype, run=run)
        for is_backward, run in ((0, forward), (1, backward))
    ]


def memory(device: str, *, quick: bool) -> list[Case]:
    """Kernels bound by memory, of the kinds that a step is made of, from what fits in a cache to what does not; by
    size."""
    largest = 1 << (22 if device == "cpu" else 27)
    found = [streamed_case(largest >> shift, device) for shift in ((0, 3, 6) if quick else (0, 1, 2, 4, 6, 8))]
    for shift in (2, 5) if quick else (1, 3, 5, 7):
        found += _shaped(torch.randn(256, (largest >> shift) // 256, device=device))
    return sorted(found, key=lambda case: case.sizes)


def streamed_case(n: int, device: str) -> Case:
    """The sum of two vectors of `n` float32 into a third."""
    x, y, out = (torch.randn(n, device=device) for _ in range(3))
    return Case(kind="memory", sizes=(12 * n,), run=lambda: torch.add(x, y, out=out))


def _shaped(x: Tensor) -> list[Case]:
    size, out = x.numel() * 4, torch.empty_like(x)
    heads = x.view(4, 64, -1, 16)
    turned = torch.empty_like(heads.transpose(1, 2).contiguous())
    runs: list[tuple[int, Callable[[], object]]] = [
        (size, lambda: x.sum(-1)),
        (size, lambda: x.sum(0)),
        (2 * size, lambda: torch.mul(x, 0.5, out=out)),
        (2 * size, lambda: torch.ops.aten.gelu.out(x, out=out)),
        (2 * size, lambda: turned.copy_(heads.transpose(1, 2))),
        (2 * size, lambda: torch.softmax(x, -1, out=out)),
    ]
    return [Case(kind="memory", sizes=(moved,), run=run) for moved, run in runs]


def fresh(device: str, *, quick: bool) -> list[Case]:
    """Chains that keep what they make and give it back, as a forward and its backward do; small tensors first, because
    some allocators learn from the largest one that they have seen."""
    return [_chain(device, n) for n in ((1 << 18,) if quick else (1 << 16, 1 << 18, 1 << 20))]


def _chain(device: str, n: int) -> Case:
    x = torch.randn(n, device=device)

    def run() -> None:
        kept = [x]
        for _ in range(_KEPT):
            kept.append(torch.add(kept[-1], x))
        back = torch.mul(kept[-1], x)
        for _ in range(_KEPT):
            back = torch.mul(back, kept.pop())

    return Case(kind="fresh", sizes=(12 * n, 4 * n), run=run, parts=2 * _KEPT + 1, calls=1)


def compiled(device: str, *, quick: bool) -> list[Case]:
    """What Inductor makes of chains: a fused one moves its input and its output, and kernels that do not fuse cost
    little each. The latter is the difference of a long and a short program, whose entry costs the same."""
    compile_one = torch.compile(lambda x: F.gelu(x * 0.5 + 1.0) * x, dynamic=False)
    found: list[Case] = []
    for n in (1 << 20,) if quick else (1 << 14, 1 << 20):
        x = torch.randn(n if device == "cpu" else 32 * n, device=device)
        found.append(Case(kind="fused", sizes=(8 * x.numel(),), run=lambda x=x: compile_one(x)))
    return found


def small_kernels(device: str) -> Callable[[int], Callable[[], object]]:
    """A compiled program of so many tiny kernels that do not fuse."""
    x = torch.randn(8, 8, device=device)

    def of(kernels: int) -> Callable[[], object]:
        def program(x: Tensor) -> Tensor:
            for _ in range(kernels):
                x = x - x.mean()
            return x

        made = torch.compile(program, dynamic=False)
        return lambda: made(x)

    return of
