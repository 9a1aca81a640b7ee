"""Check: does the planned program compute what the model computes?

The model is trained for a few AdamW steps on one process, and the same steps are run by the local programs of every
rank; losses, outputs, gradients, buffers, mutated inputs and updated parameters are compared as whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...passes.graph import Captured, values_of
from ...passes.hooks import carry_all, carry_hooks, has_hooks
from ...passes.local import localize
from ...passes.lookup import PlanLookup
from ...passes.placing import copied
from ...passes.simulate import assemble, piece, run_ranks
from ...passes.split import Halves, split
from ...passes.trees import flatten, flatten_call, flatten_output
from ...plans.layouts import Layout
from ...plans.plan import Plan

__all__ = [
    "EPS",
    "CheckReport",
    "Difference",
    "Record",
    "check_plan",
    "compare",
    "default_loss",
    "in_float64",
    "tolerance_of",
    "train",
    "train_in_place",
    "train_steps",
]

LossFunction = Callable[[Any], torch.Tensor]
Gradient = torch.Tensor | None
# AdamW's eps: large enough that 1/sqrt(v) does not blow up the rounding of a gradient that is zero in exact arithmetic.
EPS = 1e-4
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs: name, kind (loss, output, gradient, buffer, parameter or input) and relative error."""

    name: str
    kind: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Whether the sharded program equals the model, the largest relative error, and what differs."""

    equal: bool
    max_error: float
    tolerance: float
    differences: tuple[Difference, ...]
    ranks: int
    backend: str = "simulated"
    compared: int = 0


@dataclass(slots=True, kw_only=True)
class Record:
    """What a training run left behind, by kind and name; None for a gradient that is not there."""

    values: dict[tuple[str, str], torch.Tensor | None] = field(default_factory=dict)

    def put(self, kind: str, name: str, value: torch.Tensor | None) -> None:
        """Remember a copy of `value`."""
        self.values[kind, name] = None if value is None else value.detach().clone()

    def put_outputs(self, out: Any, step: int) -> None:
        """Remember the tensors of an output: a loss may not tell a permuted output from the right one."""
        for index, tensor in enumerate(flatten_output(out)[0]):
            self.put("output", f"{index} step {step}", tensor)


def default_loss(out: Any) -> torch.Tensor:
    """The output itself when it is a scalar, `out.loss` where there is one, else the mean square of all its tensors."""
    found = out.get("loss") if hasattr(out, "get") else getattr(out, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(out, torch.Tensor) and out.dim() == 0:
        return out
    tensors = [t for t in flatten(out, what="output")[0] if t.is_floating_point() or t.is_complex()]
    return sum(((t.abs() if t.is_complex() else t).square().mean() for t in tensors), torch.zeros(()))  # type: ignore[return-value]


def tolerance_of(captured: Captured) -> float:
    """What rounding allows: the lowest precision in which the program computes anything that it differentiates."""
    seen = {v.dtype for n in captured.ops() for v in values_of(n) if v is not None}
    seen |= {s.dtype for s in captured.sources.values()}
    wide = {torch.complex64: torch.float32, torch.complex128: torch.float64}
    return max((_TOLERANCE.get(wide.get(d, d), 0.0) for d in seen), default=1e-10)


def in_float64(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple, dict[str, Any]]:
    """A copy of a model and its inputs with float64 for float32, where the model is float32 throughout."""
    held = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() or t.is_complex()]
    wide, given = copied((model, (tuple(args), dict(kwargs))), {}, model)
    carry_all(model, wide)
    if any(t.dtype != torch.float32 for t in held):
        return wide, *given
    tensors, tree = flatten(given, what="input")
    inputs = [t.detach().double().requires_grad_(t.requires_grad) if t.dtype == torch.float32 else t for t in tensors]
    return wide.double(), *tree.build(inputs)


def train(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss: LossFunction,
    *,
    steps: int,
    seed: int,
    accumulate: int = 1,
) -> Record:
    """Train a copy of `model` for some AdamW steps in this process and record everything that a check compares."""
    trained, inputs = copied((model, (tuple(args), dict(kwargs))), {}, model)
    carry_all(model, trained)
    return train_in_place(trained, inputs, loss, steps=steps, seed=seed, accumulate=accumulate)


def train_in_place(
    model: nn.Module,
    inputs: tuple[tuple, dict[str, Any]],
    loss: LossFunction,
    *,
    steps: int,
    seed: int,
    accumulate: int,
) -> Record:
    """`train` without the copies; of a parallel model the whole tensors are recorded."""

    def passes(record: Record, step: int) -> list[torch.Tensor]:
        values = []
        for _ in range(accumulate):
            out = model(*inputs[0], **inputs[1])
            record.put_outputs(out, step)
            values.append(loss(out))
            # A model without anything to train, or that trains nothing by this loss, is only run forward.
            if values[-1].requires_grad:
                values[-1].backward()
        return values

    return _train(model, inputs, passes, steps=steps, seed=seed)


def train_steps(model: Any, inputs: tuple[tuple, dict[str, Any]], *, steps: int, seed: int) -> Record:
    """`train_in_place` by `model.step`."""
    return _train(model, inputs, lambda record, step: [model.step(*inputs[0], **inputs[1])], steps=steps, seed=seed)


def _train(
    model: nn.Module,
    inputs: tuple[tuple, dict[str, Any]],
    passes: Callable[[Record, int], list[torch.Tensor]],
    *,
    steps: int,
    seed: int,
) -> Record:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=EPS, foreach=False) if trained else None
    record = Record()
    tensors, tree = flatten_call(*inputs)
    for step in range(steps):
        torch.manual_seed(seed + step)
        values = passes(record, step)
        record.put("loss", f"step {step}", torch.stack([v.detach() for v in values]))
        for name, parameter in model.named_parameters():
            record.put("gradient", f"{name} step {step}", _whole(parameter.grad))
        for name, tensor in zip(tree.names, tensors, strict=True):
            record.put("input", f"{name} step {step}", tensor)
            if tensor.requires_grad:
                record.put("gradient", f"{name} step {step}", tensor.grad)
                tensor.grad = None
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        record.put("parameter", name, _whole(parameter))
    for name, buffer in model.named_buffers():
        record.put("buffer", name, _whole(buffer))
    return record


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def check_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    captured: Captured,
    plan: Plan,
    *,
    loss: LossFunction = default_loss,
    loss_inside: bool = False,
    steps: int = 3,
    seed: int = 0,
    accumulate: int = 1,
    reference: Record | None = None,
) -> CheckReport:
    """Run `model` and `plan` side by side on simulated ranks. `loss_inside` says that the capture holds the loss."""
    tolerance = tolerance_of(captured)
    expected = reference or train(model, args, kwargs, loss, steps=steps, seed=seed, accumulate=accumulate)
    outer = (lambda out: out) if loss_inside else loss
    got = _Simulation(model, args, kwargs, captured, plan).train(outer, steps=steps, seed=seed, accumulate=accumulate)
    return compare(expected, got, captured, tolerance, plan.mesh.size, loss_inside=loss_inside)


def compare(
    expected: Record,
    got: Record,
    captured: Captured,
    tolerance: float,
    ranks: int,
    *,
    backend: str = "simulated",
    loss_inside: bool = False,
) -> CheckReport:
    """The report of two records; with `loss_inside` the outputs of `got` are the loss, not the model's."""
    differences, worst, compared = [], 0.0, 0
    for (kind, name), want in expected.values.items():
        if kind == "output" and loss_inside:
            continue
        base, _, rest = name.partition(" ")
        have = got.values.get(
            (kind, captured.aliases.get(base, base) + (" " + rest if rest else "")), got.values.get((kind, name))
        )
        if want is None and have is None:
            continue
        compared += 1
        error = _error(want, have)
        worst = max(worst, error)
        if not error <= tolerance:
            differences.append(Difference(name=name, kind=kind, error=error))
    return CheckReport(
        equal=not differences,
        max_error=worst,
        tolerance=tolerance,
        differences=tuple(differences),
        ranks=ranks,
        backend=backend,
        compared=compared,
    )


