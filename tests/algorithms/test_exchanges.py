"""Exchanges as values, and what the engine makes of them: points, lags, parts, lanes, outer steps."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import (
    Add,
    Algorithm,
    Blend,
    Buffers,
    Difference,
    EagerStep,
    Every,
    Exchange,
    Flight,
    Gradients,
    Mean,
    Mix,
    Model,
    Outer,
    OuterStep,
    Parts,
    Replace,
    SlowStep,
    Sum,
    Then,
    Weights,
    What,
    around,
)
from bagua.comm import ProcessGroup, Work
from bagua.comm.transports.memory.transport import MemoryTransport
from bagua.compression import Codec, MinMaxUInt8, TopK, registry
from bagua.engine.options import Setting
from bagua.errors import CollectiveMismatchError, ConfigurationError, InvalidTypeError
from bagua.parallel import DistributedDataParallel, bagua_init, with_bagua
from bagua.primitives import AllGatherReducer, ErrorFeedback, PowerSGDReducer, ScatterGatherReducer
from tests.contract.algorithms import AlgorithmContract
from tests.harness import State as Snapshot
from tests.harness import (
    assert_close,
    assert_same_on_all_ranks,
    loss_of,
    mean_gradients,
    mlp,
    reference,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import on_ranks

BYTES = ScatterGatherReducer(MinMaxUInt8())
NESTEROV = OuterStep(Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))
LOCAL_SGD = Algorithm.of(Exchange(Weights(), Every(4), Mean(BYTES), Replace()))
DILOCO = Algorithm.of(Exchange(Difference(), Every(4), Mean(), NESTEROV))
STREAMING = Algorithm.of(
    Exchange(
        Difference(),
        Every(6, offset=-2),
        Mean(),
        OuterStep(Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), land=Blend(0.5)),
        lag=2,
        parts=Parts(3, "strided"),
    )
)


SLOWMO = around("gradient_allreduce", Exchange(Difference(), Every(4), Mean(), SlowStep(0.5), label="outer"))
GOSSIP_SLOWMO = around("decentralized", Exchange(Difference(), Every(3), Mean(), SlowStep(0.5), label="outer"))


# Values.


@pytest.mark.parametrize(
    "algorithm", [LOCAL_SGD, DILOCO, STREAMING, SLOWMO], ids=["local", "diloco", "streaming", "slowmo"]
)
def test_an_algorithm_prints_as_what_made_it_and_survives_pickle(algorithm):
    names = {**globals(), **vars(bagua.algorithms), **vars(bagua.algorithms.exchanges.gossip), **vars(bagua.topology)}
    assert eval(repr(algorithm), names) == algorithm
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert hash(algorithm) == hash(pickle.loads(pickle.dumps(algorithm)))


def test_points_follow_from_what_is_sent():
    exchange = Exchange(Gradients(), Every(), Mean(), Replace())
    assert (exchange.at, exchange.until) == ("bucket ready", "backward ends")
    exchange = Exchange(Weights(), Every(), Mean(), Add(), at="bucket stepped", lag=1)
    assert (exchange.at, exchange.until) == ("bucket stepped", "bucket ready")
    exchange = Exchange(Weights(), Every(), Mean(), Replace())
    assert (exchange.at, exchange.until) == ("stepped", "stepped")


def test_rounds_are_counted_by_starts():
    for when in (Every(), Every(3), Every(3, 1), Every(4, -1)):
        due = [t for t in range(1, 40) if when.due(t)]
        assert [when.round(t) for t in due] == list(range(1, len(due) + 1))


def test_gradients_that_are_exchanged_seldom_promise_no_equal_ranks():
    seldom = Algorithm.of(gradients(when=Every(2)))
    assert (seldom.promise, seldom.ranks_differ) == ("consensus", True)


def test_parts_are_due_one_after_the_other():
    """As streaming DiLoCo has it: applied after steps (p + 1) H / P, started so much earlier."""
    parts, when = Parts(5, "strided"), Every(12)
    due = {part: [t % 12 for t in range(1, 13) if when.due(t, parts.shift(part, 12))] for part in range(5)}
    assert due == {0: [2], 1: [4], 2: [7], 3: [9], 4: [0]}


def test_parts_are_cut_by_layer_and_by_bytes():
    named = dict(mlp().named_parameters())
    assert Parts(2, "strided").cut(named) == [["0.weight", "0.bias", "4.weight", "4.bias"], ["2.weight", "2.bias"]]
    balanced = Parts(2, "bytes").cut(named)
    assert sorted(name for part in balanced for name in part) == sorted(named)
    loads = [sum(named[name].nbytes for name in part) for part in balanced]
    assert max(loads) <= 4 / 3 * sum(loads) / 2
    with pytest.raises(ConfigurationError, match="argument fragments, expected at most as many as there are layers"):
        Parts(4, "strided").check(named)
    for by in ("strided", "bytes"):  # All layers are frozen, or all but one.
        assert Parts(2, by).cut({}) == [[], []]
        assert Parts(2, by).cut({"0.weight": named["0.weight"]}) == [["0.weight"], []]


def gradients(how: Any = Mean(), **options: Any) -> Exchange:  # noqa: B008 - a value
    return Exchange(Gradients(), options.pop("when", Every()), how, Replace(), **options)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Exchange(Weights(), Every(3), Mean(), Add(), lag=4), "at most 3"),
        (lambda: Exchange(Difference(), Every(3), Mean(), NESTEROV, lag=4), "undo every update"),
        (lambda: gradients(Mean(ErrorFeedback(BYTES)), lag=1), "at most 0"),
        (lambda: gradients(Mean(ErrorFeedback(BYTES)), when=Every(3), lag=3), "at most 2"),
        (lambda: gradients(lag=1, until="bucket ready"), "take the place"),
        (lambda: gradients(lag=1, until="safe"), "of no use any more"),
        (lambda: Exchange(Weights(), Every(), Mean(), Replace(), lag=1), "undo every update"),
        (lambda: Exchange(Weights(), Every(3), Mean(), Replace(), lag=3), "undo every update"),
        (lambda: Exchange(Difference(), Every(4), Mean(), NESTEROV, lag=4), "undo every update"),
        (lambda: Exchange(Weights(), Every(), Mean(), Replace(), at="stepped", until="safe"), "comes before"),
        (lambda: Exchange(Weights(), Every(), Mean(), Replace(), at="soon"), "at"),
        (
            lambda: Exchange(Weights(), Every(), Mean(), Replace(), at="bucket ready", parts=Parts(2, "bytes")),
            "arrival",
        ),
        (lambda: Exchange(None, Every(), Mean(), NESTEROV), "anchor"),
        (lambda: Exchange(Difference(), Every(), Mean(), Replace()), "OuterStep"),
        (lambda: Exchange(Weights(), Every(), Mean(), NESTEROV), "anchor"),
        (lambda: Exchange(Difference(), Every(3), Mix("ring"), NESTEROV), "would not be equal"),
        (lambda: Exchange(Difference(), Every(3), Mix("ring"), SlowStep()), "would not be equal"),
        (lambda: Exchange(Weights(), Every(8), Mean(AllGatherReducer(TopK())), Replace()), "become what is left"),
        (lambda: Exchange(Weights(), Every(8), Mean(ErrorFeedback(PowerSGDReducer(1))), Add()), "become what is left"),
        (lambda: Exchange(Buffers(), Every(8), Sum(AllGatherReducer(TopK(0.1))), Replace()), "become what is left"),
        (lambda: Exchange(Weights(), 8, Mean(), Replace()), "when"),
        (lambda: Exchange("weights", Every(), Mean(), Replace()), "what"),
        (lambda: Every(0), "steps"),
        (lambda: Parts(3), "arrival"),
        (lambda: Parts(3, "size"), "by"),
        (lambda: Outer(lambda parameters: None), "name"),
        (lambda: Add(0.0), "gain"),
        (lambda: Difference("anchor"), "scope"),
        (lambda: Blend(2.0), "keep"),
        (lambda: Mix("nowhere"), "nowhere"),
        (lambda: Algorithm.of(gradients(), gradients(label="b")), "both replace gradients"),
        (lambda: Algorithm.of(gradients(), gradients()), "same label"),
        (lambda: Algorithm.of(gradients(when=Every(2)), gradients(when=Every(3), label="b")), "both replace gradients"),
        (
            lambda: Algorithm.of(
                Exchange(Weights(), Every(4), Mix("ring"), Replace(), lag=2),
                Exchange(Weights(), Every(4, 1), Mean(), Replace(), label="b"),
            ),
            "replaces what the second one writes",
        ),
    ],
)
def test_contradictions_are_refused_when_the_value_is_made(make: Callable[[], object], problem: str) -> None:
    with pytest.raises((ConfigurationError, InvalidTypeError), match=problem):
        make()


def test_expectations_follow_from_the_exchanges():
    assert Algorithm.of(gradients()).promise == "exact"
    assert Algorithm.of(gradients(Mean(BYTES))).promise == "bounded"
    assert Algorithm.of(gradients(lag=1)).promise == "bounded"
    assert Algorithm.of(gradients(when=Every(2))).promise == "consensus"
    assert SLOWMO.promise == "exact"
    assert LOCAL_SGD.promise == DILOCO.promise == GOSSIP_SLOWMO.promise == "consensus"


# Contract: examples of families that the engine knows nothing of.


@pytest.fixture
def pool(thread_pool):
    return thread_pool


@pytest.mark.threads
class TestComposed(AlgorithmContract):
    sizes = (2, 3)

    @pytest.fixture(params=[LOCAL_SGD, DILOCO, STREAMING, GOSSIP_SLOWMO], ids=range(4))
    def algorithm(self, request):
        return request.param

    def test_training_gives_what_is_promised(self, algorithm, pool):
        """Outer momentum overshoots without gradients, so only that ranks are together after an outer step."""
        for size in self.sizes:
            states = pool.run(train_for, algorithm, 12, size=size)
            if algorithm is not STREAMING:
                assert_same_on_all_ranks(states)

    test_host_layouts_work_or_are_refused = None
    test_the_suite_notices_that_nothing_is_exchanged = None
    test_one_rank_alone_trains_as_without_bagua = None


# Training.


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train_for(algorithm: Algorithm, steps: int, **options: Any) -> Snapshot:
    rank, model = bagua.comm.get_rank(), mlp(bagua.comm.get_rank())
    optimizer = plain_sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=1000, **options)
    train_steps(wrapped, optimizer, rank, range(steps))
    return snapshot(model)


def flat_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def put(model: nn.Module, flat: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(flat.clone(), model.parameters())


class Ranks:
    """All ranks in one process, with weights as vectors."""

    def __init__(self, size: int) -> None:
        self.models = [mlp() for _ in range(size)]
        self.optimizers = [plain_sgd(model.parameters()) for model in self.models]

    def step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_steps(model, optimizer, rank, [number])

    def mean(self) -> torch.Tensor:
        return torch.stack([flat_of(model) for model in self.models]).mean(dim=0)

    def put(self, flat: torch.Tensor) -> None:
        for model in self.models:
            put(model, flat)


@pytest.mark.threads
@pytest.mark.parametrize(
    "make",
    [
        lambda: gradients(lag=5),
        lambda: gradients(Mean(ErrorFeedback(BYTES)), when=Every(3), lag=2),
        lambda: gradients(Sum(), lag=2),
        lambda: Exchange(Weights(), Every(3), Mean(), Add(), lag=3),
        lambda: Algorithm.of(gradients(when=Every(2)), gradients(when=Every(2, 1), label="b")),
        lambda: around("decentralized", Exchange(Weights(), Every(4), Mean(), Add(), lag=2, label="outer")),
        lambda: Algorithm.of(
            Exchange(Weights(), Every(4), Mix("ring"), Add(), lag=2),
            Exchange(Weights(), Every(4, 1), Mean(), Replace(), label="b"),
        ),
    ],
    ids=range(7),
)
def test_what_can_work_is_not_refused_and_works(make, thread_ranks):
    """What rank 0 learns depends on the data of rank 1."""
    made = make()
    algorithm = made if isinstance(made, Algorithm) else Algorithm.of(made)
    one, other = (thread_ranks(2, train_beside, algorithm, data)[0] for data in (1, 2))
    moved = [float((other[name] - value).norm()) for name, value in one.items()]
    assert all(1e-3 < distance < 10.0 for distance in moved), moved


def train_beside(algorithm: Algorithm, data: int) -> Snapshot:
    """Nine steps; rank 1 has the data of rank ``data``."""
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = plain_sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=1000)
    train_steps(wrapped, optimizer, data if rank else 0, range(9))
    return snapshot(model)


@pytest.mark.threads
def test_diloco_is_what_the_paper_says(thread_ranks):
    ranks = Ranks(3)
    anchor = torch.nn.Parameter(ranks.mean())
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(12):
        ranks.step(number)
        if number % 4 == 3:
            anchor.grad = anchor.detach() - ranks.mean()
            outer.step()
            ranks.put(anchor.detach())
    results = thread_ranks(3, train_for, DILOCO, 12)
    assert_same_on_all_ranks(results)
    assert_close(results[0], snapshot(ranks.models[0]))


@pytest.mark.threads
def test_an_outer_step_with_rate_one_is_local_sgd_and_one_rank_alone_looks_ahead(thread_ranks):
    plain = OuterStep(Outer(torch.optim.SGD, lr=1.0))
    ahead = Algorithm.of(Exchange(Difference(), Every(4), Mean(), plain))
    local = Algorithm.of(Exchange(Weights(), Every(4), Mean(), Replace()))
    assert_close(thread_ranks(2, train_for, ahead, 8)[0], thread_ranks(2, train_for, local, 8)[0])
    half = Algorithm.of(Exchange(Difference(), Every(4), Mean(), OuterStep(Outer(torch.optim.SGD, lr=0.5))))
    ranks = Ranks(1)
    before = ranks.mean()
    for number in range(8):
        ranks.step(number)
        if number % 4 == 3:
            before = before + 0.5 * (ranks.mean() - before)
            ranks.put(before)
    assert_close(thread_ranks(1, train_for, half, 8)[0], snapshot(ranks.models[0]))


@pytest.mark.threads
def test_slow_momentum_around_gossip_is_what_the_paper_says(thread_ranks):
    """With the exact mean in each gossip step."""
    ranks = Ranks(2)
    anchor, slow = ranks.mean(), torch.zeros_like(ranks.mean())
    for number in range(9):
        befores = [flat_of(model) for model in ranks.models]
        mixed = ranks.mean()
        ranks.step(number)
        for model, before in zip(ranks.models, befores, strict=True):
            put(model, mixed + flat_of(model) - before)
        if number % 3 == 2:
            slow = 0.5 * slow + (anchor - ranks.mean()) / 0.1
            anchor = anchor - 0.1 * slow
            ranks.put(anchor)
    results = thread_ranks(2, train_for, GOSSIP_SLOWMO, 9)
    assert_same_on_all_ranks(results)
    assert_close(results[0], snapshot(ranks.models[0]))


class Halves(nn.Module):
    """A model whose second half is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp()[0], mlp()[2]

    def forward(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        hidden = self.first(rows)
        return self.second(hidden) if number % 2 == 0 else hidden


@pytest.mark.threads
def test_buffers_go_all_at_once_unless_told_otherwise(thread_ranks):
    exchange = Exchange(Buffers(), Every(2), Mean(), Replace())
    assert exchange == dataclasses.replace(exchange, parts=Parts(1, "strided"))

    def train() -> list[float]:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        optimizer = plain_sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], Algorithm.of(exchange))
        seen = []
        for number in range(2):
            train_steps(wrapped, optimizer, bagua.comm.get_rank(), [number])
            seen.append(model[1].running_mean.tolist())
        return seen

    (first, mean), (other, same) = thread_ranks(2, train)
    assert first != other
    assert mean == same


