"""Ranks that fork: their children say nothing to anybody, and end like any other process."""

import os
import socket
import stat
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bagua.comm import BackgroundThread, Communicator, solo_group
from bagua.comm.lifetime.forks import Family, family
from bagua.comm.transports.c10d.groups import let_go, open_sockets, opened_since
from bagua.errors import CommunicatorClosedError
from tests.comm.memory_ranks import on_communicators, run_on_gloo
from tests.launching import PATIENCE_S, launched

PROGRAM = ("-m", "tests.comm.fork_programs")
BACKENDS = [pytest.param("gloo", marks=pytest.mark.gloo), pytest.param("shm", marks=pytest.mark.shm)]
REFUSED = "refused 11 of 11, asked True CommunicatorClosedError"
#: What a child does and says; then how it ends, and what the calls of its parent give that were under way.
CHILDREN = {
    "end_of_script": ("", 0), "left_by_an_error": ("LookupError: the child's own error", 1), "left_at_once": ("", 0),
    "destroyed": ("initialized False False", 0), "began_anew": ("alone 1", 0), "collected": ("", 0),
    "refusals": (REFUSED, 0), "trained": ("refused 2 of 2", 0),
    "forked_again": (REFUSED, 0), "refusals@thread": (REFUSED, 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_children_end_and_their_parents_go_on(backend: str) -> None:
    with launched(2, *PROGRAM, backend, "children", *CHILDREN) as ranks:
        said, _ = (rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks)
    for child, (word, status) in CHILDREN.items():
        before, end, said = said.partition(f"{child} {status}, parent 4.0 5.0\n")
        assert end, before
        assert word in before
    assert not said


@pytest.mark.gloo
@pytest.mark.slow
def test_a_child_takes_no_part_in_averaging() -> None:
    with launched(2, *PROGRAM, "gloo", "averaging") as ranks:
        said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert said == ["refused True\nstatus 0\nparents together True\n", "parents together True\n"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["killed", "replaced"])
def test_an_heir_does_not_keep_connections_open(backend: str, how: str) -> None:
    """Rank 0 hears of it by its connection; the deadline would be a CollectiveTimeoutError."""
    with launched(2, *PROGRAM, backend, "heir", how) as (survivor, _):
        output, _ = survivor.communicate(timeout=PATIENCE_S)
    assert output.splitlines()[-1] == "PeerLostError (1,)", output


@on_communicators(2, run_on_gloo)
def test_a_call_under_way_in_another_thread_keeps_no_lock_in_a_child(comm: Communicator) -> None:
    comm.pipeline.in_use.acquire()
    comm.pipeline.disown()
    with pytest.raises(CommunicatorClosedError, match="forked"):
        comm.allreduce(torch.ones(3))
    comm._transport.close()  # There is no parent that would.


def test_a_group_that_another_thread_closes_keeps_no_lock_in_a_child() -> None:
    group = solo_group()

    def close() -> None:
        group.disown()
        group.close()

    with group._closing, group.recorder._writing:
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
    assert group.closed


def test_a_task_of_the_parent_raises_in_a_child_and_later_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundThread("parent")
    blocked = threading.Event()
    task = background.submit(blocked.wait)
    with background._lock, monkeypatch.context() as child:
        child.setattr(family, "generation", family.generation + 1)
        thread = background._thread
        background.disown()
        with pytest.raises(CommunicatorClosedError, match="forked"):
            task.result()
        assert background.submit(lambda: "runs").result(5) == "runs"
        assert background.stop()
    blocked.set()
    background._queue.put(None)  # It looks for its next task there.
    thread.join(60)
    assert not thread.is_alive()
    assert task.result(5)


def test_all_are_disowned_though_one_fails() -> None:
    mistakes = [LookupError("a mistake of ours"), None, LookupError("another one")]
    relatives, members = Family(), [Mock(**{"disown.side_effect": mistake}) for mistake in mistakes]
    for member in members:
        relatives.add(member)
    with pytest.raises(LookupError):
        relatives._disown_all()
    assert [member.disown.call_count for member in members] == [1, 1, 1]
    assert relatives.generation == 1


lists_descriptors = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system lists no descriptors")


@lists_descriptors
def test_only_an_exact_number_of_new_sockets_is_taken() -> None:
    """One more may be that of another thread, and stays as it is."""
    before = open_sockets()
    with socket.socket() as one, socket.socket() as other:
        one.set_inheritable(True)
        assert opened_since(before, 1) == opened_since(before, 3) == ()
        assert one.get_inheritable()
        assert {descriptor for descriptor, _ in opened_since(before, 2)} == {one.fileno(), other.fileno()}
        assert not one.get_inheritable()


@lists_descriptors
def test_a_connection_ends_with_the_process_that_made_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = open_sockets()  # The one that listens is among these.
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        near.set_inheritable(True)
        made = opened_since(before, 2)
        assert not near.get_inheritable()
        let_go([one for one in made if one[0] == near.fileno()])  # In a child, its share.
        assert far.recv(1) == b""
        assert not stat.S_ISSOCK(os.fstat(near.fileno()).st_mode)
        other = os.dup2(far.fileno(), near.fileno())
        let_go(made)  # Another socket has the number by now.
        assert stat.S_ISSOCK(os.fstat(other).st_mode)
        os.close(near.detach())
        far.close()
