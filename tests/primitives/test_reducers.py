"""Reducers: sums that lose something, and what must hold all the same."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.compression import BlockTopK, Float16, Identity, MinMaxUInt8, Sign, TopK
from bagua.errors import InvalidTensorError
from bagua.primitives import (
    AllGatherReducer,
    ErrorFeedback,
    MatrixBlock,
    PowerSGDReducer,
    ScatterGatherReducer,
    SparseReducer,
    SumReducer,
    sum_over,
)
from tests.harness import coded

#: Everything that has a remainder.
PLAIN: list[SumReducer] = [
    AllGatherReducer(Sign(block_numel=64)),
    AllGatherReducer(TopK(0.1)),
    ScatterGatherReducer(MinMaxUInt8(block_numel=32)),
    ScatterGatherReducer(Identity()),
    PowerSGDReducer(matrix_rank=2),
    SparseReducer(TopK(0.1), gather_ranks=2),
    AllGatherReducer(BlockTopK(64, 8)),
]
WITH_FEEDBACK: list[SumReducer] = [ErrorFeedback(reducer) for reducer in PLAIN]
NUMEL = 203
BLOCKS = [MatrixBlock(3, 8, 10), MatrixBlock(90, 9, 12)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def values(rank: int, dtype: torch.dtype = torch.float32, call: int = 0, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)


def exact_sum(size: int, **options: int) -> torch.Tensor:
    return torch.stack([values(rank, **options).double() for rank in range(size)]).sum(dim=0)


# Conservation: nothing is lost that is not known to be lost.


def _reduce_all(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    communicator = bagua.comm.get_default_group().global_communicator
    results = []
    for reducer in PLAIN:
        flat = values(communicator.rank, dtype)
        memory, remainder = reducer.memory(communicator, flat, BLOCKS), torch.empty_like(flat)
        reducer.reduce(flat, communicator, memory, remainder)
        results.append((flat, remainder))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_result_and_remainders_add_up_to_the_exact_sum(thread_ranks, size, dtype):
    for reducer, of_ranks in zip(PLAIN, zip(*thread_ranks(size, _reduce_all, dtype), strict=True), strict=True):
        total = of_ranks[0][0].double() + sum(remainder.double() for _, remainder in of_ranks)
        assert (total - exact_sum(size)).abs().max() < 1e-5, reducer
        assert all(torch.equal(flat, of_ranks[0][0]) for flat, _ in of_ranks), reducer


def _reduce_without_remainder(dtype: torch.dtype) -> list[torch.Tensor]:
    communicator = bagua.comm.get_default_group().global_communicator
    results = []
    for reducer in [ScatterGatherReducer(MinMaxUInt8()), AllGatherReducer(Float16()), ErrorFeedback(PLAIN[2])]:
        flat = values(communicator.rank, dtype)
        reducer.reduce(flat, communicator, reducer.memory(communicator, flat))
        results.append(flat)
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_floating_dtype_is_summed_with_the_error_of_its_codec(thread_ranks, dtype):
    for results in zip(*thread_ranks(3, _reduce_without_remainder, dtype), strict=True):
        assert all(torch.equal(result, results[0]) for result in results)
        assert results[0].dtype == dtype
        assert (results[0].double() - exact_sum(3, dtype=dtype)).abs().max() < 0.1


def test_sums_of_16_bit_numbers_are_rounded_once(thread_ranks):
    def add() -> torch.Tensor:
        communicator = bagua.comm.get_default_group().global_communicator
        flat = torch.full((5,), 2048.0 if communicator.rank == 0 else 1.0, dtype=torch.float16)
        reducer = ScatterGatherReducer(Identity())
        reducer.reduce(flat, communicator, reducer.memory(communicator, flat))
        return flat

    assert thread_ranks(4, add)[1].tolist() == [2052.0] * 5  # 2048 + 1 + 1 + 1 in float16 is 2048


# What is not finite reaches everyone.


def _reduce_with(bad: float, position: int) -> list[bool]:
    communicator = bagua.comm.get_default_group().global_communicator
    finite = []
    for reducer in [*PLAIN, *WITH_FEEDBACK]:
        flat = values(communicator.rank)
        if communicator.rank == 1:
            flat[position] = bad
        memory = reducer.memory(communicator, flat, BLOCKS)
        before = {name: value.clone() for name, value in memory.state.items()}
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
        finite.append(bool(torch.isfinite(flat).all()))
        assert all(torch.equal(value, before[name]) for name, value in memory.state.items()), reducer
    return finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 40, NUMEL - 1])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_changes_no_state(thread_ranks, bad, position):
    assert not any(any(finite) for finite in thread_ranks(3, _reduce_with, bad, position))


# Against the formulas.


def _reduce_one(reducer: SumReducer) -> torch.Tensor:
    communicator = bagua.comm.get_default_group().global_communicator
    flat = values(communicator.rank)
    memory = reducer.memory(communicator, flat, BLOCKS)
    memory.step = 7
    reducer.reduce(flat, communicator, memory)
    return flat


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_allgather_of_a_codec_sums_what_everyone_decodes(thread_ranks, size):
    codec = Sign(block_numel=64)
    expected = sum(coded(codec, values(rank)) for rank in range(size))
    torch.testing.assert_close(thread_ranks(size, _reduce_one, AllGatherReducer(codec))[0], expected)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_scatter_gather_of_a_codec_codes_slices_then_their_sums(thread_ranks, size):
    codec = MinMaxUInt8(block_numel=32)
    length = -(-NUMEL // size)
    expected = []
    for start in range(0, NUMEL, length):
        slices = [values(rank)[start : start + length] for rank in range(size)]
        expected.append(coded(codec, sum(coded(codec, part) for part in slices)))
    result = thread_ranks(size, _reduce_one, ScatterGatherReducer(codec))[0]
    torch.testing.assert_close(result, torch.cat(expected))
    assert not torch.equal(result.double(), exact_sum(size))


def _sum_low_rank() -> tuple[torch.Tensor, torch.Tensor]:
    communicator = bagua.comm.get_default_group().global_communicator
    generator = torch.Generator().manual_seed(communicator.rank)
    flat = values(communicator.rank)
    for block in BLOCKS:  # The sum over two ranks has rank 2.
        left, right = (torch.randn(n, generator=generator) for n in (block.rows, block.columns))
        flat[block.offset : block.offset + block.numel] = torch.outer(left, right).view(-1)
    expected = flat.clone()
    communicator.allreduce(expected)
    reducer = PowerSGDReducer(matrix_rank=2)
    reducer.reduce(flat, communicator, reducer.memory(communicator, flat, BLOCKS))
    return flat, expected


def test_matrices_of_low_rank_are_summed_exactly(thread_ranks):
    for result, expected in thread_ranks(2, _sum_low_rank):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


def test_a_matrix_that_was_zero_once_is_approximated_again():
    communicator = bagua.comm.solo_group().global_communicator
    reducer, flat = PowerSGDReducer(matrix_rank=1), torch.zeros(24)
    memory = reducer.memory(communicator, flat, [MatrixBlock(0, 4, 6)])
    for number in range(4):
        flat = torch.zeros(24) if number == 0 else torch.outer(torch.ones(4), torch.arange(6.0)).view(-1)
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
    torch.testing.assert_close(flat.view(4, 6)[2], torch.arange(6.0))


def test_more_steps_of_the_power_iteration_come_nearer():
    communicator = bagua.comm.solo_group().global_communicator
    matrix = values(0, numel=120)
    reducer = PowerSGDReducer(matrix_rank=2)
    memory = reducer.memory(communicator, matrix, [MatrixBlock(0, 10, 12)])
    errors = []
    for _ in range(20):
        flat = matrix.clone()
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
        errors.append(float((flat - matrix).norm()))
    best = torch.linalg.svdvals(matrix.view(10, 12))[2:].norm()
    assert errors[0] > errors[-1]
    assert errors[-1] < 1.01 * best


# Error feedback.


def _accumulate(reducer: SumReducer, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
    communicator = bagua.comm.get_default_group().global_communicator
    memory = reducer.memory(communicator, values(0), BLOCKS)
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for call in range(calls):
        flat = values(communicator.rank, call=call)
        memory.step = call
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
        total += flat
    return total, memory.state["residual"]


@pytest.mark.parametrize("reducer", WITH_FEEDBACK, ids=repr)
def test_with_error_feedback_only_the_last_residuals_are_missing(thread_ranks, reducer):
    calls, size = 6, 3
    results = thread_ranks(size, _accumulate, reducer, calls)
    missing = sum(residual.double() for _, residual in results)
    expected = sum(exact_sum(size, call=call) for call in range(calls))
    torch.testing.assert_close(results[0][0] + missing, expected, rtol=1e-4, atol=1e-4)


def _lose_padding() -> torch.Tensor:
    communicator = bagua.comm.get_default_group().global_communicator
    reducer, padding = WITH_FEEDBACK[0], torch.tensor([5, 6, 200])
    memory = reducer.memory(communicator, values(0), padding=padding)
    flat = values(communicator.rank).index_fill_(0, padding, 0)
    reducer.reduce(flat, communicator, memory)
    memory.settle(flat)
    return memory.state["residual"][padding]


def test_no_residual_gathers_where_there_is_no_parameter(thread_ranks):
    assert all(residual.tolist() == [0.0, 0.0, 0.0] for residual in thread_ranks(2, _lose_padding))


# By host.


def _sum_by_host(reducer: SumReducer) -> torch.Tensor:
    group = bagua.comm.get_default_group()
    flat = values(group.rank)
    memory = reducer.memory(group.global_communicator, flat, BLOCKS)
    sum_over(flat, group, lambda total, ranks: reducer.reduce(total, ranks, memory), hierarchical=True)
    return flat


@pytest.mark.parametrize("hosts", [[2, 1], [1, 3], [1, 2, 2]], ids=str)
def test_hosts_sum_exactly_and_their_leaders_with_the_reducer(thread_ranks, hosts):
    codec = MinMaxUInt8(block_numel=32)
    starts = [sum(hosts[:host]) for host in range(len(hosts))]
    sums = [sum(values(rank) for rank in range(s, s + n)) for s, n in zip(starts, hosts, strict=True)]
    expected = sum(coded(codec, total) for total in sums)
    results = thread_ranks(sum(hosts), _sum_by_host, AllGatherReducer(codec), hosts=hosts)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected)


# What cannot be reduced.


@pytest.mark.parametrize("reducer", [*PLAIN, *WITH_FEEDBACK], ids=repr)
def test_tensors_without_elements_and_of_other_dtypes(reducer):
    communicator = bagua.comm.solo_group().global_communicator
    empty = torch.empty(0)
    memory = reducer.memory(communicator, empty)
    reducer.reduce(empty, communicator, memory)
    memory.settle(empty)
    with pytest.raises(InvalidTensorError, match="complex64"):
        reducer.memory(communicator, torch.zeros(3, dtype=torch.complex64))