@pytest.mark.threads
def test_late_gradients_of_what_is_unused_by_now_are_not_lost(thread_ranks):
    def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        return model(torch.full((2, 8), 1.0 + rank), number).square().mean()

    def train() -> Snapshot:
        model = Halves()
        optimizer = plain_sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], Algorithm.of(gradients(lag=1)), find_unused_parameters=True)
        for number in range(6):
            optimizer.zero_grad()
            loss(wrapped, bagua.comm.get_rank(), number).backward()
            optimizer.step()
        return snapshot(model)

    expected = Halves()
    late = [torch.zeros_like(one) for one in expected.parameters()]
    for number in range(6):
        total = loss(expected, 0, number) + loss(expected, 1, number)
        found = torch.autograd.grad(total / 2, list(expected.parameters()), allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            torch._foreach_add_(list(expected.parameters()), late, alpha=-0.1)
        late = list(found)
    for state in thread_ranks(2, train):
        assert_close(state, snapshot(expected))


@pytest.mark.threads
def test_a_safe_point_comes_once_in_each_step(thread_ranks):
    """At the first training forward, whatever others follow before the step is over."""

    def train() -> Snapshot:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = plain_sgd(model.parameters())
        exchange = Exchange(Weights(), Every(), Mean(), Replace(), at="safe", parts=Parts(1, "strided"))
        wrapped = with_bagua(model, [optimizer], Algorithm.of(exchange))
        for number in range(4):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped, rank, number).backward()
            with torch.no_grad():  # A mean in the next forward would spread it.
                model[4].bias.add_(rank)
            (loss_of(wrapped, rank, number) + loss_of(wrapped, rank, number + 1)).backward()
            optimizer.step()
        return snapshot(model)

    ranks = Ranks(2)
    for number in range(4):
        if number:  # In the first forward, there is nothing to exchange yet.
            ranks.put(ranks.mean())
        for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            with torch.no_grad():
                model[4].bias.add_(rank)
            (loss_of(model, rank, number) + loss_of(model, rank, number + 1)).backward()
            optimizer.step()
    for state, model in zip(thread_ranks(2, train), ranks.models, strict=True):
        assert_close(state, snapshot(model))


