"""What a compiled half writes to memory, on small programs by hand; sizes in bytes, one per element."""

from __future__ import annotations

from meshwright.passes.fused import Kernel, Op, kernels


def op(name: str, reads: tuple[int, ...], made: int, node: int, size: int = 64, read_size: int = 64) -> Op:
    return Op(
        node=node, name=name, tagged=name in ("mul", "add", "exp"), reads=reads, made=(made,), read_size=read_size,
        made_size=size,
    )  # fmt: skip


def run(ops: list[Op], given: set[int], ends: set[int], together: bool = False) -> list[Kernel]:
    sizes = dict.fromkeys(given, 64) | {value: each.made_size for each in ops for value in each.made}
    return kernels(ops, given, ends, sizes, together=together)


def test_a_chain_between_products_is_one_kernel_and_writes_its_end() -> None:
    ops = [op("mm", (0,), 1, 0), op("mul", (1,), 2, 1), op("add", (2, 1), 3, 2), op("mm", (3,), 4, 3)]
    first, chain, last = run(ops, {0}, {0, 4})
    assert (first.writes, last.writes) == ((1,), (4,))
    # What it reads last is written over.
    assert chain.writes == (3,) and chain.over == {3: 1}
    assert set(last.frees) == {3}


def test_what_is_given_out_is_written_and_what_is_given_is_not_written_over() -> None:
    ops = [op("mul", (0,), 1, 0), op("add", (1,), 2, 1)]
    written = {value for kernel in run(ops, {0}, {1, 2}) for value in kernel.writes}
    assert written == {1, 2}
    assert all(not kernel.over for kernel in run(ops, {0}, {2}))


def test_a_heavy_value_that_two_products_read_is_written_once() -> None:
    ops = [op("mm", (0,), 1, 0), op("exp", (1,), 2, 1), op("mm", (2,), 3, 2), op("mm", (2,), 4, 3)]
    assert [kernel.writes for kernel in run(ops, {0}, {3, 4})] == [(1,), (2,), (3,), (4,)]


def test_what_a_row_is_normalised_by_is_within_its_kernel() -> None:
    ops = [op("mm", (0,), 1, 0), op("exp", (1,), 2, 1), op("sum", (2,), 3, 2, size=8), op("mul", (2, 3), 4, 3),
           op("mm", (4,), 5, 4)]  # fmt: skip
    assert [kernel.writes for kernel in run(ops, {0}, {5})] == [(1,), (4,), (5,)]


def test_what_a_collective_reads_is_there_until_it_is_waited_for() -> None:
    wait = Op(node=2, name="wait", tagged=False, reads=(0,), made=(), read_size=0, made_size=0)
    ops = [op("all_gather_into_tensor", (0,), 1, 0), op("mm", (2,), 3, 1), wait, op("mm", (1,), 4, 3)]
    frees = [kernel.frees for kernel in run(ops, {0, 2}, {2, 3, 4})]
    assert 0 not in frees[0] and 0 in frees[2]


def test_what_two_branches_compute_from_is_counted_once() -> None:
    # Five sums of a value with itself are five ops, not thirty-one: cheap enough to be computed for each reader.
    ops = [op("add", (at, at), at + 1, at) for at in range(5)]
    ops += [op("mul", (5,), 6, 5), op("mul", (5,), 7, 6), op("mm", (6,), 8, 7), op("mm", (7,), 9, 8)]
    assert {value for kernel in run(ops, {0}, {8, 9}) for value in kernel.writes} == {6, 7, 8, 9}


def test_a_sum_down_columns_is_not_fused_with_one_along_rows() -> None:
    def ops(columns: bool) -> list[Op]:
        rows = op("sum", (1,), 2, 1, size=8)
        down = Op(node=2, name="sum", tagged=False, reads=(1, 2), made=(3,), read_size=64, made_size=8, columns=columns)
        return [op("mm", (0,), 1, 0), rows, down]

    assert len(run(ops(False), {0}, {2, 3})) == 2
    assert len(run(ops(True), {0}, {2, 3})) == 3


def test_kernels_run_in_the_order_of_their_first_ops_and_after_what_they_need() -> None:
    # The sum is at hand early, but what it is fused with needs a product that comes late, and the gather's wait.
    ops = [op("exp", (0,), 1, 0), op("mm", (2,), 3, 1), op("all_gather_into_tensor", (4,), 5, 2),
           Op(node=3, name="wait", tagged=False, reads=(5, 4), made=(), read_size=0, made_size=0),
           op("mm", (5,), 6, 4), op("mul", (1, 6), 7, 5), op("mm", (1,), 8, 6), op("mm", (7,), 9, 7)]  # fmt: skip
    written = [value for kernel in run(ops, {0, 2, 4}, {3, 8, 9}) for value in kernel.writes]
    assert written == [5, 6, 1, 7, 3, 8, 9]


def test_on_cpus_kernels_between_two_products_are_one_function() -> None:
    # The second is over other elements than the first, and so not fused with it.
    ops = [op("mm", (0,), 1, 0), op("sum", (1,), 2, 1, size=8), op("mul", (2,), 3, 2, size=16), op("mm", (3,), 4, 3)]
    apart, joined = run(ops, {0}, {2, 4}), run(ops, {0}, {2, 4}, together=True)
    assert [kernel.frees for kernel in apart[1:3]] == [(1,), ()]
    assert joined[1].writes == (2, 3) and joined[1].frees == (1,)


def test_what_only_leaves_the_half_is_written_last() -> None:
    ops = [op("mul", (0,), 1, 0), op("mm", (0,), 2, 1)]
    assert [kernel.writes for kernel in run(ops, {0}, {1, 2})] == [(2,), (1,)]


def test_what_an_embeddings_gradient_is_added_from_is_made_where_it_is_added() -> None:
    # The gradient's kernel runs when the indices are there, with the zeros that it adds to.
    ops = [op("mul", (0,), 1, 0), op("mm", (2,), 3, 1), op("topk", (3,), 4, 2, size=8),
           op("embedding_dense_backward", (1, 4), 5, 3, size=128)]  # fmt: skip
    found = run(ops, {0, 2}, {5}, together=True)
    assert [kernel.writes for kernel in found] == [(3,), (4,), (5,)]
    assert set(found[-1].frees) == {0, 4}
