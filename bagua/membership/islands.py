"""What users hold: the islands that train together, and this process's place among them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple

from typing_extensions import Self

from bagua import __version__, env
from bagua.checks import check_kind, check_whole
from bagua.comm import (
    DEFAULT_TIMEOUT_S,
    Cells,
    KeyStore,
    ProcessGroup,
    as_seconds,
    close_store,
    group_of_seats,
    open_store,
    part_of,
)
from bagua.errors import CollectiveMismatchError, CommunicatorClosedError, ConfigurationError
from bagua.membership.epochs import Epoch
from bagua.membership.participant import Attempt, Participant
from bagua.membership.presence import Presence
from bagua.membership.roster import Deadlines

__all__ = ["Islands", "Members", "join_islands"]

_DEADLINES = Deadlines()


class Members(NamedTuple):
    """Three things that are easily taken for one another. All are seats, in ascending order.

    Attributes:
        alive: joined, and not silent; newcomers that wait are among them.
        in_epoch: take part in the next exchange.
        contributed: were part of the last result.
    """

    alive: tuple[int, ...] = ()
    in_epoch: tuple[int, ...] = ()
    contributed: tuple[int, ...] = ()


class Islands:
    """Processes that train together, and come and go. Made by ``join_islands``.

    Pass it to ``with_bagua(..., between=islands)``. At the end of a ``with`` block it leaves.

    Args:
        store: store through which they meet; its calls do not block for long.
        where: name of the store in messages.
        size: processes that begin together.
        minimum: smallest number of processes that may go on; None for more than half of those before.
        name: name of the run.
        timeout_s: how long to wait for others, in seconds.
        backend: name of the backend that connects islands.
        deadlines: how often to look, and how long silence may last.

    Attributes:
        seat: number of this process, which no other one ever has. Data can be dealt out by it.
        name: name of the run.
    """

    def __init__(
        self,
        store: KeyStore,
        where: str,
        *,
        size: int,
        minimum: int | None,
        name: str,
        timeout_s: float,
        backend: str = "gloo",
        deadlines: Deadlines = _DEADLINES,
    ) -> None:
        self.name = name
        self._whole_store = store  # C++ keeps no Python object alive.
        self._store = part_of(store, f"islands/{name}")
        self._size = size
        self._history: deque[str] = deque(maxlen=64)
        self._callbacks: list[Callable[[Members, str], object]] = []
        self._left = ""
        self._bound = False
        self._cells = Cells(self._store, where)
        facts = [f"bagua {__version__}", f"size={size}", f"minimum={minimum}", f"backend={backend}"]
        _compare(self._cells, "job", facts, "runs")
        self._presence = Presence(self._cells, deadlines, time.monotonic)
        self.seat = self._presence.seat
        connect = functools.partial(_connect, self._store, self.seat, backend, timeout_s, deadlines.meet_s)
        self._participant = Participant(
            self._presence, self._cells, connect,
            minimum=minimum, timeout_s=timeout_s, deadlines=deadlines, tell=self._changed,
        )  # fmt: skip
        self._presence.start(self._participant.watch)
        _living.add(self)

    # What users ask.

    def members(self) -> Members:
        """Who is alive, who takes part, and who was part of the last result."""
        epoch = self._participant.epoch
        in_epoch = () if epoch is None else epoch.members
        return Members(self._presence.roster.alive(), in_epoch, self._participant.contributed)

    def why(self) -> str:
        """Who takes part and why, in words: what is waited for, and what led to each epoch, latest first."""
        alive, in_epoch, contributed = self.members()
        lines = [
            f"seat {self.seat}: alive {list(alive)}, in the epoch {list(in_epoch)}, contributed {list(contributed)}"
        ]
        lines += [f"waiting: {self._participant.waiting_for}"] if self._participant.waiting_for else []
        lines += [self._presence.trouble] if self._presence.trouble else []
        lines += [f"this process left: {self._left}"] if self._left else []
        return "\n".join([*lines, *reversed(self._history)])

    def on_change(self, callback: Callable[[Members, str], object]) -> None:
        """Have ``callback(members, why)`` called after each change, in the thread that trains."""
        self._callbacks.append(callback)

    def leave(self, reason: str = "it left") -> None:
        """Go, and tell the others, who then do not wait. Idempotent; happens at the end of the process at the latest.

        Args:
            reason: reason that ``why()`` of the others gives.
        """
        if not self._left:
            self._left = reason
            self._presence.leave(reason)
            self._participant.close()
            close_store(self._whole_store)
            _living.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave("it left" if error is None else f"it left with {type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"Islands(name={self.name!r})"

    # What the layers above call.

    def bind(self, facts: Sequence[str], give: Callable[[], object], take: Callable[[object], None]) -> None:
        """Come in with a model. Waits until this process takes part and has the state.

        Args:
            facts: facts about the model and its training, equal on all.
            give: returns the state, made of numbers, strings, tensors and containers of these.
            take: replaces the state.

        Raises:
            CollectiveMismatchError: the others train something else.
            ConfigurationError: a model is bound already.
            TooFewMembersError: too few others came.
            StoreLostError: the store does not answer.
        """
        self._check_open()
        if self._bound:
            raise ConfigurationError(
                "these islands train another model already",
                argument="between",
                expected="islands of its own for each model, with another name",
                seen=repr(self),
            )
        _compare(self._cells, "model", facts, "models")
        self._bound = True
        self._give = give
        with self._leaving():
            self._participant.join(self._size, give, take)

    def exchange(self, attempt: Attempt) -> None:
        """Have an exchange happen for all members or for none; see ``Participant.exchange``."""
        self._check_open()
        with self._leaving():
            self._participant.exchange(attempt)

    def rest(self) -> None:
        """This process is between two steps: newcomers may come in."""
        if not self._left:
            with self._leaving():
                self._participant.rest(self._give)

    def _check_open(self) -> None:
        if self._left:
            raise CommunicatorClosedError(
                f"this process is no longer one of the islands: {self._left}",
                rank=self.seat,
                advice="Join again with join_islands, and wrap the model anew.",
            )

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """Whatever ends an exchange half-way ends this process's part, and the others are told."""
        try:
            yield
        except BaseException as error:
            self.leave(f"it left with {type(error).__name__}: {error}")
            raise

    def _changed(self, epoch: Epoch) -> None:
        self._history.append(
            f"epoch {epoch.number} of seats {list(epoch.members)}, from exchange {epoch.base}: {epoch.why}"
        )
        members = self.members()
        for callback in self._callbacks:
            callback(members, epoch.why)