@pytest.mark.threads
@pytest.mark.parametrize(("period", "lag"), [(1, 1), (3, 0), (3, 2), (3, 3), (6, 5)])
def test_weights_may_come_late_and_in_parts_of_equal_size(thread_ranks, period, lag):
    """``x <- x + (mean - sent)`` after the step ``lag`` later, for each part by itself."""
    ranks = Ranks(2)
    parts = Parts(2, "bytes")
    cut = parts.cut(dict(ranks.models[0].named_parameters()))
    under_way: dict[int, list[tuple[list[str], dict, dict]]] = {}
    steps = 14
    for number in range(steps):
        ranks.step(number)
        weights = [dict(model.named_parameters()) for model in ranks.models]
        with torch.no_grad():
            for names, sent, mean in under_way.pop(number, []):
                for rank, name in ((rank, name) for rank in range(2) for name in names):
                    weights[rank][name] += mean[name] - sent[rank, name]
            for part, names in enumerate(cut):
                if Every(period).due(number + 1, parts.shift(part, period)):
                    sent = {(rank, name): weights[rank][name].clone() for rank in range(2) for name in names}
                    mean = {name: (sent[0, name] + sent[1, name]) / 2 for name in names}
                    if lag == 0:
                        for rank, name in sent:
                            weights[rank][name].copy_(mean[name])
                    else:
                        under_way.setdefault(number + lag, []).append((names, sent, mean))
    algorithm = Algorithm.of(Exchange(Weights(), Every(period), Mean(), Add(), lag=lag, parts=parts))
    for state, model in zip(thread_ranks(2, train_for, algorithm, steps), ranks.models, strict=True):
        assert_close(state, snapshot(model))


