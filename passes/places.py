"""Where the ops of a captured model run when it is cut into stages, and which values then cross from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..plans.errors import RequestError
from .again import computed_again
from .graph import Captured, argument
from .keeping import is_keep, readers_of
from .naming import draws_random, op_name

__all__ = ["Places", "forward_ops", "light_ops", "stage_starts"]

aten = torch.ops.aten


def stage_starts(captured: Captured, firsts: Sequence[str]) -> list[int]:
    """Where each stage begins, as an index of the forward ops in their order."""
    names = [captured.names[node] for node in forward_ops(captured)]
    starts: list[int] = []
    for stage, first in enumerate(firsts):
        least = starts[-1] + 1 if starts else 0
        found = next((i for i, name in enumerate(names) if _lies_in(name, first)), None)
        if stage == 0 and not first:
            found = 0
        if found is None or found < least or (stage == 0 and found):
            rule = "begin with the model's first op" if stage == 0 else "name an op or module after the stage before it"
            raise RequestError(
                f"'first' of stage {stage} must {rule}, got {first!r}; see the names of ops in the plan's nodes"
            )
        starts.append(found)
    return starts


def _lies_in(name: str, first: str) -> bool:
    return bool(first) and (name == first or name.startswith((f"{first}.", f"{first}::")))


def forward_ops(captured: Captured) -> list[fx.Node]:
    return [n for n in captured.ops() if n not in captured.backward]


class Places:
    """In which stage every op of a captured model runs, and which values cross from stage to stage."""

    def __init__(self, captured: Captured, starts: Sequence[int], stages: int) -> None:
        self.captured, self.stages = captured, stages
        self.light = light_ops(captured)
        self.falls = (captured.backward | set(captured.tangents.values())) - self.light
        self.of: dict[fx.Node, int] = {}
        # Where each backward op would run if its data were there.
        self.wanted: dict[fx.Node, int] = {}
        self._place_forward(starts)
        self._place_backward()
        self.parts = self._parts()
        self.dropped = self._dropped()
        self.forward_reach: dict[fx.Node, int] = {}
        self.backward_reach: dict[fx.Node, int] = {}
        self._reach()

    def _place_forward(self, starts: Sequence[int]) -> None:
        stage = 0
        for index, node in enumerate(forward_ops(self.captured)):
            while stage + 1 < self.stages and index >= starts[stage + 1]:
                stage += 1
            # One of an op's results is taken where the op is.
            source = node.args[0] if op_name(node) == "getitem" else None
            self.of[node] = self.of[source] if isinstance(source, fx.Node) else stage

    def _place_backward(self) -> None:
        """Backward ops run in the stage of their module, as far as their data allows: gradients only go down."""
        captured, last = self.captured, self.stages - 1
        backward = [n for n in captured.ops() if n in captured.backward]
        home, again = self._homes(), computed_again(captured)
        least: dict[fx.Node, int] = {}
        for node in reversed(backward):
            made = [self.of[a] for a in node.all_input_nodes if a in self.of and a not in self.light]
            least[node] = max([0, *made, *(least[u] for u in node.users if u in least)])
        for index, node in captured.tangents.items():
            output = captured.outputs[index]
            self.of[node] = last if output is None or output in self.light else self.of.get(output, last)
        for node in backward:
            above = [self.of[a] for a in node.all_input_nodes if a in self.falls]
            most = min([last, *above])
            source = node.args[0] if op_name(node) == "getitem" else None
            wanted = home.get(_path(captured.names[node]), most if above else least[node])
            if isinstance(source, fx.Node) and source in self.of:
                wanted = self.of[source]
            elif again.get(node) in self.of:
                wanted = self.of[again[node]]
            self.wanted[node] = max(least[node], wanted)
            self.of[node] = max(least[node], min(most, wanted))

    def _homes(self) -> dict[str, int]:
        """Modules whose forward lies in one stage, and that stage."""
        seen: dict[str, set[int]] = {}
        for node, stage in self.of.items():
            if node not in self.light:
                seen.setdefault(_path(self.captured.names[node]), set()).add(stage)
        return {path: stages.pop() for path, stages in seen.items() if len(stages) == 1}

    def _parts(self) -> dict[str, dict[int, fx.Node]]:
        """Gradients by name and stage: a sum over several stages is left to whoever adds the parts up."""
        found: dict[str, dict[int, fx.Node]] = {}
        for name, node in self.captured.grads.items():
            terms = self._terms(node, root=True)
            by_stage: dict[int, list[fx.Node]] = {}
            for term in terms:
                by_stage.setdefault(self._stage_of_gradient(name, term), []).append(term)
            if any(len(one) > 1 for one in by_stage.values()):
                by_stage = {self._stage_of_gradient(name, node): [node]}
            found[name] = {stage: one[0] for stage, one in by_stage.items()}
        return found

    def _stage_of_gradient(self, name: str, node: fx.Node) -> int:
        """Where a gradient is given out: where it is made, or below, in a stage that reads its tensor."""
        source = next(n for n, s in self.captured.sources.items() if s.name == name)
        readers = {self.of[u] for u in readers_of(source) if u in self.of and u not in self.light}
        made = self.stages - 1 if node in self.light else self.of[node]
        return max((stage for stage in readers if stage <= made), default=made)

    def _terms(self, node: fx.Node, *, root: bool) -> list[fx.Node]:
        """The largest sums of one stage that add up to `node`."""
        if self._adds(node) and (root or len(node.users) == 1):
            left, right = argument(node, 0), argument(node, 1)
            parts = [*self._terms(left, root=False), *self._terms(right, root=False)]
            if len({self.of[part] for part in parts}) > 1:
                return parts
        return [node]

    def _adds(self, node: fx.Node) -> bool:
        if node.target is not aten.add.Tensor or node.kwargs or node not in self.captured.backward:
            return False
        pair = node.args
        if len(pair) != 2 or any(not isinstance(a, fx.Node) or a not in self.falls for a in pair):
            return False
        values = [a.meta["val"] for a in (node, *pair)]  # type: ignore[union-attr]
        return len({(tuple(v.shape), v.dtype) for v in values}) == 1

    def _reach(self) -> None:
        """How far up each forward value, and how far down each gradient value, is needed."""
        for parts in self.parts.values():
            for stage, node in parts.items():
                if node in self.falls and stage < self.of[node]:
                    self.backward_reach[node] = min(self.backward_reach.get(node, stage), stage)
        split = {node for parts in self.parts.values() if len(parts) > 1 for node in parts.values()}
        dropped = self.dropped
        for node in self.captured.ops():
            if node in self.light or node in dropped:
                continue
            stage = self.of[node]
            for source in node.all_input_nodes:
                if source in self.light or source not in self.of or (source in split and node in dropped):
                    continue
                reach = self.backward_reach if source in self.falls else self.forward_reach
                if reach is self.backward_reach and stage < self.of[source]:
                    reach[source] = min(reach.get(source, self.stages), stage)
                elif reach is self.forward_reach and stage > self.of[source]:
                    reach[source] = max(reach.get(source, 0), stage)

    def _dropped(self) -> set[fx.Node]:
        """Sums over stages that no stage computes."""
        dropped: set[fx.Node] = set()
        for name, parts in self.parts.items():
            if len(parts) > 1:
                stack = [self.captured.grads[name]]
                while stack:
                    node = stack.pop()
                    if node not in parts.values():
                        dropped.add(node)
                        stack += [a for a in node.all_input_nodes if a in self.falls]
        return dropped

    def sums_of(self, name: str, part: fx.Node) -> tuple[tuple[str, int], ...]:
        """The sums, by name and position of the term in it, that lead from `part` to the whole gradient."""
        way: list[tuple[str, int]] = []
        end, node = self.captured.grads[name], part
        while node is not end:
            above = next(u for u in node.users if self._adds(u))
            way.append((self.captured.names[above], 0 if argument(above, 0) is node else 1))
            node = above
        return tuple(way)


def _path(name: str) -> str:
    return name.partition("::")[0]


def light_ops(captured: Captured) -> set[fx.Node]:
    """Ops that need nothing but inputs without gradient and buffers that stay as they are, and draw nothing; and those
    that may keep a parameter, each stage for itself."""
    changed = set(captured.mutations)
    light = {
        node
        for node, source in captured.sources.items()
        if source.kind != "parameter" and not source.requires_grad and source.name not in changed
    }
    light |= {node for node in captured.graph.nodes if node.op == "get_attr"}
    given = set(captured.mutations.values()) | {n for n in captured.outputs if n is not None}
    for node in captured.ops():
        if node not in given and not draws_random(node) and all(a in light for a in node.all_input_nodes):
            light.add(node)
    return light | {node for node in captured.ops() if is_keep(node)}
