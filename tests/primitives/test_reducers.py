"""Reducers: sums that lose something, and what must hold all the same. Mixing with neighbours, on any graph."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bagua.comm
from bagua import primitives
from bagua.comm import solo_group
from bagua.compression import BlockTopK, Float16, Identity, Int4, Metadata, MinMaxUInt8, Sign, TopK
from bagua.errors import InvalidTensorError
from bagua.testing import ThreadRanks
from bagua.topology import Ring, Round, create
from tests.harness import coded
from tests.parallel.wrapping import on_ranks
from tests.topologies import STAR

CODEC = TopK(0.1)
#: Everything that has a remainder.
PLAIN: list[primitives.SumReducer] = [
    primitives.AllGatherReducer(Sign(block_numel=64)), primitives.AllGatherReducer(CODEC),
    primitives.ScatterGatherReducer(MinMaxUInt8(block_numel=32)), primitives.ScatterGatherReducer(Identity()),
    primitives.PowerSGDReducer(matrix_rank=2), primitives.SparseReducer(CODEC, gather_ranks=2),
    primitives.AllGatherReducer(BlockTopK(64, 8)),
]  # fmt: skip
WITH_FEEDBACK = [primitives.ErrorFeedback(reducer) for reducer in PLAIN]
#: Other forms of feedback.
FORMS: list[primitives.SumReducer] = [
    primitives.EF21(primitives.ScatterGatherReducer(Int4(block_numel=8))),
    primitives.EF21(primitives.AllGatherReducer(CODEC), 0.2),
    primitives.MomentumCorrection(primitives.AllGatherReducer(CODEC), 0.9),
    primitives.ErrorFeedback(primitives.AllGatherReducer(Sign(block_numel=8)), 0.9),
    primitives.AveragedFeedback(primitives.ScatterGatherReducer(Int4(block_numel=8)), 0.5, 20),
]
IN_BYTES = primitives.ScatterGatherReducer(MinMaxUInt8())
NUMEL, MANY = 203, 5000
BLOCKS = [primitives.MatrixBlock(3, 8, 10), primitives.MatrixBlock(90, 9, 12)]
SIZE, CALLS = 3, 50


def values(rank: int, dtype: torch.dtype = torch.float64, call: int = 0, numel: int = NUMEL) -> torch.Tensor:
    """Like gradients: a part that stays, and noise."""
    steady = torch.linspace(-1, 1, numel, dtype=torch.float64) * (rank + 1)
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(100 * call + rank), dtype=torch.float64)
    return (steady + 0.3 * noise).to(dtype)


def exact_sum(size: int, **options: Any) -> torch.Tensor:
    return torch.stack([values(rank, **options).double() for rank in range(size)]).sum(dim=0)


def run(
    reducer: primitives.SumReducer, calls: int = 1, scale: float = 1.0, **options: Any
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


def lose(reducer: primitives.SumReducer, **options: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The result, what is left, and the bytes that this rank sent."""
    communicator = bagua.comm.get_default_group().global_communicator
    flat = values(communicator.rank, **options)
    memory, remainder = reducer.memory(communicator, flat, BLOCKS), torch.empty_like(flat)
    before = communicator.statistics.sent_bytes()
    reducer.reduce(flat, communicator, memory, remainder)
    return flat, remainder, communicator.statistics.sent_bytes() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("reducer", PLAIN, ids=repr)
def test_result_and_remainders_add_up_to_the_exact_sum(thread_ranks, reducer, size, dtype):
    flats, remainders, _ = zip(*thread_ranks(size, functools.partial(lose, dtype=dtype), reducer), strict=True)
    total = flats[0].double() + sum(remainder.double() for remainder in remainders)
    assert (total - exact_sum(size)).abs().max() < 1e-5
    assert all(torch.equal(flat, flats[0]) for flat in flats)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reducer", [IN_BYTES, primitives.AllGatherReducer(Float16()), WITH_FEEDBACK[2]], ids=repr)
def test_every_floating_dtype_is_summed_with_the_error_of_its_codec(thread_ranks, reducer, dtype):
    results = [result for (result,), _ in thread_ranks(SIZE, functools.partial(run, dtype=dtype), reducer)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].dtype == dtype
    assert (results[0].double() - exact_sum(SIZE, dtype=dtype)).abs().max() < 0.1


def test_sums_of_16_bit_numbers_are_rounded_once(thread_ranks):
    def add() -> torch.Tensor:
        communicator = bagua.comm.get_default_group().global_communicator
        flat = torch.full((5,), 2048.0 if communicator.rank == 0 else 1.0, dtype=torch.float16)
        reducer = primitives.ScatterGatherReducer(Identity())
        reducer.reduce(flat, communicator, reducer.memory(communicator, flat))
        return flat

    assert thread_ranks(4, add)[1].tolist() == [2052.0] * 5  # 2048 + 1 + 1 + 1 in float16 is 2048


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 40, NUMEL - 1])
@on_ranks(SIZE)
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_changes_no_state(bad, position):
    communicator = bagua.comm.get_default_group().global_communicator
    for reducer in [*PLAIN, *WITH_FEEDBACK, *FORMS]:
        memory = reducer.memory(communicator, values(0), BLOCKS)
        for call in range(2):
            before = {name: value.clone() for name, value in memory.state.items()}
            flat = values(communicator.rank, call=call)
            if (communicator.rank, call) == (1, 1):
                flat[position] = bad
            reducer.reduce(flat, communicator, memory)
            memory.settle(flat)
            assert bool(torch.isfinite(flat).all()) == (call == 0)
        assert all(torch.equal(value, before[name]) for name, value in memory.state.items()), reducer


