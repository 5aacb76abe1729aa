"""A backward pass that fails on one rank, where the loop catches the error: no step of it may meet another step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    DiLoCoAlgorithm,
    Every,
    Exchange,
    LocalUpdates,
    Mean,
    Model,
    Replace,
    Weights,
    registry,
)
from bagua.errors import CommunicatorClosedError, PeerLostError
from bagua.parallel import with_bagua
from tests.algorithms.toys import WarmsUp
from tests.contract.algorithms import optimizer_maker
from tests.harness import State, assert_same_on_all_ranks, loss_of, snapshot
from tests.parallel.decentralized_simulation import train as train_decentralized
from tests.parallel.decentralized_simulation import wrap as wrap_decentralized
from tests.parallel.wrapping import WRAPS, Loop, Recomputed, Wrap, on_ranks

#: One bucket: nothing is exchanged before the last gradient is there.
ONE_BUCKET_BYTES = 10**9
FAILS_IN = 2


@contextmanager
def failing(place: nn.Module | torch.Tensor, error: type[BaseException] = MemoryError) -> Iterator[None]:
    """A backward pass in this block ends where the gradient of ``place`` is there."""

    def fails(gradient: torch.Tensor) -> None:
        raise error("out of memory, as it were")

    handle = (place.weight if isinstance(place, nn.Module) else place).register_hook(fails)
    with pytest.raises(error):
        yield
    handle.remove()


def check_all_are_told(
    rank: int,
    train: Callable[[int], object],
    backward: Callable[[], object],
    place: Callable[[], nn.Module | torch.Tensor],
    steps: int = FAILS_IN,
    error: type[BaseException] = MemoryError,
) -> None:
    """After some steps, the backward pass of rank 0 fails at ``place``: each rank hears of it in its next steps."""
    if rank != 0:
        with pytest.raises(PeerLostError, match="lost rank 0: it gave up: a backward pass failed before its") as caught:
            train(steps + 4)
        assert caught.value.peers == (0,)
        return
    train(steps)
    with failing(place(), error):
        backward()
    for _ in range(2):
        with pytest.raises(CommunicatorClosedError, match="a backward pass failed before its end") as refused:
            train(1)
        assert "Wrap it anew on all ranks" in str(refused.value)


def one_bucket(wrap: Wrap | str = "with_bagua", **options: Any) -> Loop:
    return Loop(wrap, bucket_bytes=ONE_BUCKET_BYTES, **options)


def with_algorithm(algorithm: Algorithm) -> Loop:
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> nn.Module:
        return with_bagua(model, [optimizer], algorithm, **options)

    return one_bucket(wrap, make_optimizer=optimizer_maker(algorithm))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("step", [0, FAILS_IN])
@pytest.mark.parametrize("place", ["first gradient", "last gradient", "output"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@on_ranks(3)
def test_the_engine_stops_on_all_ranks(wrap, step, place, error):
    loop, outputs = one_bucket(wrap), []

    def fails_at() -> nn.Module | torch.Tensor:
        outputs.append(loop.wrapped(torch.ones(1, 8)))
        return {"first gradient": loop.model[4], "last gradient": loop.model[0], "output": outputs[0]}[place]

    check_all_are_told(loop.rank, loop.train, lambda: outputs[0].sum().backward(), fails_at, step, error)


TOGETHER = {name: registry.get(name)() for name in registry if not issubclass(registry.get(name), LocalUpdates)}
OWN_PACE = TOGETHER.pop("async")
TOGETHER["the warm-up of async"] = AsyncModelAverageAlgorithm(warmup_steps=10)


@pytest.mark.parametrize("name", TOGETHER)
@on_ranks(2)
def test_with_every_algorithm_whose_ranks_step_together(name):
    loop = with_algorithm(TOGETHER[name])
    check_all_are_told(loop.rank, loop.train, loop.backward, lambda: loop.model[0])


@on_ranks(2)
def test_where_ranks_step_at_their_own_pace_nobody_needs_to_know():
    loop = with_algorithm(OWN_PACE)
    loop.train(FAILS_IN)
    if loop.rank == 0:
        with failing(loop.model[0]):
            loop.backward()
    loop.train(2)
    loop.model.bagua_algorithm.abort(loop.model)


@pytest.mark.parametrize("topology", ["complete", "ring", "one-peer-exp"])
@on_ranks(4)
def test_with_neighbours(topology):
    rank, model = bagua.comm.get_rank(), wrap_decentralized(topology=topology)
    check_all_are_told(
        rank,
        lambda steps: train_decentralized(model, range(steps)),
        lambda: loss_of(model, rank, FAILS_IN).backward(),
        lambda: model.module[0],
    )


@on_ranks(2)
def test_the_second_backward_pass_of_one_graph():
    """Each of them is a step."""
    loop = one_bucket()
    loss = loop.loss()
    loss.backward(retain_graph=True)
    check_all_are_told(loop.rank, lambda steps: steps and loop.train(steps), loss.backward, lambda: loop.model[0], 0)


@on_ranks(2)
def test_inside_a_reentrant_checkpoint():
    loop = one_bucket(make=Recomputed)
    check_all_are_told(loop.rank, loop.train, loop.backward, lambda: loop.model.inner[2], 1)


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2, assert_same_on_all_ranks)
def test_one_that_only_accumulates_may_fail(wrap) -> State:
    """Nobody waits for it. What it left in the gradients is the user's, as without bagua."""
    loop = one_bucket(wrap)
    loop.train(2)
    if loop.rank == 0:
        with loop.wrapped.no_sync(), failing(loop.model[0]):
            loop.backward()
    return loop.train(2)


