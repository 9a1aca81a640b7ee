"""What a planned step costs beside its kernels: optimizers on DTensor parameters, and the program around the ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ..api import plan
from ..apply import apply
from .clock import Case

__all__ = ["step_cases", "update_cases"]

_TENSORS = 6
_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "adam": lambda parameters: torch.optim.Adam(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-9),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-9, momentum=0.9),
}
_WIDTH = 8
_VIEWS = {"view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand"}


def update_cases(device: str, *, quick: bool) -> list[Case]:
    """Updates of a few parameters of one size, as DTensors on a mesh of one."""
    mesh = init_device_mesh(device, (1,))
    found: list[Case] = []
    scale = 1 if device == "cpu" else 16
    for name in ("adamw",) if quick else _OPTIMIZERS:
        for count in (1 << 10, 1 << 16, 1 << 18):
            tensors = [torch.zeros(count * scale, device=device) for _ in range(2 * _TENSORS)]
            held = [DTensor.from_local(t, mesh, [Replicate()]) for t in tensors]
            parameters = [nn.Parameter(t) for t in held[:_TENSORS]]
            for parameter, gradient in zip(parameters, held[_TENSORS:], strict=True):
                parameter.grad = gradient
            optimizer = _OPTIMIZERS[name](parameters)
            sizes = (_TENSORS, 4 * count * scale)
            found.append(Case(kind=f"update.{name}", sizes=sizes, run=optimizer.step, calls=2))
    return found


def step_cases(device: str) -> list[Case]:
    """Forward and backward of planned models of next to no work: what is left is the program around their ops."""
    return [_step(device, layers) for layers in (2, 12)]


def _step(device: str, layers: int) -> Case:
    assert dist.get_world_size() == 1
    with torch.device(device):
        model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)])
        x = torch.randn(4, _WIDTH)
    made = plan(model, (x,), cluster="cpu:1", mesh="1", loss=_loss, compiled=False, recompute="none")
    parallel = apply(made, model, (x,), loss=_loss)

    def run() -> None:
        parallel(x).backward()
        for parameter in parallel.parameters():
            parameter.grad = None

    ops = [node for node in made.nodes for _ in range(node.count) if node.op not in ("output", "gradient", "update")]
    products = sum(node.op == "einsum" for node in ops)
    views = sum(node.op in _VIEWS for node in ops)
    sizes = (products, len(ops) - products - views, views, len(list(model.parameters())))
    return Case(kind="step", sizes=sizes, run=run)


def _loss(out: Tensor) -> Tensor:
    return out.sum()
