"""Collectives as planned programs run them, alone and behind compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...passes._torch import functional
from .clock import Case, Timed

__all__ = ["alternate_cases", "behind_cases", "beside_cases", "collective_cases"]

_SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
_BEHIND = (1 << 20, 1 << 22)


def collective_cases(
    device: str, group: dist.ProcessGroup, size: int, kinds: Sequence[str], *, quick: bool
) -> list[Case]:
    """Collectives of `size` ranks; the bytes are those of the whole tensor of the group."""
    scale = 1 if device == "cpu" else 8
    whole = [(1 << 12, 1 << 18, 1 << 22)[at] * scale for at in range(3)] if quick else [n * scale for n in _SIZES]
    name = group.group_name
    return [
        Case(
            kind=f"collective.{kind}", sizes=(bytes_, size), run=_run(kind, bytes_ // 4, size, name, device), waits=True
        )
        for kind in kinds
        for bytes_ in whole
    ]


def _run(kind: str, count: int, size: int, group: str, device: str) -> Callable[[], Tensor]:
    """One collective on a whole tensor of `count` float32, waited for."""
    wait = functional.wait_tensor.default
    whole, piece = torch.ones(count, device=device), torch.ones(count // size, device=device)
    if kind == "all_reduce":
        return lambda: wait(functional.all_reduce.default(whole, "sum", group))
    if kind == "all_gather":
        return lambda: wait(functional.all_gather_into_tensor.default(piece, size, group))
    if kind == "reduce_scatter":
        return lambda: wait(functional.reduce_scatter_tensor.default(whole, "sum", size, group))
    splits = [count // size // size] * size
    held = torch.ones(sum(splits), device=device)
    return lambda: wait(functional.all_to_all_single.default(held, splits, splits, group))


def behind_cases(device: str, size: int, *, rounds: int) -> list[Timed]:
    """An all-reduce with products between its start and its wait, beside the products alone, in turn."""
    assert dist.group.WORLD is not None
    group, wait = dist.group.WORLD.group_name, functional.wait_tensor.default
    n = 384 if device == "cpu" else 4096
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    found: list[Timed] = []
    for bytes_ in _BEHIND:
        whole = torch.ones(bytes_ // 4 * (1 if device == "cpu" else 16), device=device)
        alone_s = min(_clocked(lambda w=whole: wait(functional.all_reduce.default(w, "sum", group)), device)
                      for _ in range(5))  # fmt: skip
        once_s = min(_clocked(lambda: torch.mm(a, b), device) for _ in range(5))
        # The same number on every rank: each would else wait for the other's products.
        agreed = torch.tensor([float(max(2, round(2.0 * alone_s / once_s)))], device=device)
        dist.broadcast(agreed, 0)
        products = int(agreed.item())

        def compute(products: int = products) -> None:
            for _ in range(products):
                torch.mm(a, b)

        def both(whole: Tensor = whole, compute: Callable[[], None] = compute) -> None:
            pending = functional.all_reduce.default(whole, "sum", group)
            compute()
            wait(pending)

        times: list[tuple[float, float]] = []
        for _ in range(rounds):
            dist.barrier()
            alone = _clocked(compute, device)
            dist.barrier()
            times.append((alone, _clocked(both, device)))
        least, with_it = min(t[0] for t in times), [t[1] for t in times]
        found.append(
            Timed(
                kind="behind",
                sizes=(whole.numel() * 4, size, round(least * 1e9)),
                dtype="float32",
                measured_s=min(with_it),
                spread=statistics.median(with_it) / min(with_it) - 1.0,
            )
        )
    return found


def beside_cases(device: str, *, rounds: int) -> list[Timed]:
    """The same work on the first rank alone and on all ranks at once, in turn: what ranks of one machine take from each
    other in caches, memory and units. Processor time where one thread does it, which other work hardly changes."""
    n, count = (256, 1 << 21) if device == "cpu" else (4096, 1 << 26)
    a, x, small = (torch.ones(shape, device=device) for shape in ((n, n), (count,), (8, 8)))
    out = torch.empty_like(x)
    works: dict[str, Callable[[], object]] = {
        "product": lambda: [torch.mm(a, a) for _ in range(8)],
        "memory": lambda: torch.mul(x, 2.0, out=out),
        "host": lambda: [torch.neg(small) for _ in range(1000)],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            dist.barrier()
            alone = _worked(work, device) if dist.get_rank() == 0 else 0.0
            dist.barrier()
            times[name].append((alone, _worked(work, device)))
    found: list[Timed] = []
    for name, pairs in times.items():
        alone, both = (statistics.median(pair[at] for pair in pairs[1:]) for at in (0, 1))
        spread = both / min(pair[1] for pair in pairs[1:]) - 1.0
        sizes = (max(1, round(alone * 1e9)),)
        found.append(Timed(kind=f"beside.{name}", sizes=sizes, dtype="float32", measured_s=both, spread=spread))
    return found


def _worked(work: Callable[[], object], device: str) -> float:
    if device == "cuda" or torch.get_num_threads() > 1:
        return _clocked(work, device)
    began = time.process_time()
    work()
    return time.process_time() - began


def alternate_cases(device: str, size: int, *, rounds: int) -> list[Timed]:
    """Compute and a small all-reduce by turns, beside the compute alone: each collective waits for the last rank."""
    assert dist.group.WORLD is not None
    group, wait, turns, bytes_ = dist.group.WORLD.group_name, functional.wait_tensor.default, 12, 1 << 14
    n = 256 if device == "cpu" else 4096
    a, whole = torch.ones(n, n, device=device), torch.ones(bytes_ // 4, device=device)

    def compute() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def both() -> None:
        for _ in range(turns):
            compute()
            wait(functional.all_reduce.default(whole, "sum", group))

    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        dist.barrier()
        alone = _clocked(lambda: [compute() for _ in range(turns)], device) / turns
        dist.barrier()
        times.append((alone, _clocked(both, device)))
    least, together = (min(pair[at] for pair in times[1:]) for at in (0, 1))
    spread = statistics.median(pair[1] for pair in times[1:]) / together - 1.0
    sizes = (bytes_, size, max(1, round(least * 1e9)), turns)
    return [Timed(kind="alternate", sizes=sizes, dtype="float32", measured_s=together, spread=spread)]


def _clocked(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
