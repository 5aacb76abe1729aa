"""Exchanges as values, and what the engine makes of them: points, lags, parts, lanes, outer steps."""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import bagua.comm
from bagua import algorithms
from bagua.algorithms import Add, Algorithm, Difference, Every, Exchange, Gradients, Mean, Parts, Replace, Weights
from bagua.comm import ProcessGroup, Work
from bagua.compression import MinMaxUInt8, TopK
from bagua.engine.options import Setting
from bagua.errors import CollectiveMismatchError, ConfigurationError, InvalidTypeError
from bagua.parallel import bagua_init, with_bagua
from bagua.primitives import AllGatherReducer, ErrorFeedback, PowerSGDReducer, ScatterGatherReducer
from tests.algorithms.stacked import Replicas, plain_sgd
from tests.contract.algorithms import promised_by
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, reference, sgd, snapshot
from tests.parallel.wrapping import Branches, Loop, assert_trained, of_this_rank, on_ranks

BYTES, SPARSE = ScatterGatherReducer(MinMaxUInt8()), AllGatherReducer(TopK(0.1))
WHOLE = Parts(1, "strided")
NESTEROV = algorithms.OuterStep(algorithms.Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))
EAGER = algorithms.EagerStep(algorithms.Outer(torch.optim.SGD, lr=0.7, momentum=0.9))
LOCAL_SGD = Algorithm.of(Exchange(Weights(), Every(4), Mean(BYTES), Replace()))
DILOCO = Algorithm.of(Exchange(Difference(), Every(4), Mean(), NESTEROV))
BY_LAYER = Exchange(Gradients(), Every(), Mean(), Replace(), at="backward ends", parts=Parts(3, "strided"))
BY_BYTES = replace(BY_LAYER, parts=Parts(1, "bytes"), label="bytes")
SLOW = Exchange(Difference(), Every(4), Mean(), algorithms.SlowStep(0.5), label="outer")
SLOWMO = algorithms.around("gradient_allreduce", SLOW)


def test_points_follow_from_what_is_sent():
    points = attrgetter("at", "until")
    assert points(gradients()) == ("bucket ready", "backward ends")
    late = Exchange(Weights(), Every(), Mean(), Add(), at="bucket stepped", lag=1)
    assert points(late) == ("bucket stepped", "bucket ready")
    assert points(Exchange(Weights(), Every(), Mean(), Replace())) == ("stepped", "stepped")
    assert Exchange(algorithms.Buffers(), Every(), Mean(), Replace()).parts == WHOLE


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


