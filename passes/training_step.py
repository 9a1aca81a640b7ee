"""What `model.step` takes and gives, with a pipeline or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..plans.errors import RequestError
from .trees import flatten_call

__all__ = ["call_of", "clip_by_norm", "loss_of", "refuse_whole"]


def refuse_whole(model: nn.Module, state: Mapping[str, Any]) -> None:
    """RequestError where `state` has whole tensors for parameters and buffers of `model` that are DTensors."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in state.items():
        if isinstance(held.get(name), DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise RequestError(
                f"'state_dict' must hold DTensors for a model that runs by a plan, got {name} whole; call "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                "options=StateDictOptions(full_state_dict=True)), which gives each rank its pieces"
            )


def call_of(args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of the model: those given, or, where one batch is given that holds them all, what is in it.

    `names` are those of the model's input tensors, as in `flatten_call`.
    """
    if len(args) != 1 or kwargs or isinstance(args[0], torch.Tensor):
        return args, kwargs
    batch = args[0]
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        inner: tuple[tuple, dict[str, Any]] = (), dict(batch)
    elif isinstance(batch, (tuple, list)):
        inner = tuple(batch), {}
    else:
        return args, kwargs
    return inner if flatten_call(*inner)[1].names == tuple(names) else (args, kwargs)


def loss_of(out: Any) -> torch.Tensor:
    """The loss in a model's output: the output itself where it is one number, or its `loss`."""
    found = out.get("loss") if hasattr(out, "get") else getattr(out, "loss", out)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point():
        return found.reshape(()) if found.dim() else found
    raise RequestError(
        f"'loss' must be given for a model whose output is no loss, got an output of type {type(out).__name__}; "
        "pass loss=FUNCTION when you plan and apply, or let the model return its loss"
    )


def clip_by_norm(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    counted: Sequence[str] | None = None,
    over: dist.ProcessGroup | None = None,
    speaks: bool = True,
) -> torch.Tensor:
    """Scale the gradients of `model` down to a norm of at most `max_norm`; the norm before, over all ranks.

    `counted` are the parameters that this rank adds to the norm, by default all; `over` is the group of pipeline ranks
    that hold the others; a process that does not speak adds nothing.
    """
    held = {name: p for name, p in model.named_parameters() if p.grad is not None}
    own = [p.grad for name, p in held.items() if p.grad is not None and (counted is None or name in counted)]
    norm = nn.utils.get_total_norm(own, norm_type)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if over is not None:
        device = next((p.device for p in model.parameters()), norm.device)
        norm = norm.to(device, torch.float64)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=over)
        else:
            norm = norm**norm_type if speaks else torch.zeros_like(norm)
            dist.all_reduce(norm, group=over)
            norm = norm ** (1.0 / norm_type)
    nn.utils.clip_grads_with_norm_(held.values(), max_norm, norm)
    return norm
