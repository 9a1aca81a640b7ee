"""A process beside each that trains, which plans ahead: what to do when any one process is lost, or two, or one comes.

It is forked before the training process has threads or groups, works at the lowest priority, and puts what it finds on
the supervisor's store, where it outlives the process that asked. A loss is then answered from there in milliseconds.
It also judges slow devices: whether another plan would pay back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import nn

from ...plans.errors import MeshwrightError, RequestError
from ...plans.plan import Plan
from ...plans.uneven import Uneven, read_plan
from ..replanning.replan import ranks_of
from ..replanning.solved import Solved
from ..workloads import workload_of
from .epochs import Event, post
from .pace import Curve
from .processes import forked
from .survivors import Request, answer, assigned
from .watch import connect

__all__ = ["Ahead", "Ask", "StoreShelf", "ahead_of", "curve_key", "curve_of"]

# Kinds of double failures that are looked at.
_DOUBLES = 16
# Sizes at which a step is predicted.
_SIZES = 33


class StoreShelf:
    """Solved plans on the supervisor's store."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def get(self, key: str) -> bytes | None:
        """What is there under `key`."""
        return self.store.get(f"solved/{key}") if self.store.check([f"solved/{key}"]) else None

    def put(self, key: str, value: bytes) -> None:
        """Put `value` there."""
        self.store.set(f"solved/{key}", value.decode())


class Ask(Struct, frozen=True, kw_only=True):
    """The plan that runs and who plays its ranks; all processes that live; with `speeds`, judge these."""

    plan: bytes
    ranks: tuple[int, ...]
    members: tuple[int, ...]
    speeds: dict[int, float] = {}


class Ahead:
    """The process that plans ahead for this one, `me`."""

    def __init__(self, request: Request, address: str, me: int) -> None:
        reading, self._writing = os.pipe()

        def work() -> int:
            os.close(self._writing)
            return _serve(reading, request, address, me)

        self.pid, self.me = forked(work), me
        os.close(reading)
        os.set_blocking(self._writing, False)

    def plan(self, store: Any, ask: Ask) -> None:
        """Plan for what may happen, instead of what was asked before."""
        store.set(f"ask/{self.me}", msgspec.json.encode(ask).decode())
        with contextlib.suppress(OSError):  # it has ended, or has not looked yet
            os.write(self._writing, b"!")


def _serve(reading: int, request: Request, address: str, me: int) -> int:
    os.nice(19)
    torch.set_num_threads(1)
    light = request.solved()
    _drop_weights(request)
    store = None
    while os.read(reading, 1 << 16):
        if store is None:
            store = connect(address)
            light.shelf = StoreShelf(store)
        ask = msgspec.json.decode(store.get(f"ask/{me}"), type=Ask)
        try:
            for _ in _answers(ask, request, light, store, me):
                if select.select([reading], [], [], 0)[0]:
                    break
        except MeshwrightError as error:
            post(store, Event(kind="note", who=me, text=f"nothing was planned ahead: {error}"))
    return 0


def _drop_weights(request: Request) -> None:
    """Give back the memory of the weights: once the training process has, this one would be the last to hold it."""
    for tensor in request.model.parameters():
        if tensor.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # memory of somebody else, a file for instance
                tensor.untyped_storage().resize_(0)


def _answers(ask: Ask, request: Request, solved: Solved, store: Any, me: int) -> Iterator[None]:
    plan = Plan.from_bytes(ask.plan)
    if ask.speeds:
        _judge(ask, plan, request, solved, store, me)
        yield
    elif (curve := curve_of(request, plan, solved.model)) is not None:
        store.set(curve_key(plan.digest()), msgspec.json.encode(curve).decode())
        yield
    gone = {at: 0.0 for at, who in enumerate(ask.ranks) if who not in ask.members}
    for _ in ahead_of(request, plan, len(ask.members) - ranks_of(plan) + len(gone), solved, gone):
        yield


def _judge(ask: Ask, plan: Plan, request: Request, solved: Solved, store: Any, me: int) -> None:
    """Tell the supervisor of slow processes where another arrangement would be faster."""
    found = assigned(request, ask.members, (plan, ask.ranks), ask.speeds, solved)
    made = read_plan(found.plan)
    if found.ranks != ask.ranks or isinstance(made, Uneven) or made.mesh != plan.mesh:
        for who, speed in sorted(ask.speeds.items()):
            post(store, Event(kind="slow", who=who, text=json.dumps(speed)))


def curve_key(digest: str) -> str:
    """Where the curve of a plan is on the store."""
    return f"curve/{digest}"


def curve_of(request: Request, plan: Plan, model: nn.Module) -> Curve | None:
    """What a step of `plan` is predicted to take at any size of the one dim of its inputs that may change; None where
    there is no such dim, or several, or a pipeline."""
    dims = plan.options.dynamic
    if plan.pipeline is not None or len({dim.symbol for dim in dims}) != 1:
        return None
    least, most = max(dim.smallest for dim in dims), min(dim.largest or 2**20 for dim in dims)
    try:
        found = workload_of(
            plan, model, request.args, request.kwargs, dynamic=request.options["dynamic"], loss=request.loss,
            rules=request.options.get("rules", ()),
        )  # fmt: skip
    except RequestError:
        return None  # sizes that do not grow linearly: steps are held against each other instead
    sizes = np.unique(np.linspace(least, most, _SIZES).round())
    seconds = found.seconds(**{dims[0].symbol: sizes})
    return Curve(symbol=dims[0].symbol, sizes=tuple(sizes.tolist()), seconds=tuple(np.asarray(seconds).tolist()))


def ahead_of(
    request: Request, plan: Plan, spare: int, solved: Solved, gone: Mapping[int, float] = MappingProxyType({})
) -> Iterator[None]:
    """Solve what a replan will ask for when one device is lost, beside those that are `gone`, two are, or one comes; a
    step at a time."""
    size = ranks_of(plan)
    left = [device for device in range(size) if device not in gone]
    singles = [{device: 0.0} for device in left]
    per_node = plan.cluster.devices_per_node
    doubles = sorted(
        ({a: 0.0, b: 0.0} for a, b in itertools.combinations(left, 2)),
        key=lambda pair: len({device // per_node for device in pair}),
    )
    cases = [*((one, spare) for one in singles), ({}, spare + 1), *((two, spare) for two in doubles[:_DOUBLES])]
    for more, added in cases:
        health = {**gone, **more}
        if len(health) < size + added:
            # What goes wrong here, in the script's own rule for meshes too, is met and told when it is needed.
            with contextlib.suppress(Exception):
                answer(request, plan, health, added, solved)
        yield