def mixed_and_averaged(then: algorithms.Then) -> Algorithm:
    mixed = Exchange(Weights(), Every(4), algorithms.Mix("ring"), then, lag=2)
    return Algorithm.of(mixed, Exchange(Weights(), Every(4, 1), Mean(), Replace(), label="b"))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Exchange(Weights(), Every(3), Mean(), Add(), lag=4), "at most 3"),
        (lambda: Exchange(Difference(), Every(3), Mean(), NESTEROV, lag=4), "undo every update"),
        (lambda: gradients(Mean(ErrorFeedback(BYTES)), lag=1), "at most 0"),
        (lambda: gradients(Mean(ErrorFeedback(BYTES)), when=Every(3), lag=3), "at most 2"),
        (lambda: algorithms.around("async", LOCAL_SGD.exchanges()[0]).reify(bagua.comm.solo_group()), "between steps"),
        (lambda: gradients(lag=1, until="bucket ready"), "take the place"),
        (lambda: gradients(lag=1, until="safe"), "of no use any more"),
        *(
            (lambda at=at: gradients(at=at, until=at), f"not there, or of no use any more, at '{at}'")
            for at in ("safe", "backward begins", "stepped")
        ),
        (lambda: Exchange(Weights(), Every(), Mean(), Replace(), lag=1), "undo every update"),
        (lambda: Exchange(Weights(), Every(3), Mean(), Replace(), lag=3), "undo every update"),
        (lambda: Exchange(Difference(), Every(4), Mean(), NESTEROV, lag=4), "undo every update"),
        (lambda: Exchange(Weights(), Every(), Mean(), Replace(), at="stepped", until="safe"), "comes before"),
        (lambda: Exchange(Weights(), Every(), Mean(), Replace(), at="soon"), "at"),
        (lambda: Exchange(Weights(), Every(), Mean(), Add(), at="bucket ready", parts=Parts(2, "bytes")), "arrival"),
        (lambda: Exchange(None, Every(), Mean(), NESTEROV), "anchor"),
        (lambda: Exchange(Difference(), Every(), Mean(), Replace()), "OuterStep"),
        (lambda: Exchange(Weights(), Every(), Mean(), NESTEROV), "anchor"),
        (lambda: Exchange(Difference(), Every(3), algorithms.Mix("ring"), NESTEROV), "would not be equal"),
        (lambda: Exchange(Difference(), Every(3), algorithms.Mix("ring"), algorithms.SlowStep()), "would not be equal"),
        (lambda: Exchange(Difference(), Every(4), Mean(), EAGER, lag=4), "local"),
        (lambda: Exchange(Difference("local"), Every(4), Mean(), EAGER, lag=3), "the period, which is 4"),
        (lambda: Exchange(Weights(), Every(8), Mean(SPARSE), Replace()), "become what is left"),
        (lambda: Exchange(Weights(), Every(8), Mean(ErrorFeedback(PowerSGDReducer(1))), Add()), "become what is left"),
        (lambda: Exchange(algorithms.Buffers(), Every(8), algorithms.Sum(SPARSE), Replace()), "become what is left"),
        (lambda: Exchange(Weights(), 8, Mean(), Replace()), "when"),
        (lambda: Exchange("weights", Every(), Mean(), Replace()), "what"),
        (lambda: Every(0), "steps"),
        (lambda: Parts(3), "arrival"),
        (lambda: Parts(3, "size"), "by"),
        (lambda: algorithms.Outer(lambda parameters: None), "name"),
        (lambda: Add(0.0), "gain"),
        (lambda: Difference("anchor"), "scope"),
        (lambda: algorithms.Blend(2.0), "keep"),
        (lambda: algorithms.Mix("nowhere"), "nowhere"),
        (lambda: algorithms.Sum(hierarchical=True, over="inside"), "hierarchical"),
        (lambda: algorithms.Sum(over="hosts"), "over"),
        (lambda: Algorithm.of(gradients(), gradients(label="b")), "both replace gradients"),
        (lambda: Algorithm.of(gradients(), gradients()), "same label"),
        (lambda: Algorithm.of(BY_LAYER, BY_BYTES), "both replace gradients"),
        (lambda: Algorithm.of(gradients(when=Every(2)), gradients(when=Every(3), label="b")), "both replace gradients"),
        (lambda: mixed_and_averaged(Replace()), "replaces what the second one writes"),
    ],
)
def test_contradictions_are_refused_when_the_value_is_made(make: Callable[[], object], problem: str) -> None:
    with pytest.raises((ConfigurationError, InvalidTypeError), match=problem):
        make()


def test_expectations_follow_from_the_exchanges():
    assert promised_by(Algorithm.of(gradients())) == "exact"
    assert promised_by(Algorithm.of(gradients(Mean(BYTES)))) == "bounded"
    assert promised_by(Algorithm.of(gradients(lag=1))) == "bounded"
    assert promised_by(Algorithm.of(gradients(when=Every(2)))) == "consensus"
    assert promised_by(SLOWMO) == "exact"
    assert promised_by(LOCAL_SGD) == promised_by(DILOCO) == "consensus"


def loop_of(algorithm: Algorithm | str, make: Callable[[], nn.Module] = mlp, rate: float = 0.1, **options: Any) -> Loop:
    return Loop("with_bagua", make, functools.partial(torch.optim.SGD, lr=rate), algorithm=algorithm, **options)


