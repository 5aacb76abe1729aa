"""Errors: in a user's hook, in the exchange, on another rank. They reach the training loop; nothing hangs."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import bagua.comm
from bagua import testing
from bagua.algorithms import Mean
from bagua.errors import BaguaError, CollectiveTimeoutError, CommunicationError
from bagua.parallel import with_bagua
from tests.harness import State, assert_same_on_all_ranks, loss_of, mlp, sgd, snapshot, train_steps
from tests.parallel.wrapping import WRAPS, by_bagua_init, wrapped_for_rank


class CodecError(Exception):
    """What a user's own code raises in these tests."""


def _chain(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


@pytest.mark.threads
@pytest.mark.parametrize(
    ("wrap", "delay_reduce"), [*((wrap, False) for wrap in WRAPS), ("bagua_init", True), ("with_bagua", True)]
)
def test_an_error_in_the_exchange_reaches_the_end_of_backward(thread_ranks, monkeypatch, wrap, delay_reduce):
    run = Mean.run

    def fails(self, flight, group):
        if flight.step == 2 and group.rank == 0:
            raise CodecError("no such block")
        return run(self, flight, group)

    monkeypatch.setattr(Mean, "run", fails)

    def train() -> str:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        options = {"delay_reduce": True} if delay_reduce else {}
        wrapped = WRAPS[wrap](model, optimizer, **options)
        train_steps(wrapped, optimizer, rank, range(2))
        with pytest.raises((CodecError, CommunicationError)) as caught:
            train_steps(wrapped, optimizer, rank, range(2, 6))
        chain = _chain(caught.value)
        if rank == 0:
            assert any(isinstance(error, CodecError) for error in chain)
        else:
            assert any(isinstance(error, CommunicationError) for error in chain)
        with pytest.raises(BaguaError):  # And it stays an error, at once.
            train_steps(wrapped, optimizer, rank, [6])
        return type(caught.value).__name__

    thread_ranks(2, train)


@pytest.mark.threads
def test_an_error_in_a_users_own_hook_ends_every_rank(thread_ranks):
    def train() -> None:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        train_steps(wrapped, optimizer, rank, range(2))

        def refuses(gradient: torch.Tensor) -> None:
            raise CodecError("user's hook")

        if rank == 1:
            model[2].weight.register_hook(refuses)
            with pytest.raises(CodecError):
                train_steps(wrapped, optimizer, rank, [2])
            raise CodecError("rank 1 ends")
        with pytest.raises(CommunicationError):
            train_steps(wrapped, optimizer, rank, range(2, 5))

    with pytest.raises(CodecError, match="rank 1 ends"):
        thread_ranks(2, train)


@pytest.mark.threads
def test_a_rank_that_survives_its_own_hook_can_be_used_again_after_wrapping_anew(thread_ranks):
    """A broken step leaves no hook, lock or thread behind that the next model would trip over."""

    def train() -> None:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        train_steps(wrapped, optimizer, rank, range(2))
        handle = model[2].weight.register_hook(_raise)
        with pytest.raises(CodecError):
            train_steps(wrapped, optimizer, rank, [2])
        handle.remove()
        other = mlp()
        fresh = sgd(other.parameters())
        train_steps(by_bagua_init(other, fresh), fresh, rank, range(3))

    thread_ranks(2, train)


def _raise(gradient: torch.Tensor) -> None:
    raise CodecError("user's hook")


@pytest.mark.threads
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_model_whose_exchange_failed_can_be_wrapped_anew(thread_ranks, monkeypatch, wrap):
    run = Mean.run

    def fails_once(self, flight, group):
        if flight.step == 2 and group.rank == 0:
            raise CodecError("this time only")
        return run(self, flight, group)

    monkeypatch.setattr(Mean, "run", fails_once)

    def train() -> State:
        rank, model, optimizer, wrapped = wrapped_for_rank(wrap=WRAPS[wrap])
        with pytest.raises((CodecError, CommunicationError)):
            train_steps(wrapped, optimizer, rank, range(6))
        if wrap == "bagua_init":
            wrapped.switch_to("allreduce")
        else:
            wrapped = WRAPS[wrap](model, optimizer)
        train_steps(wrapped, optimizer, rank, range(6, 8))
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


@pytest.mark.threads
def test_an_error_in_forward_or_loss_leaves_the_engine_usable(thread_ranks):
    def train() -> None:
        rank, _, optimizer, wrapped = wrapped_for_rank()
        for step in range(3):
            with pytest.raises(RuntimeError):
                wrapped(torch.zeros(2, 3))  # A wrong shape.
            train_steps(wrapped, optimizer, rank, [step])

    thread_ranks(2, train)


@pytest.mark.threads
def test_a_parameter_that_arrives_twice_in_one_backward_is_named(thread_ranks):
    """Two reentrant checkpoints of one layer: its gradient is not complete when it arrives first."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            for _ in range(2):
                hidden = torch.utils.checkpoint.checkpoint(self.shared, hidden, use_reentrant=True)
            return hidden[:, :4]

    def train() -> str:
        model = Twice()
        optimizer = sgd(model.parameters())
        wrapped = by_bagua_init(model, optimizer)
        with pytest.raises(BaguaError, match=r"shared\.(weight|bias)") as caught:
            train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(2))
        return str(caught.value)

    thread_ranks(2, train)


def _train_until_killed(victim: int) -> str:
    rank, _, optimizer, wrapped = wrapped_for_rank()
    train_steps(wrapped, optimizer, rank, range(3))
    try:
        for step in range(3, 10_000):
            if rank == victim and step == 5:
                testing.die()
            train_steps(wrapped, optimizer, rank, [step])
    except CommunicationError as error:
        return type(error).__name__
    return "trained on alone"


@pytest.mark.gloo
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_ends_the_others_with_a_typed_error(process_pool, victim):
    outcomes = process_pool.outcomes(_train_until_killed, victim, size=3)
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.value in ("PeerLostError", "CollectiveTimeoutError") for outcome in survivors), survivors


@pytest.mark.threads
def test_a_killed_thread_rank_ends_the_others_with_a_typed_error(thread_pool):
    outcomes = thread_pool.outcomes(_train_until_killed, 1, size=3)
    survivors = [outcome for outcome in outcomes if outcome.rank != 1]
    assert all(outcome.value in ("PeerLostError", "CollectiveTimeoutError") for outcome in survivors), survivors


def _raise_in_a_hook(model: torch.nn.Module) -> None:
    # In the last bucket: the first one is under way by then.
    model[0].weight.register_hook(_raise)


def _detach(model: torch.nn.Module) -> None:
    model[1].register_forward_hook(lambda module, inputs, output: output.detach())


MISHAPS = {"hook": _raise_in_a_hook, "unused": _detach}


def _train_with_mishap(mishap: str) -> tuple[str, float]:
    """What ends the training when something happens to rank 1 only, and after how many seconds."""
    rank, model, optimizer, wrapped = wrapped_for_rank()
    train_steps(wrapped, optimizer, rank, range(3))
    if rank == 1:
        MISHAPS[mishap](model)
    begun = time.monotonic()
    try:
        train_steps(wrapped, optimizer, rank, range(3, 10))
    except Exception as error:
        return type(error).__name__, time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.gloo
@pytest.mark.parametrize(("mishap", "here"), [("hook", "CodecError"), ("unused", "ConfigurationError")])
def test_what_ends_one_process_ends_the_others_long_before_the_timeout(process_ranks, mishap, here):
    (other, seconds), (own, _) = process_ranks(2, _train_with_mishap, mishap, timeout_s=120.0)
    assert own == here
    assert other in ("PeerLostError", "CommunicatorClosedError")
    assert seconds < 60


def _train_on_after_a_mishap() -> State:
    rank, model, optimizer, wrapped = wrapped_for_rank()
    train_steps(wrapped, optimizer, rank, range(3))
    handle = model[0].weight.register_hook(_raise) if rank == 1 else None
    with pytest.raises((CodecError, CommunicationError)):
        train_steps(wrapped, optimizer, rank, range(3, 10))
    if handle is not None:
        handle.remove()
    train_steps(wrapped.switch_to("allreduce"), optimizer, rank, range(10, 13))
    return snapshot(model)


@pytest.mark.gloo
def test_processes_train_on_after_they_wrapped_anew(process_ranks):
    assert_same_on_all_ranks(process_ranks(3, _train_on_after_a_mishap, timeout_s=20.0))


@pytest.mark.threads
def test_a_change_that_no_other_rank_makes_is_named_after_the_timeout():
    """The other one makes no step in which it would be seen to wait."""
    gave_up = threading.Event()

    def train() -> str:
        group = bagua.comm.new_group([0, 1], timeout=1.0)
        rank, model = bagua.comm.get_rank(), mlp()
        wrapped = with_bagua(model, [sgd(model.parameters())], process_group=group)
        if rank == 1:
            assert gave_up.wait(60)
            return "rested"
        next(model.parameters()).requires_grad_(False)
        with pytest.raises(
            CollectiveTimeoutError, match=r"did not come, after .* on this one: .*weight was frozen"
        ) as caught:
            loss_of(wrapped, rank, 0)
        gave_up.set()
        assert caught.value.peers == (1,)
        return "refused"

    assert testing.ThreadRanks(2).run(train) == ["refused", "rested"]
