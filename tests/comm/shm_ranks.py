"""What the ranks of the shared-memory tests do. At the top level, because they run in processes."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bagua.comm
from bagua.comm import Communicator
from bagua.comm.startup import choice
from bagua.comm.store.serving import connect_store
from bagua.comm.transports import registry as backends
from bagua.comm.transports.memory.line import LineState, Step, Words
from bagua.comm.transports.shm import attach as shm_attach
from bagua.comm.transports.shm import segments as shm_segments
from bagua.comm.transports.shm.transport import ShmTransport
from bagua.comm.transports.threads import inject_fault
from bagua.errors import BaguaError, CollectiveMismatchError, TransportUnavailableError
from bagua.testing.ranks import this_rank
from tests.comm.memory_ranks import KINDS, agrees, ramp

#: More than is copied into the control memory, and more than one staging area.
LARGE, PIECES = 80_000, 3_000_000


def communicator() -> Communicator:
    return bagua.comm.get_default_group().global_communicator


def transport(comm: Communicator) -> ShmTransport:
    found = comm._transport
    assert isinstance(found, ShmTransport)
    return found


def resources() -> tuple[int, int]:
    """Open descriptors of this process, and mappings of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:bagua")
    return len(os.listdir("/proc/self/fd")), maps


def summed(comm: Communicator, numel: int) -> torch.Tensor:
    return ramp(0, numel) * comm.size + sum(range(comm.size))


# Results.


def all_kinds(numels: tuple[int, ...]) -> None:
    comm = communicator()
    for kind in KINDS:
        for numel in numels if kind != "barrier" else (0,):
            for async_op in (False, True):
                agrees(comm, kind, numel, async_op=async_op)


