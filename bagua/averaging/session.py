"""The background thread of one rank, from the beginning of averaging to its end."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from typing import Protocol

from bagua.averaging.handoff import HandoffBuffer
from bagua.averaging.link import DataLink
from bagua.averaging.membership import MemberState
from bagua.averaging.round_protocol import Member
from bagua.comm import bounded, family, in_background, stand_by
from bagua.errors import CommunicationError

#: An interpreter that ends without a word to the others takes at most about so long for it.
EXIT_S = 1.0
#: The host of the store stays so much longer if others are still there. Ending the interpreter takes time, too.
LINGER_S = 1.0


class Newcomer(Protocol):
    """Somebody whom others may wait for, and who may never begin a session."""

    def sign_off(self, reason: str) -> None:
        """Say so, unless a session is under way."""


class Session:
    """A daemon thread that polls a member until it is over.

    It holds the handoff buffer, but neither the model nor the algorithm: who forgets those ends it.

    Args:
        member: member to poll; its attributes are read and written whole.
        handoff: buffer of the member.
        link: data link of the member.
        name: name of the thread.
    """

    def __init__(
        self, member: Member, handoff: HandoffBuffer, link: DataLink, name: str, *, hosts_store: bool = False
    ) -> None:
        self.member = member
        self.handoff = handoff
        self._link = link
        self._hosts_store = hosts_store
        self._process = os.getpid()
        self._asked_to_leave: float | None = None
        self._thread = threading.Thread(target=in_background()(self._run), name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        _sessions.add(self)
        self._thread.start()

    def _run(self) -> None:
        member, wake = self.member, self.handoff.wake
        try:
            while not member.over:
                wake.wait(member.poll())
        except CommunicationError as error:
            member.abandon(error)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            member.error = error
            member.over = True
        finally:
            self._link.interrupt("averaging has ended")
            self.handoff.contributions = []  # Where the store is hosted, this outlives the model.
            self.handoff.tell()

    @property
    def over(self) -> bool:
        """Whether the member has ended."""
        return self.member.over or not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What the training thread has to know."""
        return self.member.error

    @property
    def ended_together(self) -> bool:
        """Whether this member ended because all had agreed to, and with the last average, if there was to be one."""
        return self.member.state is MemberState.STOPPED and self.member.apart is None

    def wait_for_change(self, limit_s: float) -> None:
        """Sleep until the background thread has changed something, at most ``limit_s``."""
        with self.handoff.changed:
            if not self.over:
                self.handoff.changed.wait(limit_s)

    def join(self, limit_s: float) -> bool:
        """Wait for the end of the thread, and say whether it has ended."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def leave(self, reason: str, limit_s: float = EXIT_S, *, for_good: bool = False) -> bool:
        """End without waiting for anybody, and say whether the thread has ended in time.

        An exchange that is under way has half of the time; then it is broken off, which
        the others survive.

        Args:
            reason: cause that the others are told.
            limit_s: how long this may take.
            for_good: later sessions need not wait for this rank.
        """
        if os.getpid() != self._process:
            return True  # Threads stay with the parent of a fork.
        self.member.for_good = self.member.for_good or for_good
        self.member.leaving = self.member.leaving or reason
        self.handoff.wake.set()
        if self._asked_to_leave is None:
            self._asked_to_leave = time.monotonic()
        else:  # It had its time already.
            limit_s = max(0.1, limit_s - (time.monotonic() - self._asked_to_leave))
        if not self.join(limit_s / 2):
            self._link.interrupt(reason)
            self.handoff.wake.set()
            return self.join(limit_s / 2)
        if for_good and self.member.state is MemberState.LEFT:
            self._sign_off(limit_s / 2)
        return True

    def _sign_off(self, limit_s: float) -> None:
        """It had left already, and might have come back."""
        bounded(self.member.sign_off, limit_s)

    def forget(self) -> None:
        """Let it end by itself, without waiting; for callers that must not block, as finalizers."""
        if os.getpid() == self._process:
            self.member.for_good = True
            self.member.leaving = self.member.leaving or "the model was dropped"
            self.handoff.wake.set()

    @property
    def may_be_outlasted(self) -> bool:
        """Where the store is hosted: whether others may still need it. Asks there, once the thread has ended."""
        if self.ended_together:
            return False
        if self._thread.is_alive():
            return True
        try:
            return self.member.others_remain
        except CommunicationError:
            return False

    def linger(self, until: float) -> None:
        """Where the store is hosted: give the others until then to end, too."""
        if not self._hosts_store or self._thread.is_alive() or os.getpid() != self._process:
            return
        with contextlib.suppress(CommunicationError):
            while time.monotonic() < until and self.member.others_remain:
                time.sleep(0.02)


class _Sessions:
    """All sessions of this process, to be ended before the interpreter does."""

    def __init__(self) -> None:
        self._living: weakref.WeakSet[Session] = weakref.WeakSet()
        self._hosting: list[Session] = []
        self._newcomers: weakref.WeakSet[Newcomer] = weakref.WeakSet()
        self._guard = threading.Lock()
        self._registered = False

    def add(self, session: Session) -> None:
        with self._guard:
            hosting = list(self._hosting)
        over = [one for one in hosting if not one.may_be_outlasted]
        with self._guard:
            self._living.add(session)
            if session._hosts_store:  # noqa: SLF001 - the other half of this file
                # Others may outlast it, also when nothing here refers to it any more.
                self._hosting = [one for one in self._hosting if one not in over] + [session]
            self._register()

    def expect(self, newcomer: Newcomer) -> None:
        stand_by()
        with self._guard:
            self._newcomers.add(newcomer)
            self._register()

    def _register(self) -> None:
        if not self._registered:
            # Now, not at import: handlers run in reverse order, and the groups must outlive the sessions.
            self._registered = True
            atexit.register(self._leave_all)
            family.add(self)

    def disown(self) -> None:
        """In a forked child: the parent's sessions go on in the parent, and only there."""
        self._guard = threading.Lock()
        self._hosting = []
        self._living, self._newcomers = weakref.WeakSet(), weakref.WeakSet()

    def _leave_all(self) -> None:
        with self._guard:
            sessions = list(self._living)
            hosting = list(self._hosting)
            newcomers = list(self._newcomers)
        for session in sessions:
            session.forget()
        until = time.monotonic() + EXIT_S
        for session in sessions:
            session.leave("its process ends", max(until - time.monotonic(), 0.1), for_good=True)
        for newcomer in newcomers:
            newcomer.sign_off("its process ends")
        until = time.monotonic() + LINGER_S
        for session in hosting:
            if not session.ended_together:
                session.linger(until)


_sessions = _Sessions()


def sign_off_at_exit(newcomer: Newcomer) -> None:
    """Have ``newcomer`` sign off before the interpreter ends, as sessions leave then.

    Args:
        newcomer: kept by a weak reference.
    """
    _sessions.expect(newcomer)
