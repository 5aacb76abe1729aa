"""The default group: who can see it, which groups come from it, how it ends, and what an error that ends it says."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from bagua import env
from bagua.comm.communicator import Communicator
from bagua.comm.group import NonMember, ProcessGroup, is_non_member
from bagua.comm.lifetime.forks import family, leak, run_all
from bagua.comm.operands import as_seconds
from bagua.comm.records.recorder import KindStatistics, observers
from bagua.comm.store.asking import refuse_together
from bagua.comm.store.keys import behind_token
from bagua.comm.torch_private import all_groups, store_of, unwrapped
from bagua.comm.transports.registry import backend_refusal
from bagua.errors import BaguaError, InvalidRankError, InvalidTypeError, NotInitializedError, blame

__all__ = [
    "destroy_process_group", "from_torch_group", "get_default_group", "get_local_rank", "get_local_size",
    "get_node_rank", "get_rank", "get_world_size", "is_initialized", "new_group", "stats",
]  # fmt: skip

#: A launcher blames the process that ends first. Those that end because of another one let it go ahead.
_AFTER_THE_CAUSE_S = 1.0
#: What is taken where ranks are named.
Group = ProcessGroup | Communicator | NonMember | dist.ProcessGroup


def uncaught_error() -> BaseException | None:
    """What ends this process, for its exit handlers: the error whose traceback the interpreter has printed, or None.

    At a prompt that is some error of the past, with which nothing ended.
    """
    error: BaseException | None = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    return error


#: Where frames are that do not help a user to find a mistake.
_INSIDE = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep)


def own_traceback(error: BaseException) -> str:
    """The traceback of ``error`` without frames of bagua and torch, if others are left; of ours only what happened.

    Example:
        >>> print(own_traceback(ValueError("no")), end="")
        ValueError: no
    """
    told = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = told
    while one is not None:
        own = [frame for frame in one.stack if not frame.filename.startswith(_INSIDE)]
        one.stack = traceback.StackSummary.from_list(own or list(one.stack))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    if not isinstance(error, BaguaError):
        return "".join(told.format())
    # Its causes are errors of libraries, and what follows the first line are calls: both are in the flight record.
    frames = "".join(["Traceback (most recent call last):\n", *told.stack.format()]) if told.stack else ""
    return f"{frames}{type(error).__name__}: {str(error).partition(chr(10))[0]}\n"


def report_uncaught(rank: int, error_file: str) -> None:
    """From now on, an error that ends this process is printed without inner frames, and handed to the launcher.

    Args:
        rank: global rank of this process, which is printed with the error.
        error_file: file that the launcher reads, in the form of ``torch.distributed.elastic``.
    """
    usual = sys.excepthook
    plain = usual is sys.__excepthook__ or getattr(usual, "__module__", "").startswith("torch.")

    def report(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        try:
            whole, own = "".join(traceback.format_exception(kind, error, frames)), own_traceback(error)
            culprit, _ = blame(error, rank, "its script")
            facts = {"py_callstack": whole, "timestamp": str(int(time.time())), "own": own, "rank": rank}
            last = own.rstrip().rpartition("\n")[2]
            short = f"{kind.__name__}: {error.problem}" if isinstance(error, BaguaError) else last
            message = {"message": short, "extraInfo": {**facts, "culprit": culprit}}
            Path(error_file).write_text(json.dumps({"message": message}), encoding="utf-8")
        except Exception:  # noqa: BLE001  # an error that cannot be told, or a full disk
            usual(kind, error, frames)
            return
        if not plain:  # A hook that the program chose shows what it wants to show.
            usual(kind, error, frames)
            return
        shown = own if culprit == rank else f"{last}\n"
        with contextlib.suppress(OSError):
            sys.stderr.write("".join(f"[rank{rank}]: {line}" for line in shown.splitlines(keepends=True)))

    sys.excepthook = report


@dataclass(eq=False)
class World:
    """What ``init_process_group`` made on one rank, and what must end with it."""

    group: ProcessGroup
    owns_torch: bool
    process: int = field(default_factory=os.getpid)
    adopted: list[ProcessGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        family.add(self)

    def close(self) -> None:
        """End all groups, then torch's if it was started here.

        Raises:
            Exception: the first error of one of them, after all were ended.
        """
        for observer in observers:
            observer.ended(self.group.recorder)
        run_all([*(group.close for group in reversed(self.adopted)), self.group.close, self._end_torch])

    def abort(self, error: BaseException | None) -> None:
        """Tell the other ranks with which error this process ends, if with one, or which rank is behind that error."""
        if error is None:
            return
        rank = self.group.ranks[self.group.rank]
        culprit, reason = blame(error, rank, "its script")
        for group in (*self.adopted, self.group):
            group.abort(reason, culprit)
        if culprit != rank and env.launcher_variables().get("TORCHELASTIC_RUN_ID"):
            time.sleep(_AFTER_THE_CAUSE_S)

    def _end_torch(self) -> None:
        # To shut NCCL down in a forked child is more than to forget it.
        stays = self.process != os.getpid() and dist.is_initialized() and dist.get_backend() != "gloo"
        if self.owns_torch and dist.is_initialized() and not stays:
            dist.destroy_process_group()

    def disown(self) -> None:
        """In a forked child: torch's groups are never destroyed."""
        if dist.is_initialized():
            leak(all_groups())