@dataclass(frozen=True)
class CopiedGradients(What):
    """Gradients, sent from a copy."""

    reads: ClassVar[frozenset[str]] = frozenset({"gradients"})

    def fill(self, flight: Flight) -> None:
        flight.flat.copy_(flight.bucket.allocate_gradients())


@dataclass(frozen=True)
class Look(Then):
    """A local action that changes nothing."""

    def fold(self, flight: Flight) -> None:
        assert flight.bucket.gradients is not None


@pytest.mark.threads
@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm.of(Exchange(CopiedGradients(), Every(), Mean(), Replace())),
        Algorithm.of(Exchange(Gradients(), Every(), None, Look(), label="look"), gradients()),
    ],
    ids=["copied", "looked at"],
)
def test_gradients_are_divided_once(thread_ranks, algorithm):
    expected = reference(mlp(), plain_sgd, 2, range(3))
    for state in thread_ranks(2, train_for, algorithm, 3):
        assert_close(state, expected)


def _stop_and_go_on(algorithm: Algorithm, stops: list[int], steps: int) -> list[Snapshot]:
    """The weights in the end, from each checkpoint; the first is of training without a stop."""
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = plain_sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=1000)
    saved = []
    for number in range(steps):
        if number in stops:
            saved.append((number, snapshot(wrapped), pickle.loads(pickle.dumps(wrapped.bagua_state_dict()))))
        train_steps(wrapped, optimizer, rank, [number])
    ends = [snapshot(model)]
    for number, (at, weights, remembered) in enumerate(saved):
        model = mlp(5)
        optimizer = plain_sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=10**9)
        for _ in range(2):  # Once more changes nothing.
            if number % 2:  # In either order.
                wrapped.load_state_dict(weights)
            wrapped.bagua_load_state_dict(remembered)
            if not number % 2:
                wrapped.load_state_dict(weights)
        train_steps(wrapped, optimizer, rank, range(at, steps))
        ends.append(snapshot(model))
    return ends