def test_a_matrix_that_was_zero_once_is_approximated_again():
    communicator, reducer, flat = solo_group().global_communicator, primitives.PowerSGDReducer(1), torch.zeros(24)
    memory = reducer.memory(communicator, flat, [primitives.MatrixBlock(0, 4, 6)])
    for matrix in (torch.zeros(24), *[torch.arange(6.0).repeat(4)] * 3):
        flat = matrix.clone()
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
    torch.testing.assert_close(flat.view(4, 6)[2], torch.arange(6.0))


def test_residuals_pay_what_earlier_means_lack_whoever_took_part(thread_ranks):
    """Means of three, then of two of them: all results and what is left add up to all exact means."""

    def rank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        everyone, pair = bagua.comm.get_default_group(), bagua.comm.new_group([0, 1])
        reducer = primitives.ErrorFeedback(primitives.AllGatherReducer(CODEC))
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


@pytest.mark.parametrize("averaging", [1.0, 0.2])
def test_estimates_follow_by_compressed_changes(thread_ranks, averaging):
    def simulated(averaging: float) -> torch.Tensor:
        estimates, averages, results = torch.zeros(SIZE, NUMEL).double(), torch.zeros(SIZE, NUMEL).double(), []
        for call in range(CALLS):
            given = torch.stack([values(rank, call=call) for rank in range(SIZE)])
            averages = (1 - averaging) * averages + averaging * given
            estimates = estimates + coded(CODEC, averages - estimates)
            results.append(estimates.sum(dim=0))
        return torch.stack(results)

    results = thread_ranks(SIZE, run, primitives.EF21(primitives.AllGatherReducer(CODEC), averaging), CALLS)
    torch.testing.assert_close(results[0][0], simulated(averaging))
    total = sum(state["estimate"] for _, state in results)
    for result, state in results:
        assert torch.equal(result, results[0][0])
        torch.testing.assert_close(state["total"], total)
    assert not torch.allclose(results[0][0], simulated(averaging / 2))


@pytest.mark.parametrize("reducer", FORMS, ids=repr)
def test_forms_know_nothing_of_the_scale_of_the_loss(thread_ranks, reducer):
    plain, scaled = thread_ranks(2, run, reducer, CALLS)[1], thread_ranks(2, run, reducer, CALLS, 1024.0)[1]
    torch.testing.assert_close(plain[0], scaled[0])
    for name, one in plain[1].items():
        torch.testing.assert_close(one, scaled[1][name])


@pytest.mark.parametrize("codec", [TopK(0.01), BlockTopK(512, 8, None)], ids=repr)
@pytest.mark.parametrize("contributors", [False, True])
def test_nine_ranks_send_less_than_eight(codec, contributors):
    reducer = functools.partial(lose, primitives.SparseReducer(codec, contributors), numel=MANY)
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

    reducer = primitives.ErrorFeedback(primitives.SparseReducer(codec, contributors=True))
    flats = [results[-1] for results, _ in ThreadRanks(size).run(functools.partial(run, numel=MANY), reducer, calls)]
    assert all(torch.equal(flat, flats[0]) for flat in flats)
    torch.testing.assert_close(flats[0], simulated())
    assert not torch.allclose(flats[0], simulated(feeds_answers_back=False))


