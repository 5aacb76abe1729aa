"""A backward pass that fails on one rank, where the loop catches the error: no step of it may meet another step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
from bagua.algorithms.async_model_average import AsyncModelAverageAlgorithmImpl
from bagua.errors import CommunicatorClosedError, PeerLostError
from bagua.parallel import with_bagua
from tests.algorithms.toys import WarmsUp
from tests.contract.algorithms import optimizer_maker
from tests.harness import State, assert_same_on_all_ranks, loss_of, mlp, sgd, snapshot, train_steps
from tests.parallel.decentralized_simulation import train as train_decentralized
from tests.parallel.decentralized_simulation import wrap as wrap_decentralized
from tests.parallel.wrapping import WRAPS, wrapped_for_rank

pytestmark = pytest.mark.threads

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


def assert_this_rank_is_told(step: Callable[[], object]) -> None:
    """At the next forward pass, and at each later one."""
    for _ in range(2):
        with pytest.raises(CommunicatorClosedError, match="a backward pass failed before its end") as caught:
            step()
        assert "Wrap it anew on all ranks" in str(caught.value)


def assert_peers_are_told(steps: Callable[[], object]) -> None:
    with pytest.raises(PeerLostError, match="lost rank 0: it gave up: a backward pass failed before its end") as caught:
        steps()
    assert caught.value.peers == (0,)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("step", [0, FAILS_IN])
@pytest.mark.parametrize("place", ["first gradient", "last gradient", "output"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_the_engine_stops_on_all_ranks(thread_ranks, wrap, step, place, error):
    def train() -> None:
        rank, model, optimizer, wrapped = wrapped_for_rank(wrap=WRAPS[wrap], bucket_bytes=ONE_BUCKET_BYTES)
        if rank != 0:
            assert_peers_are_told(lambda: train_steps(wrapped, optimizer, rank, range(step + 1)))
            return
        train_steps(wrapped, optimizer, rank, range(step))
        output = wrapped(torch.ones(1, 8))
        with failing({"first gradient": model[4], "last gradient": model[0], "output": output}[place], error):
            output.sum().backward()
        assert_this_rank_is_told(lambda: train_steps(wrapped, optimizer, rank, [step + 1]))

    thread_ranks(3, train)


@pytest.mark.parametrize("name", [name for name in registry if not issubclass(registry.get(name), LocalUpdates)])
def test_with_every_algorithm_whose_ranks_step_together(thread_ranks, name):
    algorithm = registry.get(name)()

    def train() -> None:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = optimizer_maker(algorithm)(model.parameters())
        with_bagua(model, [optimizer], algorithm, bucket_bytes=ONE_BUCKET_BYTES)
        if rank != 0:
            assert_peers_are_told(lambda: train_steps(model, optimizer, rank, range(FAILS_IN + 4)))
            return
        train_steps(model, optimizer, rank, range(FAILS_IN))
        with failing(model[0]):
            loss_of(model, rank, FAILS_IN).backward()
        assert_this_rank_is_told(lambda: loss_of(model, rank, FAILS_IN + 1))

    def train_at_its_own_pace() -> None:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        with_bagua(model, [optimizer], algorithm)
        for step in range(4):
            if rank == 0 and step == FAILS_IN:
                with failing(model[0]):
                    loss_of(model, rank, step).backward()
            else:
                train_steps(model, optimizer, rank, [step])
        model.bagua_algorithm.abort(model)

    thread_ranks(2, train_at_its_own_pace if registry.get(name) is AsyncModelAverageAlgorithm else train)


def test_in_the_warm_up_of_asynchronous_averaging(thread_ranks):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        with_bagua(model, [optimizer], AsyncModelAverageAlgorithm(warmup_steps=10))
        assert isinstance(model.bagua_algorithm, AsyncModelAverageAlgorithmImpl)
        if rank != 0:
            assert_peers_are_told(lambda: train_steps(model, optimizer, rank, range(FAILS_IN + 1)))
            return
        train_steps(model, optimizer, rank, range(FAILS_IN))
        with failing(model[0]):
            loss_of(model, rank, FAILS_IN).backward()
        assert_this_rank_is_told(lambda: loss_of(model, rank, FAILS_IN + 1))

    thread_ranks(2, train)


@pytest.mark.parametrize("topology", ["complete", "ring", "one-peer-exp"])
def test_with_neighbours(thread_ranks, topology):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model = wrap_decentralized(topology=topology)
        if rank != 0:
            assert_peers_are_told(lambda: train_decentralized(model, range(FAILS_IN + 4)))
            return
        train_decentralized(model, range(FAILS_IN))
        with failing(model.module[0]):
            loss_of(model, rank, FAILS_IN).backward()
        assert_this_rank_is_told(lambda: loss_of(model, rank, FAILS_IN + 1))

    thread_ranks(4, train)


def test_the_second_backward_pass_of_one_graph(thread_ranks):
    """Each of them is a step."""

    def train() -> None:
        rank = bagua.comm.get_rank()
        model = mlp()
        wrapped = WRAPS["with_bagua"](model, sgd(model.parameters()), bucket_bytes=ONE_BUCKET_BYTES)
        loss = loss_of(wrapped, rank, 0)
        loss.backward(retain_graph=True)
        if rank != 0:
            assert_peers_are_told(loss.backward)
            return
        with failing(model[0]):
            loss.backward()
        assert_this_rank_is_told(lambda: loss_of(wrapped, rank, 1))

    thread_ranks(2, train)


class Recomputed(nn.Module):
    """Its hidden layers are computed anew in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inner[0](inputs)
        return torch.utils.checkpoint.checkpoint(self.inner[1:], hidden, use_reentrant=True)


