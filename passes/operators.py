"""What hides a program in one call, as the ops that it stands for, while a model is captured.

scan, map           their steps one after another
while_loop          likewise, as often as the example goes round: what the condition reads is read again at every step
cond                both branches, and a choice between what they give
flex_attention      scores, their change, mask, softmax and sum, each an op (its own backward runs on no CPU)
checkpoint          a reentrant one as one that is not: the same numbers, and the graph knows what is computed again
packed sequences    a step per time for the sequences that are as long, by the lengths of the example
recurrent layers    a step per time, not the fused layer of one make of CPU
torch.compile       parts that are compiled are traced as they would run without it

Checks of linear algebra that raise on singular matrices go: what the ops give then is what their `_ex` forms give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import _torch

__all__ = ["as_plain_ops"]


@contextlib.contextmanager
def as_plain_ops() -> Iterator[None]:
    """Let calls of such operators run as plain ops until the end of the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_torch.without_mkldnn())
        stack.enter_context(_torch.operators_go_to(_OPERATORS))
        stack.enter_context(_torch.recurrent_layers_go_to(_recurrent))
        stack.enter_context(_torch.packing_goes_to(_pack, _pad))
        stack.enter_context(_torch.reentrant_checkpoints_go_to(_checkpoint))
        stack.enter_context(_torch.flexible_attention_on_cpu())
        stack.enter_context(_torch.unchecked_linear_algebra())
        yield


def _together(join: Callable[..., Any], *trees: Any) -> Any:
    """A tree of what `join` makes of the leaves of trees of one structure; None stays."""
    structure = _torch.tree_flatten(trees[0])[1]
    columns = zip(*(_torch.tree_leaves(tree) for tree in trees), strict=True)
    return _torch.tree_unflatten([None if parts[0] is None else join(*parts) for parts in columns], structure)


def _stacked(*parts: torch.Tensor) -> torch.Tensor:
    return torch.stack(parts)


def _scan(combine: Callable, init: Sequence[Any], xs: Sequence[torch.Tensor], additional_inputs: Any = ()) -> Any:
    """The last carry, and what the steps give along a new first dim."""
    carry: Any = list(init)
    steps = []
    for at in range(xs[0].shape[0]):
        carry, step = combine(*_torch.tree_leaves(carry), *(x[at] for x in xs), *additional_inputs)
        steps.append(step)
    return carry, _together(_stacked, *steps)


def _map(function: Callable, xs: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
    """What the function gives for each row of `xs`, along a new first dim."""
    return _together(_stacked, *(function(*(x[at] for x in xs), *args) for at in range(xs[0].shape[0])))


def _cond(pred: torch.Tensor, if_true: Callable, if_false: Callable, operands: Sequence[Any]) -> Any:
    return _together(lambda a, b: torch.where(pred, a, b), if_true(*operands), if_false(*operands))


def _while_loop(cond: Callable, body: Callable, carried: Sequence[Any], additional: Sequence[Any]) -> Any:
    state: Any = tuple(carried)
    while bool(cond(*state, *additional)):
        state = tuple(_torch.tree_leaves(body(*state, *additional)))
    return state


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "scan": _scan,
    "map_impl": _map,
    "cond": _cond,
    "while_loop": _while_loop,
    "flex_attention": _torch.plain_flexible_attention,
}


def _recurrent(
    x: torch.Tensor,
    hidden: Sequence[Any],
    weights: Sequence[Any],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
    run: Callable[..., tuple[torch.Tensor, Any]],
) -> tuple[torch.Tensor, list[Any]]:
    """The outputs of the last of `layers`, each `run` in one direction or in both, and the last state of every run."""
    x = x.transpose(0, 1) if batch_first else x
    ways, ends = 2 if both_ways else 1, []
    for layer in range(layers):
        found = []
        for way in range(ways):
            at = layer * ways + way
            found.append(run(x, hidden[at], weights[at], biases, reverse=way == 1))
        x = torch.cat([out for out, _ in found], -1) if both_ways else found[0][0]
        ends += [end for _, end in found]
        if dropout and train and layer + 1 < layers:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, ends


def _pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all times in a row, and how many there are of each: sequences come with the longest first."""
    long = [int(n) for n in lengths.tolist()]
    x = x.transpose(0, 1) if batch_first else x
    counts = [sum(n > time for n in long) for time in range(long[0])]
    return torch.cat([x[time, :count] for time, count in enumerate(counts)]), torch.tensor(counts)


def _pad(
    data: torch.Tensor, counts: torch.Tensor, batch_first: bool, padding: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: times (at least `total`) by sequences, and how long these are."""
    rows = [int(n) for n in counts.tolist()]
    width = rows[0]
    tail = [0, 0] * (data.dim() - 1)
    times = [F.pad(part, [*tail, 0, width - len(part)], value=padding) for part in data.split(rows)]
    padded = F.pad(torch.stack(times), [*tail, 0, 0, 0, max(0, total - len(rows))], value=padding)
    lengths = torch.tensor([sum(n > at for n in rows) for at in range(width)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _checkpoint(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint gives no gradients where none of its arguments takes one."""
    if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        with torch.no_grad():
            return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve, determinism_check="none")
