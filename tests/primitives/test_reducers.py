"""Reducers: sums that lose something, against their formulas, and what must hold all the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import bagua.comm
from bagua.compression import BlockTopK, Float16, Identity, Int4, Metadata, MinMaxUInt8, Sign, TopK
from bagua.errors import InvalidTensorError
from bagua.primitives import (
    EF21,
    AllGatherReducer,
    AveragedFeedback,
    ContributorsReducer,
    ErrorFeedback,
    MatrixBlock,
    MomentumCorrection,
    PowerSGDReducer,
    ScatterGatherReducer,
    SparseReducer,
    SumReducer,
    on_leaders,
    sum_over,
)
from bagua.testing import ThreadRanks
from tests.harness import coded

CODEC = TopK(0.1)
#: Everything that has a remainder.
PLAIN: list[SumReducer] = [
    AllGatherReducer(Sign(block_numel=64)),
    AllGatherReducer(CODEC),
    ScatterGatherReducer(MinMaxUInt8(block_numel=32)),
    ScatterGatherReducer(Identity()),
    PowerSGDReducer(matrix_rank=2),
    SparseReducer(CODEC, gather_ranks=2),
    AllGatherReducer(BlockTopK(64, 8)),
]
WITH_FEEDBACK: list[SumReducer] = [ErrorFeedback(reducer) for reducer in PLAIN]
#: Other forms of feedback.
FORMS: list[SumReducer] = [
    EF21(ScatterGatherReducer(Int4(block_numel=8))),
    EF21(AllGatherReducer(CODEC), 0.2),
    MomentumCorrection(AllGatherReducer(CODEC), 0.9),
    ErrorFeedback(AllGatherReducer(Sign(block_numel=8)), 0.9),
    AveragedFeedback(ScatterGatherReducer(Int4(block_numel=8)), 0.5, 20),
]
NUMEL, MANY = 203, 5000
BLOCKS = [MatrixBlock(3, 8, 10), MatrixBlock(90, 9, 12)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZE, CALLS = 3, 50


def values(rank: int, dtype: torch.dtype = torch.float64, call: int = 0, numel: int = NUMEL) -> torch.Tensor:
    """Like gradients: a part that stays, and noise."""
    steady = torch.linspace(-1, 1, numel, dtype=torch.float64) * (rank + 1)
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(100 * call + rank), dtype=torch.float64)
    return (steady + 0.3 * noise).to(dtype)


def exact_sum(size: int, **options: Any) -> torch.Tensor:
    return torch.stack([values(rank, **options).double() for rank in range(size)]).sum(dim=0)


def run(
    reducer: SumReducer, calls: int = 1, scale: float = 1.0, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The results of all calls, and what is remembered in the end; ``options`` are those of ``values``."""
    communicator = bagua.comm.get_default_group().global_communicator
    memory = reducer.memory(communicator, values(0, **options), () if options.get("numel") else BLOCKS)
    memory.loss_scale = scale
    results = []
    for call in range(calls):
        memory.step = call
        flat = values(communicator.rank, call=call, **options) * scale
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
        results.append(flat / scale)
    return torch.stack(results), {name: one.clone() for name, one in memory.state.items()}


