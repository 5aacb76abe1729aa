"""The connections of one rank with its counterparts: the ranks of the same number in the other islands of the epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from bagua.comm import Cells, ProcessGroup
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
    StoreLostError,
    TransportUnavailableError,
)
from bagua.membership.epochs import Epoch
from bagua.membership.island import Act
from bagua.membership.position import Tally
from bagua.membership.presence import Presence
from bagua.membership.transfer import receive_state, send_state

__all__ = ["LOSSES", "Attempt", "Counterparts", "Samples", "epoch_name"]

_log = logging.getLogger("bagua")
#: Runs an exchange on the group of the epoch, from the same contribution each time.
Attempt = Callable[[ProcessGroup], None]
#: What ends an exchange that can be repeated without those who are lost.
LOSSES = (PeerLostError, CollectiveTimeoutError, CommunicatorClosedError)


def epoch_name(number: int) -> str:
    """The cell that says who takes part in epoch ``number``."""
    return f"epoch/{number}"


class Samples(Protocol):
    """What deals out samples, as ``ElasticSampler`` does."""

    @property
    def fact(self) -> str:
        """What all islands have in common."""

    def begin(self, seat: int, epoch: Epoch) -> None:
        """This island has come in, with this epoch."""

    def said(self) -> Tally:
        """What this rank says in an exchange."""

    def hear(self, said: Mapping[int, Tally], room: int) -> None:
        """What all have said, and how many newcomers may come, if the exchange comes to count."""

    def settle(self) -> None:
        """The exchange counts."""

    def give(self) -> dict[str, Any]:
        """What a newcomer needs."""

    def take(self, state: Mapping[str, Any]) -> None:
        """Begin where the others are."""


class Counterparts:
    """What one rank does with those of the other islands, when the first rank of its own says so.

    Args:
        presence: seat of the island, and what is seen of the others.
        cells: cells of the store.
        connect: makes the group of an epoch; collective among its members.
        tell: called after each change, with the epoch.

    Attributes:
        give: returns the state of this rank.
        take: replaces it.
        attempt: the exchange that is under way.
        samples: deals out samples, and agrees on them in exchanges; None if there is no sampler.
        room: how many newcomers the members of the last attempt have agreed on, where samples are dealt out.
    """

    def __init__(
        self,
        presence: Presence,
        cells: Cells,
        connect: Callable[[Epoch], ProcessGroup],
        tell: Callable[[Epoch], None],
    ) -> None:
        self._presence = presence
        self._cells = cells
        self._connect = connect
        self._tell = tell
        #: One value, because the thread that gives signs of life reads both.
        self._link: tuple[Epoch, ProcessGroup] | None = None
        self.busy = False
        self.give: Callable[[], object] = _nothing
        self.take: Callable[[object], None] = _ignore
        self.attempt: Attempt = _ignore
        self.samples: Samples | None = None
        self.room = 0
        self._received: Any = None
        self._sent_before = 0

    @property
    def epoch(self) -> Epoch | None:
        """That whose members it has met last; None before the first."""
        return None if self._link is None else self._link[0]

    @property
    def group(self) -> ProcessGroup:
        """The members of that epoch."""
        assert self._link is not None
        return self._link[1]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to its counterparts in exchanges, at least."""
        link = self._link
        return self._sent_before + (0 if link is None else link[1].recorder.sent_bytes())

    @property
    def acts(self) -> Mapping[str, tuple[Act, tuple[type[CommunicationError], ...]]]:
        """What the first rank of the island may order, and which errors say that it has not happened."""
        return {
            "enter": (self._enter, (*LOSSES, TransportUnavailableError)),
            "attempt": (self._attempt, LOSSES),
            "receive": (self._receive, (CommunicationError,)),
            "take": (self._take, ()),
            "serve": (self._serve, ()),
        }

    @contextmanager
    def call(self) -> Iterator[ProcessGroup]:
        """The group, for a call that is ended if a member is gone."""
        self.busy = True
        try:
            yield self.group
        finally:
            self.busy = False

    def _enter(self, told: Mapping[str, Any]) -> None:
        """Connect with the members of an epoch. The connections of the one before stay until then.

        Who closes them refuses others that still ask who is lost.
        """
        epoch = Epoch.from_json(told)
        before, self._link = self._link, (epoch, self._connect(epoch))
        if before is not None:
            self._sent_before += before[1].recorder.sent_bytes()
            before[1].close()
        _log.info("islands: epoch %d of seats %s: %s", epoch.number, list(epoch.members), epoch.why)
        self._tell(epoch)

    def _attempt(self, waiting: int) -> None:
        """Run the exchange, and agree on samples: a rank that has the result has heard what all have said."""
        with self.call() as group:
            self.attempt(group)
            if self.samples is not None:
                self._agree(group, self.samples, waiting)

    def _agree(self, group: ProcessGroup, samples: Samples, waiting: int) -> None:
        own = torch.tensor([waiting, *samples.said()])
        told = torch.empty(group.size * own.numel(), dtype=own.dtype)
        group.global_communicator.allgather(told, own)
        rows = told.view(group.size, -1).tolist()
        self.room = max(row[0] for row in rows)
        samples.hear({seat: Tally(*row[1:]) for seat, row in zip(group.ranks, rows, strict=True)}, self.room)

    def _receive(self, _: object) -> None:
        """Receive the state of this rank's counterpart in the island that gives it."""
        epoch = self.epoch
        assert epoch is not None
        donor = epoch.members.index(epoch.donor_of(self._presence.seat))
        with self.call() as group:
            self._received = receive_state(group.global_communicator, donor)

    def _take(self, _: object) -> None:
        """Replace the state of this rank. All ranks have received theirs: they compare what they load."""
        state, self._received = self._received, None
        self.take(state["model"])
        if self.samples is not None:
            self.samples.take(state["samples"])

    def _serve(self, _: object) -> None:
        """Give newcomers the state, where it is this island's turn."""
        epoch = self.epoch
        assert epoch is not None
        state = {"model": self.give(), "samples": None if self.samples is None else self.samples.give()}
        with self.call() as group:
            try:
                for seat in epoch.served_by(self._presence.seat):
                    send_state(state, group.global_communicator, epoch.members.index(seat))
            except CommunicationError as error:  # The next exchange fails, and goes on without that one.
                _log.info("islands: a newcomer did not get the state: %s", error)
                group.abort(f"it could not give a newcomer the state: {error}")

    # From the thread that gives signs of life.

    def watch(self) -> None:
        """End a call that waits for a member that is gone, or that has stopped."""
        link = self._link
        if not self.busy or link is None:
            return
        epoch, group = link
        roster = self._presence.roster
        gone = {seat: why for seat, why in roster.gone(epoch.number).items() if seat in epoch.members}
        stopped = [seat for seat, report in roster.reports(epoch.number).items() if not report.resting]
        if gone:
            seat, why = next(iter(gone.items()))
            group.abort(why, seat)
        elif stopped or self._is_over(epoch):
            group.abort("it went on to the next epoch")

    def _is_over(self, epoch: Epoch) -> bool:
        try:
            return self._cells.read([epoch_name(epoch.number + 1)])[0] is not None
        except StoreLostError as error:
            self._presence.trouble = error.problem
            return False

    def abort(self, reason: str) -> None:
        """End whatever waits for other islands, from any thread."""
        if self._link is not None:
            self._link[1].abort(reason)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._link is not None:
            self._link[1].close()


def _nothing() -> object:
    return None


def _ignore(_: object) -> None:
    """What is done before anything is known."""