@pytest.mark.threads
@pytest.mark.parametrize(
    "algorithm",
    [
        STREAMING,
        Algorithm.of(gradients(lag=2)),
        around("decentralized", Exchange(Difference(), Every(6), Mean(), NESTEROV, lag=4, label="outer")),
        Algorithm.of(Exchange(Difference(), Every(4), Mean(ErrorFeedback(BYTES)), NESTEROV, lag=2)),
        Algorithm.of(Exchange(Difference(), Every(4), Mean(ErrorFeedback(PowerSGDReducer(1))), NESTEROV, lag=2)),
        Algorithm.init("sparse_loco", sync_every=4, start_after=0, error_feedback="weights", hierarchical=False),
    ],
    ids=["streaming", "late gradients", "around gossip", "residuals", "residuals and factors", "residuals in weights"],
)
def test_training_goes_on_in_the_middle_of_flights(thread_ranks, algorithm):
    for ends in thread_ranks(2, _stop_and_go_on, algorithm, [2, 5, 6, 9, 11], 16):
        for end in ends[1:]:
            assert_same_on_all_ranks([ends[0], end])


@pytest.mark.threads
@pytest.mark.parametrize("how", [Mean(), Mean(ErrorFeedback(BYTES))], ids=["exact", "residuals"])
def test_tuning_leaves_flights_of_parts_alone(thread_ranks, how):
    exchange = dataclasses.replace(STREAMING.exchanges()[0], how=how)

    def train(tuned: bool) -> Snapshot:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = plain_sgd(model.parameters())
        wrapped: Any = with_bagua(model, [optimizer], Algorithm.of(exchange), bucket_bytes=1000)
        for number in range(14):
            train_steps(wrapped, optimizer, rank, [number])
            if tuned:
                reducer = wrapped._bagua_engine.reducer
                reducer.formation.recut(Setting(1000 + 1000 * (number % 2), reducer.formation.setting.hierarchical))
        return snapshot(model)

    for plain, tuned in zip(thread_ranks(2, train, False), thread_ranks(2, train, True), strict=True):
        assert_same_on_all_ranks([plain, tuned])


# What is remembered.


@pytest.mark.threads
def test_what_starts_from_weights_starts_from_those_that_training_begins_with(thread_ranks):
    """Buckets that the user wants are formed before rank 0's weights have come."""

    def train(buckets: bool) -> Snapshot:
        model = mlp(bagua.comm.get_rank())
        wanted = [[name for name, _ in model.named_parameters()]] if buckets else []
        optimizer = plain_sgd(model.parameters())
        wrapped, _ = bagua_init(model, optimizer, DILOCO, buckets=wanted)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(4))
        return snapshot(model)

    for by_hand, formed in zip(thread_ranks(2, train, True), thread_ranks(2, train, False), strict=True):
        assert_same_on_all_ranks([by_hand, formed])


@pytest.mark.threads
def test_weights_that_are_loaded_are_what_the_next_outer_step_starts_from(thread_ranks):
    """An anchor of the weights before would pull them back, and with momentum beyond."""
    loaded = {name: value + 10 for name, value in snapshot(mlp()).items()}

    def load(alone: bool) -> Snapshot:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wrapped = with_bagua(model, [optimizer], DILOCO)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(6))
        (model if alone else wrapped).load_state_dict(loaded)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(6, 13))
        return snapshot(model)

    for alone in (False, True):
        for state in thread_ranks(2, load, alone):
            assert_close(state, loaded)


@dataclass(frozen=True)
class Regrouped(Algorithm):
    """Sends differences in other parts from the third step on."""

    label: str = "outer"
    parts: int = 2

    @property
    def phases(self) -> tuple[Hashable, ...]:
        return (0, 1)

    def phase(self, step: int, model: Model) -> Hashable:
        return int(step >= 2)

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        label, parts = (self.label, Parts(self.parts, "strided")) if phase else ("outer", Parts(1, "strided"))
        step = OuterStep(Outer(torch.optim.SGD, lr=1.0))
        return (Exchange(Difference(), Every(2), Mean(), step, parts=parts, label=label),)


