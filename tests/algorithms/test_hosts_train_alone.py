"""Hosts that train alone, each as one rank would: gradients are exchanged inside them, local updates between them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
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
    Replace,
    SlowMoAlgorithm,
    SparseLoCoAlgorithm,
    Sum,
    around,
)
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua
from tests.harness import State, assert_same_on_all_ranks, batch, loss_of, mlp, snapshot

STEPS = 13
INNER = "gradient_allreduce"
OUTER = {"outer": "sgd", "outer_lr": 0.5, "outer_momentum": 0.5}


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    inputs, targets = (one.double() for one in batch(rank, number))
    return nn.functional.mse_loss(model(inputs), targets)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def train(algorithm: Algorithm | str, steps: int = STEPS, share: int | None = None) -> list[State]:
    """The weights after each step, in double precision. With a ``share``, on that many batches in each step."""
    rank, model = bagua.comm.get_rank(), mlp(bagua.comm.get_rank()).double()
    optimizer = optimizer_of(model)
    wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=1000)
    batches = [rank] if share is None else range(rank * share, (rank + 1) * share)
    watched = []
    for number in range(steps):
        optimizer.zero_grad()
        (sum(loss(wrapped, one, number) for one in batches) / len(batches)).backward()
        optimizer.step()
        watched.append(snapshot(model))
    return watched


def assert_equal_in_double(states: list[State], expected: list[State]) -> None:
    for state, one in zip(states, expected, strict=True):
        for name, value in state.items():
            assert torch.allclose(value, one[name], rtol=0, atol=1e-12), name


class Hosts:
    """The same in plain torch: one model for each host, with the mean gradient of its ranks."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.models = [mlp().double() for _ in sizes]
        self.optimizers = [optimizer_of(model) for model in self.models]
        self.anchor = [nn.Parameter(one.detach().clone()) for one in self.models[0].parameters()]
        self.outer = torch.optim.SGD(self.anchor, lr=0.5, momentum=0.5)

    def step(self, number: int) -> None:
        first = 0
        for size, model, optimizer in zip(self.sizes, self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            (sum(loss(model, rank, number) for rank in range(first, first + size)) / size).backward()
            optimizer.step()
            first += size

    @torch.no_grad()
    def outer_step(self) -> None:
        parts = [size / sum(self.sizes) for size in self.sizes]
        for anchor, *weights in zip(self.anchor, *(model.parameters() for model in self.models), strict=True):
            anchor.grad = anchor - sum(part * one for part, one in zip(parts, weights, strict=True))
        self.outer.step()
        for model in self.models:
            for own, anchor in zip(model.parameters(), self.anchor, strict=True):
                own.copy_(anchor)


#: Batches of each rank: the first one of the first host has fewer than the other one.
BATCHES = (2, 6, 4, 3)


def train_while_there_is_data() -> State:
    rank, model = bagua.comm.get_rank(), mlp().double()
    optimizer = optimizer_of(model)
    wrapped = with_bagua(model, [optimizer], LocalSGDAlgorithm(2, inner=INNER), bucket_bytes=1000)
    with wrapped.join():
        for number in range(BATCHES[rank]):
            optimizer.zero_grad()
            loss(wrapped, rank, number).backward()
            optimizer.step()
    return snapshot(model)


def test_a_host_whose_first_rank_has_no_data_left_contributes_what_the_others_learn(thread_pool):
    """In plain torch: one model for each host, with zeros for the gradients of ranks without data."""
    models = [mlp().double() for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    for number in range(max(BATCHES)):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in (2 * host, 2 * host + 1):
                (loss(model, rank, number) * (number < BATCHES[rank]) / 2).backward()
            optimizer.step()
        if number % 2:
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                mean = (one.data + other.data) / 2
                one.data.copy_(mean)
                other.data.copy_(mean)
    expected = snapshot(models[0])
    ends = thread_pool.run(train_while_there_is_data, hosts=[2, 2])
    assert_equal_in_double(ends, [expected] * 4)


@pytest.mark.parametrize("hosts", [[2, 2], [1, 3]], ids=str)
def test_hosts_train_as_in_plain_torch(thread_pool, hosts):
    expected = Hosts(hosts)
    watched = thread_pool.run(train, DiLoCoAlgorithm(4, **OUTER, inner=INNER), hosts=hosts)
    of_host = [host for host, size in enumerate(hosts) for _ in range(size)]
    for number in range(STEPS):
        expected.step(number)
        if number % 4 == 3:
            expected.outer_step()
        ends = [states[number] for states in watched]
        assert_equal_in_double(ends, [snapshot(expected.models[host]) for host in of_host])
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


def test_one_rank_on_each_host_trains_as_without_inner(thread_pool):
    for one, other in zip(
        thread_pool.run(train, DiLoCoAlgorithm(4, inner=INNER), hosts=[1, 1, 1]),
        thread_pool.run(train, DiLoCoAlgorithm(4), hosts=[1, 1, 1]),
        strict=True,
    ):
        assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def test_one_host_averages_gradients_and_looks_ahead(thread_pool):
    together = thread_pool.run(train, INNER, hosts=[3])
    for algorithm in (
        LocalSGDAlgorithm(4, inner=INNER),
        DiLoCoAlgorithm(4, outer="sgd", outer_lr=1.0, outer_momentum=0.0, inner=INNER),
        DiLoCoAlgorithm(
            4, outer="sgd", outer_lr=1.0, outer_momentum=0.0, codec="int2", error_feedback=True, inner=INNER
        ),
    ):
        for states, expected in zip(thread_pool.run(train, algorithm, hosts=[3]), together, strict=True):
            assert_equal_in_double(states, expected)
    ahead = Hosts([3])
    watched = thread_pool.run(train, DiLoCoAlgorithm(4, **OUTER, inner=INNER), hosts=[3])
    for number in range(STEPS):
        ahead.step(number)
        if number % 4 == 3:
            ahead.outer_step()
    assert_equal_in_double([states[-1] for states in watched], [snapshot(ahead.models[0])] * 3)


def test_the_same_can_be_composed(thread_pool):
    inside = Algorithm.of(Exchange(Gradients(), Every(), Mean(over="inside"), Replace()))
    step = OuterStep(Outer(torch.optim.SGD, lr=0.5, momentum=0.5))
    between = Exchange(Difference(), Every(4), Mean(over="between"), step)
    composed = thread_pool.run(train, around(inside, between), hosts=[2, 2])
    named = thread_pool.run(train, DiLoCoAlgorithm(4, **OUTER, inner=INNER), hosts=[2, 2])
    for states, expected in zip(composed, named, strict=True):
        assert_equal_in_double(states, expected)


def bytes_of_an_outer_step() -> dict[str, int]:
    """Bytes that this rank sends on each communicator, in the step after which hosts exchange."""
    model = mlp()
    optimizer = optimizer_of(model)
    wrapped: Any = with_bagua(model, [optimizer], DiLoCoAlgorithm(4, inner=INNER))
    group = wrapped._bagua_engine.reducer.group
    rank, before = bagua.comm.get_rank(), {}
    for number in range(4):
        before = {name: one.statistics.sent_bytes() for name, one in communicators(group)}
        optimizer.zero_grad()
        loss_of(wrapped, rank, number).backward()
        optimizer.step()
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


def save_and_go_on(algorithm: Algorithm) -> tuple[State, State]:
    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = mlp(seed).double()
        optimizer = optimizer_of(model)
        return model, optimizer, with_bagua(model, [optimizer], algorithm, bucket_bytes=1000)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(wrapped, rank, number).backward()
        optimizer.step()

    rank = bagua.comm.get_rank()
    model, optimizer, wrapped = begin(0)
    for number in range(7):
        step(number)
    saved = snapshot(model), copy.deepcopy(optimizer.state_dict()), wrapped.bagua_state_dict()
    for number in range(7, STEPS):
        step(number)
    end = snapshot(model)
    wrapped.bagua_close()
    model, optimizer, wrapped = begin(5)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    wrapped.bagua_load_state_dict(saved[2])
    for number in range(7, STEPS):
        step(number)
    return end, snapshot(model)


def test_training_resumes_bit_by_bit(thread_pool):
    algorithm = DiLoCoAlgorithm(4, fragments=2, overlap=2, codec="int4", error_feedback=True, inner="bytegrad")
    for end, resumed in thread_pool.run(save_and_go_on, algorithm, hosts=[2, 2]):
        assert_same_on_all_ranks([end, resumed])


def finish() -> State:
    model = mlp(bagua.comm.get_rank()).double()
    optimizer = optimizer_of(model)
    wrapped = with_bagua(model, [optimizer], LocalSGDAlgorithm(100, inner=INNER))
    optimizer.zero_grad()
    loss(wrapped, bagua.comm.get_rank(), 0).backward()
    optimizer.step()
    wrapped.bagua_finish()
    return snapshot(model)


def test_the_end_makes_one_model_of_all_hosts(thread_pool):
    assert_same_on_all_ranks(thread_pool.run(finish, hosts=[2, 2]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DiLoCoAlgorithm(4, inner="decentralized"), "sums gradients in each step"),
        (lambda: DiLoCoAlgorithm(4, inner="local_sgd"), "sums gradients in each step"),
        (lambda: LocalSGDAlgorithm(4, inner="qadam"), "sums gradients in each step"),
        (lambda: LocalSGDAlgorithm(4, inner=LocalSGDAlgorithm(2, inner=INNER)), "sums gradients in each step"),
        (lambda: SparseLoCoAlgorithm(4, inner=INNER, hierarchical=False), "hosts exchange in place of ranks"),
        (lambda: SparseLoCoAlgorithm(4, inner=INNER, error_feedback="weights"), "each rank exchanges for itself"),
        (lambda: SparseLoCoAlgorithm(4, error_feedback="weights"), "argument hierarchical, expected False"),
        (lambda: SlowMoAlgorithm(4, inner=3), "inner"),
        (lambda: Sum(hierarchical=True, over="inside"), "hierarchical"),
        (lambda: Sum(over="hosts"), "over"),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()
