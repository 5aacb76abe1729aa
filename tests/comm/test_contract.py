"""The transports of this project, and those from outside of it, against the contract that all transports share."""

from unittest.mock import Mock

import pytest
import torch

import bagua.comm
from bagua.comm import register_transport
from bagua.comm.transports import registry
from bagua.comm.transports.threads import ThreadsTransport
from bagua.errors import CollectiveMismatchError, ConfigurationError, TransportUnavailableError
from bagua.testing import ProcessRanks, ThreadRanks
from tests.contract.exercises import communicator
from tests.contract.transports import TransportContract
from tests.versions import nccl_ranks


@pytest.mark.threads
class TestThreads(TransportContract):
    sizes = (2, 3, 5)
    pool = pytest.fixture(lambda self: ThreadRanks(5))


@pytest.mark.solo
class TestSolo(TransportContract):
    sizes = (1,)
    can_lose_ranks = False
    pool = pytest.fixture(lambda self: ProcessRanks(1, backend="solo"))


@pytest.mark.shm
class TestShm(TransportContract):
    """The collectives are those of threads, which run with five ranks, too."""

    pool = pytest.fixture(lambda self: ProcessRanks(3, backend="shm"))


@pytest.mark.gloo
class TestGloo(TransportContract):
    compares_calls = False
    matches_in_order = False
    adds_in_float32 = False
    pool = pytest.fixture(lambda self: ProcessRanks(3, backend="gloo"))


@pytest.mark.gloo
class TestGlooWithDebugChecks(TransportContract):
    sizes = (3,)
    compares_messages = False
    matches_in_order = False
    adds_in_float32 = False
    pool = pytest.fixture(lambda self: ProcessRanks(3, backend="gloo", environment={"BAGUA_DEBUG": "1"}))


@pytest.mark.nccl
class TestNccl(TransportContract):
    sizes = (2,)
    compares_calls = False
    adds_in_float32 = False
    keeps_apart = False
    receives_from_any = False
    names_the_dead = False  # untried
    blocks_host = False
    deadline_s = 1.5  # untried with less

    @pytest.fixture
    def pool(self):
        if nccl_ranks() < 2:
            pytest.skip("two ranks on NCCL need two GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
        return ProcessRanks(2, backend="nccl")


class Outside(ThreadsTransport):
    compares_calls = False


register_transport("outside", Outside)


@pytest.mark.parametrize("name", ["shm", "gloo", "nccl", "bagua", "two words", "", "cpu:mine"])
def test_names_that_are_taken_or_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        register_transport(name, Outside)


def test_a_name_belongs_to_one_factory() -> None:
    register_transport("twice", Outside)
    register_transport("twice", Outside)
    with pytest.raises(ConfigurationError, match="twice"):
        register_transport("twice", ThreadsTransport)


def test_the_refusal_of_a_transport_is_an_error_on_all_ranks() -> None:
    register_transport("unplugged", Outside, refusal=lambda: TransportUnavailableError("there is no cable"))
    for outcome in ThreadRanks(2, backend="unplugged").outcomes(bagua.comm.get_rank):
        assert isinstance(outcome.error, TransportUnavailableError)
        assert "no cable" in str(outcome.error)


def test_calls_are_compared_with_debug_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare() -> None:
        communicator().allreduce(torch.ones(2))
        with pytest.raises(CollectiveMismatchError, match=r"."):
            communicator().allreduce(torch.ones(2 + communicator().rank))

    monkeypatch.setenv("BAGUA_DEBUG", "1")
    checked = Mock(wraps=registry.CheckedTransport)
    monkeypatch.setattr(registry, "CheckedTransport", checked)
    ThreadRanks(2, backend="outside").run(compare)
    assert checked.called


def test_what_was_connected_is_closed_if_calls_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Closing(Outside):
        def close(self) -> None:
            closed.append(self.rank)
            super().close()

    register_transport("alone", Closing)
    monkeypatch.setenv("BAGUA_DEBUG", "1")
    monkeypatch.setattr(registry, "C10dTransport", Mock(side_effect=TransportUnavailableError("no place beside it")))
    for outcome in ThreadRanks(2, backend="alone").outcomes(bagua.comm.get_rank):
        assert "no place beside it" in str(outcome.error)
    assert set(closed) == {0, 1}