def test_parts_of_what_remembers_do_not_change_from_phase_to_phase():
    """The anchor of a label lies in its parts: others began with a new one, and nothing was said."""
    with pytest.raises(ConfigurationError, match=r"anchor.* would begin anew where the parts change") as caught:
        Regrouped().reify(bagua.comm.solo_group())
    assert "another label" in str(caught.value)
    Regrouped(label="later").reify(bagua.comm.solo_group())
    Regrouped(parts=1).reify(bagua.comm.solo_group())


@dataclass(frozen=True)
class LateDiLoCo(Algorithm):
    """Gradient allreduce for five steps, and outer steps after that."""

    @property
    def phases(self) -> tuple[str, ...]:
        return "warm-up", "local"

    def phase(self, step: int, model: Model) -> str:
        return "warm-up" if step < 5 else "local"

    def exchanges(self, phase: Hashable = "local") -> tuple[Exchange, ...]:
        return (gradients(),) if phase == "warm-up" else DILOCO.exchanges()


@pytest.mark.threads
def test_what_a_later_phase_remembers_starts_with_it_and_its_steps_are_counted_anew(thread_ranks):
    """Steps 9 and 13 are outer ones; the anchor of the first is what the warm-up ended with."""
    ranks = Ranks(2)
    for number in range(5):
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            mean_gradients(model, 2, lambda model, rank, number=number: loss_of(model, rank, number))
            optimizer.step()
    anchor = nn.Parameter(ranks.mean())
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(5, 14):
        ranks.step(number)
        if number in (8, 12):
            anchor.grad = anchor.detach() - ranks.mean()
            outer.step()
            ranks.put(anchor.detach())
    for state, model in zip(thread_ranks(2, train_for, LateDiLoCo(), 14), ranks.models, strict=True):
        assert_close(state, snapshot(model))


@dataclass(frozen=True)
class LossyThenOuter(LateDiLoCo):
    """The gradients' residual is remembered under the label that outer steps have later."""

    def exchanges(self, phase: Hashable = "local") -> tuple[Exchange, ...]:
        return (gradients(Mean(ErrorFeedback(BYTES))),) if phase == "warm-up" else DILOCO.exchanges()