def test_inside_a_reentrant_checkpoint(thread_ranks):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model = Recomputed()
        wrapped = WRAPS["with_bagua"](model, sgd(model.parameters()), bucket_bytes=ONE_BUCKET_BYTES)
        loss_of(wrapped, rank, 0).backward()
        if rank != 0:
            assert_peers_are_told(lambda: loss_of(wrapped, rank, 1).backward())
            return
        with failing(model.inner[2]):
            loss_of(wrapped, rank, 1).backward()
        assert_this_rank_is_told(lambda: loss_of(wrapped, rank, 2))

    thread_ranks(2, train)


@pytest.mark.parametrize("wrap", WRAPS)
def test_one_that_only_accumulates_may_fail(thread_ranks, wrap):
    """Nobody waits for it. What it left in the gradients is the user's, as without bagua."""

    def train() -> State:
        rank, model, optimizer, wrapped = wrapped_for_rank(wrap=WRAPS[wrap], bucket_bytes=ONE_BUCKET_BYTES)
        train_steps(wrapped, optimizer, rank, range(2))
        if rank == 0:
            with wrapped.no_sync(), failing(model[0]):
                loss_of(wrapped, rank, 2).backward()
        train_steps(wrapped, optimizer, rank, range(2, 4))
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


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


def test_gradients_of_inputs_are_no_step(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = WRAPS["with_bagua"](model, optimizer, bucket_bytes=ONE_BUCKET_BYTES)
        train_steps(wrapped, optimizer, rank, range(2))
        if rank == 0:
            inputs = torch.ones(1, 8, requires_grad=True)
            torch.autograd.grad(wrapped(inputs).sum(), inputs)
        train_steps(wrapped, optimizer, rank, range(2, 4))
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


@pytest.mark.parametrize("ends", ["bagua_finish", "switch_to"])
def test_who_is_interrupted_while_results_come_in_does_not_go_on_without_them(thread_ranks, ends):
    def interrupted() -> None:
        raise KeyboardInterrupt

    def train() -> None:
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = with_bagua(model, optimizer, DiLoCoAlgorithm(2, overlap=1))
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(3))
        tracks = wrapped._bagua_engine.reducer.execution.scheduler.tracks
        under_way = [flight for track in tracks for flight in track.flights]
        assert under_way
        for flight in under_way:
            flight.wait = interrupted
        bagua.comm.barrier()  # Who gives up ends the calls of others, too.
        end = wrapped.bagua_finish if ends == "bagua_finish" else lambda: wrapped.switch_to("gradient_allreduce")
        with pytest.raises(KeyboardInterrupt):
            end()
        with pytest.raises(CommunicatorClosedError, match="no longer be synchronized: KeyboardInterrupt"):
            wrapped.bagua_finish()

    thread_ranks(2, train)


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
def test_a_phase_that_is_not_left_to_its_end_ends_training_on_all_ranks(thread_ranks, algorithm, error):
    """The others are in the next phase already: nothing that this rank did later would fit."""

    def interrupted() -> None:
        raise error("in the middle")

    def train() -> None:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        with_bagua(model, [optimizer], algorithm)
        train_steps(model, optimizer, rank, range(FAILS_IN))
        if rank == 0:
            with pytest.raises(PeerLostError, match="rank 1") as caught:
                train_steps(model, optimizer, rank, range(FAILS_IN, 3 * FAILS_IN))
            assert caught.value.peers == (1,)
            return
        model._bagua_engine.reducer.execution.scheduler.flush = interrupted
        with pytest.raises(error):
            train_steps(model, optimizer, rank, [FAILS_IN])
        with pytest.raises(CommunicatorClosedError, match="in the middle"):
            train_steps(model, optimizer, rank, [FAILS_IN])

    thread_ranks(2, train)
