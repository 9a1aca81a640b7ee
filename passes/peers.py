"""What joins replicas of unlike sizes in a step: the rows each takes of a batch, gradients summed over all of them, and
outputs put together.

Each replica computes its own samples alone, so the gradient of a loss over the whole batch is the sum of what the
replicas have. Their pieces of a parameter differ: a cell, held alike by some ranks of each replica, is summed over all
ranks that hold it, to which one of each replica gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..plans.errors import RequestError
from ..plans.migration import Box, cells_of
from ..plans.uneven import Uneven
from .graph import Captured
from .holdings import Holders, Kind, Spread
from .microbatches import splits
from .naming import draws_random
from .trees import Tree

__all__ = ["Peers", "check_separable"]


class Peers:
    """The replicas of `plan`, of which this rank is in number `index`. Made by all ranks of the process group at once,
    whose ranks are those of the replicas one after another."""

    def __init__(self, plan: Uneven, parameters: Sequence[Kind], holders: Sequence[Holders]) -> None:
        self.plan, me = plan, dist.get_rank()
        self.index = plan.portion_of(me)
        rows = plan.split(range(dist.get_world_size()))
        self._leaders = [row[0] for row in rows]
        spread = Spread([(one.plan, row, held) for one, row, held in zip(plan.portions, rows, holders, strict=True)])
        # For each set of ranks that hold something in common: name, where it lies in this rank's piece, who gives.
        self._meetings: dict[tuple[int, ...], list[tuple[str, Box, bool]]] = {}
        meetings: dict[tuple[int, ...], None] = {}
        for kind in parameters:
            place = spread.place(kind)
            own = place.box(kind.shape, me)
            for cell, ranks in cells_of(kind.shape, place)[0].items():
                members = tuple(sorted(ranks))
                meetings.setdefault(members)
                if me in members and own is not None:
                    here = tuple((start - first, length) for (start, length), (first, _) in zip(cell, own, strict=True))
                    gives = me == min(rank for rank in members if rank in rows[self.index])
                    self._meetings.setdefault(members, []).append((kind.name, here, gives))
        # In one order on all ranks, by which none waits in a circle.
        self._groups = {members: dist.new_group(list(members)) for members in sorted(meetings)}

    def rows(self, batch: int) -> tuple[int, int]:
        """The first of this replica's samples, and how many it has."""
        sizes = self.plan.samples(batch)
        return sum(sizes[: self.index]), sizes[self.index]

    def cut(self, tensors: Sequence[torch.Tensor], tree: Tree) -> tuple[list[torch.Tensor], int]:
        """This replica's rows of the inputs of a step, and the batch's size. A replica that has none takes the first
        one, which then counts for nothing."""
        split = splits(tensors)
        batch = next((t.shape[0] for t, cut in zip(tensors, split, strict=True) if cut), 0)
        flowing = [name for name, t in zip(tree.names, tensors, strict=True) if t.requires_grad]
        if not batch or flowing:
            raise RequestError(
                "'inputs' must have samples along dim 0, and no gradients, where replicas of unlike sizes share a "
                f"batch, got {'none with samples' if not batch else flowing[0]}; pass uneven=False to elastic"
            )
        first, count = self.rows(batch)
        first, count = (first, count) if count else (0, 1)
        return [t[first : first + count] if cut else t for t, cut in zip(tensors, split, strict=True)], batch

    def sum(self, gradients: Mapping[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
        """The sum over replicas of each gradient's piece; a new tensor."""
        found = {name: torch.empty_like(gradient) for name, gradient in gradients.items()}
        idle = not self.rows(batch)[1]
        for members, cells in sorted(self._meetings.items()):
            present = [cell for cell in cells if cell[0] in gradients]
            for dtype in sorted({gradients[name].dtype for name, _, _ in present}, key=str):
                alike = [cell for cell in present if gradients[cell[0]].dtype == dtype]
                given = [
                    (_at(gradients[name], box) if gives and not idle else torch.zeros_like(_at(gradients[name], box)))
                    for name, box, gives in alike
                ]
                flat = torch.cat([piece.reshape(-1) for piece in given])
                dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=self._groups[members])
                for (name, box, _), piece in zip(alike, flat.split([one.numel() for one in given]), strict=True):
                    target = _at(found[name], box)
                    target.copy_(piece.view(target.shape))
        return found

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of one number over the replicas, each of whose ranks have it."""
        mine = value.detach().clone() if dist.get_rank() == self._leaders[self.index] else torch.zeros_like(value)
        dist.all_reduce(mine)
        return mine

    def whole(self, output: Any, batch: int) -> Any:
        """An output over the whole batch: rows put together, or the mean over the samples of what is one number."""
        if not isinstance(output, torch.Tensor):
            return output
        count = max(self.rows(batch)[1], 1)
        if output.dim() and output.shape[0] == count:
            return _Rows.apply(output, self, batch)
        if not output.dim() and output.is_floating_point():
            return _Mean.apply(output, self, batch)
        raise RequestError(
            "'model' must give samples along dim 0, or the mean over them, where replicas of unlike sizes share a "
            f"batch, got shape {list(output.shape)} for {count} samples; pass uneven=False to elastic"
        )

    def put_together(self, local: torch.Tensor, batch: int) -> torch.Tensor:
        """The rows of all replicas."""
        whole = local.new_empty((batch, *local.shape[1:]))
        for index, part in enumerate(whole.split(self.plan.samples(batch))):
            if not part.numel():
                continue
            if index == self.index:
                part.copy_(local[: part.shape[0]])
            dist.broadcast(torch.view_as_real(part) if part.is_complex() else part, src=self._leaders[index])
        return whole


class _Rows(torch.autograd.Function):
    """Rows of all replicas from those of this one; its own rows of the gradient, which is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, peers: Peers, batch: int) -> torch.Tensor:
        ctx.peers, ctx.batch = peers, batch
        return peers.put_together(local.detach(), batch)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        first, count = ctx.peers.rows(ctx.batch)
        gradient = gradients[0][first : first + count]
        return gradient if count else torch.zeros_like(gradients[0][:1]), None, None


class _Mean(torch.autograd.Function):
    """The mean over all samples from that over those of this replica."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, peers: Peers, batch: int) -> torch.Tensor:
        ctx.share = peers.rows(batch)[1] / batch
        return peers.total(local * ctx.share)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        return gradients[0] * ctx.share, None, None


def _at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def check_separable(captured: Captured, *, draws: bool = False) -> None:
    """RequestError where a replica's samples cannot be computed without those of the others. `draws`: what is drawn at
    random goes by the micro-batch."""
    drawn = None if draws else next((node for node in captured.ops() if draws_random(node)), None)
    changed = next(iter(captured.mutations), None)
    if drawn is not None or changed is not None:
        what = f"{changed}, which a forward changes" if drawn is None else f"{drawn}, which draws at random"
        raise RequestError(
            "'model' must compute each sample by itself, without random draws and buffers that change, where replicas "
            f"of unlike sizes share a batch, got {what}; pass uneven=False to elastic"
        )
