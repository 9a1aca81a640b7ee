"""torch.compile(model, backend="meshwright"): a model that was not parallelised runs split over the process group.

The parameters stay the user's own, whole on every rank, and so do inputs, outputs and gradients; only the work
between is split, as a plan says that is made when the graph is first compiled. For sharded parameters use
`autoparallelize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..passes.capture import capture
from ..passes.runtime import Program
from .api import plan
from .apply import agreed, device_mesh_for, here, usual_here

__all__ = ["meshwright"]


class _Graph(nn.Module):
    """Dynamo's graph as a module without parameters of its own."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.run = graph

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def meshwright(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend: `graph` and its example inputs as Dynamo gives them, to a callable on whole tensors."""
    model = _Graph(graph)
    mesh = usual_here()
    found = agreed(lambda: plan(model, tuple(example_inputs), cluster=here(), mesh=mesh, optimizer="none"))
    device_mesh = device_mesh_for(found.mesh)
    program = Program(capture(model, tuple(example_inputs), {}, recompute=found.options.recompute), found, device_mesh)
    layouts = dict(zip([s.name for s in program.sources], program.layouts, strict=True))
    held = [_attribute(model, s.name) for s in program.sources if s.kind != "input"]

    def run(*inputs: Any) -> Any:
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        local = [program.local(t, layouts[n], device_mesh) for t, n in zip(tensors, program.inputs.names, strict=True)]
        results = program.run(held, local, compiled=False)
        done = program.halves.program
        outputs = dict(zip(done.outputs, results, strict=False))
        for name, value in zip(done.mutations, results[len(done.outputs) :], strict=True):
            with torch.no_grad():
                tensors[program.inputs.names.index(name)].copy_(value)
        return program.outputs.build([outputs.get(index) for index in range(program.count)])

    return torch.compiler.disable(run)


def _attribute(model: nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), key)
