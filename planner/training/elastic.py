"""Training that survives the loss of processes: what a script calls, and the loop that `meshwright run` supervises.

    job = mw.elastic(model, args, optimizer=lambda model: torch.optim.AdamW(model.parameters()), checkpoint="saved")
    for batch in job.batches(samples, size=32, epochs=3):
        with job.step():
            loss = job.model(*batch)
            loss.backward()
            job.optimizer.step()

When a process is lost the block ends early on the others, they regroup, and the loop gives them the same batch again.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from ...passes.trees import flatten_call
from ...plans.batches import Batches
from ...plans.errors import CheckError, RequestError, StepError
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ...plans.uneven import Uneven
from ..api import LossFunction
from ..arguments import check_arguments
from .ahead import Ahead, Ask, StoreShelf, curve_key
from .checkpoints import Checkpoints
from .epochs import IDLE, Epoch
from .pace import Curve, Pace, own_work_s
from .regroup import Groups, Regroup, entry_key, gathered
from .state import Running, Training
from .survivors import Request
from .watch import Watch, supervised

__all__ = ["Elastic", "elastic"]

_SLOW = 0.8
# Speeds that differ by less are the same.
_UNLIKE = 0.1
# So long a process that met an error waits to be told that another one is lost.
_PATIENCE_S = 10.0


def elastic(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    loss: LossFunction | None = None,
    plan: Plan | None = None,
    mesh: Mesh | str | Callable[[int], Mesh | str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
    keep: int = 2,
    timeout_s: float = 600.0,
    horizon_s: float | None = None,
    ahead: bool = True,
    slow: float | None = None,
    uneven: bool | None = None,
    **options: Any,
) -> Elastic:
    """A job that trains `model` on the processes that `meshwright run` started, and goes on with those that are left.

    args, kwargs     inputs of the whole batch, as for `mw.plan`; the same on every process
    optimizer        makes the optimizer of a parallel model; called again each time the model is laid out anew
    scheduler        makes its learning-rate scheduler, which the job steps after each step of the optimizer
    plan             the plan to begin with, used again whenever as many processes run
    mesh             for the processes at the start, its last axes kept as far as possible later; or a function of their
                     number. Other `options` are those of `mw.plan`
    checkpoint       a folder for checkpoints after every `every` steps, the newest `keep` stay; the newest complete one
                     is taken up at the start, and when no survivor holds what is needed
    timeout_s        the last resort of a collective; the supervisor finds out earlier
    horizon_s        seconds to the next failure, as for `mw.replan`
    ahead            plan for the next loss beforehand, in a process of its own at the lowest priority
    slow             a process below this share of the others' speed is slow, and left out if a plan without it is
                     faster (`ahead` judges that); 0: none is. By default 0.8 on GPUs, and 0 on CPUs, which
                     processes may share
    uneven           after a loss, replicas may be of unlike sizes and share each batch, where that is faster: the model
                     computes each sample by itself, and the loss is the mean over them. By default with a pipeline
                     alone, which asks the same of its micro-batches

    Waits until all processes are there. Raises RequestError without a supervisor, Infeasible when no plan fits, and
    StateLost when neither survivors nor a checkpoint hold what the new plan needs.
    """
    check_arguments(
        model=model, args=args, kwargs=kwargs, scheduler=scheduler, loss=loss, checkpoint=checkpoint, every=every,
        keep=keep, timeout_s=timeout_s, horizon_s=horizon_s, ahead=ahead, uneven=uneven, **options,
        **({} if plan is None else {"plan": plan}), **({} if callable(mesh) else {"mesh": mesh}),
    )  # fmt: skip
    if not callable(optimizer):
        raise RequestError(
            f"'optimizer' must be a function that makes the optimizer of a model, got {optimizer!r:.80}; e.g. "
            "lambda model: torch.optim.AdamW(model.parameters())"
        )
    if timeout_s <= _PATIENCE_S:
        raise RequestError(
            f"'timeout_s' must be more than the {_PATIENCE_S:g} s that a process waits for the supervisor's word, got "
            f"{timeout_s}; leave it out"
        )
    if slow is not None and not (isinstance(slow, int | float) and 0 <= slow < 1):
        raise RequestError(f"'slow' must be a share from 0 to below 1, got {slow}; 0.8 is usual, 0 for none")
    kept = None if checkpoint is None else Checkpoints(Path(checkpoint).absolute(), every=every, keep=keep)
    request = Request(
        model=model, args=tuple(args), kwargs=dict(kwargs or {}), loss=loss, mesh=mesh, first=plan,
        horizon_s=horizon_s, uneven=_piped(options) if uneven is None else uneven, options=options,
    )  # fmt: skip
    # Before this process has threads.
    planner = Ahead(request, *supervised()) if ahead else None
    training = Training(request=request, optimizer_for=optimizer, scheduler_for=scheduler)
    share = (_SLOW if torch.cuda.is_available() else 0.0) if slow is None else slow
    job = Elastic(Watch(), training, kept, planner, timeout_s, share)
    job.enter()
    return job


def _piped(options: dict[str, Any]) -> bool:
    return options.get("pipeline") is not None or options.get("microbatches") is not None


class Elastic:
    """A running job, made by `elastic`. `model` and `optimizer` are new objects after each regrouping."""

    def __init__(
        self,
        watch: Watch,
        training: Training,
        checkpoints: Checkpoints | None,
        planner: Ahead | None,
        timeout_s: float,
        slow: float,
    ) -> None:
        self._watch, self._training, self._checkpoints, self._timeout_s = watch, training, checkpoints, timeout_s
        self._planner, self._slow = planner, 0.0 if planner is None else slow
        self._solved = training.request.solved(StoreShelf(watch.store))
        self._groups = Groups()
        self._agreed = 0
        self._saved = -1
        self._met = (-1, "")
        # Seconds to the gate of the last step, by its slowest rank, and whether ranks are checked after it.
        self._began, self._took_s, self._checking = 0.0, 0.0, False
        self._looped = False
        self._pace = Pace(0.0, 0.0)
        # Of the last call of the model, and what its step should take.
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._curve: Curve | None = None

    @property
    def model(self) -> nn.Module:
        """The parallel model."""
        return self._running.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""
        return self._running.optimizer

    @property
    def plan(self) -> Plan:
        """The plan that it runs by, of replicas of unlike sizes that of this process's own."""
        return self._running.own

    @property
    def done(self) -> int:
        """Steps done, by all processes alike."""
        return self._training.done

    @property
    def members(self) -> tuple[int, ...]:
        """The processes that train, by their numbers for life, in the order of their ranks."""
        return self._running.ranks

    @property
    def number(self) -> int:
        """The number of this process."""
        return self._watch.me

    @property
    def _running(self) -> Running:
        running = self._training.running
        assert running is not None
        return running

    def enter(self) -> None:
        """Wait for the first epoch that has this process among its members, and join it. `elastic` does this."""
        watch = self._watch
        watch.tell("ready")
        # No epoch can be missed here: one that follows replaces this one while it is entered.
        first: list[int] = []

        def included() -> bool:
            first[:] = [n for n, epoch in sorted(watch.epochs.items()) if watch.me in epoch.members]
            return bool(first) or watch.store.check(["closed"])

        watch.epoch = 2**31
        watch.until(included)
        self._agreed = min(first, default=0)
        self._recover()

    def batches(self, data: Any, size: int, *, epochs: int = 1, seed: int | None = 0) -> Iterator[Any]:
        """Batches of `size` samples of `data` (len(data) of them, data[i] each), collated as by a DataLoader: each
        sample once per epoch, in an order that `seed` gives (None: as they lie). The last batch of an epoch may be
        smaller. Every process gets the whole batch."""
        order = Batches(samples=len(data), size=size, epochs=epochs, seed=seed)
        epoch, samples = -1, order.samples_of(0)
        for number in self.steps(len(order)):
            if epoch != number // order.per_epoch:
                epoch = number // order.per_epoch
                samples = order.samples_of(epoch)
            at = number % order.per_epoch * size
            yield default_collate([data[index] for index in samples[at : at + size]])

    def steps(self, total: int) -> Iterator[int]:
        """Numbers of steps from those done to `total`; one comes again when its step was broken off."""
        if self._looped:
            raise RequestError("'steps' must be the only loop of a job, got a second one; count on in the first one")
        self._looped = True
        while True:
            while self.done < total:
                epoch, number = self._watch.epoch, self.done
                yield number
                if (epoch, number) == (self._watch.epoch, self.done):
                    raise RequestError(
                        f"'step' must be entered once in each turn of the loop, got none in step {number}; put the "
                        "work into `with job.step():`"
                    )
            if self._closed():
                return

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, which calls `job.optimizer.step()` once. What it raises because another process is lost
        goes no further: the processes have regrouped when the block ends, and the step is done, or comes again."""
        training = self._training
        if training.stage != "between":
            raise RequestError("'step' must not be entered within another one, got two; end the first one before")
        training.begin()
        self._watch.stage, self._began = "step", time.perf_counter()
        try:
            yield
            if training.stage != "stepped":
                raise RequestError(
                    "'step' must call job.optimizer.step() once, got none; accumulate gradients within one step"
                )
            training.stage = "between"
            self._keep_pace()
            self._save_if_due()
            if self._agreed > self._watch.epoch:
                self._recover()
        except (RuntimeError, StepError) as error:
            # Within the optimizer nothing waits for others: what fails there has left the parameters half changed.
            met = (training.done, str(error))
            # The same error again in the same step, and nobody lost: it is the script's own.
            own = met == self._met and self._watch.urgent <= self._watch.epoch
            self._met = met
            if own or training.stage == "passed" or not self._lost():
                raise
            # What the broken step held, old process groups among it, must not outlive it.
            traceback.clear_frames(error.__traceback__)
            self._recover()
        self._watch.stage = "between"

    def finish(self) -> None:
        """End the job before its loop does; all processes together. The last state is saved."""
        while not self._closed():
            pass

    # --- agreements

    def _gate(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before an optimizer steps: every process is at the same step and has its gradients."""
        training, watch = self._training, self._watch
        if training.stage == "finish":
            return
        if training.stage != "step":
            raise RequestError(
                "'optimizer.step' must be called once within `with job.step():`, got another call; accumulate "
                "gradients within one step"
            )
        training.stage = watch.stage = "gate"
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        asked = max(watch.epochs, default=0)
        took_us, wanted = int(1e6 * (time.perf_counter() - self._began)), int(self._pace.checks > 0)
        said = torch.tensor([training.done, -training.done, asked, took_us, wanted])
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._groups.control)
        most, least, newest, took_us, wanted = said.tolist()
        self._took_s, self._checking = max(took_us, 1) / 1e6, bool(wanted)
        if most != -least:
            raise CheckError(f"all ranks must be at the same step, got {-least} to {most}")
        if most == 0:
            watch.store.set("trained", "1")
        self._agreed = max(self._agreed, newest)
        training.stage = "passed"

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After it: the step is done."""
        training = self._training
        if self._running.scheduler is not None:
            self._running.scheduler.step()
        training.forget_weights()
        training.done += 1
        training.stage = "stepped"
        self._watch.done = training.done

    def _keep_pace(self) -> None:
        """Look whether the step took too long, and where that is to be found out, time all ranks for themselves. The
        last rank decides, and has it judged whether another plan would pay."""
        last, epoch = self._watch.me == self.members[-1], self._watch.epochs[self._watch.epoch]
        if self._checking:
            device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
            seconds = gathered(self._groups.control, own_work_s(device))
            if last and self._planner is not None:
                slow = {self.members[rank]: speed for rank, speed in self._pace.checked(seconds).items()}
                if any(abs(speed - epoch.speeds.get(who, 1.0)) > _UNLIKE for who, speed in slow.items()):
                    self._ask_ahead({**epoch.speeds, **slow})
        if last:
            self._pace.took(self._took_s, self._predicted_s())

    def _predicted_s(self) -> float | None:
        """What this step should have taken, by the sizes of its inputs; None where that is not known."""
        key, store = curve_key(self.plan.digest()), self._watch.store
        if self._curve is None and self._shapes and store.check([key]):
            self._curve = msgspec.json.decode(store.get(key), type=Curve)
        return None if self._curve is None else self._curve.at(self.plan.options.dynamic, self._shapes)

    def _seen(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the shapes of what a model is called with."""
        tensors, tree = flatten_call(args, kwargs)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in zip(tree.names, tensors, strict=True)}

    def _ask_ahead(self, speeds: dict[int, float]) -> None:
        """Have the process beside this one plan for what may come, and judge `speeds` first."""
        members = self._watch.epochs[self._watch.epoch].members
        if self._planner is not None:
            plan, ranks = self._running.plan, self.members
            if isinstance(plan, Uneven):
                plan, ranks = plan.whole, plan.played
            ask = Ask(plan=plan.to_bytes(), ranks=ranks, members=members, speeds=speeds)
            self._planner.plan(self._watch.store, ask)

    def _closed(self) -> bool:
        """Whether the job has ended; False when processes regrouped and some of the loop may be left."""
        training, watch = self._training, self._watch
        training.stage = watch.stage = "closing"
        try:
            if self._checkpoints is not None:
                self._save()
                self._checkpoints.wait()
            dist.all_reduce(torch.zeros(1), group=self._groups.control)
        except RuntimeError:
            if not self._lost():
                raise
            if not watch.store.check(["closed"]):
                self._recover()
                return False
        watch.store.set("closed", "1")
        watch.gone = True
        watch.tell("done", value=training.done)
        return True

    # --- losses

    def _lost(self) -> bool:
        """Whether the supervisor says that a process is lost. The message of an error does not tell."""
        watch = self._watch
        if watch.urgent <= watch.epoch:
            try:
                watch.until(lambda: False, _PATIENCE_S)
            except RuntimeError:
                return True
            return False
        return True

    def _recover(self) -> None:
        """Enter the epoch that was agreed on, or the last one that a loss made; again as often as needed."""
        watch, training = self._watch, self._training
        while True:
            if training.running is None and training.settled is None and watch.store.check(["closed"]):
                # It came when the job was done.
                watch.gone = True
                watch.tell("done", value=0)
                raise SystemExit(0)
            watch.epoch = max(self._agreed, watch.urgent)
            watch.until(lambda: watch.epoch in watch.epochs)
            epoch = watch.epochs[watch.epoch]
            if watch.me not in (*epoch.members, *epoch.leaving):
                raise SystemExit(f"meshwright: process {watch.me} was taken for lost, and ends")
            regroup = Regroup(self._training, watch, epoch, self._checkpoints, self._solved, self._timeout_s)
            try:
                self._groups = regroup.run()
                if watch.me not in regroup.ranks:
                    self._idle(epoch)
                    continue
                # What was being written may be incomplete, and newcomers know nothing of it.
                self._saved = -1
                if self.done == 0 and self._checkpoints is not None:
                    # From the first step on there is something to go back to.
                    self._save()
                    self._checkpoints.wait()
                break
            except RuntimeError:
                if not self._lost():
                    raise
        optimizer = self._running.optimizer
        optimizer.register_step_pre_hook(self._gate)
        optimizer.register_step_post_hook(self._stepped)
        watch.stage, watch.done = "between", self.done
        watch.tell("running", msgspec.json.encode({"done": self.done, **regroup.seconds}).decode(), watch.epoch)
        last = watch.me == self.members[-1]
        self._pace = Pace(self.plan.predicted.step_time_s, self._slow if last else 0.0)
        self._curve, self._shapes = None, {}
        if last:
            self._ask_ahead({})
            if self._slow and self.plan.options.dynamic:
                self.model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def _idle(self, epoch: Epoch) -> None:
        """Live without a part in the plan, until those that have one enter another epoch."""
        watch, asked = self._watch, epoch.number
        watch.stage = IDLE
        watch.tell("running", value=epoch.number)

        def left() -> bool:
            # An urgent epoch raises in `until`; of those that were asked for it is one that somebody has entered.
            later = [n for n, one in watch.epochs.items() if n > epoch.number]
            entered = [n for n in later if any(watch.store.check([entry_key(n, who)]) for who in epoch.members)]
            self._agreed = max([self._agreed, *entered])
            return self._agreed > asked or watch.store.check(["closed"])

        watch.until(left)

    # --- checkpoints

    def _save_if_due(self) -> None:
        if self._checkpoints is not None and self.done % self._checkpoints.every == 0:
            self._save()

    def _save(self) -> None:
        kept, running = self._checkpoints, self._running
        if kept is None or self._saved == self.done:
            return
        tensors, kinds = self._training.tensors()
        if running.own.pipeline is not None:
            # Each rank of a pipeline knows of its own alone.
            kinds = self._training.kinds(running.plan, gathered(self._groups.control, kinds))
        extra = {**self._training.extra(running), "kinds": msgspec.json.encode(kinds), "done": self.done}
        if self._training.repeats:
            tensors = {}
        token = f"{self._watch.epoch:x}-{self._job():x}"
        kept.save(tensors, extra, done=self.done, token=token, group=self._groups.saving)
        self._saved = self.done

    def _job(self) -> int:
        """A number that tells this run of the job from earlier ones in the same folder."""
        return int(self._watch.store.get("job"))