def rest(algorithm: Algorithm) -> tuple[Snapshot, Snapshot]:
    """Weights before and after training at rate 0."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = with_bagua(model, [optimizer], algorithm)
    before = snapshot(model)
    train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(14))
    return before, snapshot(model)


@pytest.mark.threads
def test_what_an_earlier_phase_remembers_is_no_anchor(thread_ranks):
    for before, after in thread_ranks(2, rest, LossyThenOuter()):
        assert_close(after, before)


def freeze(model: nn.Module, layer: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name[0] != layer)


def step_anchors(outer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """An outer step of whatever is not frozen; ``outer`` has a copy of the weights."""
    trained = [[one for one in model.parameters() if one.requires_grad] for model in ranks.models]
    frozen = [not one.requires_grad for one in ranks.models[0].parameters()]
    anchors = [one for one, left in zip(outer.param_groups[0]["params"], frozen, strict=True) if not left]
    outer.zero_grad()
    for one, replicas in zip(anchors, zip(*trained, strict=True), strict=True):
        one.grad = one.detach() - sum(replica.detach() for replica in replicas) / len(replicas)
    outer.step()
    with torch.no_grad():
        for parameters in trained:
            torch._foreach_copy_(parameters, anchors)


@pytest.mark.threads
@pytest.mark.parametrize(
    ("kind", "options", "first", "later"),
    [
        (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}, "0", ""),
        (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}, "4", ""),
        (torch.optim.Adam, {"lr": 0.01}, "", "4"),
    ],
    ids=["first", "last", "freeze"],
)
def test_no_layer_loses_its_anchor_when_others_are_frozen_or_unfrozen(thread_ranks, kind, options, first, later):
    """The layer ``first`` is frozen until step 5, in the middle of a period, and the layer ``later`` from there on."""
    ranks = Ranks(2)
    outer = kind([nn.Parameter(one.detach().clone()) for one in ranks.models[0].parameters()], **options)
    for number in range(14):
        for model in ranks.models:
            freeze(model, first if number < 5 else later)
        ranks.step(number)
        if number % 4 == 3:
            step_anchors(outer, ranks)

    def train() -> Snapshot:
        model = mlp()
        freeze(model, first)
        optimizer = plain_sgd(model.parameters())
        then = OuterStep(Outer(kind, **options))
        wrapped = with_bagua(model, [optimizer], Algorithm.of(Exchange(Difference(), Every(4), Mean(), then)))
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(5))
        freeze(model, later)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(5, 14))
        return snapshot(model)

    for state, model in zip(thread_ranks(2, train), ranks.models, strict=True):
        assert_close(state, snapshot(model))


@pytest.mark.threads
def test_what_has_yet_to_start_from_weights_is_not_saved(thread_ranks):
    loaded = {name: value + 10 for name, value in snapshot(mlp()).items()}

    def load_and_save() -> Snapshot:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wrapped: Any = with_bagua(model, [optimizer], DILOCO)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(6))
        wrapped.load_state_dict(loaded)
        wrapped.bagua_load_state_dict(wrapped.bagua_state_dict())
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(6, 9))
        return snapshot(model)

    for state in thread_ranks(2, load_and_save):
        assert_close(state, loaded)


def test_what_goes_on_between_steps_cannot_be_put_inside():
    outer = Exchange(Weights(), Every(4), Mean(), Replace(), label="outer")
    with pytest.raises(ConfigurationError, match="between steps"):
        around("async", outer).reify(bagua.comm.solo_group())


@pytest.mark.threads
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=range(2))
@on_ranks(2)
def test_copies_know_nothing_of_the_engine(copied):
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], DILOCO)
    train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(2))
    twin = copied(wrapped)
    before = wrapped.bagua_state_dict()
    twin.load_state_dict(mlp(3).state_dict())
    assert type(twin) is nn.Sequential
    after = wrapped.bagua_state_dict()
    assert before["parameters"]["0.bias"]["anchor"].equal(after["parameters"]["0.bias"]["anchor"])


@pytest.mark.threads
@pytest.mark.parametrize("name", list(registry))
@pytest.mark.parametrize("what", [Gradients(), Weights(), Difference()], ids=repr)
def test_every_codec_works_on_whatever_is_sent(thread_ranks, name, what):
    then = NESTEROV if isinstance(what, Difference) else Replace()
    codec = Codec.init(name)
    if isinstance(what, Weights) and codec.contraction is not None and codec.contraction < 0.5:
        return  # Refused: weights would become what is left of them.
    reducer = ErrorFeedback(ScatterGatherReducer(codec))
    algorithm = Algorithm.of(Exchange(what, Every(1 if isinstance(what, Gradients) else 3), Mean(reducer), then))
    states = thread_ranks(3, train_for, algorithm, 6)
    assert_same_on_all_ranks(states)
    assert all(value.isfinite().all() for value in states[0].values())


@pytest.mark.threads
def test_shared_state_first_makes_weights_equal(thread_ranks):
    def train() -> tuple[Snapshot, str]:
        model = mlp(bagua.comm.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wrapped = DistributedDataParallel(model, optimizers=[optimizer], algorithm=DILOCO, init_sync=False)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(2))
        return snapshot(model), wrapped.bagua_state_digest()

    (first, digest), (second, other) = thread_ranks(2, train)
    assert_same_on_all_ranks([first, second])
    assert digest == other


@pytest.mark.threads
def test_ranks_that_mix_with_neighbours_have_anchors_and_momenta_of_their_own(thread_ranks):
    """Each rank steps its anchor with the mean of its own difference and those of its neighbours on a ring."""
    ranks = Ranks(4)
    anchors = [nn.Parameter(ranks.mean()) for _ in ranks.models]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    for number in range(9):
        ranks.step(number)
        if number % 3 == 2:
            apart = [one.detach() - flat_of(model) for one, model in zip(anchors, ranks.models, strict=True)]
            for rank, one in enumerate(anchors):
                one.grad = (apart[rank - 1] + apart[rank] + apart[(rank + 1) % 4]) / 3
            outer.step()
            for one, model in zip(anchors, ranks.models, strict=True):
                put(model, one.detach())

    def train() -> Snapshot:
        model = mlp()
        optimizer = plain_sgd(model.parameters())
        exchange = Exchange(Difference(scope="local"), Every(3), Mix("ring"), NESTEROV)
        wrapped: Any = with_bagua(model, [optimizer], Algorithm.of(exchange))
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(9))
        wrapped.bagua_state_digest()
        return snapshot(model)

    for state, model in zip(thread_ranks(4, train), ranks.models, strict=True):
        assert_close(state, snapshot(model))


@pytest.mark.threads
def test_an_eager_step_remembers_what_others_bring_for_buckets_too(thread_ranks):
    """The memory of a flight is that of the next one there."""
    then = EagerStep(Outer(torch.optim.SGD, lr=0.7, momentum=0.9))
    whole = Exchange(Difference("local"), Every(3), Mean(), then, lag=3, parts=Parts(1, "strided"))
    runs = [
        thread_ranks(2, train_for, Algorithm.of(dataclasses.replace(whole, parts=one)), 13)
        for one in (Parts(), whole.parts)
    ]
    for by_arrival, as_whole in zip(*runs, strict=True):
        assert_close(by_arrival, as_whole)


@pytest.mark.threads
@pytest.mark.parametrize(
    "algorithm", [DILOCO, Algorithm.init("power_sgd", hierarchical=False), Algorithm.init("sign_sgd", warmup_steps=0)]
)
def test_a_digest_names_what_differs(thread_ranks, algorithm):
    def train() -> str:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = plain_sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], algorithm)
        train_steps(wrapped, optimizer, rank, range(5))
        digest = wrapped.bagua_state_digest()
        places = wrapped._bagua_engine.reducer.execution.places
        shared = [
            one.name for one in places[0].memory.declared.values() if one.scope == "shared" and one.per != "family"
        ]
        tensor = places[0].memory.state[shared[0]] if shared else model[0].weight.data
        if rank == 1:
            tensor.view(-1)[0] += 1
        with pytest.raises(CollectiveMismatchError, match=shared[0] if shared else r"0\.weight") as caught:
            wrapped.bagua_state_digest()
        assert {caught.value.rank, *caught.value.peers} == {0, 1}
        return digest

    first, second = thread_ranks(2, train)
    assert first == second


@pytest.mark.threads
def test_a_rank_that_is_not_finite_starts_again_from_the_anchor(thread_ranks):
    def train() -> Snapshot:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = plain_sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], DILOCO)
        train_steps(wrapped, optimizer, rank, range(6))
        if rank == 1:
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)
        train_steps(wrapped, optimizer, rank, range(6, 16))
        return snapshot(model)

    states = thread_ranks(2, train)
    assert_same_on_all_ranks(states)
    assert all(value.isfinite().all() for value in states[0].values())


@pytest.mark.threads
@pytest.mark.parametrize("size", [1, 2])
def test_no_exchange_is_made_and_checked_anew_in_each_step(thread_ranks, monkeypatch, size):
    made, own = [], Exchange.__post_init__

    def train() -> int:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = plain_sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], SLOWMO)
        train_steps(wrapped, optimizer, rank, range(2))
        bagua.comm.get_default_group().global_communicator.barrier()
        before = len(made)
        train_steps(wrapped, optimizer, rank, range(2, 7))
        return len(made) - before

    monkeypatch.setattr(Exchange, "__post_init__", lambda self: (made.append(self), own(self))[1])
    assert thread_ranks(size, train) == [0] * size
    assert made


@pytest.mark.threads
def test_what_goes_on_beside_other_exchanges_does_not_hold_them_up(thread_ranks, monkeypatch):
    """The outer mean waits until three more gradients were exchanged: on one connection that would be for ever."""
    done = [threading.Event(), threading.Event()]
    run = Sum.run

    def wait(self: Mean, flight: Flight, group: ProcessGroup) -> Work | None:
        assert done[group.rank].wait(60), "the inner exchanges wait for the outer one"
        return run(self, flight, group)

    monkeypatch.setattr(Slow, "run", wait)
    algorithm = around("gradient_allreduce", Exchange(Weights(), Every(4), Slow(), Add(), lag=3, label="outer"))

    def train() -> Snapshot:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = plain_sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], algorithm)
        train_steps(wrapped, optimizer, rank, range(6))
        done[rank].set()
        train_steps(wrapped, optimizer, rank, range(6, 9))
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


@dataclass(frozen=True)
class Slow(Mean):
    """A mean that takes its time."""


@dataclass(frozen=True)
class InTurn(Mean):
    """A mean of which the exchange of the first bucket ends when that of the second one has begun."""

    begun: ClassVar[list[threading.Event]]

    def blocking(self, group: ProcessGroup, prepared: object) -> bool:
        return True

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        if flight.bucket.index == 1:
            self.begun[group.rank].set()
        elif flight.bucket.index == 0:
            assert self.begun[group.rank].wait(60), "the second bucket waits for the first one"
        group.global_communicator.allreduce(flight.flat)


@pytest.mark.threads
def test_over_a_network_buckets_take_turns_on_two_lanes(thread_ranks, monkeypatch):
    monkeypatch.setattr(MemoryTransport, "overlaps", True)
    monkeypatch.setattr(InTurn, "begun", [threading.Event(), threading.Event()], raising=False)
    states = thread_ranks(2, train_for, Algorithm.of(Exchange(Gradients(), Every(), InTurn(), Replace())), 3)
    assert_same_on_all_ranks(states)
    monkeypatch.undo()
    assert_same_on_all_ranks([states[0], *thread_ranks(2, train_for, "gradient_allreduce", 3)])


class OnItsOwn(InTurn):
    """The same, on connections that it keeps to itself."""

    side_by_side: ClassVar[bool] = False

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        group.global_communicator.allreduce(flight.flat)


@pytest.mark.threads
@pytest.mark.parametrize(
    ("how", "overlaps", "bucket_bytes", "more"),
    [(InTurn(), True, 1000, 1), (InTurn(), False, 1000, 0), (InTurn(), True, 10**6, 0), (OnItsOwn(), True, 1000, 0)],
)
def test_a_second_lane_is_there_only_where_it_saves_time(thread_ranks, monkeypatch, how, overlaps, bucket_bytes, more):
    monkeypatch.setattr(MemoryTransport, "overlaps", overlaps)
    monkeypatch.setattr(InTurn, "run", OnItsOwn.run)

    def train() -> int:
        model = mlp()
        optimizer = plain_sgd(model.parameters())
        algorithm = Algorithm.of(Exchange(Gradients(), Every(), how, Replace()))
        wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=bucket_bytes)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(2))
        return len(model._bagua_engine.reducer.execution.lanes.apart)

    assert thread_ranks(2, train) == [more, more]


@pytest.mark.threads
@on_ranks(2)
def test_ranks_with_other_exchanges_are_told_apart_before_the_first_one():
    model = mlp()
    algorithm = Algorithm.of(Exchange(Weights(), Every(4 + bagua.comm.get_rank()), Mean(), Replace()))
    with pytest.raises(CollectiveMismatchError, match=r"steps=4.*steps=5|steps=5.*steps=4"):
        with_bagua(model, [plain_sgd(model.parameters())], algorithm)
