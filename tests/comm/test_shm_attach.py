"""Who can share memory, and what those who cannot are told."""

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
from bagua.comm.transports import registry as backends
from bagua.comm.transports.shm import attach as shm_attach
from bagua.comm.transports.shm import memory as shm_segments
from bagua.comm.transports.shm.transport import shm_refusal
from bagua.errors import BaguaError, TransportUnavailableError
from bagua.testing import ProcessRanks, die, this_rank
from tests.comm.memory_ranks import ramp
from tests.comm.test_shm import LARGE, resources, summed
from tests.contract.exercises import communicator
from tests.harness import on_ranks

pytestmark = pytest.mark.shm

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or make a namespace")
NOBODY = 65534
CLONE_NEWPID = 0x20000000


def refuse(*_: object, **__: object) -> int:
    raise OSError("for this test")


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (platform, "machine", lambda: "aarch64", "on aarch64"),
        (sys, "platform", "darwin", "this is darwin"),
        (sys, "_is_gil_enabled", lambda: False, "global interpreter lock"),
        *((os, name, refuse, "for this test") for name in ("memfd_create", "eventfd", "pidfd_open")),
    ],
)
def test_machines_without_shared_memory_say_why(monkeypatch, owner, name: str, value, reason: str) -> None:
    assert shm_refusal() is None
    monkeypatch.setattr(owner, name, value, raising=False)
    assert reason in str(shm_refusal())


