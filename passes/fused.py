"""What a half allocates when it is compiled: which values Inductor writes to memory, and when.

The ops that the half runs eagerly were recorded (passes/footprint.py). Here they are followed as Inductor lowers them:
pointwise values are computed where they are read until something needs them in memory, reductions and the ops that it
does not generate (products, attention, collectives, sorting) write theirs, kernels of one domain that read each other
are fused, and a value that only its own kernel reads is never written. A kernel may write over what it reads last.
The thresholds are those of torch/_inductor/config.py, the rules those of its graph.py, ir.py and scheduler.py for CPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

__all__ = ["Op", "Kernel", "kernels"]

# Ops without the tag that are computed where they are read.
_POINTWISE = frozenset(
    "clone _to_copy cat constant_pad_nd index embedding gather slice_backward select_backward slice_scatter stack "
    "select_scatter flip roll repeat tril triu where copy full arange scalar_tensor zeros zeros_like ones ones_like "
    "full_like new_zeros new_ones new_full empty empty_like new_empty empty_strided index_select bernoulli rand "
    "upsample_nearest2d native_dropout_backward nll_loss_backward reflection_pad1d lift_fresh_copy floor_divide "
    "convert_element_type view_copy fill unfold_backward diagonal_backward _unsafe_view contiguous glu glu_backward "
    "hardtanh_backward elu_backward avg_pool2d avg_pool2d_backward max_pool2d_with_indices_backward ge masked_fill "
    "im2col expand_copy rot90 movedim_copy normal_functional mse_loss_backward logical_and polar complex".split()
)
_REDUCED = frozenset(
    "sum mean amax amin max min var std var_mean argmax argmin any all prod logsumexp nll_loss_forward mse_loss "
    "binary_cross_entropy linalg_vector_norm norm count_nonzero histc".split()
)
# Values over rows and what is normalised by them: small results, then one of the size of the input.
_NORMALISED = frozenset(
    "_softmax _log_softmax _safe_softmax native_layer_norm native_group_norm _fused_rms_norm native_batch_norm "
    "_native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm_backward native_group_norm_backward native_batch_norm_backward "
    "_fused_rms_norm_backward _native_batch_norm_legit_no_training".split()
)
# Values are added to, or put into, a copy of the first one.
_SCATTERED = frozenset("index_put _unsafe_index_put scatter scatter_add scatter_reduce index_add index_copy".split())
# Of these the ones that Inductor generates no code for on CPUs.
_SCATTERED_APART = frozenset(("scatter_add", "scatter_reduce"))
# Written when read more than once on CPUs.
_HEAVY = frozenset(
    "exp log log10 log1p log2 sigmoid tanh silu silu_backward gelu softplus _log_softmax_backward_data".split()
)
# An op of a graph is about three of those that Inductor counts up to 50 of.
_READS, _MOST_READS, _MOST_OPS = 4, 12, 16
# What these give is not written over: they are not of a kernel's own making.
_FOREIGN = frozenset(
    "all_gather_into_tensor reduce_scatter_tensor all_to_all_single all_reduce topk sort cumsum convolution "
    "convolution_backward _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward".split()
)
_RANDOM = frozenset(("bernoulli", "rand", "native_dropout", "normal_functional"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op that ran: the node of the half that it belongs to, by number, the values that it read and made (storages,
    by number), and of how many elements the largest that it read and the largest that it made are. A `wait` reads the
    collective's result, then what that is read from until then. `columns` says of a reduction that it leaves the last
    dims of what it reads."""

    node: int
    name: str
    tagged: bool
    reads: tuple[int, ...]
    made: tuple[int, ...]
    read_size: int
    made_size: int
    columns: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What runs as one: the node at which it does, the values that it writes to memory, those of them that take the
    place of one that it reads last (new: old), and the values that nothing reads after it."""

    node: int
    writes: tuple[int, ...]
    over: Mapping[int, int]
    frees: tuple[int, ...]


def kernels(
    ops: Sequence[Op], given: set[int], ends: set[int], sizes: Mapping[int, int], *, together: bool
) -> list[Kernel]:
    """The kernels of a half in the order in which they run. `given` are the values that it starts from, `ends` those
    that are there after it, `sizes` the bytes of each value. `together` as on CPUs, where kernels between two ops that
    Inductor does not generate are one function: what any of them writes is allocated before it, and freed after it."""
    foreign = given | {value for op in ops if op.name in _FOREIGN for value in op.made}
    lowered = _Lowering(ops, ends, sizes).made
    reads = _reads(lowered)
    group = _fused(lowered, reads)
    order = _order(reads, group)
    position = {g: index for index, g in enumerate(order)}
    first = {g: number for number, g in reversed(list(enumerate(group)))}
    maker = {v: position[group[n]] for n, kernel in enumerate(lowered) for v in kernel.writes}
    direct: list[set[int]] = [set() for _ in order]
    dies = dict(maker)
    outside: set[int] = set(ends)
    for number, kernel in enumerate(lowered):
        here = position[group[number]]
        direct[here] |= kernel.direct
        for value in kernel.reads:
            dies[value] = max(dies.get(value, here), here)
            if maker.get(value) != here:
                outside.add(value)
        # What only waits is read by nobody, and what nobody reads is written all the same.
        outside |= {v for v in kernel.writes if not kernel.fusible}
    writes: list[list[int]] = [[] for _ in order]
    for value, here in maker.items():
        if value in outside:
            writes[here].append(value)
    frees: list[list[int]] = [[] for _ in order]
    for value, here in dies.items():
        if value not in ends and (value in given or value in outside):
            frees[here].append(value)
    found: list[Kernel] = []
    node, joins = 0, False
    for here, g in enumerate(order):
        node = max(node, lowered[first[g]].at)
        over = _over(writes[here], [v for v in frees[here] if v in direct[here] and v not in foreign], sizes)
        kernel = Kernel(node=node, writes=tuple(writes[here]), over=over, frees=tuple(frees[here]))
        generated = lowered[first[g]].fusible or lowered[first[g]].generated
        if together and joins and generated:
            found[-1] = _both(found[-1], kernel)
        else:
            found.append(kernel)
        joins = generated
    return found


def _both(one: Kernel, other: Kernel) -> Kernel:
    return Kernel(
        node=one.node,
        writes=one.writes + other.writes,
        over={**one.over, **other.over},
        frees=one.frees + other.frees,
    )


def _over(writes: Sequence[int], last: Sequence[int], sizes: Mapping[int, int]) -> dict[int, int]:
    """Values written in place of one of the same size that is read last."""
    free = {v for v in last if v not in writes}
    over: dict[int, int] = {}
    for value in writes:
        old = next((v for v in free if sizes[v] == sizes[value]), None)
        if old is not None:
            free.discard(old)
            over[value] = old
    return over


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Lowered:
    """One kernel before fusion: what it writes and reads, what of that it may write over, as it reads there what it
    writes there, the values of others that are whole once it ran (`waits`), and its elements (`rows` where it reduces
    to so many, which may be `columns`). One that is not fused may be `generated` all the same."""

    at: int
    writes: tuple[int, ...]
    reads: set[int]
    direct: set[int]
    fusible: bool
    waits: tuple[int, ...] = ()
    size: int = 0
    rows: int = 0
    columns: bool = False
    generated: bool = False


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Lazy:
    """A value that is not written yet: the written values it reads, those that it reads element by element, what is
    computed for it (each value once, however many read it) and how many ops that takes, whether one is heavy."""

    reads: set[int]
    direct: set[int]
    ops: Mapping[int, int]
    heavy: bool
    size: int
    at: int


class _Lowering:
    """Follows the ops and collects kernels."""

    def __init__(self, ops: Sequence[Op], ends: set[int], sizes: Mapping[int, int]) -> None:
        self.made: list[_Lowered] = []
        self.lazy: dict[int, _Lazy] = {}
        self.ends, self.sizes = ends, sizes
        self.users: dict[int, int] = {}
        for op in ops:
            for value in set(op.reads) if op.name != "wait" else ():
                self.users[value] = self.users.get(value, 0) + 1
        for op in ops:
            self._lower(op)
        # What only leaves the graph is written when all else is.
        for value in [v for v in self.lazy if v in ends]:
            self._realize(value, ops[-1].node)

    def _lower(self, op: Op) -> None:
        if op.name == "wait":
            self.made.append(
                _Lowered(at=op.node, writes=(), reads=set(op.reads), direct=set(), fusible=False, waits=op.reads[:1])
            )
        elif not op.made:
            return
        elif op.name in _NORMALISED:
            self._normalise(op)
        elif op.name in _REDUCED:
            kernel = self._write(op, set(), fusible=True)
            kernel.size, kernel.rows, kernel.columns = op.read_size, op.made_size, op.columns
        elif op.name == "embedding_dense_backward":
            # Zeros, then a kernel over the gradient that adds to them.
            self.made.append(
                _Lowered(at=op.node, writes=op.made, reads=set(), direct=set(), fusible=False, generated=True)
            )
            kernel = self._write(op, set(), fusible=True)
            kernel.reads |= set(op.made)
            kernel.writes, kernel.waits, kernel.size = (), op.made, op.read_size
        elif op.name in _SCATTERED:
            kernel = self._write(op, self._direct(op.reads[:1]), fusible=False)
            kernel.generated = op.name not in _SCATTERED_APART
        elif op.name == "all_reduce":
            # Done in place of what it reads, or of a copy.
            self._write(op, self._direct(op.reads), fusible=False)
        elif op.tagged or op.name in _POINTWISE:
            self._compute(op)
        else:
            for value in op.reads:
                self._realize(value, op.node)
            self._write(op, set(), fusible=False)

    def _inputs(self, op: Op) -> set[int]:
        found: set[int] = set()
        for value in op.reads:
            found |= self.lazy[value].reads if value in self.lazy else {value}
        return found

    def _direct(self, values: Sequence[int]) -> set[int]:
        found: set[int] = set()
        for value in values:
            found |= self.lazy[value].direct if value in self.lazy else {value}
        return found

    def _write(self, op: Op, direct: set[int], *, fusible: bool) -> _Lowered:
        kernel = _Lowered(at=op.node, writes=op.made, reads=self._inputs(op), direct=direct, fusible=fusible)
        self.made.append(kernel)
        return kernel

    def _normalise(self, op: Op) -> None:
        """Small results are written; a large one is computed where it is read, as far as that is worth it."""
        most = max(self.sizes[v] for v in op.made)
        large = [v for v in op.made if 2 * self.sizes[v] >= most]
        small = tuple(v for v in op.made if v not in large)
        reads, direct = self._inputs(op), self._direct(op.reads)
        if small:
            kernel = _Lowered(
                at=op.node, writes=small, reads=set(reads), direct=set(), fusible=True, size=op.read_size, rows=-1
            )
            self.made.append(kernel)
        for value in large:
            heavy = "softmax" in op.name
            self.lazy[value] = _Lazy(
                reads=reads | set(small), direct=set(direct), ops={value: 8}, heavy=heavy, size=op.made_size, at=op.node
            )
            self._settle(value, op)

    def _compute(self, op: Op) -> None:
        read = [self.lazy[v] for v in op.reads if v in self.lazy]
        heavy = op.name in _HEAVY or any(lazy.heavy for lazy in read)
        reads, within = self._inputs(op), dict.fromkeys(op.made, 1)
        for lazy in read:
            within |= lazy.ops
        direct = self._direct(op.reads) if op.tagged else set()
        for value in op.made:
            self.lazy[value] = _Lazy(
                reads=set(reads), direct=set(direct), ops=within, heavy=heavy, size=op.made_size, at=op.node
            )
            self._settle(value, op)

    def _settle(self, value: int, op: Op) -> None:
        """Write a value that many read, that reads many, or that is given out as well as read."""
        lazy, users = self.lazy[value], self.users.get(value, 0)
        many = users > 1 and (lazy.heavy or sum(lazy.ops.values()) > _MOST_OPS or len(lazy.reads) > _READS)
        if many or op.name in _RANDOM or (users and value in self.ends) or len(lazy.reads) > _MOST_READS:
            self._realize(value, op.node)

    def _realize(self, value: int, at: int) -> None:
        lazy = self.lazy.pop(value, None)
        if lazy is not None:
            kernel = _Lowered(
                at=at, writes=(value,), reads=lazy.reads, direct=lazy.direct, fusible=True, size=lazy.size
            )
            self.made.append(kernel)


def _reads(lowered: Sequence[_Lowered]) -> list[set[int]]:
    """For each kernel those that it needs: a collective's result is there when it was waited for."""
    maker: dict[int, int] = {}
    found: list[set[int]] = []
    for number, kernel in enumerate(lowered):
        found.append({maker[v] for v in kernel.reads if v in maker})
        maker |= dict.fromkeys(kernel.waits or kernel.writes, number)
    return found