def lose(reducer: SumReducer, **options: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The result, what is left, and the bytes that this rank sent."""
    communicator = bagua.comm.get_default_group().global_communicator
    flat = values(communicator.rank, **options)
    memory, remainder = reducer.memory(communicator, flat, BLOCKS), torch.empty_like(flat)
    before = communicator.statistics.sent_bytes()
    reducer.reduce(flat, communicator, memory, remainder)
    return flat, remainder, communicator.statistics.sent_bytes() - before


# Conservation: nothing is lost that is not known to be lost.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("reducer", PLAIN, ids=repr)
def test_result_and_remainders_add_up_to_the_exact_sum(thread_ranks, reducer, size, dtype):
    flats, remainders, _ = zip(*thread_ranks(size, functools.partial(lose, dtype=dtype), reducer), strict=True)
    total = flats[0].double() + sum(remainder.double() for remainder in remainders)
    assert (total - exact_sum(size)).abs().max() < 1e-5
    assert all(torch.equal(flat, flats[0]) for flat in flats)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "reducer", [ScatterGatherReducer(MinMaxUInt8()), AllGatherReducer(Float16()), WITH_FEEDBACK[2]], ids=repr
)
def test_every_floating_dtype_is_summed_with_the_error_of_its_codec(thread_ranks, reducer, dtype):
    results = [result for (result,), _ in thread_ranks(SIZE, functools.partial(run, dtype=dtype), reducer)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].dtype == dtype
    assert (results[0].double() - exact_sum(SIZE, dtype=dtype)).abs().max() < 0.1


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
    for reducer in [*PLAIN, *WITH_FEEDBACK, *FORMS]:
        memory, before = reducer.memory(communicator, values(0), BLOCKS), {}
        for call in range(2):
            before = {name: value.clone() for name, value in memory.state.items()}
            flat = values(communicator.rank, call=call)
            if (communicator.rank, call) == (1, 1):
                flat[position] = bad
            reducer.reduce(flat, communicator, memory)
            memory.settle(flat)
            finite.append(bool(torch.isfinite(flat).all()))
        assert all(torch.equal(value, before[name]) for name, value in memory.state.items()), reducer
    return finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 40, NUMEL - 1])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_changes_no_state(thread_ranks, bad, position):
    for finite in thread_ranks(SIZE, _reduce_with, bad, position):
        assert finite == [True, False] * len([*PLAIN, *WITH_FEEDBACK, *FORMS])


# Against the formulas.


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_allgather_of_a_codec_sums_what_everyone_decodes(thread_ranks, size):
    codec = Sign(block_numel=64)
    (result,), _ = thread_ranks(size, run, AllGatherReducer(codec))[0]
    torch.testing.assert_close(result, sum(coded(codec, values(rank)) for rank in range(size)))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_scatter_gather_of_a_codec_codes_slices_then_their_sums(thread_ranks, size):
    codec = MinMaxUInt8(block_numel=32)
    slices = zip(*(values(rank).split(-(-NUMEL // size)) for rank in range(size)), strict=True)
    expected = [coded(codec, sum(coded(codec, part) for part in parts)) for parts in slices]
    (result,), _ = thread_ranks(size, run, ScatterGatherReducer(codec))[0]
    torch.testing.assert_close(result, torch.cat(expected))
    assert not torch.equal(result, exact_sum(size))


def _sum_low_rank() -> tuple[torch.Tensor, torch.Tensor]:
    communicator = bagua.comm.get_default_group().global_communicator
    generator = torch.Generator().manual_seed(communicator.rank)
    flat = values(communicator.rank, torch.float32)
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


def approximated(matrices: list[torch.Tensor], matrix_rank: int) -> list[torch.Tensor]:
    """What one rank makes of matrices of one shape, one after the other."""
    communicator = bagua.comm.solo_group().global_communicator
    reducer, (rows, columns) = PowerSGDReducer(matrix_rank), matrices[0].shape
    memory = reducer.memory(communicator, matrices[0].flatten(), [MatrixBlock(0, rows, columns)])
    found = []
    for matrix in matrices:
        flat = matrix.flatten().clone()
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
        found.append(flat.view(rows, columns))
    return found


def test_a_matrix_that_was_zero_once_is_approximated_again():
    found = approximated([torch.zeros(4, 6), *[torch.arange(6.0).expand(4, 6)] * 3], matrix_rank=1)
    torch.testing.assert_close(found[-1][2], torch.arange(6.0))


def test_more_steps_of_the_power_iteration_come_nearer():
    matrix = torch.randn(10, 12, generator=torch.Generator().manual_seed(0))
    errors = [float((one - matrix).norm()) for one in approximated([matrix] * 20, matrix_rank=2)]
    assert errors[0] > errors[-1]
    assert errors[-1] < 1.01 * torch.linalg.svdvals(matrix)[2:].norm()


# Feedback.


@pytest.mark.parametrize("reducer", WITH_FEEDBACK, ids=repr)
def test_with_error_feedback_only_the_last_residuals_are_missing(thread_ranks, reducer):
    results, states = zip(*thread_ranks(SIZE, run, reducer, 6), strict=True)
    missing = sum(state["residual"] for state in states)
    expected = sum(exact_sum(SIZE, call=call) for call in range(6))
    torch.testing.assert_close(results[0].sum(dim=0) + missing, expected, rtol=1e-4, atol=1e-4)


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


def simulated_feedback(decay: float) -> torch.Tensor:
    residuals, results = torch.zeros(SIZE, NUMEL).double(), []
    for call in range(CALLS):
        given = torch.stack([values(rank, call=call) for rank in range(SIZE)]) + decay * residuals
        residuals = given - coded(CODEC, given)
        results.append(coded(CODEC, given).sum(dim=0))
    return torch.stack(results)


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_a_part_of_the_residual_is_fed_back(thread_ranks, decay):
    result, _ = thread_ranks(SIZE, run, ErrorFeedback(AllGatherReducer(CODEC), decay), CALLS)[0]
    torch.testing.assert_close(result, simulated_feedback(decay))
    assert not torch.allclose(result, simulated_feedback(decay - 0.1))


def test_residuals_pay_what_earlier_means_lack_whoever_took_part(thread_ranks):
    """Means of three, then of two of them: all results and what is left add up to all exact means."""

    def rank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        everyone = bagua.comm.get_default_group()
        pair = bagua.comm.new_group([0, 1])
        reducer = ErrorFeedback(AllGatherReducer(CODEC))
        memory = reducer.memory(everyone.global_communicator, values(0))
        results, exact = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for call in range(CALLS):
            size = 3 if call < CALLS // 2 else 2
            if everyone.rank >= size:
                continue
            flat = values(everyone.rank, call=call) / size
            reducer.reduce(flat, (everyone if size == 3 else pair).global_communicator, memory)
            memory.settle(flat)
            results += flat
            exact += exact_sum(size, call=call) / size
        return results, exact, memory.state["residual"].clone()

    (results, exact, first), (_, _, second), (_, _, gone) = thread_ranks(SIZE, rank)
    torch.testing.assert_close(results + first + second + gone, exact)
    assert not torch.allclose(results + (first + second) * 2 / 3 + gone, exact), "no other units"
    assert gone.norm() > 0


def simulated_ef21(averaging: float) -> torch.Tensor:
    estimates, averages, results = torch.zeros(SIZE, NUMEL).double(), torch.zeros(SIZE, NUMEL).double(), []
    for call in range(CALLS):
        given = torch.stack([values(rank, call=call) for rank in range(SIZE)])
        averages = (1 - averaging) * averages + averaging * given
        estimates = estimates + coded(CODEC, averages - estimates)
        results.append(estimates.sum(dim=0))
    return torch.stack(results)


@pytest.mark.parametrize("averaging", [1.0, 0.2])
def test_estimates_follow_by_compressed_changes(thread_ranks, averaging):
    results = thread_ranks(SIZE, run, EF21(AllGatherReducer(CODEC), averaging), CALLS)
    torch.testing.assert_close(results[0][0], simulated_ef21(averaging))
    total = sum(state["estimate"] for _, state in results)
    for result, state in results:
        assert torch.equal(result, results[0][0])
        torch.testing.assert_close(state["total"], total)
    assert not torch.allclose(results[0][0], simulated_ef21(averaging / 2))


@pytest.mark.parametrize("reducer", FORMS, ids=repr)
def test_forms_know_nothing_of_the_scale_of_the_loss(thread_ranks, reducer):
    plain, scaled = thread_ranks(2, run, reducer, CALLS)[1], thread_ranks(2, run, reducer, CALLS, 1024.0)[1]
    torch.testing.assert_close(plain[0], scaled[0])
    for name, one in plain[1].items():
        torch.testing.assert_close(one, scaled[1][name])


# Few elements: means over those who sent them, and bytes that do not grow with the number of ranks.


def test_the_mean_over_those_who_sent_counts_for_all(thread_ranks):
    results = thread_ranks(SIZE, lose, ContributorsReducer(CODEC))
    sent = torch.stack([coded(CODEC, values(rank)) for rank in range(SIZE)])
    expected = SIZE * sent.sum(dim=0) / (sent != 0).sum(dim=0).clamp(min=1)
    for rank, (flat, lost, _) in enumerate(results):
        torch.testing.assert_close(flat, expected)
        assert torch.equal(lost, values(rank) - sent[rank])
    assert not torch.allclose(expected, sent.sum(dim=0)), "some elements come from fewer ranks"


@pytest.mark.parametrize("codec", [TopK(0.01), BlockTopK(512, 8, None)], ids=repr)
@pytest.mark.parametrize("contributors", [False, True])
def test_nine_ranks_send_less_than_eight(codec, contributors):
    reducer = functools.partial(lose, SparseReducer(codec, contributors), numel=MANY)
    whole = codec.compressed_bytes(Metadata(MANY, torch.float64))
    eight, nine = ThreadRanks(8).run(reducer), ThreadRanks(9).run(reducer)
    assert {sent for _, _, sent in eight} == {7 * whole}
    rows = codec.compressed_bytes(Metadata(-(-MANY // 9), torch.float64))
    assert {sent for _, _, sent in nine} == {2 * 8 * rows}
    assert 2 * 8 * rows < 3 * whole
    for results in (eight, nine):
        assert all(torch.equal(flat, results[0][0]) for flat, _, _ in results)


def test_means_over_senders_by_ranges_are_the_formula():
    """With feedback: what an answer lacks is sent again by the rank that had added up, and counts as its mean then."""
    size, codec, calls = 9, TopK(0.02), 6

    def simulated(*, feeds_answers_back: bool = True) -> torch.Tensor:
        residuals, length = torch.zeros(size, MANY).double(), -(-MANY // size)
        answers = torch.empty(0)
        for call in range(calls):
            given = torch.stack([values(rank, call=call, numel=MANY) for rank in range(size)]) + residuals
            sent = torch.cat([coded(codec, part) for part in given.split(length, dim=1)], dim=1)
            means = size * sent.sum(dim=0) / (sent != 0).sum(dim=0).clamp(min=1)
            answers = torch.cat([coded(codec, part) for part in means.split(length)])
            residuals = given - sent
            for rank in range(size if feeds_answers_back else 0):
                mine = slice(rank * length, (rank + 1) * length)
                residuals[rank, mine] += (means - answers)[mine] / size
        return answers

    reducer = ErrorFeedback(SparseReducer(codec, contributors=True))
    flats = [results[-1] for results, _ in ThreadRanks(size).run(functools.partial(run, numel=MANY), reducer, calls)]
    assert all(torch.equal(flat, flats[0]) for flat in flats)
    torch.testing.assert_close(flats[0], simulated())
    assert not torch.allclose(flats[0], simulated(feeds_answers_back=False))


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


LAYOUTS = [[1], [2], [3], [1, 1], [2, 1], [1, 2], [2, 2], [1, 3, 2]]


def _sum(hierarchical: bool) -> tuple[torch.Tensor, list[str]]:
    group = bagua.comm.get_default_group()
    tensor = torch.tensor([1.0, 10.0]) * (group.rank + 1)
    sum_over(tensor, group, lambda total, ranks: ranks.allreduce(total), hierarchical=hierarchical)
    return tensor, [str(call) for call in group.global_communicator.history()]


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_sums_do_not_depend_on_hosts_and_are_flat_without_several_ranks_on_one_of_several(
    thread_ranks, hosts, hierarchical
):
    size, flat = sum(hosts), not hierarchical or len(hosts) == 1 or max(hosts) == 1
    expected = torch.tensor([1.0, 10.0]) * (size * (size + 1) // 2)
    for tensor, calls in thread_ranks(size, _sum, hierarchical, hosts=hosts):
        assert torch.equal(tensor, expected)
        assert any("allreduce" in call for call in calls) == flat


def _sums_seen_by_leaders() -> list[float]:
    group = bagua.comm.get_default_group()
    seen = []
    tensor = torch.tensor([float(2**group.rank)])

    def between_hosts(total, leaders) -> None:
        seen.append(total.item())
        total.fill_(-1.0)

    on_leaders(tensor, group, between_hosts)
    return [*seen, tensor.item()]


def test_leaders_see_sums_over_their_host_and_everyone_gets_what_they_make_of_them(thread_ranks):
    results = thread_ranks(6, _sums_seen_by_leaders, hosts=[1, 3, 2])
    assert results == [[1.0, -1.0], [14.0, -1.0], [-1.0], [-1.0], [48.0, -1.0], [-1.0]]


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