def reduce_in_place(numel: int) -> bool:
    """Whether ordinary memory was needed for a tensor of ``empty``; and for a part of it."""
    comm = communicator()
    tensor = comm.empty(numel, dtype=torch.float32)
    tensor.copy_(ramp(comm.rank, numel))
    part = tensor[numel // 2 :]
    comm.allreduce(tensor)
    assert torch.equal(tensor, summed(comm, numel))
    comm.broadcast(part, 1)
    other = bagua.comm.get_default_group().duplicate().global_communicator
    other.allreduce(part)
    assert torch.equal(part, comm.size * summed(comm, numel)[numel // 2 :])
    return any(transport(each)._shm_peers._staging is not None for each in (comm, other))


def mix_memory() -> None:
    """Some ranks pass a tensor of ``empty``, some an ordinary one."""
    comm = communicator()
    for numel in (LARGE, PIECES + 1):
        for special in range(comm.size):
            tensor = comm.empty(numel, dtype=torch.float32) if comm.rank == special else torch.empty(numel)
            tensor.copy_(ramp(comm.rank, numel))
            comm.allreduce(tensor)
            assert torch.equal(tensor, summed(comm, numel))
            output = torch.empty(comm.size * numel)
            comm.allgather(output, tensor + comm.rank if comm.rank == special else tensor)


def send_from_shared_memory() -> None:
    comm = communicator()
    for numel in (1, LARGE, PIECES):
        tensor = comm.empty(numel, dtype=torch.float64).fill_(comm.rank)
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        output = torch.empty(numel, dtype=torch.float64)
        comm.sendrecv(output, tensor, before, after)
        assert (output == before).all()


def exchange_alike_from_changing_places(seed: int) -> None:
    """Calls of few kinds, one after the other, whose data lies here or there: what is known of the last one ages."""
    comm, choose = communicator(), random.Random(seed)
    other = 1 - comm.rank
    shared = comm.empty(70_000, dtype=torch.float32)  # More than two ranks copy at once.
    forms = ("send", "send", "sendrecv", "broadcast", "allgather", "allreduce")
    for number in range(120):
        form, lenders, sender = choose.choice(forms), choose.randrange(4), choose.randrange(2)
        numel, dtype = choose.choice((5, 7, 70_000)), choose.choice((torch.float32, torch.int32))
        lent = lenders >> comm.rank & 1 and dtype is torch.float32
        mine = shared[:numel] if lent else torch.empty(numel, dtype=dtype)
        mine.fill_(number + 1000 * comm.rank)
        output, expected = torch.empty(numel, dtype=dtype), number + 1000 * other
        if form == "sendrecv":
            comm.sendrecv(output, mine, other, other)
        elif form == "allgather":
            output = torch.empty(2 * numel, dtype=dtype)
            comm.allgather(output, mine)
            output = output.view(2, numel)[other]
        elif form == "allreduce":
            comm.allreduce(mine)
            output, expected = mine, 2 * number + 1000
        elif form == "broadcast":
            comm.broadcast(mine, sender)
            output, expected = mine, number + 1000 * sender
        elif comm.rank == sender:
            comm.send(mine, other)
            continue
        else:
            comm.recv(output, other)
        assert (output == expected).all(), (number, form, lenders)


def send_another_size_after_equal_ones() -> str:
    """What the error says of the call that differs, after three that did not."""
    comm = communicator()
    for numel in (5, 5, 5, 6):
        tensor = torch.ones(5 if comm.rank else numel)
        try:
            comm.recv(tensor, 0) if comm.rank else comm.send(tensor, 1)
        except CollectiveMismatchError as error:
            return f"{error.expected}; {error.seen}"
    return ""


# Memory.


def rebuild(times: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Resources before and after, with one tensor more or less in flight."""
    comm = communicator()
    counts = []
    for number in range(times):
        tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
        comm.allreduce(tensor)
        assert (tensor == comm.size).all()
        comm.empty(LARGE, dtype=torch.float32)  # and one that nobody ever sees
        del tensor
        if number == 10:
            counts.append(resources())
    counts.append(resources())
    return counts[0], counts[1]


def open_and_close(times: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Resources before and after communicators that used everything they can use."""
    counts = []
    for number in range(times):
        group = bagua.comm.get_default_group().duplicate()
        comm = group.global_communicator
        comm.allreduce(torch.ones(PIECES))
        tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
        comm.allreduce(tensor, async_op=True).wait()
        if comm.rank < 2:
            (comm.send if comm.rank else comm.recv)(torch.ones(LARGE), 1 - comm.rank)
        communicator().barrier()
        group.close()
        bagua.comm.get_default_group()._descendants.clear()
        del group, comm, tensor
        if number == 1:
            counts.append(resources())
    counts.append(resources())
    return counts[0], counts[1]


def many_small_calls(times: int) -> tuple[tuple[int, int], tuple[int, int]]:
    comm, tensor = communicator(), torch.zeros(1)
    comm.allreduce(tensor)
    before = resources()
    for _ in range(times):
        comm.allreduce(tensor)
    return before, resources()


def wait_for_a_late_rank(late_s: float) -> float:
    """Share of one core that the waiting took."""
    comm = communicator()
    comm.barrier()
    if comm.rank == 0:
        time.sleep(late_s)
    spent, started = time.process_time(), time.monotonic()
    comm.barrier()
    return (time.process_time() - spent) / max(time.monotonic() - started, late_s)


# Forked children.


def write_in_a_child() -> tuple[bool, bool]:
    """What a forked child writes is its own, also if it has closed what it inherited; it closes no file of its own."""
    comm = communicator()
    tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
    descriptor = shm_segments.find(tensor).descriptor
    comm.allreduce(tensor)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
        same = bool((tensor == comm.size).all())
        tensor.zero_()
        mine = bool((tensor == 0).all())
        del tensor
        gc.collect()
        os.fstat(descriptor)  # An error, if it was closed with the tensor.
        os._exit(0 if same and mine else 1)
    well = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    untouched = bool((tensor == comm.size).all())
    comm.allreduce(tensor)
    return well, untouched and bool((tensor == comm.size**2).all())


# Failures.


class AtStep:
    """Does something at the given step of the calls that matter."""

    def __init__(self, at: int, what: Callable[[], object]) -> None:
        self.at, self.what, self.steps, self.armed = at, what, 0, False

    def __call__(self, step: Step) -> None:
        if self.armed:
            self.steps += 1
            if self.steps == self.at:
                self.what()


def lose_a_rank_at_each_step(kind: str, numel: int, steps: int) -> list[tuple[str, tuple[int, ...], float]]:
    """Rank 1 is killed once it is at the first step of a call on one communicator, at the second on another, and so on.

    How the calls of a survivor ended on each of them, with the seconds that the last one took.
    """
    together = threading.Barrier(steps, action=lambda: os.kill(os.getpid(), signal.SIGKILL))
    hooks = [AtStep(1 + number, together.wait) for number in range(steps)]
    comms = []
    for hook in hooks:
        with inject_fault(hook if communicator().rank == 1 else None):
            comms.append(bagua.comm.get_default_group().duplicate().global_communicator)
    for comm, hook in zip(comms, hooks, strict=True):
        agrees(comm, kind, numel)
        comm.barrier()
        hook.armed = True
    with ThreadPoolExecutor(steps) as threads:
        return list(threads.map(lambda comm: call_until_a_loss(comm, kind, numel), comms))


def call_until_a_loss(comm: Communicator, kind: str, numel: int) -> tuple[str, tuple[int, ...], float]:
    try:
        while True:
            started = time.monotonic()
            agrees(comm, kind, numel)
            comm.barrier()
    except BaguaError as error:
        return type(error).__name__, getattr(error, "peers", ()), time.monotonic() - started


def forget_what_was_read() -> tuple[int, int]:
    """Mappings of a peer's memory that it gave up after a message and after a collective."""
    comm = communicator()
    peers = transport(comm)._shm_peers
    counts = []
    for exchange in (lambda tensor: (comm.recv if comm.rank else comm.send)(tensor, 1 - comm.rank), comm.allreduce):
        comm.barrier()
        _, before = resources()
        tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
        exchange(tensor)
        del tensor
        comm.barrier()
        peers._drop_gone()
        counts.append(resources()[1] - before)
        comm.barrier()
    return counts[0], counts[1]


class Straggler:
    """Comes to a call's data only when the other rank has left, and looks for memory that is gone meanwhile."""

    def __init__(self, barrier: int) -> None:
        self.barrier = barrier
        self.comm: Communicator | None = None

    def __call__(self, step: Step) -> None:
        if self.comm is None or step.name != "pass":
            return
        self.barrier -= 1
        if self.barrier == 0:
            peers = transport(self.comm)._shm_peers
            while peers.lines[1 - self.comm.rank].words[Words.STATE] == LineState.OPEN:
                time.sleep(0.001)
            peers._drop_gone()  # as a thread that waits for a message does at any time


def read_what_has_left(kind: str, numel: int, barrier: int) -> None:
    """A call of rank 1 after which rank 0 leaves at once."""
    straggler = Straggler(barrier)
    with inject_fault(straggler if communicator().rank == 1 else None):
        group = bagua.comm.get_default_group().duplicate()
    comm = group.global_communicator
    agrees(comm, kind, numel)  # Now all memory is mapped.
    comm.barrier()
    if comm.rank == 0:
        agrees(comm, kind, numel)
        group.close()
        return
    straggler.comm = comm
    agrees(comm, kind, numel)
    assert straggler.barrier == 0, "the other rank left before that barrier, or never"


def lose_a_rank_at_any_time(seed: int) -> tuple[str, tuple[int, ...], float, int]:
    """One rank is killed while all communicate; the survivors' results are right until then."""
    comm = communicator()
    dice = random.Random(seed)
    victim, delay_s = dice.randrange(comm.size), dice.uniform(0.0, 0.05)
    kinds = [(kind, dice.choice((7, LARGE, PIECES // 2))) for kind in KINDS]
    dice.shuffle(kinds)
    ends_at = bagua.comm.get_default_group().store
    comm.barrier()
    if comm.rank == victim:

        def end() -> None:
            time.sleep(delay_s)
            ends_at.set("killed", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end, daemon=True).start()
    try:
        while True:
            for kind, numel in kinds:
                agrees(comm, kind, numel)
    except BaguaError as error:
        now = time.monotonic()
        late_s = now - float(ends_at.get("killed"))
        return type(error).__name__, getattr(error, "peers", ()), late_s, victim


def stop_and_wake(numel: int, at: int) -> tuple[str, bool]:
    """Rank 1 is stopped inside a call, and woken when rank 0 has given up and used its tensor."""
    pids = communicator().allgather_object(os.getpid())
    store = bagua.comm.get_default_group().store
    stop = AtStep(at, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    with inject_fault(stop if communicator().rank == 1 else None):
        comm = bagua.comm.get_default_group().duplicate().global_communicator
    tensor = comm.empty(numel, dtype=torch.float32).fill_(1.0)
    comm.allreduce(tensor)
    communicator().barrier()
    stop.armed = True
    problem: Any = None
    try:
        comm.allreduce(tensor, timeout=1.0)
    except BaguaError as error:
        problem = error
    tensor.fill_(-1.0)
    if comm.rank == 1:
        store.set("woken", "yes")
        return type(problem).__name__, True
    os.kill(pids[1], signal.SIGCONT)
    store.wait(["woken"])
    return type(problem).__name__, bool((tensor == -1.0).all())


# Who gets it.


def hinder(obstacle: str) -> None:
    """Put ``obstacle`` in the way of rank 1."""
    reason = "for this test"

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(reason)

    if this_rank.get().rank != 1:
        return
    if obstacle == "no_shared_memory":
        choice.shm_refusal = backends.shm_refusal = lambda: TransportUnavailableError(reason)
    elif obstacle == "no_descriptors":
        shm_attach.create_memory = refuse
    elif obstacle == "no_connection":
        shm_attach.map_memory = refuse
    elif obstacle == "another_user":
        _use_gloo()
        os.setuid(65534)


def _use_gloo() -> None:
    """Have torch 2.15 find its backends while it may: another user cannot read an environment of tox."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


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
