"""Hosts that train alone, each as one rank would: gradients are exchanged inside them, local updates between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bagua.algorithms import (
    Algorithm,
    Difference,
    DiLoCoAlgorithm,
    Every,
    Exchange,
    Gradients,
    LocalSGDAlgorithm,
    LocalUpdates,
    Mean,
    Outer,
    OuterStep,
    Parts,
    Replace,
    SlowMoAlgorithm,
)
from tests.algorithms.replicas import Replicas
from tests.algorithms.stacked import loss_of, model_of
from tests.harness import Losses, State, assert_same_on_all_ranks, mlp, sgd, snapshot
from tests.parallel.wrapping import Loop, of_this_rank

STEPS = 13
INNER = "gradient_allreduce"
OUTER = {"outer": "sgd", "outer_lr": 0.5, "outer_momentum": 0.5}
WHOLE_STEP = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}


def loop_of(algorithm: Algorithm | str, losses: Losses = loss_of) -> Loop:
    """In double precision."""
    return Loop("with_bagua", lambda: of_this_rank().double(), sgd, losses, algorithm=algorithm)


def train(algorithm: Algorithm | str, steps: int = STEPS, share: int | None = None) -> list[State]:
    """The weights after each step. With a ``share``, on that many batches in each step."""

    def losses(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        batches = [rank] if share is None else range(rank * share, (rank + 1) * share)
        return sum(loss_of(model, one, number) for one in batches) / len(batches)

    loop = loop_of(algorithm, losses)
    return [loop.train() for _ in range(steps)]


def assert_equal_in_double(states: list[State], expected: list[State]) -> None:
    for state, one in zip(states, expected, strict=True):
        for name, value in state.items():
            assert torch.allclose(value, one[name], rtol=0, atol=1e-12), name


class Hosts(Replicas):
    """The same in plain torch: one model for each host, with the mean gradient of its ranks that have data."""

    def __init__(self, sizes: Sequence[int], batches: Sequence[int] = (STEPS,) * 4) -> None:
        def losses(model: nn.Module, host: int, number: int) -> torch.Tensor:
            ranks = range(sum(sizes[:host]), sum(sizes[: host + 1]))
            return sum(loss_of(model, rank, number) * (number < batches[rank]) for rank in ranks) / len(ranks)

        super().__init__(len(sizes), sgd, model_of, losses)
        self.parts = torch.tensor(sizes).double() / sum(sizes)
        self.anchor = nn.Parameter(self.rows[0])
        self.outer = torch.optim.SGD([self.anchor], lr=0.5, momentum=0.5)

    def outer_step(self) -> None:
        self.anchor.grad = self.anchor.detach() - self.parts @ self.rows
        self.outer.step()
        self.rows = self.anchor.detach()


@pytest.mark.parametrize("batches", [(2, 6, 4, 3), (0, 4, 4, 4), (4, 0, 4, 4)], ids=str)
def test_a_host_contributes_what_its_ranks_with_data_learn(thread_pool, batches):
    """Also if its first rank has none, or none any more: gradients of such ranks are zero."""

    def train_while_there_is_data() -> State:
        loop = loop_of(LocalSGDAlgorithm(2, inner=INNER))
        with loop.wrapped.join():
            loop.train(batches[loop.rank])
        return snapshot(loop.model)

    expected = Hosts([2, 2], batches)
    for number in range(max(batches)):
        expected.step(number)
        if number % 2:
            expected.rows = expected.mean
    ends = thread_pool.run(train_while_there_is_data, hosts=[2, 2])
    assert_equal_in_double(ends, [expected.states()[0]] * 4)


@pytest.mark.parametrize("hosts", [[2, 2], [1, 3], [1, 1, 1], [3]], ids=str)
def test_hosts_train_as_in_plain_torch(thread_pool, hosts):
    expected = Hosts(hosts)
    watched = thread_pool.run(train, DiLoCoAlgorithm(4, **OUTER, inner=INNER), hosts=hosts)
    of_host = [host for host, size in enumerate(hosts) for _ in range(size)]
    for number in range(STEPS):
        expected.step(number)
        if number % 4 == 3:
            expected.outer_step()
        ends = [states[number] for states in watched]
        assert_equal_in_double(ends, [expected.states()[host] for host in of_host])
        for host in range(len(hosts)):
            assert_same_on_all_ranks([end for end, its in zip(ends, of_host, strict=True) if its == host])


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda inner: LocalSGDAlgorithm(4, inner=inner),
        lambda inner: SlowMoAlgorithm(4, inner=inner),
        lambda inner: DiLoCoAlgorithm(4, fragments=2, overlap=1, start_after=2, inner=inner),
        lambda inner: DiLoCoAlgorithm(4, eager=True, inner=inner),
        lambda inner: DiLoCoAlgorithm(4, codec="int4", error_feedback=True, inner=inner),
    ],
    ids=["local_sgd", "slowmo", "streaming", "eager", "codec"],
)
def test_a_host_trains_as_one_rank_with_its_data(thread_pool, algorithm: Callable[[Any], LocalUpdates]):
    hosts = thread_pool.run(train, algorithm(INNER), hosts=[2, 2])
    alone = thread_pool.run(train, algorithm(None), STEPS, 2, size=2)
    for rank, states in enumerate(hosts):
        assert_equal_in_double(states, alone[rank // 2])


@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGDAlgorithm(4, inner=INNER),
        DiLoCoAlgorithm(4, **WHOLE_STEP, inner=INNER),
        DiLoCoAlgorithm(4, **WHOLE_STEP, codec="int2", error_feedback=True, inner=INNER),
    ],
    ids=["local_sgd", "diloco", "codec"],
)
def test_one_host_averages_gradients(thread_pool, algorithm):
    together = thread_pool.run(train, INNER, hosts=[3])
    for states, expected in zip(thread_pool.run(train, algorithm, hosts=[3]), together, strict=True):
        assert_equal_in_double(states, expected)


def test_the_same_can_be_composed():
    inside, between = DiLoCoAlgorithm(4, **OUTER, inner=INNER).exchanges()
    assert inside == Exchange(Gradients(), Every(), Mean(over="inside"), Replace(), label="inner")
    step = OuterStep(Outer(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=False))
    whole = Parts(1, "strided")
    assert between == Exchange(Difference(), Every(4), Mean(over="between"), step, parts=whole)


def bytes_of_an_outer_step() -> dict[str, int]:
    """Bytes that this rank sends on each communicator, in the step after which hosts exchange."""
    loop = Loop("with_bagua", mlp, sgd, algorithm=DiLoCoAlgorithm(4, inner=INNER), bucket_bytes=10**6)
    group = loop.reducer.group
    loop.train(3)
    before = {name: one.statistics.sent_bytes() for name, one in communicators(group)}
    loop.train()
    return {name: one.statistics.sent_bytes() - before[name] for name, one in communicators(group)}


def communicators(group: Any) -> list[tuple[str, Any]]:
    found = [("all", group.global_communicator), ("inside", group.intra_node_communicator)]
    return [*found, ("between", group.inter_node_communicator)] if group.inter_node_communicator else found


def test_one_rank_of_each_host_talks_between_hosts(thread_pool):
    found = thread_pool.run(bytes_of_an_outer_step, hosts=[2, 2])
    weights = sum(one.numel() for one in mlp().parameters()) * 4
    assert [one.get("between", 0) > 0 for one in found] == [True, False, True, False]
    assert all(one["all"] == 0 for one in found)
    assert weights <= found[0]["between"] <= 3 * weights


def test_the_end_makes_one_model_of_all_hosts(thread_pool):
    def finish() -> State:
        loop = loop_of(LocalSGDAlgorithm(100, inner=INNER))
        loop.train()
        loop.wrapped.bagua_finish()
        return snapshot(loop.model)

    assert_same_on_all_ranks(thread_pool.run(finish, hosts=[2, 2]))