class WorldHolder:
    """The world of this process, and of the ranks that are threads of it."""

    def __init__(self) -> None:
        self.process_world: World | None = None
        #: Stores that this process hosts for a job without an agent, by process and port. They end with the process:
        #: after ``destroy_process_group`` faster ranks may be back already, and must not meet at one that is about to
        #: close.
        self.hosted: dict[tuple[int, str], dist.Store] = {}
        family.add(self)
        self.exit_registered = False
        self._hook: Callable[..., object] | None = None
        self.context: contextvars.ContextVar[World | None] = contextvars.ContextVar("bagua_world", default=None)
        #: Whether the calling thread is a rank of its own, on any transport.
        self.thread_is_rank: contextvars.ContextVar[bool] = contextvars.ContextVar("bagua_rank", default=False)

    def get(self) -> World | None:
        """The world of the calling rank, if it has one."""
        return self.context.get() or self.process_world

    def is_thread(self, backend: str | None) -> bool:
        """Whether the calling rank is a thread of a process that has others."""
        return backend == "threads" or self.thread_is_rank.get()

    def put(self, world: World | None, backend: str) -> None:
        """Make ``world`` that of the calling rank."""
        if self.is_thread(backend):
            self.context.set(world)
            return
        self.process_world = world
        if world is not None and not self.exit_registered:
            self.exit_registered = True
            atexit.register(self._close_at_exit)
            self.report(world.group.ranks[world.group.rank], backend)

    def report(self, rank: int, backend: str | None) -> None:
        """Have the error that ends this process, if it is ``rank``, told to the launcher."""
        if self.is_thread(backend) or (error_file := env.error_file()) is None:
            return
        if self._hook is None:
            report_uncaught(rank, error_file)
            self._hook = sys.excepthook
        elif getattr(sys.excepthook, "__module__", "").startswith("torch."):
            sys.excepthook = self._hook  # Torch's, which its start has put around ours, would name the rank once more.

    def _close_at_exit(self) -> None:
        world, self.process_world = self.process_world, None
        if world is not None and world.process == os.getpid():
            run_all([lambda: world.abort(uncaught_error()), world.close])

    def disown(self) -> None:
        """In a forked child: the threads that serve the stores are the parent's."""
        leak(list(self.hosted.values()))


holder = WorldHolder()


def become_rank() -> None:
    """Make the calling thread a rank of its own, on any transport, with a default group of its own."""
    holder.thread_is_rank.set(True)


def destroy_process_group() -> None:
    """Close everything that ``init_process_group`` made on this rank, and nothing else. Idempotent."""
    world = holder.get()
    if world is None:
        return
    holder.put(None, world.group.backend)
    world.close()


def is_initialized() -> bool:
    """Whether ``init_process_group`` was called on this rank."""
    return holder.get() is not None


def _world() -> World:
    world = holder.get()
    if world is None:
        raise NotInitializedError(
            "bagua is not initialized",
            advice="Call bagua.init_process_group() before everything else, and destroy_process_group() after it.",
        )
    return world


def get_default_group() -> ProcessGroup:
    """The group of all ranks.

    Raises:
        NotInitializedError: without ``init_process_group``.
    """
    return _world().group


def default_communicator() -> Communicator:
    """The communicator of all ranks, without a detour: it is looked up in every call of a function.

    Raises:
        NotInitializedError: without ``init_process_group``.
    """
    world = holder.context.get() or holder.process_world or _world()
    return world.group.global_communicator


def new_group(
    ranks: Sequence[int] | None = None,
    *,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    label: str | None = None,
) -> ProcessGroup | NonMember:
    """A group of some ranks. Called by all ranks, with the same arguments and in the same order.

    Args:
        ranks: its members; None means all.
        backend: name of the new group's backend; None means the default group's.
        timeout: default deadline of its calls; None means the default group's.
        label: name of the group in messages, which put a number after it; None means ``group``.

    Returns:
        The group on its members, ``NON_MEMBER`` on other ranks, whose calls on it return at once.

    Raises:
        InvalidRankError: ``ranks`` is not a set of ranks.
        CollectiveMismatchError: ranks passed different arguments.
    """
    group = get_default_group()
    return group.subgroup(
        range(group.size) if ranks is None else ranks,
        backend=unwrapped(backend),
        timeout_s=None if timeout is None else as_seconds(timeout),
        label=label or "group",
    )


