"""Rules that a user gives for ops of their own: how the op may be split along one mesh axis, and what it computes.

A rule is asked once per call of the op with the call's own arguments, tensors on the meta device, and answers with
rows: the placement of each result and of each tensor argument that go together. On a mesh of several axes the rows of
every axis are combined, as for any op. Rules are passed to the calls that need them and kept nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from ...cost_models.prices import Prices
from ...passes.graph import Captured, tensor_args, values_of
from ...plans.errors import RequestError
from ...plans.layouts import parse_placement, shard_dim
from .. import _torch
from .op_costs import Local, dtype_name
from .rules.rule import Rule

__all__ = ["OpRule", "attach_rules"]

# Placements of the results (one for an op of one result) and of the tensor arguments.
Row = tuple["str | Sequence[str | None]", Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """How the op named `op` ("mylib::combine") may run on pieces.

    rule   called as the op is; gives (results, arguments) rows of placements R, S(dim), P(sum), P(max) or P(min), one
           per result and one per tensor argument (lists flattened, None left out). All whole need not be among them.
    flop   called likewise, with tensors as large as one device's pieces; gives floating-point operations. Without it
           the op is priced by the bytes of its tensors alone.

    A backward that is an op of its own takes a rule of its own; one made of known ops takes none.
    """

    op: str
    rule: Callable[..., Sequence[Row]]
    flop: Callable[..., float] | None = None

    def rules(self, node: fx.Node) -> list[Rule]:
        """The rows for the call `node`. RequestError for one that does not fit it."""
        outs, ins = values_of(node), tensor_args(node)
        args, kwargs = _on_meta(node, [tuple(_of(n).shape) for n in ins])
        found = []
        for row in self._asked("rule", self.rule, args, kwargs):
            results, arguments = row
            wanted = (results,) if isinstance(results, str) else tuple(results)
            if len(wanted) != len(outs) or len(arguments) != len(ins):
                raise RequestError(
                    f"'rules' must give {self.op} rows of {len(outs)} results and {len(ins)} tensor arguments, "
                    f"got {row!r}"
                )
            for placement, value in zip((*wanted, *arguments), (*outs, *map(_of, ins)), strict=True):
                self._fits(placement, value, row)
            found.append(Rule(wanted, tuple(arguments)))
        return found

    def _asked(self, what: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise RequestError(
                f"'rules' must hold functions that can be called as {self.op} is, got {type(error).__name__}: {error} "
                f"from its {what}; see docs/custom-ops.md"
            ) from error

    def _fits(self, placement: str | None, value: torch.Tensor | None, row: Row) -> None:
        if placement is None or value is None:
            if placement is not None or value is not None:
                raise RequestError(
                    f"'rules' must give {self.op} None for what is no tensor, and only for it, got {row!r}"
                )
            return
        dim = shard_dim(parse_placement(placement))
        if dim is not None and dim >= value.dim():
            raise RequestError(
                f"'rules' must split dims that the tensors of {self.op} have, got {placement} for one of shape "
                f"{list(value.shape)}"
            )

    def seconds(self, node: fx.Node, outs: Sequence[Local | None], ins: Sequence[Local], prices: Prices) -> np.ndarray:
        """Seconds of `node` under each strategy: its operations at the speed of a matrix product of as many, or its
        bytes, whichever takes longer."""
        moved = sum((local.bytes for local in (*outs, *ins) if local is not None), np.zeros(1))
        seconds = np.asarray(prices.memory_s(moved))
        if self.flop is None:
            return seconds
        dtype = dtype_name(next(v for v in values_of(node) if v is not None).dtype)
        work = []
        for at in range(len(seconds)):
            args, kwargs = _on_meta(node, [tuple(int(n) for n in local.sizes[at]) for local in ins])
            work.append(float(self._asked("flop", self.flop, args, kwargs)))
        side = (np.array(work) / 2) ** (1 / 3)
        known = dtype if dtype in ("float64", "float32", "bfloat16", "float16") else "float32"
        return np.maximum(seconds, prices.gemm_s(side, side, side, 1, known))


def attach_rules(captured: Captured, rules: Sequence[OpRule]) -> None:
    """Let the nodes whose op a rule names know that rule."""
    given = {rule.op: rule for rule in rules}
    for node in captured.ops():
        rule = given.get(_torch.spelled(node.target))
        if rule is not None:
            node.meta["rule"] = rule


def _of(node: fx.Node) -> torch.Tensor:
    value = values_of(node)[0]
    assert value is not None
    return value


def _on_meta(node: fx.Node, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of `node` with meta tensors of `shapes`, one per tensor argument."""
    ins = tensor_args(node)
    made = iter([torch.empty(s, dtype=_of(n).dtype, device="meta") for s, n in zip(shapes, ins, strict=True)])
    held: Any = fx.map_arg((node.args, node.kwargs), lambda n: next(made) if n in ins else n.meta["val"])
    args, kwargs = held
    return tuple(args), dict(kwargs)