def _order(reads: Sequence[set[int]], group: Sequence[int]) -> list[int]:
    """The groups in the order in which they run: by their first kernels, each after those that it needs."""
    needs: dict[int, set[int]] = {}
    for number, g in enumerate(group):
        needs.setdefault(g, set()).update(group[m] for m in reads[number])
    done: dict[int, None] = {}
    stack = list(reversed(needs))
    while stack:
        g = stack[-1]
        waiting = [n for n in sorted(needs[g], reverse=True) if n != g and n not in done] if g not in done else []
        if not waiting:
            done[stack.pop()] = None
        stack += waiting
    return list(done)


def _fused(lowered: Sequence[_Lowered], reads: Sequence[set[int]]) -> list[int]:
    """For each kernel the number of the group that it is fused into."""
    group = list(range(len(lowered)))
    members: dict[int, list[int]] = {g: [g] for g in group}
    for number, kernel in enumerate(lowered):
        for source in sorted(reads[number], reverse=True) if kernel.fusible else ():
            a, b = group[source], group[number]
            if a == b or not lowered[source].fusible or not _alike(lowered, members[a], members[b]):
                continue
            if not _through(reads, group, members, a, b):
                for each in members.pop(a):
                    group[each] = b
                    members[b].append(each)
    return group


def _alike(lowered: Sequence[_Lowered], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two groups run over the same elements and reduce to the same rows, or to the same columns."""
    rows = {(lowered[k].rows, lowered[k].columns) for k in (*one, *other) if lowered[k].rows > 0}
    sizes = {lowered[k].size for k in (*one, *other)} - {size for size, _ in rows}
    return len(rows) <= 1 and len(sizes) <= 1


def _through(
    reads: Sequence[set[int]], group: Sequence[int], members: Mapping[int, Sequence[int]], source: int, reader: int
) -> bool:
    """Whether the group `reader` reads the group `source` also by way of another group."""
    first = min(members[source])
    stack = [m for k in members[reader] for m in reads[k] if m > first and group[m] not in (source, reader)]
    seen: set[int] = set()
    while stack:
        at = group[stack.pop()]
        if at not in seen:
            seen.add(at)
            further = {m for k in members[at] for m in reads[k]}
            if any(group[m] in (source, reader) for m in further):
                return True
            stack.extend(m for m in further if m > first)
    return False