def train_for(algorithm: Algorithm | str, steps: int) -> State:
    return loop_of(algorithm, of_this_rank).train(steps)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Algorithm.of(gradients(algorithms.Sum(), lag=2)),
        lambda: Algorithm.of(gradients(when=Every(2)), gradients(when=Every(2, 1), label="b")),
        lambda: mixed_and_averaged(Add()),
    ],
    ids=["late sums", "in turns", "mixed and averaged"],
)
def test_what_can_work_is_not_refused_and_works(make, thread_ranks):
    """What rank 0 learns depends on the data of rank 1."""

    def train(data_of_rank_1: int) -> State:
        loop = loop_of(make())
        loop.rank *= data_of_rank_1
        return loop.train(9)

    one, other = (thread_ranks(2, train, data)[0] for data in (1, 2))
    moved = [float((other[name] - value).norm()) for name, value in one.items()]
    assert all(1e-3 < distance < 10.0 for distance in moved), moved


def test_late_gradients_of_what_is_unused_by_now_are_not_lost(thread_ranks):
    def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        return model(torch.full((2, 8), 1.0 + rank), "left" if number % 2 else "right").square().mean()

    def train() -> State:
        late = Algorithm.of(gradients(lag=1))
        return loop_of(late, Branches, losses=loss, find_unused_parameters=True).train(6)

    expected = Branches()
    late = [torch.zeros_like(one) for one in expected.parameters()]
    for number in range(6):
        total = loss(expected, 0, number) + loss(expected, 1, number)
        found = torch.autograd.grad(total / 2, list(expected.parameters()), allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            torch._foreach_add_(list(expected.parameters()), late, alpha=-0.1)
        late = list(found)
    assert_trained(thread_ranks(2, train), snapshot(expected))


def test_a_safe_point_comes_once_in_each_step(thread_ranks):
    """At the first training forward, whatever others follow before the step is over."""

    def backward(model: nn.Module, called: nn.Module, rank: int, number: int, first: Any) -> None:
        with first:
            loss_of(called, rank, number).backward()
        with torch.no_grad():  # A mean in the next forward would spread it.
            model[4].bias.add_(rank)
        (loss_of(called, rank, number) + loss_of(called, rank, number + 1)).backward()

    def train() -> State:
        loop = loop_of(Algorithm.of(Exchange(Weights(), Every(), Mean(), Replace(), at="safe", parts=WHOLE)))
        for number in range(4):
            loop.optimizer.zero_grad()
            backward(loop.model, loop.wrapped, loop.rank, number, loop.wrapped.no_sync())
            loop.optimizer.step()
        return snapshot(loop.model)

    ranks = Replicas(2)
    for number in range(4):
        if number:  # In the first forward, there is nothing to exchange yet.
            ranks.rows = ranks.mean
        for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
            optimizer.zero_grad()
            backward(model, model, rank, number, contextlib.nullcontext())
        ranks.update()
    ranks.assert_equals(thread_ranks(2, train))


@dataclass(frozen=True)
class CopiedGradients(algorithms.What):
    reads: ClassVar[frozenset[str]] = frozenset({"gradients"})

    def fill(self, flight: algorithms.Flight) -> None:
        flight.flat.copy_(flight.bucket.allocate_gradients())


@dataclass(frozen=True)
class Look(algorithms.Then):
    def fold(self, flight: algorithms.Flight) -> None:
        assert flight.bucket.gradients is not None


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm.of(Exchange(CopiedGradients(), Every(), Mean(), Replace())),
        Algorithm.of(Exchange(Gradients(), Every(), None, Look(), label="look"), gradients()),
    ],
    ids=["copied", "looked at"],
)
def test_gradients_are_divided_once(thread_ranks, algorithm):
    assert_trained(thread_ranks(2, train_for, algorithm, 3), reference(mlp(), plain_sgd, 2, range(3)))


