"""How processes come to train together: at the start, after a loss, at a change that was asked for.

    join      processes of the epoch meet; nobody waits on one that is gone
    agree     on the step and on the version of the state that all survivors have (planner/training/state.py)
    plan      the first one replans for those that stay; all compare digests; who has no part in the plan is idle
    move      pieces go from rank to rank; what no survivor holds comes, with all else, from the newest checkpoint
    build     model, optimizer and groups; then the step that was broken off is done again

Each may be cut short by the loss of another process: then everything begins anew with the next epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ...passes.holdings import Kind, as_dtensor, carried_kinds, parts
from ...passes.lookup import PlanLookup
from ...passes.transfer import Part, transfer
from ...plans.errors import CheckError, StateLost
from ...plans.migration import Migration, migrate
from ...plans.plan import Plan
from ...plans.uneven import Uneven, read_plan
from .. import _torch
from ..apply import agreed_bytes, device_mesh_for, device_mesh_of
from ..replanning.solved import Solved
from .checkpoints import Checkpoints, newest, read_extra, read_into
from .epochs import Epoch
from .state import State, Training, set_random_state
from .survivors import Assigned, assigned
from .watch import Watch, connect

__all__ = ["Groups", "Regroup", "agree", "entry_key", "gathered"]


def entry_key(epoch: int, who: int) -> str:
    """What is on the store when process `who` has entered an epoch."""
    return f"epoch {epoch} entered {who}"


class Groups:
    """The process groups beside the one that trains: `control` for agreements, `saving` for checkpoints."""

    control: Any
    saving: Any


class Regroup:
    """One process's way into one epoch. Raises RuntimeError when another process is lost on the way."""

    def __init__(
        self,
        training: Training,
        watch: Watch,
        epoch: Epoch,
        checkpoints: Checkpoints | None,
        solved: Solved,
        timeout_s: float,
    ) -> None:
        self.training, self.watch, self.epoch, self.checkpoints = training, watch, epoch, checkpoints
        self.solved = solved
        # Who plays the ranks of the plan.
        self.ranks: tuple[int, ...] = ()
        # The plan so far, and who played its ranks.
        self.before: tuple[Plan | Uneven, tuple[int, ...]] | None = None
        self.timeout = timedelta(seconds=timeout_s)
        self.groups = Groups()
        self.seconds: dict[str, float] = {}
        self.base_done: int | None = None

    def run(self) -> Groups:
        """Leave the old groups and come out training in `epoch`; SystemExit where this process is to leave."""
        training, watch, epoch = self.training, self.watch, self.epoch
        watch.epoch, watch.stage = epoch.number, "regroup"
        with self._timed("leave"):
            self._leave()
        everyone = (*epoch.members, *(who for who in epoch.leaving if who not in epoch.members))
        with self._timed("join"):
            self._join("move", everyone)
        with self._timed("agree"):
            base, holders = self._agree()
        with self._timed("plan"):
            self.base_done = None if base is None else base.done
            plan = self._plan(base)
            training.take_apart()
        with self._timed("move"):
            state = None if base is None else self._move(base, holders, plan, everyone)
        if watch.me not in self.ranks:
            self._leave()
            if watch.me not in epoch.members:
                raise SystemExit(0)
            training.settled = None
            return self.groups
        if everyone != self.ranks:
            with self._timed("join again"):
                self._leave()
                self._join("train", self.ranks)
        with self._timed("build"):
            self._build(plan, state)
        return self.groups

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self.watch.check()
        began = time.monotonic()
        yield
        self.seconds[phase] = round(time.monotonic() - began, 4)

    def _leave(self) -> None:
        self.watch.groups = {}
        if self.checkpoints is not None:
            # A change that was asked for lets a checkpoint end; after a loss its sockets are shut.
            failed = self.checkpoints.abandon()
            if failed is not None and not self.epoch.urgent:
                self.watch.tell("note", f"a checkpoint could not be written: {failed}")
        if dist.is_initialized():
            dist.destroy_process_group()
        # The loss of a process may have cut the making of a group.
        _torch.count_groups_anew()
        self.watch.fence.forget()

    def _join(self, what: str, members: tuple[int, ...]) -> None:
        """A new default process group of `members`, in that order."""
        watch, prefix = self.watch, f"epoch {self.epoch.number} {what}"
        if what == "move":
            watch.store.set(entry_key(self.epoch.number, watch.me), "1")
        watch.store.set(f"{prefix} ready {watch.me}", "1")
        ready = [f"{prefix} ready {who}" for who in members]
        watch.until(lambda: watch.store.check(ready))
        with watch.fence.around():
            watch.check()
            # Its own connection: the fence shuts it too, so that no rendezvous waits for one that is gone.
            store = PrefixStore(prefix, connect(watch.address, self.timeout.total_seconds()))
            backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            dist.init_process_group(
                backend, store=store, rank=members.index(watch.me), world_size=len(members), timeout=self.timeout
            )
            self.groups.control = dist.new_group(backend="gloo", timeout=self.timeout)
            self.groups.saving = dist.new_group(backend="gloo", timeout=self.timeout)
        watch.groups = {"all": dist.group.WORLD, "control": self.groups.control}

    def _agree(self) -> tuple[State | None, tuple[int, ...]]:
        """The state that all survivors have, as one of them describes it, and who they are."""
        training = self.training
        running, fresh, settled = training.running, training.fresh, training.settled
        version = running.version if running is not None else settled.version if settled is not None else -1
        mine = {
            "who": self.watch.me,
            "version": version,
            "fresh": -1 if fresh is None else fresh.version,
            "done": training.done,
            "known": -1 if training.known is None else training.known[0],
        }
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine, group=self.groups.control)
        best = max(one["version"] for one in said)
        holders = tuple(one["who"] for one in said if best >= 0 and best in (one["version"], one["fresh"]))
        done = max((one["done"] for one in said if one["who"] in holders), default=0)
        if best < 0:
            # Nobody has anything, though some had when they began to read a checkpoint.
            training.settled = training.running = None
            self.before = self._recalled(said)
        elif version == best:
            training.settle_step(done)
        elif fresh is not None and fresh.version == best:
            training.settled, training.done = fresh, fresh.done
        else:
            training.settled = training.running = None
        training.fresh = None
        if best < 0:
            return None, ()
        return self._described(holders[0], said), holders

    def _recalled(self, said: list[Any]) -> tuple[Plan | Uneven, tuple[int, ...]] | None:
        """The last plan that any of them ran by, on every rank, when nobody has its state any more."""
        newest, box = max(one["known"] for one in said), [None]
        if newest < 0:
            return None
        source = next(index for index, one in enumerate(said) if one["known"] == newest)
        if dist.get_rank() == source:
            box = [self.training.known]  # type: ignore[list-item]
        dist.broadcast_object_list(box, src=source, group=self.groups.control)
        _, data, ranks = box[0]  # type: ignore[misc]
        return read_plan(data), ranks

    def _described(self, teller: int, said: list[Any]) -> State:
        """What `teller` holds, without its pieces, and the kinds of what all hold, on every rank."""
        training, box = self.training, [None]
        held = training.settled
        if training.running is not None:
            held = training.version_of(training.running, training.running.version)
        if self.watch.me == teller:
            assert held is not None
            told: Any = (held.version, held.plan.to_bytes(), held.ranks, held.done, held.extra)
            box = [told]
        source = [one["who"] for one in said].index(teller)
        dist.broadcast_object_list(box, src=source, group=self.groups.control)
        version, data, ranks, done, extra = box[0]  # type: ignore[misc]
        plan = read_plan(data)
        kinds = training.kinds(plan, gathered(self.groups.control, () if held is None else held.kinds))
        return State(version=version, plan=plan, ranks=ranks, done=done, kinds=kinds, pieces={}, extra=extra)

    def _plan(self, base: State | None) -> Plan | Uneven:
        """The plan for those that stay, the same on every rank, and who plays its ranks."""
        epoch = self.epoch
        last = self.before if base is None else (base.plan, base.ranks)
        before: tuple[Plan, tuple[int, ...]] | None = None
        if last is not None:
            one, ranks = last
            before = (one.whole, one.played) if isinstance(one, Uneven) else (one, ranks)
        request, solved = self.training.request, self.solved

        def make() -> bytes:
            return msgspec.json.encode(assigned(request, epoch.members, before, epoch.speeds, solved))

        found = msgspec.json.decode(agreed_bytes(make), type=Assigned)
        plan, self.ranks = read_plan(found.plan), found.ranks
        if isinstance(plan, Plan):
            plan.one_mesh("trained elastically")
        agree(self.groups.control, {"plan": plan.digest(), "ranks": self.ranks})
        return plan

    def _move(
        self, base: State, holders: tuple[int, ...], plan: Plan | Uneven, everyone: tuple[int, ...]
    ) -> State | None:
        """The new version of the state; None where the newest checkpoint has to be read instead."""
        training, me, members = self.training, self.watch.me, self.ranks
        # Those who have nothing yet may receive, and not give.
        ranks = tuple(who if who in holders else -1 - at for at, who in enumerate(base.ranks))
        after = training.spread(plan, members)
        tensors = list(carried_kinds(base.kinds, training.spread(base.plan, ranks), after))
        migration = migrate(tensors, {*holders, *everyone})
        agree(self.groups.control, {"step": base.done, "migration": migration.digest()})
        if migration.missing:
            # Before the first step the weights that the model came with are the state.
            if base.done > 0:
                self._refuse_without_checkpoint(migration)
            return None
        held = training.settled
        sources: dict[str, Part] = {}
        if held is not None and me in base.ranks:
            mine = [kind for kind in held.kinds if kind.name in held.pieces]
            sources = parts(mine, training.spread(base.plan, base.ranks), me, held.pieces)
        fresh = None
        if me in members:
            targets = _targets(parts(base.kinds, after, me), sources)
            pieces = {name: part.local for name, part in targets.items()}
            fresh = State(
                version=self.epoch.number,
                plan=plan,
                ranks=members,
                done=base.done,
                kinds=base.kinds,
                pieces=pieces,
                extra=base.extra,
            )
        else:
            targets = {}
        device = torch.device("cuda") if dist.get_backend() == "nccl" else None
        transfer(migration, sources, targets, me=me, ranks=everyone, device=device)
        training.fresh = fresh
        self.seconds["moved_bytes"] = migration.moved_bytes
        self._settle()
        if held is None and fresh is not None:
            set_random_state(fresh.extra["random"])
        return training.settled

    def _settle(self) -> None:
        """All have the fresh version: it is the one from now on."""
        dist.all_reduce(torch.zeros(1), group=self.groups.control)
        self.training.settled, self.training.fresh = self.training.fresh, None
        if self.training.settled is not None:
            self.training.done = self.training.settled.done

    def _refuse_without_checkpoint(self, migration: Migration) -> None:
        found = [self.checkpoints is not None and newest(self.checkpoints.folder) is not None]
        dist.broadcast_object_list(found, src=0, group=self.groups.control)
        if not found[0]:
            names = sorted({piece.name for piece in migration.missing})
            raise StateLost(
                f"'checkpoint' must hold what no survivor holds, got none with {names[0]} and {len(names) - 1} others; "
                "pass checkpoint=FOLDER to elastic, or plan with replicas (e.g. recipe='hsdp')"
            )

    def _build(self, plan: Plan | Uneven, state: State | None) -> None:
        training, members = self.training, self.ranks
        _torch.forget_meshes()
        with self.watch.fence.around():
            self.watch.check()
            mark = f"@{self.epoch.number}"
            if isinstance(plan, Uneven):
                mesh = device_mesh_of(plan, dist.get_rank(), mark=mark)
            else:
                mesh = device_mesh_for(plan.mesh, plan.pipeline, mark=mark)
        self.watch.groups |= {name.removesuffix(mark): mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
        if state is None:
            state = self._from_checkpoint(plan, mesh)
        if state is None and self.base_done != 0 and self.watch.store.check(["trained"]):
            raise StateLost(
                "'checkpoint' must hold the state when all processes that held it are lost, got none; pass "
                "checkpoint=FOLDER to elastic"
            )
        # A pipeline makes more groups, between its ranks.
        with self.watch.fence.around():
            self.watch.check()
            running = training.build(plan, members, self.epoch.number, mesh, state, self.timeout.total_seconds())
        if training.settled is None:
            training.fresh = training.version_of(running, self.epoch.number)
            self._settle()
        training.running, training.settled = running, None
        training.stage = "between"

    def _from_checkpoint(self, plan: Plan | Uneven, mesh: Any) -> State | None:
        """The state in the newest checkpoint, which lies as all ranks will hold it; None without one."""
        training = self.training
        training.settled = None
        path: list[Any] = [None]
        if dist.get_rank() == 0 and self.checkpoints is not None:
            path = [newest(self.checkpoints.folder)]
        dist.broadcast_object_list(path, src=0, group=self.groups.control)
        if path[0] is None:
            return None
        extra = read_extra(path[0])
        kinds = tuple(msgspec.json.decode(extra["kinds"], type=list[Kind]))
        members = self.ranks
        own = plan.portions[plan.portion_of(dist.get_rank())].plan if isinstance(plan, Uneven) else plan
        lookup = PlanLookup(own)
        mine = parts(kinds, training.spread(plan, members), self.watch.me)
        pieces = {name: part.local for name, part in mine.items()}
        mesh = mesh if own.pipeline is None else mesh[mesh.mesh_dim_names[1:]]
        tensors: dict[str, torch.Tensor] = {}
        for kind in (kind for kind in kinds if kind.name in pieces):
            layout = None if kind.like is None else lookup.layout(kind.like)
            local = pieces[kind.name]
            tensors[kind.name] = local if layout is None else as_dtensor(local, kind, layout, mesh)
        read_into(path[0], tensors)
        training.done = extra["done"]
        set_random_state(extra["random"])
        return State(
            version=self.epoch.number,
            plan=plan,
            ranks=members,
            done=extra["done"],
            kinds=kinds,
            pieces=pieces,
            extra=extra,
        )


def _targets(targets: dict[str, Part], sources: dict[str, Part]) -> dict[str, Part]:
    """Where a piece stays as it is, it is not copied."""
    return {
        name: sources[name]
        if name in sources and sources[name].box == part.box and sources[name].local.shape == part.local.shape
        else part
        for name, part in targets.items()
    }


def gathered(group: dist.ProcessGroup, what: Any) -> list[Any]:
    """What every rank of `group` says, in the order of ranks."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, what, group=group)
    return said


def agree(group: dist.ProcessGroup, what: dict[str, Any]) -> None:
    """CheckError unless every rank of `group` says the same."""
    said = gathered(group, what)
    for key in what:
        values = {str(one[key]) for one in said}
        if len(values) > 1:
            raise CheckError(f"all ranks must have the same {key}, got {sorted(values)}")