def _error(want: torch.Tensor | None, have: torch.Tensor | None) -> float:
    """Largest difference relative to the largest value, or absolute below one; infinite when only one is there."""
    if want is None or have is None or want.shape != have.shape or want.dtype != have.dtype:
        return float("inf")
    if want.numel() == 0 or torch.equal(want, have):
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = want.to(wide), have.to(wide)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / max(1.0, float(a.abs().max()))) if a.numel() else 0.0


class _Simulation:
    """All ranks of a plan in this process."""

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], captured: Captured, plan: Plan
    ) -> None:
        self.captured, self.plan, self.mesh = captured, plan, plan.mesh
        self.lookup = PlanLookup(plan)
        groups = [f"axis:{a}" for a in range(self.mesh.ndim)]
        self.halves: list[Halves] = [
            split(localize(captured, self.lookup, self.mesh, coordinate, groups), early=plan.options.prefetch)
            for coordinate in self.mesh.coordinates()
        ]
        self.names = self.halves[0].program.sources
        held = self._held(model)
        tensors, _ = flatten_call(args, kwargs)
        self.whole = [*held, *tensors]
        self.hooked = {i: t for i, t in enumerate(held) if has_hooks(t)}
        self.layouts: list[Layout] = [self.lookup(name).outputs[0] for name in self.names]  # type: ignore[misc]
        self.local = [
            [piece(t.detach(), layout, self.mesh, c) for t, layout in zip(self.whole, self.layouts, strict=True)]
            for c in self.mesh.coordinates()
        ]

    def _held(self, model: nn.Module) -> list[torch.Tensor]:
        found = []
        for source in self.captured.sources.values():
            if source.kind != "input":
                path, _, key = source.name.rpartition(".")
                found.append(getattr(model.get_submodule(path), key))
        return found

    def train(self, loss: LossFunction, *, steps: int, seed: int, accumulate: int) -> Record:
        """The same steps as `train`, by all ranks."""
        sources = list(self.captured.sources.values())
        trained = [i for i, s in enumerate(sources) if s.kind == "parameter" and s.requires_grad]
        optimizers = []
        for rank in self.local:
            for i in trained:
                rank[i] = nn.Parameter(rank[i])
            optimizers.append(
                torch.optim.AdamW([rank[i] for i in trained], lr=1e-3, eps=EPS, foreach=False) if trained else None
            )
        record = Record()
        for step in range(steps):
            torch.manual_seed(seed + step)
            gradients = self._step(loss, record, step, accumulate)
            for rank, optimizer, grads in zip(self.local, optimizers, gradients, strict=True):
                for i in trained:
                    rank[i].grad = grads.get(self.names[i])
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
        for i, source in enumerate(sources):
            if source.kind in ("parameter", "buffer"):
                record.put(source.kind, source.name, self._whole(i))
        return record

    def _whole(self, index: int) -> torch.Tensor:
        shape = self.whole[index].shape
        return assemble(
            [rank[index].detach() for rank in self.local], shape, self.layouts[index], self.mesh, self.names[index]
        )

    def _step(self, loss: LossFunction, record: Record, step: int, accumulate: int) -> list[dict[str, Gradient]]:
        """Every rank's gradients by name, summed over the backward passes."""
        totals: list[dict[str, Gradient]] = [{} for _ in self.halves]
        values = []
        stands = {i: self._stand_in(i) for i in self.hooked}
        for _ in range(accumulate):
            value, ends = self._pass(loss, record, step)
            values.append(value)
            for total, end in zip(totals, ends, strict=True):
                for name, gradient in end.items():
                    before = total.get(name)
                    total[name] = before if gradient is None else gradient if before is None else before + gradient
            for i, stand in stands.items():
                self._by_hooks(i, stand, ends, totals)
        record.put("loss", f"step {step}", torch.stack(values))
        self._record(record, step, totals)
        return totals

    def _stand_in(self, index: int) -> nn.Parameter:
        """The whole parameter, with the hooks of the model's."""
        whole = nn.Parameter(self._whole(index))
        carry_hooks(self.hooked[index], whole)
        return whole

    def _by_hooks(
        self, index: int, stand: nn.Parameter, ends: list[dict[str, Gradient]], totals: list[dict[str, Gradient]]
    ) -> None:
        """Let autograd accumulate the gradient of one pass on `stand`, as its hooks say, and cut what they leave."""
        name = self.names[index]
        pieces = [p for end in ends if (p := end.get(name)) is not None]
        if not pieces:
            return
        layout, before = self.layouts[index], stand.detach().clone()
        stand.backward(assemble(pieces, stand.shape, layout, self.mesh, f"gradient of {name}"))
        left = stand.grad
        for rank, total, place in zip(self.local, totals, self.mesh.coordinates(), strict=True):
            total[name] = None if left is None else piece(left.detach(), layout, self.mesh, place)
            if not torch.equal(before, stand):
                rank[index].data.copy_(piece(stand.detach(), layout, self.mesh, place))

    def _pass(self, loss: LossFunction, record: Record, step: int) -> tuple[torch.Tensor, list[dict[str, Gradient]]]:
        """One forward and backward: the loss, and every rank's gradients by name."""
        halves, mesh = self.halves, self.mesh
        program = halves[0].program
        with torch.no_grad():
            results = run_ranks([h.forward.graph for h in halves], self.local, mesh, program.constants)
        count = len(program.outputs)
        value, tangents, missing = self._tangents(loss, record, step, [r[:count] for r in results])
        for rank, result in zip(self.local, results, strict=True):
            for name, mutated in zip(program.mutations, result[count : halves[0].results], strict=True):
                rank[self.names.index(name)] = mutated
        saved = [result[h.results :] for h, result in zip(halves, results, strict=True)]
        with torch.no_grad():
            given = [[*s, *tangents] for s in saved]
            ends = run_ranks([h.backward.graph for h in halves], given, mesh, program.constants)
        return value, [dict(zip(program.gradients, end, strict=True)) | dict.fromkeys(missing) for end in ends]

    def _tangents(
        self, loss: LossFunction, record: Record, step: int, outputs: list
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[str]]:
        """The outer loss on the whole outputs, the tangents that it gives them, and what gets no gradient from them."""
        program = self.halves[0].program
        leaves: list[torch.Tensor] = []
        for at, index in enumerate(program.outputs):
            value = values_of(self.captured.outputs[index])[0]  # type: ignore[arg-type]
            assert value is not None
            layout = self.lookup(f"output.{index}::output").inputs[0].layout
            assert layout is not None
            whole = assemble([o[at].detach() for o in outputs], value.shape, layout, self.mesh, f"output {index}")
            leaves.append(whole.requires_grad_(index in program.tangents))
        given = dict(zip(program.outputs, leaves, strict=True))
        out = self.captured.output_tree.build([given.get(i) for i in range(len(self.captured.outputs))])
        record.put_outputs(out, step)
        value = loss(out)
        if value.requires_grad:
            value.backward()
        got = {i: leaf.grad for i, leaf in given.items()}
        missing = [n for n, needs in program.needs.items() if needs and all(got[i] is None for i in needs)]
        tangents = [g if (g := got[i]) is not None else torch.zeros_like(given[i]) for i in program.tangents]
        return value.detach(), tangents, missing

    def _record(self, record: Record, step: int, gradients: list[dict[str, Gradient]]) -> None:
        where = {s.name: s for s in self.captured.sources.values()}
        for name in gradients[0]:
            i = self.names.index(name)
            pieces = [p for rank in gradients if (p := rank[name]) is not None]
            whole = None
            if pieces:
                whole = assemble(pieces, where[name].shape, self.layouts[i], self.mesh, f"gradient of {name}")
            record.put("gradient", f"{name} step {step}", whole)
        for i, source in enumerate(self.captured.sources.values()):
            if source.kind == "input":
                record.put("input", f"{source.name} step {step}", self._whole(i))