def test_without_other_ranks_the_next_step_goes_on(thread_ranks):
    def train(fails: bool) -> State:
        model = wrap_decentralized()
        train_decentralized(model, range(2))
        if fails:
            with failing(model.module[0]):
                loss_of(model, 0, 2).backward()
            model.zero_grad()
        train_decentralized(model, range(2, 4))
        return snapshot(model)

    assert_same_on_all_ranks([thread_ranks(1, train, fails)[0] for fails in (True, False)])


@pytest.mark.parametrize("ends", ["bagua_finish", "with_bagua"])
@on_ranks(2)
def test_who_is_interrupted_while_results_come_in_does_not_go_on_without_them(ends):
    def interrupted() -> None:
        raise KeyboardInterrupt

    loop = with_algorithm(DiLoCoAlgorithm(2, overlap=1))
    loop.train(3)
    wrapped = loop.wrapped
    courses = wrapped._bagua_engine.reducer.scheduler.courses
    under_way = [flight for course in courses for flight in course.flights]
    assert under_way
    for flight in under_way:
        flight.wait = interrupted
    bagua.comm.barrier()  # Who gives up ends the calls of others, too.
    with pytest.raises(KeyboardInterrupt):
        wrapped.bagua_finish() if ends == "bagua_finish" else wrapped.with_bagua(loop.optimizer)
    with pytest.raises(CommunicatorClosedError, match="no longer be synchronized: KeyboardInterrupt"):
        wrapped.bagua_finish()


@dataclass(frozen=True)
class _Slower(Algorithm):
    """The mean of all weights in each step, and after two steps in every second one: in the same buckets."""

    @property
    def phases(self) -> tuple[Hashable, ...]:
        return 1, 2

    def phase(self, step: int, model: Model) -> Hashable:
        return 1 if step < FAILS_IN else 2

    def exchanges(self, phase: Hashable = 1) -> tuple[Exchange, ...]:
        return (Exchange(Weights(), Every(int(str(phase))), Mean(), Replace()),)


@pytest.mark.parametrize("algorithm", [WarmsUp(FAILS_IN), _Slower()])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@on_ranks(2)
def test_a_phase_that_is_not_left_to_its_end_ends_training_on_all_ranks(algorithm, error):
    """The others are in the next phase already: nothing that this rank did later would fit."""

    def interrupted() -> None:
        raise error("in the middle")

    loop = with_algorithm(algorithm)
    loop.train(FAILS_IN)
    if loop.rank == 0:
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            loop.train(2 * FAILS_IN)
        assert caught.value.peers == (1,)
        return
    loop.model._bagua_engine.reducer.scheduler.flush = interrupted
    with pytest.raises(error):
        loop.train()
    with pytest.raises(CommunicatorClosedError, match="in the middle"):
        loop.train()