_uses_of_torch_group: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def from_torch_group(
    group: dist.ProcessGroup | None = None, *, backend: str | None = None, timeout: float | timedelta | None = None
) -> ProcessGroup:
    """A group of the ranks of a ``torch.distributed`` group. Called by its members only.

    Args:
        group: torch's group; None means torch's default one.
        backend: name of the new group's backend; None means the one that ``init_process_group`` chose.
        timeout: default deadline of its calls; None means the default group's.

    Raises:
        NotInitializedError: without ``init_process_group``.
        InvalidRankError: this rank is not a member.
    """
    world = _world()
    torch_group = dist.group.WORLD if group is None else group
    if not isinstance(torch_group, dist.ProcessGroup):  # torch's sentinel for non-members
        raise InvalidRankError("this rank is not a member of the group", argument="group", expected="a member's group")
    number = _uses_of_torch_group.get(torch_group, 0) + 1
    _uses_of_torch_group[torch_group] = number
    store = dist.PrefixStore(f"bagua/torch_group{number}", behind_token(store_of(torch_group)))
    ranks = dist.get_process_group_ranks(torch_group)
    backend, rank = unwrapped(backend) or world.group.backend, dist.get_rank(torch_group)
    timeout_s = world.group.timeout_s if timeout is None else as_seconds(timeout)
    refuse_together(store, "refusal", rank, ranks, backend_refusal(backend, len(ranks)), timeout_s)
    made = ProcessGroup(
        store,
        rank,
        ranks,
        [world.group.nodes[rank] for rank in ranks],
        backend,
        timeout_s,
        f"torch_group{number}",
        world.group.recorder,
    )
    world.adopted.append(made)
    return made


def get_rank(group: Group | None = None) -> int:
    """Rank of this process in ``group``, -1 if it is no member; before initialization what the launcher says, else 0.

    Args:
        group: a group or communicator of ``bagua.comm``, or a group of ``torch.distributed``; None means all ranks.

    Raises:
        InvalidTypeError: something else than a group.
    """
    if group is None:
        return get_default_group().rank if is_initialized() else env.get_rank() or 0
    if isinstance(group, ProcessGroup | Communicator | NonMember):
        return group.rank
    return dist.get_rank(_of_torch(group))


def get_world_size(group: Group | None = None) -> int:
    """Size of ``group``, -1 if this rank is no member; before initialization what the launcher says, else 1.

    Args:
        group: as for ``get_rank``.

    Raises:
        InvalidTypeError: something else than a group.
    """
    if group is None:
        return get_default_group().size if is_initialized() else env.get_world_size() or 1
    if isinstance(group, ProcessGroup | Communicator | NonMember):
        return group.size
    return dist.get_world_size(_of_torch(group))


def _of_torch(group: Any) -> Any:
    if not isinstance(group, dist.ProcessGroup) and not is_non_member(group):
        raise not_a_group(group)
    return group


def not_a_group(group: object, argument: str = "group") -> InvalidTypeError:
    """The error for what is given in place of a group."""
    return InvalidTypeError(
        "not a process group",
        argument=argument,
        expected="a group or communicator of bagua.comm, a group of torch.distributed, or None for all ranks",
        seen=type(group).__name__,
    )


def get_local_rank() -> int:
    """Rank among the processes of this host, as the launcher says; without one as was found out, or 0.

    Initialization does not change what the launcher has said: scripts choose a device by it.
    """
    return _as_launched(env.get_local_rank(), "local_rank", 0)


def get_local_size() -> int:
    """Processes on this host, as the launcher says; without one as was found out, or 1."""
    return _as_launched(env.get_local_world_size(), "local_size", 1)


def get_node_rank() -> int:
    """Index of this host, as the launcher says; without one as was found out, or 0."""
    return _as_launched(env.get_node_rank(), "node_rank", 0)


def _as_launched(said: int | None, fact: str, default: int) -> int:
    """What the launcher said of this process, which may be several ranks if these are threads."""
    group = get_default_group() if is_initialized() else None
    if group is not None and (said is None or group.backend == "threads"):
        return int(getattr(group, fact))
    return default if said is None else said


def stats() -> dict[str, KindStatistics]:
    """Calls, bytes and seconds of everything this rank communicated, by kind of call.

    Includes the private communicators of wrapped models. ``Communicator.stats()``
    tells one communicator alone.

    Raises:
        NotInitializedError: without ``init_process_group``.
    """
    return _world().group.recorder.totals()
