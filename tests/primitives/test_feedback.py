"""Forms of error feedback against their formulas, on any reducer."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.compression import Int4, Sign, TopK
from bagua.primitives import (
    EF21,
    AllGatherReducer,
    AveragedFeedback,
    ContributorsReducer,
    ErrorFeedback,
    MomentumCorrection,
    ScatterGatherReducer,
    SumReducer,
)
from tests.harness import coded

SIZE, CALLS, NUMEL = 3, 50, 101
CODEC = TopK(0.1)


def values(rank: int, call: int) -> torch.Tensor:
    """Like gradients: a part that stays, and noise."""
    steady = torch.linspace(-1, 1, NUMEL, dtype=torch.float64) * (rank + 1)
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * call + rank), dtype=torch.float64)
    return steady + 0.3 * noise


def run(reducer: SumReducer, scale: float = 1.0, bad_call: int = -1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The results of all calls, and what is remembered in the end. One call may see an Inf on rank 1."""
    communicator = bagua.comm.get_default_group().global_communicator
    memory = reducer.memory(communicator, values(0, 0))
    memory.loss_scale = scale
    results = []
    for call in range(CALLS):
        memory.step = call
        flat = values(communicator.rank, call) * scale
        if (call, communicator.rank) == (bad_call, 1):
            flat[3] = torch.inf
        reducer.reduce(flat, communicator, memory)
        memory.settle(flat)
        results.append(flat / scale)
    return torch.stack(results), {name: one.clone() for name, one in memory.state.items()}


def simulated_feedback(decay: float) -> torch.Tensor:
    residuals, results = [torch.zeros(NUMEL).double() for _ in range(SIZE)], []
    for call in range(CALLS):
        given = [values(rank, call) + decay * residuals[rank] for rank in range(SIZE)]
        residuals = [x - coded(CODEC, x) for x in given]
        results.append(coded(CODEC, torch.stack(given)).sum(dim=0))
    return torch.stack(results)


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_a_part_of_the_residual_is_fed_back(thread_ranks, decay):
    result = thread_ranks(SIZE, run, ErrorFeedback(AllGatherReducer(CODEC), decay))[0][0]
    torch.testing.assert_close(result, simulated_feedback(decay))
    assert not torch.allclose(result, simulated_feedback(decay - 0.1))


def test_residuals_pay_what_earlier_means_lack_whoever_took_part(thread_ranks):
    """Means of three, then of two of them: all results and what is left add up to all exact means."""

    def rank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        everyone = bagua.comm.get_default_group()
        pair = bagua.comm.new_group([0, 1])
        reducer = ErrorFeedback(AllGatherReducer(CODEC))
        memory = reducer.memory(everyone.global_communicator, values(0, 0))
        results, exact = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for call in range(CALLS):
            size = 3 if call < CALLS // 2 else 2
            if everyone.rank >= size:
                continue
            flat = values(everyone.rank, call) / size
            reducer.reduce(flat, (everyone if size == 3 else pair).global_communicator, memory)
            memory.settle(flat)
            results += flat
            exact += sum(values(one, call) for one in range(size)) / size
        return results, exact, memory.state["residual"].clone()

    (results, exact, first), (_, _, second), (_, _, gone) = thread_ranks(SIZE, rank)
    torch.testing.assert_close(results + first + second + gone, exact)
    assert not torch.allclose(results + (first + second) * 2 / 3 + gone, exact), "no other units"
    assert gone.norm() > 0


def simulated_ef21(averaging: float) -> torch.Tensor:
    estimates, averages = ([torch.zeros(NUMEL).double() for _ in range(SIZE)] for _ in range(2))
    results = []
    for call in range(CALLS):
        for rank in range(SIZE):
            averages[rank] = (1 - averaging) * averages[rank] + averaging * values(rank, call)
            estimates[rank] = estimates[rank] + coded(CODEC, averages[rank] - estimates[rank])
        results.append(sum(estimates))
    return torch.stack(results)


@pytest.mark.parametrize("averaging", [1.0, 0.2])
def test_estimates_follow_by_compressed_changes(thread_ranks, averaging):
    results = thread_ranks(SIZE, run, EF21(AllGatherReducer(CODEC), averaging))
    torch.testing.assert_close(results[0][0], simulated_ef21(averaging))
    total = sum(state["estimate"] for _, state in results)
    for result, state in results:
        assert torch.equal(result, results[0][0])
        torch.testing.assert_close(state["total"], total)
    assert not torch.allclose(results[0][0], simulated_ef21(averaging / 2))


FORMS = [
    EF21(ScatterGatherReducer(Int4(block_numel=8))),
    EF21(AllGatherReducer(CODEC), 0.2),
    MomentumCorrection(AllGatherReducer(CODEC), 0.9),
    ErrorFeedback(AllGatherReducer(Sign(block_numel=8)), 0.9),
    AveragedFeedback(ScatterGatherReducer(Int4(block_numel=8)), 0.5, 20),
]


@pytest.mark.parametrize("reducer", FORMS, ids=repr)
def test_forms_know_nothing_of_the_scale_of_the_loss(thread_ranks, reducer):
    plain, scaled = thread_ranks(2, run, reducer)[1], thread_ranks(2, run, reducer, 1024.0)[1]
    torch.testing.assert_close(plain[0], scaled[0])
    for name, one in plain[1].items():
        torch.testing.assert_close(one, scaled[1][name])


@pytest.mark.parametrize("reducer", FORMS, ids=repr)
def test_a_call_with_an_inf_leaves_nothing_behind(thread_ranks, reducer):
    """All ranks see it, and go on as if the call had not been; with a codec that draws nothing, bit by bit."""
    for result, state in thread_ranks(2, run, reducer, 1.0, CALLS - 1):
        assert not result[-1].isfinite().all()
        assert result[:-1].isfinite().all()
        assert all(one.isfinite().all() for one in state.values())


def contribute(codec: TopK) -> tuple[torch.Tensor, torch.Tensor]:
    communicator = bagua.comm.get_default_group().global_communicator
    flat = values(communicator.rank, 0)
    reducer, lost = ContributorsReducer(codec), torch.empty_like(flat)
    reducer.reduce(flat, communicator, reducer.memory(communicator, flat), lost)
    return flat, lost


def test_the_mean_over_those_who_sent_counts_for_all(thread_ranks):
    results = thread_ranks(SIZE, contribute, CODEC)
    sent = torch.stack([coded(CODEC, values(rank, 0)) for rank in range(SIZE)])
    expected = SIZE * sent.sum(dim=0) / (sent != 0).sum(dim=0).clamp(min=1)
    for rank, (flat, lost) in enumerate(results):
        torch.testing.assert_close(flat, expected)
        assert torch.equal(lost, values(rank, 0) - sent[rank])
    assert not torch.allclose(expected, sent.sum(dim=0)), "some elements come from fewer ranks"