@on_ranks(2)
def test_a_sum_of_gradients_that_nobody_used_stays_none():
    model = torch.nn.ModuleList([mlp(), torch.nn.Linear(2, 2)])
    algorithm = Algorithm.of(replace(BY_LAYER, how=algorithms.Sum()))
    wrapped = with_bagua(model, [sgd(model.parameters())], algorithm, find_unused_parameters=True)
    for step in range(2):
        loss_of(wrapped[0], bagua.comm.get_rank(), step).backward()
    assert [one.grad is None for one in model.parameters()] == [False] * 6 + [True] * 2


@pytest.mark.parametrize("parts", [Parts(), BY_LAYER.parts], ids=["arrival", "strided"])
def test_what_was_sent_is_known_without_the_factor_of_the_mean(thread_ranks, parts, monkeypatch):
    @dataclass(frozen=True)
    class OwnShare(Replace):
        def start(self, flight: algorithms.Flight) -> None:
            flight.keep()

        def fold(self, flight: algorithms.Flight) -> None:
            assert flight.sent is not None
            flight.flat.copy_(flight.sent)
            super().fold(flight)

    # Each rank steps with its own gradients.
    monkeypatch.setattr("bagua.engine.formation.Formation.concern_step", lambda *_: None)
    algorithm = Algorithm.of(replace(BY_LAYER, then=OwnShare(), parts=parts))
    alone = Replicas(2)
    for number in range(6):
        alone.step(number)
    alone.assert_equals(thread_ranks(2, train_for, algorithm, 6))


@pytest.mark.parametrize("how", [Mean(), Mean(ErrorFeedback(BYTES))], ids=["exact", "residuals"])
def test_tuning_leaves_flights_of_parts_alone(thread_ranks, how):
    then = algorithms.OuterStep(NESTEROV.optimizer, algorithms.Blend(0.5))
    exchange = Exchange(Difference(), Every(6, offset=-2), how, then, lag=2, parts=Parts(3, "strided"))

    def train(tuned: bool) -> State:
        loop = loop_of(Algorithm.of(exchange))
        for number in range(14):
            loop.train()
            if tuned:
                formation = loop.reducer.formation
                formation.recut(Setting(1000 + 1000 * (number % 2), formation.setting.hierarchical))
        return snapshot(loop.model)

    torch.testing.assert_close(thread_ranks(2, train, True), thread_ranks(2, train, False), rtol=0, atol=0)


def test_what_starts_from_weights_starts_from_those_that_training_begins_with(thread_ranks):
    """Buckets that the user wants are formed before rank 0's weights have come."""

    def train(buckets: bool) -> State:
        wanted = [[name for name, _ in mlp().named_parameters()]] if buckets else []
        return Loop(lambda *made: bagua_init(*made, DILOCO, buckets=wanted)[0], of_this_rank, plain_sgd).train(4)

    torch.testing.assert_close(thread_ranks(2, train, True), thread_ranks(2, train, False), rtol=0, atol=0)


@dataclass(frozen=True)
class Followed(Algorithm):
    """One exchange for five steps, and another one after that."""

    first: Exchange
    later: Exchange

    @property
    def phases(self) -> tuple[Hashable, ...]:
        return (0, 1)

    def phase(self, step: int, model: algorithms.Model) -> Hashable:
        return int(step >= 5)

    def exchanges(self, phase: Hashable = 1) -> tuple[Exchange, ...]:
        return (self.later if phase else self.first,)


def test_parts_of_what_remembers_do_not_change_from_phase_to_phase():
    """The anchor of a label lies in its parts: others began with a new one, and nothing was said."""
    whole = Exchange(Difference(), Every(2), Mean(), NESTEROV, parts=WHOLE)
    halves = replace(whole, parts=Parts(2, "strided"))
    with pytest.raises(ConfigurationError, match=r"anchor.* would begin anew where the parts change.*another label"):
        Followed(whole, halves).reify(bagua.comm.solo_group())
    for later in (replace(halves, label="later"), whole):
        Followed(whole, later).reify(bagua.comm.solo_group())


