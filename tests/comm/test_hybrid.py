"""Memory inside a host and Gloo between hosts: the contract of all transports on uneven hosts, and who owns what."""

import ctypes
import os
import shutil
import subprocess
import threading
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch

import bagua.comm
from bagua import env
from bagua.comm.transports import hybrid
from bagua.comm.transports.hybrid import HybridTransport, slice_owners
from bagua.comm.transports.memory.exchange import SMALL_BYTES
from bagua.comm.transports.shm import attach as shm_attach
from bagua.errors import CommunicationError, PeerLostError, TransportUnavailableError
from bagua.testing import ProcessRanks, this_rank
from tests.comm.memory_ranks import all_kinds
from tests.contract.exercises import communicator
from tests.contract.transports import TransportContract
from tests.harness import on_ranks

pytestmark = pytest.mark.hybrid


class RanksOnTwoHosts(ProcessRanks):
    def outcomes(self, function, *arguments, **options):
        return super().outcomes(function, *arguments, **{**options, "hosts": [2, 1]})


class TestHybrid(TransportContract):
    """The results on other hosts are those of the tests below; who is lost there, of ``test_culprits.py``."""

    sizes = (3,)
    compares_calls = False
    names_the_late = False
    matches_in_order = False
    adds_in_float32 = False
    pool = pytest.fixture(lambda self: RanksOnTwoHosts(3, backend="hybrid"))


pool = pytest.fixture(lambda: ProcessRanks(6, backend="hybrid"), scope="module")


def backends() -> tuple[str, str]:
    group = bagua.comm.get_default_group()
    return group.global_communicator.backend, group.intra_node_communicator.backend


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [([3], [("shm", "shm")] * 3), ([1, 1], [("gloo", "solo")] * 2), ([2, 1], [("hybrid", "shm")] * 2)],
    ids=str,
)
def test_parts_that_need_no_hybrid(pool, hosts: list[int], expected: list[tuple[str, str]]) -> None:
    assert pool.run(backends, hosts=hosts)[: len(expected)] == expected


def lose_a_rank_between_pieces() -> tuple[int, ...]:
    """Rank 3 dies while the piece before is on its way between the hosts."""
    hybrid._PIECE_BYTES = 4096
    group = bagua.comm.get_default_group()
    if group.rank == 3:
        reduce, seen = HybridTransport._reduce, []

        def die_at_the_third(self, *arguments):
            seen.append(arguments)
            if len(seen) == 3:
                this_rank.die()
            return reduce(self, *arguments)

        HybridTransport._reduce = die_at_the_third
    with pytest.raises(PeerLostError) as caught:
        group.global_communicator.allreduce(torch.ones(4 * SMALL_BYTES))
    return caught.value.peers


def test_a_rank_that_dies_between_pieces(pool) -> None:
    assert [one.value for one in pool.outcomes(lose_a_rank_between_pieces, hosts=[2, 2])[:3]] == [(3,)] * 3


@on_ranks(4, pool="pool", hosts=[2, 2])
def test_a_call_is_sent_off_while_the_one_before_is_on_its_way() -> None:
    """The first of two allreduces is gathered only when all pieces of the second are on their way."""
    hybrid._PIECE_BYTES = 16384
    slices, sent, ended = hybrid._Slices, threading.Event(), []
    send_off, gather = slices.send_off, slices.gather

    def send_off_and_tell(self) -> None:
        send_off(self)
        ended.append(self)
        if len(ended) == 2:
            sent.set()

    def gather_late(self) -> None:
        assert sent.wait(60)
        gather(self)

    slices.send_off, slices.gather = send_off_and_tell, gather_late
    comm = communicator()
    tensors = [torch.full((SMALL_BYTES,), float(comm.rank + more)) for more in range(2)]
    works = [comm.allreduce(tensor, async_op=True) for tensor in tensors]
    for more, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert tensor.unique().tolist() == [6.0 + 4 * more]


