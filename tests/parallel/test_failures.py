"""Errors: in a user's hook, in the exchange, on another rank. They reach the training loop; nothing hangs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.hooks import RemovableHandle

import bagua.comm
from bagua import testing
from bagua.algorithms import Mean
from bagua.errors import BaguaError, CollectiveTimeoutError, CommunicationError
from tests.harness import State, assert_same_on_all_ranks
from tests.parallel.wrapping import WRAPS, Loop, Twice, on_ranks


class CodecError(Exception):
    """What a user's own code raises in these tests."""


def _chain(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


@pytest.fixture
def fails_on_rank_0(monkeypatch):
    """The exchange of step 2 fails there."""
    run = Mean.run

    def fails(self, flight, group):
        if flight.step == 2 and group.rank == 0:
            raise CodecError("no such block")
        return run(self, flight, group)

    monkeypatch.setattr(Mean, "run", fails)


def _raise(gradient: torch.Tensor) -> None:
    raise CodecError("user's hook")


@pytest.mark.parametrize(
    ("wrap", "delay_reduce"), [*((wrap, False) for wrap in WRAPS), ("bagua_init", True), ("with_bagua", True)]
)
@pytest.mark.usefixtures("fails_on_rank_0")
@on_ranks(2)
def test_an_error_in_the_exchange_reaches_the_end_of_backward(wrap, delay_reduce):
    loop = Loop(wrap, **({"delay_reduce": True} if delay_reduce else {}))
    loop.train(2)
    with pytest.raises((CodecError, CommunicationError)) as caught:
        loop.train(4)
    kind = CommunicationError if loop.rank else CodecError
    assert any(isinstance(error, kind) for error in _chain(caught.value))
    with pytest.raises(BaguaError):  # And it stays an error, at once.
        loop.train()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.usefixtures("fails_on_rank_0")
@on_ranks(2, assert_same_on_all_ranks)
def test_a_model_whose_exchange_failed_can_be_wrapped_anew(wrap) -> State:
    loop = Loop(wrap)
    with pytest.raises((CodecError, CommunicationError)):
        loop.train(6)
    if wrap == "bagua_init":
        loop.wrapped.switch_to("allreduce")
    else:
        loop.wrapped = WRAPS[wrap](loop.model, loop.optimizer)
    loop.train(1)
    return loop.train(1)


@on_ranks(2)
def test_an_error_in_forward_or_loss_leaves_the_engine_usable():
    loop = Loop()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            loop.wrapped(torch.zeros(2, 3))  # A wrong shape.
        loop.train()


@on_ranks(2)
def test_a_parameter_that_arrives_twice_in_one_backward_is_named():
    with pytest.raises(BaguaError, match=r"shared\.(weight|bias)"):
        Loop(make=Twice).train(2)


def _raise_in_a_hook(model: torch.nn.Module) -> RemovableHandle:
    # In the last bucket: the first one is under way by then.
    return model[0].weight.register_hook(_raise)


def _detach(model: torch.nn.Module) -> RemovableHandle:
    return model[1].register_forward_hook(lambda module, inputs, output: output.detach())


MISHAPS = {"hook": _raise_in_a_hook, "unused": _detach}


def _train_through_a_mishap(mishap: str) -> tuple[str, State]:
    """What ends the training when something happens to rank 1 only, and the weights after training on, wrapped anew."""
    loop = Loop()
    loop.train(3)
    handle = MISHAPS[mishap](loop.model) if loop.rank == 1 else None
    with pytest.raises((BaguaError, CodecError)) as caught:
        loop.train(7)
    if handle is not None:
        handle.remove()
    loop.wrapped.switch_to("allreduce")
    loop.step = 10
    return type(caught.value).__name__, loop.train(3)


@pytest.mark.parametrize(("mishap", "here"), [("hook", "CodecError"), ("unused", "ConfigurationError")])
def test_what_ends_one_process_ends_the_others_and_all_train_on_wrapped_anew(process_ranks, mishap, here):
    """The error of the others is not that of a timeout."""
    (other, first), (own, second), (another, third) = process_ranks(3, _train_through_a_mishap, mishap, timeout_s=120.0)
    assert own == here
    assert {other, another} <= {"PeerLostError", "CommunicatorClosedError"}
    assert_same_on_all_ranks([first, second, third])


def test_a_change_that_no_other_rank_makes_is_named_after_the_timeout():
    """The other one makes no step in which it would be seen to wait."""
    gave_up = threading.Event()

    def train() -> str:
        group = bagua.comm.new_group([0, 1], timeout=1.0)
        loop = Loop("with_bagua", process_group=group)
        if loop.rank == 1:
            assert gave_up.wait(60)
            return "rested"
        next(loop.model.parameters()).requires_grad_(False)
        with pytest.raises(
            CollectiveTimeoutError, match=r"did not come, after .* on this one: .*weight was frozen"
        ) as caught:
            loop.loss()
        gave_up.set()
        assert caught.value.peers == (1,)
        return "refused"

    assert testing.ThreadRanks(2).run(train) == ["refused", "rested"]