@on_ranks(2)
def test_what_an_earlier_phase_remembers_is_no_anchor():
    """The gradients' residual is remembered under the label that outer steps have later."""
    loop = loop_of(Followed(gradients(Mean(ErrorFeedback(BYTES))), *DILOCO.exchanges()), rate=0.0)
    before = snapshot(loop.model)
    assert_close(loop.train(14), before)


def freeze(model: nn.Module, layer: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name[0] != layer)
    return model


def step_anchors(outer: torch.optim.Optimizer, ranks: Replicas) -> None:
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
    ranks = Replicas(2)
    outer = kind([nn.Parameter(one.detach().clone()) for one in ranks.models[0].parameters()], **options)
    for number in range(14):
        for model in ranks.models:
            freeze(model, first if number < 5 else later)
        ranks.step(number)
        if number % 4 == 3:
            step_anchors(outer, ranks)

    def train() -> State:
        then = algorithms.OuterStep(algorithms.Outer(kind, **options))
        exchange = Exchange(Difference(), Every(4), Mean(), then)
        loop = loop_of(Algorithm.of(exchange), lambda: freeze(mlp(), first))
        loop.train(5)
        freeze(loop.model, later)
        return loop.train(9)

    ranks.assert_equals(thread_ranks(2, train))


@on_ranks(2)
def test_what_has_yet_to_start_from_weights_is_not_saved():
    loaded = {name: value + 10 for name, value in snapshot(mlp()).items()}
    loop = loop_of(DILOCO, rate=0.0)
    loop.train(6)
    loop.wrapped.load_state_dict(loaded)
    loop.wrapped.bagua_load_state_dict(loop.wrapped.bagua_state_dict())
    assert_close(loop.train(3), loaded)


def test_shared_state_first_makes_weights_equal(thread_ranks):
    def train() -> tuple[State, str]:
        loop = Loop("data_parallel", of_this_rank, plain_sgd, algorithm=DILOCO, init_sync=False)
        loop.optimizer.param_groups[0]["lr"] = 0.0
        return loop.train(2), loop.wrapped.bagua_state_digest()

    (first, digest), (second, other) = thread_ranks(2, train)
    assert_same_on_all_ranks([first, second])
    assert digest == other


def test_an_eager_step_remembers_what_others_bring_for_buckets_too(thread_ranks):
    """The memory of a flight is that of the next one there."""
    whole = Exchange(Difference("local"), Every(3), Mean(), EAGER, lag=3, parts=WHOLE)
    by_arrival = replace(whole, parts=Parts())
    runs = (thread_ranks(2, train_for, Algorithm.of(exchange), 13) for exchange in (by_arrival, whole))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm", [DILOCO, Algorithm.init("power_sgd", hierarchical=False), Algorithm.init("sign_sgd", warmup_steps=0)]
)
def test_a_digest_names_what_differs(thread_ranks, algorithm):
    def train() -> str:
        loop = loop_of(algorithm, bucket_bytes=10**6)
        loop.train(5)
        digest = loop.wrapped.bagua_state_digest()
        memory = loop.reducer.scheduler.places[0].memory
        shared = [one.name for one in memory.declared.values() if one.scope == "shared" and one.per != "family"]
        tensor = memory.state[shared[0]] if shared else loop.model[0].weight.data
        if loop.rank == 1:
            tensor.view(-1)[0] += 1
        with pytest.raises(CollectiveMismatchError, match=shared[0] if shared else r"0\.weight") as caught:
            loop.wrapped.bagua_state_digest()
        assert {caught.value.rank, *caught.value.peers} == {0, 1}
        return digest

    first, second = thread_ranks(2, train)
    assert first == second


