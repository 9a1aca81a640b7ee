"""Hooks that a user put on a model before it is planned: those on its parameters go with them wherever the model is
copied, those on its call are part of the captured program and run there."""

from __future__ import annotations

from torch import nn

from ..plans.errors import RequestError
from . import _torch

__all__ = ["carry_all", "carry_hooks", "drop_call_hooks", "has_hooks", "refuse_hooks"]


def has_hooks(tensor: object) -> bool:
    """Whether a tensor has hooks on its gradient."""
    return any(_torch.tensor_hooks(tensor))


def carry_hooks(before: object, after: nn.Parameter) -> None:
    """Give `after` the hooks of the parameter that it takes the place of, in their order. On a DTensor they get the
    DTensor gradient, of the whole parameter's shape: what they compute is what they compute on the whole."""
    gradient, accumulated = _torch.tensor_hooks(before)
    trained = after.requires_grad
    after.requires_grad_(trained or bool(gradient or accumulated))
    for hook in gradient:
        after.register_hook(hook)
    for hook in accumulated:
        after.register_post_accumulate_grad_hook(hook)
    after.requires_grad_(trained)


def carry_all(before: nn.Module, after: nn.Module) -> None:
    """Give the parameters of a deep copy the hooks that a deep copy leaves behind."""
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        carry_hooks(old, new)


def drop_call_hooks(model: nn.Module) -> None:
    """Take the hooks off the call of `model` itself: its program has them, and they would run once more around it."""
    for hooks in _torch.call_hooks(model):
        hooks.clear()


def refuse_hooks(model: nn.Module) -> None:
    """RequestError where a parameter has hooks: a pipeline sums gradients over micro-batches outside of autograd."""
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise RequestError(
                f"'model' must have no hooks on its parameters where it runs as a pipeline, got one on {name}; change "
                "the gradients after model.step, before the optimizer's step"
            )
