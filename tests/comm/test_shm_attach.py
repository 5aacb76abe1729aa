"""Who can share memory, and what those who cannot are told."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import logging
import os
import platform
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.comm
from bagua.comm.startup import formation as choice
from bagua.comm.store.serving import connect_store, serve_store
from bagua.comm.transports import registry as backends
from bagua.comm.transports.shm import attach as shm_attach
from bagua.comm.transports.shm import memory as shm_segments
from bagua.comm.transports.shm.transport import shm_refusal
from bagua.errors import BaguaError, TransportUnavailableError
from bagua.testing import ProcessRanks, die
from bagua.testing.ranks import this_rank
from tests.comm.memory_ranks import ramp
from tests.comm.test_shm import LARGE, resources, summed
from tests.contract.exercises import communicator

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
def test_ranks_in_different_pid_namespaces_communicate_and_name_the_one_that_is_killed() -> None:
    first, killed, last = run_anew(3, isolated, outlive_rank_1)
    assert first == [False, True, "PeerLostError", [1]]
    assert last == [True, True, "PeerLostError", [1]]
    assert killed == "kill me"


@needs_root
def test_pid_namespaces_on_an_old_kernel() -> None:
    for text in run_anew(3, isolated, meet_on_an_old_kernel):
        assert "its process is in another pid namespace, and Linux is older than 6.5" in text, text


# Other users.


@needs_root
def test_another_user_is_given_nothing() -> None:
    outcomes = run_anew(2, meet_beside_an_intruder)
    assert outcomes[1] == (True, b"0 bytes, 0 descriptors")
    assert outcomes[0] == (True, b"nothing was tried")


@needs_root
@pytest.mark.parametrize("unwary", [0, 1])
def test_both_ends_look_at_the_user(unwary: int) -> None:
    for text in run_anew(2, demand_as_another_user, unwary):
        assert "another user" in text or "did not connect" in text, text


# What there is not enough of.


def test_too_few_descriptors_to_attach(shm_pool) -> None:
    """Wherever they run out, all ranks are told, nothing is left behind, and other communicators go on."""
    results = shm_pool.run(attach_with_few_descriptors, 12, size=3)
    for rank, (problems, before, after) in enumerate(results):
        for problem in filter(None, problems):
            assert "Too many open files; raise `ulimit -n`, which is " in problem, problem
        assert not problems[-1]
        assert problems == sorted(problems, key=lambda problem: not problem), problems
        assert [bool(problem) for problem in problems] == [bool(problem) for problem in results[0][0]]
        assert after[0] <= before[0] + 2, f"descriptors of rank {rank}"
        assert after[1] <= before[1] + 4, f"mappings of rank {rank}"


@pytest.mark.parametrize("connected", [False, True])
def test_a_rank_that_dies_while_they_connect_is_named_at_once(shm_pool, connected: bool) -> None:
    outcomes = shm_pool.outcomes(attach_while_one_dies, connected, size=3, timeout_s=1000.0)
    for survivor in outcomes[:2]:
        assert "rank 2: it ended while the ranks connected" in survivor.value, survivor


def test_too_little_memory_later(shm_pool) -> None:
    """Memory that is missing is an error, never a SIGBUS; ``empty`` gives ordinary memory."""
    outcomes = shm_pool.run(run_out_of_memory_later, size=3)
    assert [ordinary for ordinary, _ in outcomes] == [False, True, False]
    assert outcomes[1][1].startswith("TransportUnavailableError"), outcomes
    for _, text in (outcomes[0], outcomes[2]):
        assert text.startswith("PeerLostError: lost rank 1: it left"), text
        assert "TransportUnavailableError" in text


def test_too_few_descriptors_later(shm_pool) -> None:
    texts = shm_pool.run(run_out_of_descriptors_later, size=3)
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


# What the ranks do. At the top level, because they run in processes.


NOBODY = 65534
CLONE_NEWPID = 0x20000000


def works(numel: int = LARGE) -> bool:
    """Whether an allreduce on the default group comes to the right sum, in ordinary and in shared memory."""
    comm = communicator()
    right = []
    for tensor in (torch.empty(numel), comm.empty(numel, dtype=torch.float32)):
        comm.allreduce(tensor.copy_(ramp(comm.rank, numel)))
        right.append(torch.equal(tensor, summed(comm, numel)))
    return all(right)


# Ranks in pid namespaces of their own.


Life = Callable[[int, Callable[[Any], None]], Any]


def isolated(port: int, life: Life) -> Any:
    """Run ``life`` in a child, on rank 0 beside this process, elsewhere as the first process of a pid namespace.

    Returns:
        What the child said. This process kills it if it asks for that.
    """
    if this_rank.get().rank and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "no pid namespace")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _live(port, life, writing)
    os.close(writing)
    with open(reading) as said:
        line = json.loads(said.readline() or '"it ended without a word"')
        if line == "kill me":
            # Not by itself: the first process of a namespace is immune to its own signals.
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return line


def _live(port: int, life: Life, writing: int) -> None:
    def say(what: Any) -> None:
        os.write(writing, json.dumps(what).encode() + b"\n")

    try:
        say(life(port, say))
    except BaseException as error:
        say(repr(error))
    finally:
        os._exit(0)


def outlive_rank_1(port: int, say: Callable[[Any], None]) -> Any:
    start(port, "shm", None, 3)
    comm = communicator()
    right = works()
    comm.barrier()
    if comm.rank == 1:
        say("kill me")
    try:
        while True:
            comm.allreduce(torch.ones(LARGE))
    except BaguaError as error:
        return [os.getpid() == 1, right, type(error).__name__, list(getattr(error, "peers", ()))]


def meet_on_an_old_kernel(port: int, say: Callable[[Any], None]) -> Any:
    shm_attach._SO_PEERPIDFD = 0x7FFF  # type: ignore[misc]  # an option that no kernel knows
    return demand(port, "none", 3)


# Another user.


def meet_beside_an_intruder(port: int) -> tuple[bool, bytes]:
    """Another user calls rank 0 with all that rank 1 would say. What it is given, and whether the ranks meet."""
    given = b"nothing was tried"
    original = shm_attach._Meeting._call

    def call(meeting: Any, other: int) -> None:
        nonlocal given
        given = _as_nobody(meeting._names[other], meeting._nonces[1], meeting._own[1:])
        original(meeting, other)

    shm_attach._Meeting._call = call  # type: ignore[method-assign]
    start(port, "shm", None, 2)
    return works(), given


def _as_nobody(name: str, nonce: bytes, descriptors: tuple[int, int]) -> bytes:
    """What rank 0 answers, and with how many descriptors; from a process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(10.0)
                connection.connect(f"\0{name}")
                with contextlib.suppress(BrokenPipeError):  # It may have hung up already.
                    socket.send_fds(connection, [shm_attach._HELLO.pack(1, nonce)], list(descriptors))
                try:
                    data, received, _, _ = socket.recv_fds(connection, 64, 2)
                except ConnectionResetError:
                    data, received = b"", []
                os.write(writing, b"%d bytes, %d descriptors" % (len(data), len(received)))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as said:
        answer = said.read()
    os.waitpid(child, 0)
    return answer


