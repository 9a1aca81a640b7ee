"""The processes that measure: one alone for kernels, optimizers and steps, then several together for collectives.

A worker sends what it has done so far through a pipe, and at the end what it took; an error as its text. Every worker
is an own process, so that threads, allocator and compiler are those of a training process, and nothing of the caller's.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..checking.gloo import free_port
from . import sweeps
from .clock import Case, Timed, take

__all__ = ["Job", "Tell", "run_job"]

Tell = Callable[[str, float], None]
_TIMEOUT_S = 300.0
_CPU_TYPES, _CUDA_TYPES = ("float32",), ("bfloat16", "float32")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure: `alone` the kernels of one process, else the collectives of `ranks`."""

    device: str
    threads: int
    ranks: int
    quick: bool
    compiled: bool
    rounds: int
    alone: bool


def run_job(job: Job, tell: Tell) -> list[Timed]:
    """What the workers of a job took, seen by the first. RuntimeError with a worker's message when one fails."""
    context = mp.get_context("spawn")
    count, port = (1 if job.alone else job.ranks), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    workers = [
        context.Process(target=_worker, args=(rank, count, port, job, pipes[rank][1]), daemon=True)
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    for _, sending in pipes:
        sending.close()
    try:
        return _listen([receiving for receiving, _ in pipes], tell)
    finally:
        for worker in workers:
            worker.join(timeout=5.0)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _listen(pipes: Sequence[Connection], tell: Tell) -> list[Timed]:
    """Pass on what workers tell until the first is done or any fails."""
    last = time.monotonic()
    while time.monotonic() - last < _TIMEOUT_S:
        for pipe in wait(pipes, timeout=1.0):
            assert isinstance(pipe, Connection)
            try:
                kind, *rest = pipe.recv()
            except EOFError:
                raise RuntimeError("a measuring process ended without a result") from None
            last = time.monotonic()
            if kind == "failed":
                raise RuntimeError(rest[0])
            if kind == "done" and pipe is pipes[0]:
                return rest[0]
            if kind == "tell":
                tell(*rest)
            if kind == "done":
                pipes = [other for other in pipes if other is not pipe]
    raise RuntimeError(f"no word from the measuring processes for {_TIMEOUT_S:.0f} s")


def _worker(rank: int, count: int, port: int, job: Job, pipe: Connection) -> None:
    try:
        torch.set_num_threads(job.threads)
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        if job.device == "cpu":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            torch.cuda.set_device(rank)
        backend = "gloo" if job.device == "cpu" else "nccl"
        dist.init_process_group(backend, rank=rank, world_size=count, timeout=timedelta(seconds=_TIMEOUT_S))

        def tell(stage: str, share: float) -> None:
            if rank == 0:
                pipe.send(("tell", stage, share))

        found = _alone(job, tell) if job.alone else _together(job, count, tell)
        dist.barrier()
        pipe.send(("done", found if rank == 0 else []))
        dist.destroy_process_group()
    except BaseException as error:
        lines = str(error).strip().splitlines() or traceback.format_exc().strip().splitlines()
        pipe.send(("failed", f"{type(error).__name__}: {lines[-1][:300]}"))
        raise SystemExit(1) from None


def _alone(job: Job, tell: Tell) -> list[Timed]:
    """Kernels, optimizers and whole steps of one process. New memory comes first: see `sweeps.fresh`."""
    from .steps import step_cases, update_cases

    device, quick = job.device, job.quick
    types = _CPU_TYPES if device == "cpu" else _CUDA_TYPES
    found = _taken("new memory", sweeps.fresh(device, quick=quick), job, tell)
    found += _taken("host", sweeps.launches(device), job, tell)
    found += _taken("memory", sweeps.memory(device, quick=quick), job, tell)
    for dtype in types[: 1 if quick else None]:
        found += _taken(f"products, {dtype}", sweeps.products(device, dtype, quick=quick), job, tell)
    found += _taken("attention", sweeps.attention(device, types[0], quick=quick), job, tell)
    found += _taken("optimizers", update_cases(device, quick=quick), job, tell)
    found += _taken("steps", step_cases(device), job, tell)
    if job.compiled:
        found += _compiled(job, tell)
    return found


def _compiled(job: Job, tell: Tell) -> list[Timed]:
    tell("compiled programs", 0.0)
    found = _taken("compiled programs", sweeps.compiled(job.device, quick=job.quick), job, tell)
    of = sweeps.small_kernels(job.device)
    short, long = (Case(kind="small", sizes=(n,), run=of(n), host=True) for n in (4, 24))
    less, more = take([short, long], rounds=job.rounds, device=job.device)
    seconds = max(1e-9, more.measured_s - less.measured_s)
    found.append(Timed(kind="small", sizes=(20,), dtype="float32", measured_s=seconds, spread=more.spread))
    return found


def _together(job: Job, count: int, tell: Tell) -> list[Timed]:
    """Collectives, and one behind compute; every rank runs the same calls."""
    from .collectives import alternate_cases, behind_cases, beside_cases, collective_cases

    found: list[Timed] = []
    groups = [count] if job.quick or count < 4 else [count, 2]
    for size in groups:
        group = dist.new_group(list(range(size))) if size < count else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank() >= size:
            continue
        cases = collective_cases(job.device, group, size, _COLLECTIVES[: 2 if job.quick else None], quick=job.quick)
        found += _taken(f"collectives of {size}", cases, job, tell, calls=8)
    dist.barrier()
    found += behind_cases(job.device, count, rounds=job.rounds)
    tell("ranks beside each other", 0.0)
    found += beside_cases(job.device, rounds=job.rounds)
    return found + alternate_cases(job.device, count, rounds=job.rounds)


def _taken(stage: str, cases: list[Case], job: Job, tell: Tell, *, calls: int = 0) -> list[Timed]:
    for case in cases:
        case.calls = case.calls or calls
    tell(stage, 0.0)
    return take(cases, rounds=job.rounds, device=job.device, tell=lambda share: tell(stage, share))
