"""Transports from outside: how they are registered, and what they get that can only send and receive."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed import HashStore

import bagua.comm
from bagua.comm import LoweredTransport, Membership, register_transport
from bagua.comm.transports import registry
from bagua.errors import (
    CollectiveMismatchError,
    CommunicationError,
    ConcurrentUseError,
    ConfigurationError,
    PeerLostError,
    TransportUnavailableError,
)
from bagua.parallel import DistributedDataParallel
from bagua.testing import ProcessRanks, ThreadRanks
from bagua.testing.contract.failures import caught, die_last, say, wait_until_said
from tests.comm.socket_transport import SocketTransport

BACKEND = SocketTransport.name


@pytest.mark.parametrize("name", ["shm", "gloo", "nccl", "bagua", "two words", "", "cpu:mine"])
def test_names_that_are_taken_or_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        register_transport(name, SocketTransport)


def test_a_name_belongs_to_one_factory() -> None:
    register_transport("twice", SocketTransport)
    register_transport("twice", SocketTransport)
    with pytest.raises(ConfigurationError, match="twice"):
        register_transport("twice", LoweredTransport)  # type: ignore[arg-type]


def test_the_refusal_of_a_transport_is_an_error_on_all_ranks() -> None:
    reason = TransportUnavailableError("there is no cable")
    register_transport("unplugged", SocketTransport, refusal=lambda: reason)
    outcomes = ThreadRanks(2, backend="unplugged").outcomes(bagua.comm.get_rank)
    for outcome in outcomes:
        assert isinstance(outcome.error, TransportUnavailableError)
        assert "no cable" in str(outcome.error)


def test_what_was_connected_is_closed_if_the_rest_cannot_be() -> None:
    closed = []

    class Half(SocketTransport):
        def __init__(self, membership: Membership) -> None:
            if membership.rank in made:
                raise TransportUnavailableError("the second time")
            made.append(membership.rank)
            super().__init__(membership)

        def close(self) -> None:
            closed.append(self.rank)
            super().close()

    made: list[int] = []
    register_transport("half", partial(LoweredTransport, Half))
    for outcome in ThreadRanks(2, backend="half").outcomes(bagua.comm.get_rank):
        assert isinstance(outcome.error, TransportUnavailableError)
        assert "the second time" in str(outcome.error)
    assert sorted(closed) == [0, 1]


def train() -> torch.Tensor:
    """Two steps of the engine, with sums in a background thread."""
    layer = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 10)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + bagua.comm.get_rank())
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


def test_models_train_on_it() -> None:
    on_threads, on_sockets = ThreadRanks(2).run(train), ThreadRanks(2, backend=BACKEND).run(train)
    assert torch.equal(on_sockets[0], on_sockets[1])
    assert torch.equal(on_sockets[0], on_threads[0])


def be_killed() -> CommunicationError | None:
    comm = bagua.comm.get_default_group().global_communicator
    tensor = torch.full((100_000,), comm.rank + 1.0, dtype=torch.bfloat16)
    comm.allreduce(tensor)
    assert bool((tensor == 6.0).all())
    die_last(comm.rank == 1, comm.size - 1)
    error = caught(lambda: comm.allreduce(tensor)).error
    assert isinstance(error, CommunicationError)
    return error


def test_a_process_that_is_killed_is_named_by_the_others() -> None:
    pool = ProcessRanks(3, backend=BACKEND, modules=[SocketTransport.__module__])
    for outcome in pool.outcomes(be_killed):
        error = outcome.value
        if outcome.rank != 1:
            assert isinstance(error, PeerLostError), f"{error!r}"
            assert error.peers == (1,)


def disagree() -> CommunicationError | None:
    comm = bagua.comm.get_default_group().global_communicator
    if comm.rank == 0:
        comm.send(torch.ones(3), 1)
        return None
    error = caught(lambda: comm.recv(torch.ones(3, dtype=torch.float64), 0)).error
    assert isinstance(error, CommunicationError)
    return error


def test_a_message_of_another_dtype_is_refused_by_its_receiver() -> None:
    _, receiver = ThreadRanks(2, backend=BACKEND).outcomes(disagree)  # The sender may hear of it, and fail as well.
    error = receiver.value
    assert isinstance(error, CollectiveMismatchError)
    assert "float64" in str(error.expected)
    assert "float32" in str(error.seen)


def compare() -> BaseException:
    comm = bagua.comm.get_default_group().global_communicator
    comm.allreduce(torch.ones(2))
    return caught(lambda: comm.allreduce(torch.ones(2 + comm.rank))).error


def test_calls_are_compared_with_debug_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_DEBUG", "1")
    errors = ThreadRanks(2, backend=BACKEND).run(compare)
    assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors


def test_what_was_connected_is_closed_if_calls_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Closing(SocketTransport):
        def close(self) -> None:
            closed.append(self.rank)
            super().close()

    def unable(*_: object) -> None:
        raise TransportUnavailableError("no place beside it")

    register_transport("alone", partial(LoweredTransport, Closing))
    monkeypatch.setenv("BAGUA_DEBUG", "1")
    monkeypatch.setattr(registry, "C10dTransport", unable)
    for outcome in ThreadRanks(2, backend="alone").outcomes(bagua.comm.get_rank):
        assert "no place beside it" in str(outcome.error)
    assert set(closed) == {0, 1}


def close_with_calls_under_way() -> float:
    """Rank 1 begins the first call when rank 0 closes; the second one of rank 0 is still in its queue then."""
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    tensors = [torch.ones(1000), torch.ones(1000)]
    if comm.rank == 0:
        lanes = comm._transport._lanes
        stop = lanes.stop

        def tell_and_stop(timeout_s: float) -> bool:
            say("closes")
            return stop(timeout_s)

        lanes.stop = tell_and_stop
    else:
        wait_until_said("closes", 1)
    for tensor in tensors:
        comm.allreduce(tensor, async_op=comm.rank == 0)
    comm.close()
    return sum(tensor.sum().item() for tensor in tensors)


def test_calls_that_were_started_are_completed_by_close() -> None:
    assert ThreadRanks(2, backend=BACKEND).run(close_with_calls_under_way) == [4000.0, 4000.0]


def be_refused(refusing: pytest.MonkeyPatch) -> float:
    comm = bagua.comm.get_default_group().global_communicator
    message = torch.ones(1)
    if comm.rank == 1:
        comm.send(message, 0)
        return 0.0
    lanes = comm._transport._lanes
    with refusing.context() as patch:
        patch.setattr(lanes, "start", raise_concurrent_use)
        error = caught(lambda: comm.recv_any(message)).error
    assert isinstance(error, ConcurrentUseError)
    comm.recv(message, 1, timeout=5.0)
    return message.item()


def raise_concurrent_use(*_: object, **__: object) -> None:
    raise ConcurrentUseError("in the middle of another call")


def test_a_receive_that_was_not_started_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ThreadRanks(2, backend=BACKEND).run(partial(be_refused, monkeypatch)) == [1.0, 0.0]


def test_one_rank_needs_no_connection() -> None:
    bagua.comm.init_process_group(backend=BACKEND, store=HashStore(), rank=0, world_size=1)
    try:
        assert bagua.comm.get_default_group().global_communicator.backend == "solo"
    finally:
        bagua.comm.destroy_process_group()
