"""Who can share memory, and what those who cannot are told."""

from __future__ import annotations

import os
import platform
import socket
import sys

import pytest

from bagua.comm.transports.shm import attach as shm_attach
from bagua.comm.transports.shm.transport import shm_refusal
from tests.comm import shm_attach_ranks
from tests.comm.test_shm import run_anew

pytestmark = pytest.mark.shm

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or make a namespace")


def refuse(*_: object, **__: object) -> int:
    raise OSError("for this test")


# This machine.


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (platform, "machine", lambda: "aarch64", "on aarch64"),
        (sys, "platform", "darwin", "this is darwin"),
        (sys, "_is_gil_enabled", lambda: False, "global interpreter lock"),
        (os, "memfd_create", refuse, "for this test"),
        (os, "eventfd", refuse, "for this test"),
        (os, "pidfd_open", refuse, "for this test"),
    ],
)
def test_machines_without_shared_memory_say_why(monkeypatch, owner, name: str, value, reason: str) -> None:
    assert shm_refusal() is None
    monkeypatch.setattr(owner, name, value, raising=False)
    assert reason in str(shm_refusal())


# Pid namespaces, as of containers in one pod.


@needs_root
def test_ranks_in_different_pid_namespaces() -> None:
    assert run_anew(3, shm_attach_ranks.isolated, "communicate") == [[False, True], [True, True], [True, True]]


@needs_root
def test_a_rank_killed_in_another_pid_namespace() -> None:
    first, killed_at, last = run_anew(3, shm_attach_ranks.isolated, "outlive rank 1")
    for name, peers, noticed_at in (first, last):
        assert (name, peers) == ("PeerLostError", [1])
        assert noticed_at - killed_at < 10.0


@needs_root
def test_pid_namespaces_on_an_old_kernel() -> None:
    for text in run_anew(3, shm_attach_ranks.isolated, "old kernel"):
        assert "its process is in another pid namespace, and Linux is older than 6.5" in text, text
    assert run_anew(3, shm_attach_ranks.isolated, "old kernel, any backend") == [["gloo", True]] * 3


# Other users.


@needs_root
def test_another_user_is_given_nothing() -> None:
    outcomes = run_anew(2, shm_attach_ranks.meet_beside_an_intruder)
    assert outcomes[1] == (True, b"0 bytes, 0 descriptors")
    assert outcomes[0] == (True, b"nothing was tried")


@needs_root
@pytest.mark.parametrize("unwary", [0, 1])
def test_both_ends_look_at_the_user(unwary: int) -> None:
    for text in run_anew(2, shm_attach_ranks.demand_as_another_user, unwary):
        assert "another user" in text or "did not connect" in text, text


# What there is not enough of.


def test_too_few_descriptors_to_attach(shm_pool) -> None:
    """Wherever they run out, all ranks are told, nothing is left behind, and other communicators go on."""
    results = shm_pool.run(shm_attach_ranks.attach_with_few_descriptors, 12, size=3)
    for rank, (problems, before, after) in enumerate(results):
        for problem in filter(None, problems):
            assert "Too many open files; raise `ulimit -n`, which is " in problem, problem
        assert not problems[-1]
        assert problems == sorted(problems, key=lambda problem: not problem), problems
        assert [bool(problem) for problem in problems] == [bool(problem) for problem in results[0][0]]
        assert after[0] <= before[0] + 2, f"descriptors of rank {rank}"
        assert after[1] <= before[1] + 4, f"mappings of rank {rank}"


def test_too_little_memory_to_attach(shm_pool) -> None:
    for text in shm_pool.run(shm_attach_ranks.attach_without_memory, size=3):
        assert "rank 1: it cannot make its shared memory" in text, text


@pytest.mark.parametrize("connected", [False, True])
def test_a_rank_that_dies_while_they_connect_is_named_at_once(shm_pool, connected: bool) -> None:
    outcomes = shm_pool.outcomes(shm_attach_ranks.attach_while_one_dies, connected, size=3, timeout_s=1000.0)
    for survivor in outcomes[:2]:
        assert "rank 2: it ended while the ranks connected" in survivor.value, survivor


def test_too_little_memory_later(shm_pool) -> None:
    """Memory that is missing is an error, never a SIGBUS; ``empty`` gives ordinary memory."""
    outcomes = shm_pool.run(shm_attach_ranks.run_out_of_memory_later, size=3)
    assert [ordinary for ordinary, _ in outcomes] == [False, True, False]
    assert outcomes[1][1].startswith("TransportUnavailableError"), outcomes
    for _, text in (outcomes[0], outcomes[2]):
        assert text.startswith("PeerLostError: lost rank 1: it left"), text
        assert "TransportUnavailableError" in text


def test_too_few_descriptors_later(shm_pool) -> None:
    texts = shm_pool.run(shm_attach_ranks.run_out_of_descriptors_later, size=3)
    assert texts[1].startswith("TransportUnavailableError: memory of rank 0 cannot be mapped: Too many open files"), (
        texts
    )
    for text in (texts[0], texts[2]):
        assert text.startswith("PeerLostError: lost rank 1: it left"), text
        assert "TransportUnavailableError" in text


def test_a_process_that_ends_before_its_descriptor_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an old kernel, where the number of the process might be another one's by then."""
    monkeypatch.setattr(shm_attach, "_SO_PEERPIDFD", 0x7FFF)  # an option that no kernel knows
    own, other = socket.socketpair()
    with own, other:
        os.close(shm_attach._process_descriptor(own))
        other.close()
        with pytest.raises(ConnectionResetError, match="ended while they connected"):
            shm_attach._process_descriptor(own)


# Forked children.


def test_data_loaders_read_shared_memory(shm_pool) -> None:
    shm_pool.run(shm_attach_ranks.load_data_from_shared_memory, size=2)
