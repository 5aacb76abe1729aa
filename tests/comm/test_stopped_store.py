"""A store whose host is stopped: every question ends, and the error says so. The connection is open all the time."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from bagua.comm.startup.formation import fresh
from bagua.comm.startup.seats import group_of_seats
from bagua.comm.store import bounded
from bagua.comm.store.asking import consult, gather_values
from bagua.comm.store.serving import connect_store
from bagua.comm.torch_forms import tagged
from bagua.comm.transports.contract import Membership
from bagua.comm.transports.failure.finder import FailureFinder
from bagua.errors import CollectiveTimeoutError
from tests.harness import until
from tests.interpreters import interpreter

pytestmark = pytest.mark.gloo

HOST = """
import os, sys
from bagua.comm.store.serving import serve_store
store, port = serve_store()
print(port, os.getpid(), flush=True)
sys.stdin.read()
"""


class Host:
    """A process that hosts a store."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        port, pid = map(int, process.stdout.readline().split())
        self.pid = pid
        self.store = connect_store(port, 20.0)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: all(task.read_text().rpartition(") ")[2][0] == "T" for task in self.tasks()))  # One may answer.

    def tasks(self) -> list[Path]:
        return list(Path(f"/proc/{self.pid}/task").glob("*/stat"))

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(bounded, "_LEAST_S", 0.05)
    process = subprocess.Popen([*interpreter(), "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found = Host(process)
    try:
        yield found
    finally:
        found.go_on()
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: gather_values(store, "subject", 1, (0, 1), "here", 0.05),
        lambda store: consult(store, "subject", 1, 1, (0, 1), "here", sum, 0.05),
        lambda store: fresh(store, 1, (0, 1), 0.05),
        lambda store: FailureFinder(Membership(store, 1, (0, 1), (0, 0), 0.05), lambda: None),
    ],
    ids=["gather_values", "consult", "fresh", "failure finder"],
)
def test_ranks_that_meet_name_the_host_that_is_stopped(host, ask):
    host.stop()
    with pytest.raises(CollectiveTimeoutError, match="does not answer rank 1") as caught:
        ask(host.store)
    assert caught.value.peers == (0,)
    assert "stopped" in caught.value.advice


def test_ranks_that_do_not_come_are_named_when_the_host_answers(host):
    """The questions after the deadline are answered, too: who is missing is one of them."""
    with pytest.raises(CollectiveTimeoutError, match="1 of 2 ranks did not come") as caught:
        gather_values(host.store, "subject", 0, (0, 1), "here", 0.0)
    assert caught.value.peers == (1,)


def test_ranks_go_on_when_the_host_does(host):
    host.stop()
    with pytest.raises(CollectiveTimeoutError):
        gather_values(host.store, "subject", 0, (0,), "here", 0.05)
    host.go_on()
    assert gather_values(host.store, "another", 0, (0,), "here", 20.0) == ["here"]


def test_what_a_group_asks_of_its_store_ends(host):
    group = group_of_seats(host.store, [0], 0, "group", backend="gloo", timeout_s=0.05, meet_s=20.0)
    mail = tagged.mail_of(group.global_communicator)
    host.stop()
    with pytest.raises(CollectiveTimeoutError, match="does not answer"):
        group.subgroup([0])
    with pytest.raises(CollectiveTimeoutError, match="messages with a tag"):
        mail.find([0], 7)
    with pytest.raises(CollectiveTimeoutError, match="messages with a tag"):
        mail.receive(torch.zeros(1), 0, 7).wait()
    group.close()


def test_a_connection_that_is_first_needed_then_is_not_waited_for(host):
    group = group_of_seats(host.store, [0], 0, "group", backend="gloo", timeout_s=0.05, meet_s=20.0)
    host.stop()
    with pytest.raises(CollectiveTimeoutError, match="does not answer"):
        tagged.mail_of(group.global_communicator)
    with pytest.raises(CollectiveTimeoutError, match="does not answer"):
        group.connect([0], "more", timeout_s=0.05)
    group.close()