def demand_as_another_user(port: int, unwary: int) -> str:
    """Rank 1 belongs to another user, and rank ``unwary`` does not look."""
    if this_rank.get().rank == unwary:
        shm_attach._same_user = lambda _: True
    return demand(port, "another_user", 2)


# What there is not enough of.


@contextlib.contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    """With the soft limit ``kind``."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """With room for ``free`` more descriptors."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    gaps = [os.open(os.devnull, os.O_RDONLY)]
    while gaps[-1] < highest:
        gaps.append(os.open(os.devnull, os.O_RDONLY))
    try:
        with limited(resource.RLIMIT_NOFILE, gaps[-1] + 1 + free):
            yield
    finally:
        for descriptor in gaps:
            os.close(descriptor)


def attach_with_few_descriptors(most: int) -> tuple[list[str], tuple[int, int], tuple[int, int]]:
    """New communicators, where rank 1 may open so many more descriptors, from 0 to ``most``."""
    group = bagua.comm.get_default_group()
    problems: list[str] = []
    assert works()
    before = resources()
    for more in range(most + 1):
        try:
            with few_descriptors(more) if group.rank == 1 else contextlib.nullcontext():
                group.duplicate().close()
            problems.append("")
        except TransportUnavailableError as error:
            problems.append(str(error))
        assert works()
    bagua.comm.get_default_group()._descendants.clear()
    return problems, before, resources()


def attach_while_one_dies(connected: bool) -> str:
    """A new communicator, where rank 2 dies before it connects, or when it has connected."""
    group = bagua.comm.get_default_group()
    if group.rank == 2:
        connect = shm_attach._Meeting.connect

        def dying(meeting: shm_attach._Meeting) -> str:
            if connected:
                connect(meeting)
            die()
            return ""

        shm_attach._Meeting.connect = dying  # type: ignore[method-assign]
    try:
        group.duplicate()
    except TransportUnavailableError as error:
        return str(error)
    return "no error"


