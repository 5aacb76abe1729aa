"""Random programs of collectives on every transport, against what plain tensors give.

``HYPOTHESIS_PROFILE=thorough`` tries many more of them.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.testing.contract.exercises import EXERCISES, Setting, as_it_is, communicator, home
from bagua.testing.contract.results import (
    REDUCING,
    as_leaf,
    conjugated,
    negated,
    strided,
    transposed,
    with_history,
    with_offset,
)
from bagua.testing.reference import COPIED, LEGAL, assert_same, reduced, values

COALESCED = ("allreduce_coalesced", "broadcast_coalesced")
SIZES = st.integers(1, 5)
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.integers(1_000, 70_000)),
)
REDUCTIONS = st.sampled_from([(op, dtype) for op, dtypes in LEGAL for dtype in dtypes])


def layouts(dtype: torch.dtype) -> st.SearchStrategy:
    suitable = [as_it_is, transposed, strided, with_offset]
    if dtype in (torch.float32, torch.float64):
        suitable.append(negated)
    if dtype.is_complex:
        suitable.append(conjugated)
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        suitable += [as_leaf, with_history]
    return st.sampled_from(suitable)


@st.composite
def steps(draw, size: int) -> tuple[str, Setting]:
    """One call: which, on what, and how."""
    kind = draw(st.sampled_from(sorted(EXERCISES)))
    op, dtype = LEGAL[0][0], draw(st.sampled_from(COPIED))
    if kind in REDUCING:
        op, dtype = draw(REDUCTIONS)
    suitable = layouts(dtype)
    if kind in COALESCED:  # the exercise adds integers
        dtype, suitable = torch.float32, st.sampled_from([as_it_is, transposed, strided, with_offset])
    setting = Setting(
        shape=draw(SHAPES),
        dtype=dtype,
        op=op,
        root=draw(st.integers(0, size - 1)),
        seed=draw(st.integers(0, 99)),
        present=draw(suitable),
        options={"async_op": True} if draw(st.booleans()) else {},
    )
    return kind, setting


@st.composite
def programs(draw) -> tuple[int, list[tuple[str, Setting]], list[int]]:
    """A number of ranks, the calls that all of them make, and the order in which they wait for them."""
    size = draw(SIZES)
    program = draw(st.lists(steps(size), min_size=1, max_size=6))
    return size, program, draw(st.permutations(range(len(program))))


def run_program(program: list[tuple[str, Setting]], order: list[int]) -> list[torch.Tensor]:
    comm = communicator()
    started = [EXERCISES[kind](comm, setting) for kind, setting in program]
    for number in order:
        for work in started[number].works:
            if work is not None:
                work.wait()
    for exercise in started:
        exercise.check()
    return [result.detach().clone() for exercise in started for result in exercise.results]


@given(programs())
def test_programs_give_what_plain_tensors_give(rank_pool, drawn):
    size, program, order = drawn
    per_rank = rank_pool.run(run_program, program, order, size=size)
    for results in per_rank[1:]:
        for mine, first in zip(results, per_rank[0], strict=True):
            assert_same(mine, first, "a result that shall be bitwise identical on all ranks")


@st.composite
def counts(draw) -> list[list[int]]:
    size = draw(SIZES)
    row = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    return draw(st.lists(row, min_size=size, max_size=size))


def exchange_uneven(matrix: list[list[int]], dtype: torch.dtype) -> None:
    comm = communicator()
    inputs = [values((sum(row),), dtype, rank) for rank, row in enumerate(matrix)]
    received = [row[comm.rank] for row in matrix]
    output = torch.zeros(sum(received), dtype=dtype, device=home(comm))
    comm.alltoall_v(output, inputs[comm.rank].to(home(comm)), received, matrix[comm.rank])
    parts = [torch.split(sent, row)[comm.rank] for sent, row in zip(inputs, matrix, strict=True)]
    assert_same(output, torch.cat(parts), "alltoall_v")


@given(counts(), st.sampled_from(COPIED))
def test_uneven_shares_arrive(rank_pool, matrix, dtype):
    rank_pool.run(exchange_uneven, matrix, dtype, size=len(matrix))


def overlap(kind: str, share: int, output_at: int, input_at: int) -> None:
    """Output and input at drawn places of one buffer; what is neither must stay."""
    comm = communicator()
    size, rank = comm.size, comm.rank
    into, outof = {
        "allgather": (size * share, share),
        "reduce_scatter": (share, size * share),
        "alltoall": (size * share, size * share),
        "sendrecv": (share, share),
    }[kind]
    buffers = [values((3 * size * share + 9,), torch.float64, 10 + other) for other in range(size)]
    inputs = [buffer[input_at : input_at + outof] for buffer in buffers]
    mine = buffers[rank].to(home(comm), copy=True)
    output, tensor = mine[output_at : output_at + into], mine[input_at : input_at + outof]
    if kind == "allgather":
        comm.allgather(output, tensor)
        expected = torch.cat(inputs)
    elif kind == "reduce_scatter":
        comm.reduce_scatter(output, tensor)
        expected = reduced(inputs, LEGAL[0][0])[rank * share : (rank + 1) * share]
    elif kind == "alltoall":
        comm.alltoall(output, tensor)
        expected = torch.cat([sent[rank * share : (rank + 1) * share] for sent in inputs])
    else:
        comm.sendrecv(output, tensor, (rank - 1) % size, (rank + 1) % size)
        expected = inputs[(rank - 1) % size]
    whole = buffers[rank].clone()
    whole[output_at : output_at + into] = expected
    assert_same(mine, whole, f"{kind} into its own input", rounding_steps=size)


@given(
    st.integers(2, 4),
    st.sampled_from(["allgather", "reduce_scatter", "alltoall", "sendrecv"]),
    st.integers(0, 6),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_output_and_input_may_overlap(rank_pool, size, kind, share, output_at, input_at):
    rank_pool.run(overlap, kind, share, output_at, input_at, size=size)