@pytest.mark.parametrize("hosts", [[1], [2], [3], [1, 1], [2, 1], [1, 2], [2, 2], [1, 3, 2]], ids=str)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_sums_do_not_depend_on_hosts_and_are_flat_unless_some_of_several_share_one(thread_ranks, hosts, hierarchical):
    def add() -> tuple[torch.Tensor, list[str]]:
        group = bagua.comm.get_default_group()
        tensor = torch.tensor([1.0, 10.0]) * (group.rank + 1)
        primitives.sum_over(tensor, group, lambda total, ranks: ranks.allreduce(total), hierarchical=hierarchical)
        return tensor, [str(call) for call in group.global_communicator.history()]

    size, flat = sum(hosts), not hierarchical or len(hosts) == 1 or max(hosts) == 1
    expected = torch.tensor([1.0, 10.0]) * (size * (size + 1) // 2)
    for tensor, calls in thread_ranks(size, add, hosts=hosts):
        assert torch.equal(tensor, expected)
        assert any("allreduce" in call for call in calls) == flat


@pytest.mark.parametrize("reducer", [*PLAIN, *WITH_FEEDBACK], ids=repr)
def test_tensors_without_elements_and_of_other_dtypes(reducer):
    communicator, empty = solo_group().global_communicator, torch.empty(0)
    memory = reducer.memory(communicator, empty)
    reducer.reduce(empty, communicator, memory)
    memory.settle(empty)
    with pytest.raises(InvalidTensorError, match="complex64"):
        reducer.memory(communicator, torch.zeros(3, dtype=torch.complex64))


FEW = 5


def vector(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(FEW, generator=generator, dtype=torch.float64).to(dtype)


def scratch(dtype: torch.dtype):
    made: dict[str, torch.Tensor] = {}
    return lambda name: made.setdefault(name, torch.full((FEW,), float("nan"), dtype=dtype))


def _mix(rounds: list[Round], dtype: torch.dtype) -> torch.Tensor:
    communicator, buffers = bagua.comm.get_default_group().global_communicator, scratch(dtype)
    tensor = vector(communicator.rank, dtype)
    for mixing in rounds:
        assert primitives.neighbour_average(tensor, mixing, communicator, buffers) is None
    return tensor


def assert_mixed(results: list[torch.Tensor], rounds: list[Round], dtype: torch.dtype = torch.float32) -> None:
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-6)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.stack([vector(rank, dtype) for rank in range(rounds[0].size)]).to(wide)
    for mixing in rounds:
        expected = mixing.matrix().to(wide) @ expected
    for result, row in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert torch.allclose(result.to(wide), row, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_other_dtypes(thread_ranks, dtype):
    rounds = [one.round(4, 1) for one in (STAR, create("shift_one"), create("complete"))]
    assert_mixed(thread_ranks(4, _mix, rounds, dtype), rounds, dtype)


@given(st.data(), st.integers(2, 5))
def test_any_directed_graph_works_without_waiting_for_ever(thread_pool, data, size):
    """Every doubly stochastic matrix is a mean of permutations."""
    orders = data.draw(st.lists(st.permutations(range(size)), min_size=1, max_size=3))
    matrix = sum(torch.eye(size, dtype=torch.float64)[list(order)] for order in orders) / len(orders)
    rounds = [Round.from_matrix(matrix)]
    assert_mixed(thread_pool.run(_mix, rounds, torch.float32, size=size), rounds)


@pytest.mark.parametrize("spoilt", [0, 3], ids=["at the start", "later"])
def test_a_nan_on_one_rank_stays_there_and_nobody_loses_track(thread_ranks, spoilt):
    """Steps with a random change of the own vector in between; in one of them, rank 1 has a NaN."""
    mixing = Ring().round(3, 1)

    def follow() -> dict[str, torch.Tensor]:
        communicator = bagua.comm.get_default_group().global_communicator
        rank, exchange = communicator.rank, primitives.DifferenceExchange(mixing, MinMaxUInt8())
        memory = primitives.ReducerMemory(communicator, FEW, torch.float64)
        memory.declare(exchange.state())
        tensor = vector(rank, torch.float64)
        for step in range(40):
            sound = tensor.clone()
            if (rank, step) == (1, spoilt):
                tensor[1] = float("nan")
            exchange.run(tensor, communicator, memory.state)
            if (rank, step) == (1, spoilt):
                assert torch.isnan(tensor[1])
                tensor = sound
            if step < 20:
                tensor.add_(vector(100 * rank + step, torch.float64), alpha=0.1)
        return {"x": tensor, **memory.state}

    results = thread_ranks(3, follow)
    for rank, result in enumerate(results):
        assert torch.isfinite(result["x"]).all()
        known = sum(weight * results[source]["estimate"] for source, weight in mixing[rank].sources)
        assert torch.allclose(result["neighbours"], known, atol=1e-12)
        assert torch.allclose(result["x"], results[0]["x"], atol=1e-3)


def test_sixteen_bit_tensors_are_followed_in_single_precision():
    memory = primitives.ReducerMemory(solo_group().global_communicator, 3, torch.bfloat16)
    memory.declare(primitives.DifferenceExchange.state())
    assert memory.state["estimate"].dtype == memory.state["neighbours"].dtype == torch.float32


def _start_all(rounds: list[Round]) -> list[torch.Tensor]:
    communicator = bagua.comm.get_default_group().global_communicator
    tensors, works = [vector(communicator.rank) for _ in rounds], []
    for tensor, mixing in zip(tensors, rounds, strict=True):
        buffers = scratch(torch.float32)
        works.append(primitives.neighbour_average(tensor, mixing, communicator, buffers, async_op=True))
    for work in works:
        if work is not None:
            work.wait()
    return tensors


def test_several_exchanges_are_under_way_at_the_same_time(process_ranks):
    rounds = [create("shift_one").round(3, 1), create("shift_one").round(3, 2), STAR.round(3, 1)]
    results = process_ranks(3, _start_all, rounds)
    for number, mixing in enumerate(rounds):
        assert_mixed([tensors[number] for tensors in results], [mixing])