def run_out_of_memory_later() -> tuple[bool, str]:
    """Rank 1 finds no memory: for a tensor of ``empty``, then for its staging area."""
    comm = communicator()
    scarce = limited(resource.RLIMIT_FSIZE, 4096) if comm.rank == 1 else contextlib.nullcontext()
    with scarce:
        tensor = comm.empty(LARGE, dtype=torch.float32)
        ordinary = shm_memory_count() == 0
        try:
            comm.allreduce(tensor.fill_(1.0))
        except BaguaError as error:
            return ordinary, f"{type(error).__name__}: {error}"
    return ordinary, "no error"


def shm_memory_count() -> int:
    """Segments of this process that tensors lie in."""
    return len([segment for segment in shm_segments._registry._table[1] if not segment.gone])


def run_out_of_descriptors_later() -> str:
    """Rank 1 has no descriptor left for the memory of a peer."""
    comm = communicator()
    tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
    try:
        with few_descriptors(0) if comm.rank == 1 else contextlib.nullcontext():
            comm.allreduce(tensor)
    except BaguaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Who gets it.


def hinder(obstacle: str) -> None:
    """Put ``obstacle`` in the way of rank 1."""
    if this_rank.get().rank != 1:
        return
    if obstacle == "no_shared_memory":
        choice.shm_refusal = backends.shm_refusal = lambda: TransportUnavailableError("for this test")
    elif obstacle == "no_descriptors":
        shm_attach.create_memory = refuse
    elif obstacle == "no_connection":
        shm_attach.map_memory = refuse
    elif obstacle == "another_user":
        # Torch 2.15 finds its backends while it may: another user cannot read an environment of tox.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        os.setuid(NOBODY)


def start(port: int, backend: str | None, nodes: tuple[int, ...] | None, world_size: int) -> None:
    bagua.comm.init_process_group(
        backend=backend,
        store=connect_store(port, 20.0),
        rank=this_rank.get().rank,
        world_size=world_size,
        timeout=20.0,
        _nodes=nodes,
    )


def start_without_a_choice(port: int, obstacle: str, nodes: tuple[int, ...] | None) -> tuple[str, float, str]:
    """The backend that was chosen, the sum of 1, 2 and 3 on it, and what the log says."""
    hinder(obstacle)
    heard = io.StringIO()
    logging.getLogger("bagua").addHandler(logging.StreamHandler(heard))
    start(port, None, nodes, 3)
    tensor = torch.tensor([bagua.comm.get_rank() + 1.0])
    bagua.comm.allreduce(tensor)
    return bagua.comm.get_default_group().global_communicator.backend, tensor.item(), heard.getvalue()


def demand(port: int, obstacle: str, world_size: int) -> str:
    """The error of ``backend="shm"`` where that is not possible."""
    hinder(obstacle)
    try:
        start(port, "shm", None, world_size)
    except TransportUnavailableError as error:
        return str(error)
    return "no error"


def run_anew(size: int, job, *arguments):
    """What ``job`` returns on ranks that have yet to initialize."""
    store, port = serve_store()
    pool = ProcessRanks(size, backend=None, environment={"BAGUA_LOG": "info"})
    results = pool.run(job, port, *arguments)
    del store
    return results


@pytest.mark.parametrize(
    ("obstacle", "backend"),
    [("none", "shm"), ("no_shared_memory", "gloo"), ("no_descriptors", "gloo"), ("no_connection", "gloo")],
)
def test_the_default_backend(obstacle: str, backend: str) -> None:
    """Shared memory if all ranks can have it; what one rank lacks all lack, and the log says so."""
    outcomes = run_anew(3, start_without_a_choice, obstacle, None)
    for own_backend, total, log in outcomes:
        assert (own_backend, total) == (backend, 6.0)
        assert ("rank 1" in log and "for this test" in log) is (obstacle != "none"), log
        assert f"backend {backend}" in log
    warned = ["cannot share memory" in log for *_, log in outcomes]
    assert warned == [obstacle != "none", False, False], "one rank of the host warns, once"


def test_the_default_backend_on_several_hosts() -> None:
    for nodes, backend in (((0, 0, 1), "hybrid"), ((0, 1, 2), "gloo")):
        outcomes = run_anew(3, start_without_a_choice, "none", nodes)
        assert [outcome[:2] for outcome in outcomes] == [(backend, 6.0)] * 3