def _connect(store: KeyStore, seat: int, backend: str, timeout_s: float, meet_s: float, epoch: Epoch) -> ProcessGroup:
    """The group of ``epoch``; a function, so that nothing but its user keeps the islands alive."""
    return group_of_seats(
        store, epoch.members, seat, f"epoch{epoch.number}", backend=backend, timeout_s=timeout_s, meet_s=meet_s
    )


def _compare(cells: Cells, topic: str, facts: Sequence[str], what: str) -> None:
    """Refuse to join those who do something else."""
    theirs = cells.claim(topic, list(facts))
    if theirs == list(facts):
        return
    here, there = next(
        ((one, other) for one, other in zip(facts, theirs, strict=False) if one != other),
        (f"{len(facts)} facts", f"{len(theirs)} facts"),
    )
    raise CollectiveMismatchError(
        f"these islands have different {what}; the first difference",
        call="join_islands" if topic == "job" else "with_bagua",
        expected=there,
        seen=here,
        advice="Start all processes with the same program, version and options, or choose another name=.",
    )


def join_islands(
    where: str | None = None,
    size: int | None = None,
    minimum: int | None = None,
    name: str | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> Islands:
    """Join the processes that train together and may come and go. Returns at once, as soon as the store answers.

    ``with_bagua(..., between=islands)`` then waits until this process takes part: with the others at the
    beginning, or as a newcomer, which receives the state.

    Args:
        where: ``tcp://host:port``, as ``baguarun --serve-islands`` prints it, or ``etcd://host:port,host:port,...``
            with the servers of an etcd cluster; None for ``BAGUA_ISLANDS``.
        size: processes that begin together; None for ``minimum``, or for one, which others may join.
        minimum: processes that may go on when others are lost; None for more than half.
        name: name of the run; another run over the same store needs another one. None for ``default``.
        timeout: how long to wait for others, in seconds; None for ``BAGUA_TIMEOUT_S``, or 30 minutes.

    Returns:
        The islands, with the seat of this process.

    Raises:
        ConfigurationError: an argument that cannot be used.
        StoreLostError: no store answers there.
        CollectiveMismatchError: the others have joined with other arguments, or another version.

    Example:
        >>> import bagua.torch_api as bagua
        >>> islands = bagua.join_islands("tcp://head:29600", size=3)  # doctest: +SKIP
        >>> model = model.with_bagua(optimizer, "diloco", between=islands)  # doctest: +SKIP
    """
    found = env.islands() if where is None else where
    if found is None:
        raise ConfigurationError(
            "no store where islands meet",
            argument="where",
            expected="an address, or one in BAGUA_ISLANDS",
            seen="neither",
            advice="Start a store with: baguarun --serve-islands",
        )
    for option, value in (("size", size), ("minimum", minimum)):
        if value is not None:
            check_whole(1, **{option: value})
    check_kind((str, type(None)), "a word", name=name)
    if size is not None and minimum is not None and minimum > size:
        raise ConfigurationError(
            "fewer begin than may go on", argument="minimum", expected=f"at most size, which is {size}", seen=minimum
        )
    chosen = env.timeout_s() if timeout is None else timeout
    timeout_s = DEFAULT_TIMEOUT_S if chosen is None else as_seconds(chosen)
    store = open_store(found, timeout_s)
    begin = size or minimum or 1
    try:
        return Islands(store, found, size=begin, minimum=minimum, name=name or "default", timeout_s=timeout_s)
    except BaseException:
        close_store(store)
        raise


_living: weakref.WeakSet[Islands] = weakref.WeakSet()


def _leave_all() -> None:
    for islands in list(_living):
        islands.leave("its process ended")


atexit.register(_leave_all)