def problem_of(call: Callable[[], object], kind: type[BaguaError] = BaguaError) -> str:
    """The error of ``call``; empty if there is none."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start(port: int, backend: str | None, nodes: tuple[int, ...] | None, world_size: int) -> None:
    place = {"store": bagua.comm.connect_store(port, 20.0), "rank": this_rank.get().rank, "world_size": world_size}
    bagua.comm.init_process_group(backend=backend, timeout=20.0, _nodes=nodes, **place)


def start_without_a_choice(port: int, obstacle: str, nodes: tuple[int, ...] | None) -> tuple[str, float, str]:
    """The backend that was chosen, the sum of 1, 2 and 3 on it, and the log; ``obstacle`` is what fails on rank 1."""
    if this_rank.get().rank == 1 and obstacle == "shm_refusal":
        choice.shm_refusal = backends.shm_refusal = lambda: TransportUnavailableError("for this test")
    elif this_rank.get().rank == 1 and obstacle != "none":
        setattr(shm_attach, obstacle, refuse)
    heard = io.StringIO()
    logging.getLogger("bagua").addHandler(logging.StreamHandler(heard))
    start(port, None, nodes, 3)
    tensor = torch.tensor([bagua.comm.get_rank() + 1.0])
    bagua.comm.allreduce(tensor)
    return bagua.comm.get_default_group().global_communicator.backend, tensor.item(), heard.getvalue()


def demand(port: int, world_size: int) -> str:
    """The error of ``backend="shm"`` where that is not possible."""
    return problem_of(lambda: start(port, "shm", None, world_size), TransportUnavailableError)


def run_anew(size: int, job, *arguments):
    """What ``job`` returns on ranks that have yet to initialize."""
    store, port = bagua.comm.serve_store()
    results = ProcessRanks(size, backend=None, environment={"BAGUA_LOG": "info"}).run(job, port, *arguments)
    del store
    return results


def works(numel: int = LARGE) -> bool:
    """Whether an allreduce on the default group comes to the right sum, in ordinary and in shared memory."""
    comm = communicator()
    right = []
    for tensor in (torch.empty(numel), comm.empty(numel, dtype=torch.float32)):
        comm.allreduce(tensor.copy_(ramp(comm.rank, numel)))
        right.append(torch.equal(tensor, summed(comm, numel)))
    return all(right)


@pytest.mark.parametrize(
    ("obstacle", "nodes", "backend"),
    [
        ("none", None, "shm"), ("none", (0, 0, 1), "hybrid"), ("none", (0, 1, 2), "gloo"),
        *((function, None, "gloo") for function in ("shm_refusal", "create_memory", "map_memory")),
    ],
)  # fmt: skip
def test_the_default_backend(obstacle: str, nodes: tuple[int, ...] | None, backend: str) -> None:
    """Shared memory if all ranks can have it; what one rank lacks all lack, and the log says so."""
    outcomes = run_anew(3, start_without_a_choice, obstacle, nodes)
    for own_backend, total, log in outcomes:
        assert (own_backend, total) == (backend, 6.0)
        assert ("rank 1" in log and "for this test" in log) is (obstacle != "none"), log
        assert f"backend {backend}" in log
    warned = ["cannot share memory" in log for *_, log in outcomes]
    assert warned == [obstacle != "none", False, False], "one rank of the host warns, once"


Say = Callable[[Any], None]


def in_a_child(life: Callable[[Say], Any]) -> Any:
    """What ``life(say)`` says first, or returns, or raises, in a child; which is killed if it asks for that."""
    reading, writing = os.pipe()

    def say(what: Any) -> None:
        os.write(writing, json.dumps(what).encode() + b"\n")

    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            say(life(say))
        except BaseException as error:
            say(repr(error))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        line = json.loads(said.readline() or '"it ended without a word"')
        if line == "kill me":
            # Not by itself: the first process of a namespace is immune to its own signals.
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return line


def isolated(port: int, life: Callable[[int, Say], Any]) -> Any:
    """Run ``life`` in a child: of rank 0 beside this process, else first in a pid namespace, as containers of a pod."""
    if this_rank.get().rank and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "no pid namespace")
    return in_a_child(lambda say: life(port, say))


def outlive_rank_1(port: int, say: Say) -> Any:
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


@needs_root
def test_ranks_in_different_pid_namespaces_communicate_and_name_the_one_that_is_killed() -> None:
    lost = [True, "PeerLostError", [1]]
    assert run_anew(3, isolated, outlive_rank_1) == [[False, *lost], "kill me", [True, *lost]]


def meet_on_an_old_kernel(port: int, say: Say) -> Any:
    shm_attach._SO_PEERPIDFD = 0x7FFF  # type: ignore[misc]  # an option that no kernel knows
    return demand(port, 3)


@needs_root
def test_pid_namespaces_on_an_old_kernel() -> None:
    for text in run_anew(3, isolated, meet_on_an_old_kernel):
        assert "its process is in another pid namespace, and Linux is older than 6.5" in text, text


def _as_nobody(name: str, nonce: bytes, descriptors: tuple[int, int]) -> str:
    """What rank 0 answers, and with how many descriptors; from a process of another user."""

    def life(_: Say) -> str:
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10.0)
            connection.connect(f"\0{name}")
            with contextlib.suppress(BrokenPipeError):  # It may have hung up already.
                socket.send_fds(connection, [shm_attach._HELLO.pack(1, nonce)], list(descriptors))
            data, received = b"", []
            with contextlib.suppress(ConnectionResetError):
                data, received, _, _ = socket.recv_fds(connection, 64, 2)
        return f"{len(data)} bytes, {len(received)} descriptors"

    return in_a_child(life)


def meet_beside_an_intruder(port: int) -> tuple[bool, str]:
    """Another user calls rank 0 with all that rank 1 would say. What it is given, and whether the ranks meet."""
    given, original = "nothing was tried", shm_attach._Meeting._call

    def call(meeting: Any, other: int) -> None:
        nonlocal given
        given = _as_nobody(meeting._names[other], meeting._nonces[1], meeting._own[1:])
        original(meeting, other)

    shm_attach._Meeting._call = call  # type: ignore[method-assign]
    start(port, "shm", None, 2)
    return works(), given


@needs_root
def test_another_user_is_given_nothing() -> None:
    given = ["nothing was tried", "0 bytes, 0 descriptors"]
    assert run_anew(2, meet_beside_an_intruder) == [(True, one) for one in given]


def demand_as_another_user(port: int, unwary: int) -> str:
    """Rank 1 belongs to another user, and rank ``unwary`` does not look."""
    rank = this_rank.get().rank
    if rank == unwary:
        shm_attach._same_user = lambda _: True
    if rank == 1:
        # Torch 2.15 finds its backends while it may: another user cannot read an environment of tox.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        os.setuid(NOBODY)
    return demand(port, 2)


@needs_root
@pytest.mark.parametrize("unwary", [0, 1])
def test_both_ends_look_at_the_user(unwary: int) -> None:
    for text in run_anew(2, demand_as_another_user, unwary):
        assert "another user" in text or "did not connect" in text, text


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
    with contextlib.ExitStack() as gaps:
        last = -1
        while last < highest:
            last = os.open(os.devnull, os.O_RDONLY)
            gaps.callback(os.close, last)
        gaps.enter_context(limited(resource.RLIMIT_NOFILE, last + 1 + free))
        yield


def attach_with_few_descriptors(most: int) -> tuple[list[str], tuple[int, int], tuple[int, int]]:
    """New communicators, where rank 1 may open so many more descriptors, from 0 to ``most``."""
    group = bagua.comm.get_default_group()
    problems: list[str] = []
    assert works()
    before = resources()
    for more in range(most + 1):
        with few_descriptors(more) if group.rank == 1 else contextlib.nullcontext():
            problems.append(problem_of(lambda: group.duplicate().close(), TransportUnavailableError))
        assert works()
    group._descendants.clear()
    return problems, before, resources()


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


def attach_while_one_dies(connected: bool) -> str:
    """A new communicator, where rank 2 dies before it connects, or when it has connected."""
    group = bagua.comm.get_default_group()
    if group.rank == 2:
        connect = shm_attach._Meeting.connect

        def dying(meeting: shm_attach._Meeting) -> None:
            if connected:
                connect(meeting)
            die()

        shm_attach._Meeting.connect = dying  # type: ignore[method-assign]
    return problem_of(group.duplicate, TransportUnavailableError)


@pytest.mark.parametrize("connected", [False, True])
def test_a_rank_that_dies_while_they_connect_is_named_at_once(shm_pool, connected: bool) -> None:
    for survivor in shm_pool.outcomes(attach_while_one_dies, connected, size=3, timeout_s=1000.0)[:2]:
        assert "rank 2: it ended while the ranks connected" in survivor.value, survivor


@pytest.mark.parametrize("lacks", ["memory", "descriptors"])
@on_ranks(3, pool="shm_pool")
def test_what_runs_out_later_is_an_error_on_all_ranks(lacks: str) -> None:
    """Rank 1 finds no memory, for a tensor of ``empty`` and then for its staging area; or no descriptor for a peer's.

    Tensors of ``empty`` lie in ordinary memory then. Memory that is missing is never a SIGBUS.
    """
    comm = communicator()
    with contextlib.ExitStack() as scarce:
        if comm.rank == 1 and lacks == "memory":
            scarce.enter_context(limited(resource.RLIMIT_FSIZE, 4096))
        tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
        ordinary = all(segment.gone for segment in shm_segments._registry._table[1])
        if comm.rank == 1 and lacks == "descriptors":
            scarce.enter_context(few_descriptors(0))
        problem = problem_of(lambda: comm.allreduce(tensor))
    assert ordinary is (comm.rank == 1 and lacks == "memory")
    assert "TransportUnavailableError: " in problem, problem
    mapped = "memory of rank 0 cannot be mapped: Too many open files" if lacks == "descriptors" else ""
    own = f"TransportUnavailableError: {mapped}"
    assert problem.startswith(own if comm.rank == 1 else "PeerLostError: lost rank 1: it left"), problem


def test_a_process_that_ends_before_its_descriptor_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an old kernel, where the number of the process might be another one's by then."""
    monkeypatch.setattr(shm_attach, "_SO_PEERPIDFD", 0x7FFF)  # an option that no kernel knows
    own, other = socket.socketpair()
    with own, other:
        os.close(shm_attach._process_descriptor(own))
        other.close()
        with pytest.raises(ConnectionResetError, match="ended while they connected"):
            shm_attach._process_descriptor(own)
