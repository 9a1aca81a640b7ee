"""Rules of decompositions of matrices and of solvers: the dims before the matrices run apart, as far as each tensor has
them, and so do the columns that are solved for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ....passes.graph import named_arguments, tensor_args, value_of, values_of
from ....passes.naming import op_name
from ....plans.layouts import PARTIAL, REPLICATE
from .rule import Link, Rule, from_links

__all__ = ["LINEAR_RULES"]

# How many dims at the end of each result, then of each tensor argument, are those of one problem.
_DIMS: Mapping[str, tuple[str, str]] = {
    "_linalg_svd": ("212", "2"),
    "_linalg_eigh": ("12", "2"),
    "linalg_eig": ("12", "2"),
    "linalg_qr": ("22", "2"),
    "linalg_inv_ex": ("20", "2"),
    "linalg_cholesky_ex": ("20", "2"),
    "cholesky": ("2", "2"),
    "cholesky_inverse": ("2", "2"),
    "linalg_matrix_exp": ("2", "2"),
    "_linalg_det": ("021", "2"),
    "_linalg_slogdet": ("0021", "2"),
    "linalg_lu_factor_ex": ("210", "2"),
    "linalg_lu": ("222", "2"),
    "lu_unpack": ("222", "21"),
    "linalg_householder_product": ("2", "21"),
    "geqrf": ("21", "2"),
    "ormqr": ("2", "212"),
    "linalg_lu_solve": ("2", "212"),
    "linalg_solve_triangular": ("2", "22"),
    "cholesky_solve": ("2", "22"),
    "_linalg_solve_ex": ("2210", "22"),
}
# Where the right side stands among the arguments of the solvers of one result, which is linear in it.
_RIGHT_SIDE: Mapping[str, int] = {"linalg_lu_solve": 2, "linalg_solve_triangular": 1, "cholesky_solve": 0}


def _matrices(node: fx.Node) -> list[Rule]:
    name = op_name(node)
    outs, ins = values_of(node), [value_of(n) for n in tensor_args(node)]
    ends = [int(end) for part in _DIMS[name] for end in part]
    if name == "_linalg_solve_ex" and ins[0].dim() == ins[1].dim() + 1:  # the right sides are vectors
        ends[0] = ends[-1] = 1
    shapes = [tuple(v.shape) if v is not None else () for v in (*outs, *ins)]
    before = [shape[: max(0, len(shape) - end)] for shape, end in zip(shapes, ends, strict=True)]
    count = max(map(len, before))

    def place(dims: tuple[int, ...], at: int) -> int | None:
        """Dim number `at` of all in a tensor that has `dims`, aligned at the end; None where it is broadcast."""
        here = at - (count - len(dims))
        whole = max(other[at - (count - len(other))] for other in before if at >= count - len(other))
        return here if here >= 0 and dims[here] == whole else None

    present = [v is not None for v in outs]
    links: list[Link] = []
    for at in range(count):
        places = [place(dims, at) for dims in before]
        links.append((places[: len(outs)], places[len(outs) :]))
    right = _RIGHT_SIDE.get(name)
    if right is not None and named_arguments(node).get("left", True):
        columns: list[int | None] = [None] * len(ins)
        columns[right] = ins[right].dim() - 1
        links.append(((len(shapes[0]) - 1,), columns))
    rules = from_links(links, present, len(ins))
    if right is not None:
        rules.append(Rule((PARTIAL,), tuple(PARTIAL if i == right else REPLICATE for i in range(len(ins)))))
    return rules


LINEAR_RULES = dict.fromkeys(_DIMS, _matrices)