@on_ranks(4, pool="pool", hosts=[2, 2])
def test_a_rank_that_cannot_gather() -> None:
    """Rank 1 cannot gather the second of more pieces than may be on their way, while the next call has begun.

    That must not take the rest of this one for its own.
    """
    hybrid._PIECE_BYTES = 4096
    group, reduce, seen = bagua.comm.get_default_group(), HybridTransport._reduce, []
    refuse = Mock(side_effect=MemoryError("nothing left"))

    def fail_at_the_second(self, *arguments):
        gather = reduce(self, *arguments)
        seen.append(arguments)
        return refuse if len(seen) == 2 and group.rank == 1 else gather

    HybridTransport._reduce = fail_at_the_second
    works = [group.global_communicator.allreduce(torch.ones(4 * SMALL_BYTES), async_op=True) for _ in range(2)]
    found = []
    for work in reversed(works) if group.rank == 1 else works:  # Nobody has heard of the error when the next goes on.
        try:
            work.wait()
            found.append("no error")
        except (CommunicationError, MemoryError) as error:
            found.append(f"{type(error).__name__} {getattr(error, 'peers', error)}")
    own = ["CommunicatorClosedError ()", "MemoryError nothing left"]
    assert found == (own if group.rank == 1 else ["PeerLostError (1,)"] * 2)


def test_every_slice_has_one_owner_on_each_host() -> None:
    assert slice_owners([[0], [1, 2, 3], [4, 5]]) == [(0, 1, 4), (0, 2, 5), (0, 3, 4)]


@on_ranks(3, pool="pool", hosts=[2, 1])
def test_one_host_that_cannot_is_everyone() -> None:
    """Rank 1 cannot have shared memory; the rank alone on the other host hears of it."""
    if bagua.comm.get_rank() == 1:
        shm_attach.create_memory = Mock(side_effect=OSError("no memory for this test"))
    with pytest.raises(TransportUnavailableError, match="no memory for this test"):
        bagua.comm.get_default_group().duplicate()


# Two hosts for the kernel: rank 2 lives in a network namespace of its own. Names carry the process id, so that two
# runs on one machine do not meet. Both ends are in namespaces of their own: so no address appears on the machine
# itself, and nothing remains when the namespaces go.
NEAR, FAR = f"bagua-near-{os.getpid()}", f"bagua-far-{os.getpid()}"
ADDRESS, PORT = "10.213.0.1", 29777
_SET_UP = f"""
ip netns exec {NEAR} ip link set lo up
ip netns exec {FAR} ip link set lo up
ip netns exec {NEAR} ip link add near type veth peer name far netns {FAR}
ip netns exec {NEAR} ip addr add {ADDRESS}/24 dev near
ip netns exec {NEAR} ip link set near up
ip netns exec {FAR} ip addr add 10.213.0.2/24 dev far
ip netns exec {FAR} ip link set far up
"""


@pytest.fixture
def network_namespaces():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    made = [name for name in (NEAR, FAR) if subprocess.run(["ip", "netns", "add", name], check=False).returncode == 0]
    try:
        if made != [NEAR, FAR]:
            pytest.skip("no network namespace can be made here")
        for command in _SET_UP.strip().splitlines():
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=True)


def live_on_two_hosts(backend: str | None, near: str, far: str) -> tuple[str, tuple[int, ...]] | str:
    rank = this_rank.get().rank
    name, interface = (far, "far") if rank == 2 else (near, "near")
    assert ctypes.CDLL(None).setns(os.open(f"/run/netns/{name}", os.O_RDONLY), 0) == 0
    env.overlay({"GLOO_SOCKET_IFNAME": interface})
    patience = timedelta(seconds=20)
    store = torch.distributed.TCPStore(ADDRESS, PORT, 3, is_master=rank == 0, timeout=patience, wait_for_workers=False)
    try:
        bagua.comm.init_process_group(backend=backend, store=store, rank=rank, world_size=3, timeout=patience)
    except TransportUnavailableError as error:
        return str(error)
    all_kinds((0, 1, 7, 20_001))
    communicator().barrier()
    return communicator().backend, bagua.comm.get_default_group().node_sizes


@pytest.mark.usefixtures("network_namespaces")
def test_namespaces_are_hosts() -> None:
    assert ProcessRanks(3, backend=None).run(live_on_two_hosts, None, NEAR, FAR) == [("hybrid", (2, 1))] * 3


@pytest.mark.usefixtures("network_namespaces")
def test_shared_memory_ends_at_the_namespace() -> None:
    for text in ProcessRanks(3, backend=None).run(live_on_two_hosts, "shm", NEAR, FAR):
        assert "rank 2: it has another host" in text