@pytest.mark.parametrize("size", [1, 2])
def test_no_exchange_is_made_and_checked_anew_in_each_step(thread_ranks, monkeypatch, size):
    made, own = [], Exchange.__post_init__

    def train() -> int:
        loop = loop_of(SLOWMO)
        loop.train(2)
        bagua.comm.get_default_group().global_communicator.barrier()
        before = len(made)
        loop.train(5)
        return len(made) - before

    monkeypatch.setattr(Exchange, "__post_init__", lambda self: (made.append(self), own(self))[1])
    assert thread_ranks(size, train) == [0] * size
    assert made


def test_what_goes_on_beside_other_exchanges_does_not_hold_them_up(thread_ranks):
    """The outer mean waits until three more gradients were exchanged: on one connection that would be forever."""
    done = [threading.Event(), threading.Event()]

    @dataclass(frozen=True)
    class Slow(Mean):
        def run(self, flight: algorithms.Flight, group: ProcessGroup) -> Work | None:
            assert done[group.rank].wait(60), "the inner exchanges wait for the outer one"
            return super().run(flight, group)

    def train() -> State:
        slow = Exchange(Weights(), Every(4), Slow(), Add(), lag=3, label="outer")
        loop = loop_of(algorithms.around("gradient_allreduce", slow))
        loop.train(6)
        done[loop.rank].set()
        return loop.train(3)

    assert_same_on_all_ranks(thread_ranks(2, train))


@dataclass(frozen=True)
class InTurn(Mean):
    """A mean of which the exchange of the first bucket ends when that of the second one has begun."""

    begun: ClassVar[list[threading.Event]]

    def blocking(self, group: ProcessGroup, prepared: object) -> bool:
        return True

    def run(self, flight: algorithms.Flight, group: ProcessGroup) -> None:
        if flight.bucket.index == 1:
            self.begun[group.rank].set()
        elif flight.bucket.index == 0:
            assert self.begun[group.rank].wait(60), "the second bucket waits for the first one"
        group.global_communicator.allreduce(flight.flat)


def test_over_a_network_buckets_take_turns_on_two_lanes(thread_ranks, monkeypatch):
    monkeypatch.setattr("bagua.comm.transports.memory.transport.MemoryTransport.overlaps", True)
    monkeypatch.setattr(InTurn, "begun", [threading.Event(), threading.Event()], raising=False)
    states = thread_ranks(2, train_for, Algorithm.of(Exchange(Gradients(), Every(), InTurn(), Replace())), 3)
    assert_same_on_all_ranks(states)
    monkeypatch.undo()
    assert_same_on_all_ranks([states[0], *thread_ranks(2, train_for, "gradient_allreduce", 3)])


class OnItsOwn(InTurn):
    """The same, on connections that it keeps to itself."""

    side_by_side: ClassVar[bool] = False

    def run(self, flight: algorithms.Flight, group: ProcessGroup) -> None:
        group.global_communicator.allreduce(flight.flat)


@pytest.mark.parametrize(
    ("how", "overlaps", "bucket_bytes", "more"),
    [(InTurn(), True, 1000, 1), (InTurn(), False, 1000, 0), (InTurn(), True, 10**6, 0), (OnItsOwn(), True, 1000, 0)],
)
def test_a_second_lane_is_there_only_where_it_saves_time(thread_ranks, monkeypatch, how, overlaps, bucket_bytes, more):
    monkeypatch.setattr("bagua.comm.transports.memory.transport.MemoryTransport.overlaps", overlaps)
    monkeypatch.setattr(InTurn, "run", OnItsOwn.run)

    def train() -> int:
        loop = loop_of(Algorithm.of(gradients(how)), bucket_bytes=bucket_bytes)
        loop.train(2)
        return len(loop.model._bagua_engine.reducer.scheduler.lanes.apart)

    assert thread_ranks(2, train) == [more, more]
