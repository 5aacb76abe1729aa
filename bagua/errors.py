"""Every error that bagua raises on purpose, in one tree.

Each class is one condition that a caller can act on, and also derives from the
standard type that a Python user would catch. The facts are attributes; the
message is built from them in one place, and ends with what to do next. Errors
survive pickling with all their attributes, so they cross process boundaries.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

#: How ranks that came late are told of, by ``CollectiveTimeoutError.of``.
_LATE = re.compile(r"it did not come within (\S+) s(?:, nor did ([\d, ]+))?")


def blame(error: BaseException, rank: int, call: str) -> tuple[int, str]:
    """Who is to blame for ``error``, and what that rank did: what other ranks are told.

    Args:
        error: ended ``call`` on this rank.
        rank: global rank of this process.
        call: description of the call on this rank.

    Returns:
        Global rank of the culprit, and a reason that begins with "it".

    Example:
        >>> blame(ValueError("no"), 1, "allreduce(3 x float32, sum)")
        (1, 'it left allreduce(3 x float32, sum) with ValueError: no')
        >>> blame(PeerLostError.of(2, "it closed its communicator"), 1, "the step")
        (2, 'it closed its communicator')
    """
    if isinstance(error, PeerLostError | CollectiveTimeoutError) and error.peers and error.reason:
        return error.peers[0], error.reason
    detail = error.problem if isinstance(error, BaguaError) else str(error)
    return rank, f"it left {call} with {type(error).__name__}" + (f": {detail}" if detail else "")


def relayed(culprit: int, reason: str, rank: int, *, teller: int | None = None, **facts: Any) -> CommunicationError:
    """The error of a rank that is told who ended a communicator, and why: the other half of ``blame``.

    Args:
        culprit: global rank to blame.
        reason: deed of the culprit, as ``blame`` words it.
        rank: global rank that raises.
        teller: global rank that says so, which is at fault if it gave up a rank that lives.
        facts: other arguments of the error.

    Example:
        >>> error = relayed(1, "it did not come within 2 s, nor did 3", 0)
        >>> type(error).__name__, error.peers
        ('CollectiveTimeoutError', (1, 3))
    """
    late = _LATE.fullmatch(reason)
    if late is not None:
        others = [int(one) for one in (late[2] or "").split(", ") if one]
        return CollectiveTimeoutError.of((culprit, *others), float(late[1]), rank, **facts)
    if culprit == rank and teller is not None:
        return PeerLostError.of(teller, f"it gave up rank {rank}: {reason}", **facts)
    return PeerLostError.of(culprit, reason, **facts)


def how_it_ended(exit_code: int | None) -> str:
    """How a process ended that was not to end yet, for a message.

    Args:
        exit_code: as processes of Python have it: the number of a signal is negative. None if it is not known.

    Example:
        >>> how_it_ended(-9), how_it_ended(3)
        ('was killed by SIGKILL', 'ended too early, with exit status 3')
    """
    if exit_code is None or exit_code >= 0:
        return f"ended too early, with exit status {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # Of the real-time signals only the first and the last one have a name.
        return f"was killed by signal {-exit_code}"


def _words(fact: object) -> str:
    return ", ".join(map(str, fact)) if isinstance(fact, tuple) else str(fact)


def _rebuild(error_class: type[BaguaError], facts: dict[str, Any]) -> BaguaError:
    # Not error_class.__new__: that is RuntimeError's, which refuses classes that derive from OSError too.
    error = (OSError if issubclass(error_class, OSError) else Exception).__new__(error_class)
    error.__dict__.update(facts)
    error.args = (facts.get("problem", ""),)
    return error


class BaguaError(Exception):
    """Root of all errors raised by bagua.

    Args:
        problem: sentence that says what is wrong, without a final period.
        advice: sentence that says what to do next; empty if nothing general can be said.

    Example:
        >>> str(BaguaError("the sky is falling", advice="Go inside."))
        'the sky is falling. Go inside.'
    """

    #: (attribute, label) pairs that the message shows when the attribute is set.
    _shown: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(self, problem: str, *, advice: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.advice = advice

    def __str__(self) -> str:
        shown = self._facts()
        facts = f" ({', '.join(shown)})" if shown else ""
        advice = f". {self.advice}" if self.advice else ""
        return f"{self.problem}{facts}{advice}{self._appendix()}"

    def _facts(self) -> list[str]:
        return [
            f"{label} {_words(getattr(self, name))}"
            for name, label in self._shown
            if getattr(self, name, None) not in (None, "", ())
        ]

    def _appendix(self) -> str:
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


class ConfigurationError(BaguaError, ValueError):
    """An argument, option or environment variable cannot be used.

    Args:
        problem: sentence that says what is wrong.
        argument: name of the argument.
        expected: value that would have been right, in words.
        seen: value that was given.
        advice: sentence that says what to do next.

    Example:
        >>> error = ConfigurationError("bad size", argument="size", expected=">= 1", seen=0)
        >>> str(error)
        'bad size (argument size, expected >= 1, seen 0)'
    """

    _shown = tuple((name, name) for name in ("argument", "expected", "seen"))

    def __init__(
        self,
        problem: str,
        *,
        argument: str | None = None,
        expected: object = None,
        seen: object = None,
        advice: str = "",
    ) -> None:
        super().__init__(problem, advice=advice)
        self.argument = argument
        self.expected = None if expected is None else str(expected)
        self.seen = None if seen is None else str(seen)

    def _facts(self) -> list[str]:
        said = all(fact is not None and fact in self.problem for fact in (self.argument, self.expected, self.seen))
        return [] if said else super()._facts()


class InvalidTypeError(ConfigurationError, TypeError):
    """An argument of another type than the one that is wanted."""


class InvalidTensorError(ConfigurationError, TypeError):
    """A tensor that this operation cannot take: type, dtype, shape, device or layout."""


class InvalidRankError(ConfigurationError):
    """A rank that is not in the group, or not allowed in this place."""


class InvalidReduceOpError(ConfigurationError):
    """A reduction that has no meaning for the tensor's dtype."""


class UnsupportedAlgorithmException(ConfigurationError):  # noqa: N818 - the documented name
    """The named algorithm does not exist; the message lists those that do."""

    _shown = ()  # The message has them all.


class NotInitializedError(BaguaError, RuntimeError):
    """A call that needs ``init_process_group()`` first."""


class RepeatedInitializationError(BaguaError, RuntimeError):
    """``init_process_group()`` was called twice without ``destroy_process_group()``."""


def _facts(peers: str) -> tuple[tuple[str, str], ...]:
    """What messages of communication errors show; ``peers`` under that label, or not at all if it is empty."""
    facts = (
        ("activity", "in"),
        ("call", "in"),
        ("rank", "on rank"),
        ("communicator", "of communicator"),
        ("peers", peers),
        ("silent", "silent"),
        ("expected", "this rank has"),
        ("seen", "others have"),
        ("elapsed_s", "seconds elapsed"),
        ("timeout_s", "timeout in seconds"),
    )
    return tuple(fact for fact in facts if fact[1])


class CommunicationError(BaguaError, RuntimeError):
    """Something went wrong between ranks; the communicator is unusable afterwards.

    All ranks in an error are global ranks: those of the default group, whatever group the call was made in.

    Args:
        problem: sentence that says what happened.
        rank: rank that raises.
        activity: purpose of the call: the step, the bucket and its parameters.
        call: description of the collective that was running; roots and peers in it count inside the communicator.
        sequence: its number on this communicator.
        communicator: label of the communicator, ``world/intra`` for example.
        peers: ranks that are lost, at fault, or did not come before the deadline.
        silent: ranks that did not answer when they were asked for the cause. They may be well, and busy.
        reason: account of what the first of ``peers`` did, for the errors of other ranks; begins with "it".
        expected: this rank's side of a disagreement.
        seen: the other side of a disagreement.
        elapsed_s: seconds since the call started.
        timeout_s: the deadline in force, in seconds.
        history: descriptions of the last calls on this communicator, oldest first.
        advice: sentence that says what to do next.
    """

    #: What to do next, unless something better is known.
    _advice: ClassVar[str] = ""

    _shown = _facts("peers")

    def __init__(
        self,
        problem: str,
        *,
        rank: int | None = None,
        activity: str | None = None,
        call: str | None = None,
        sequence: int | None = None,
        communicator: str | None = None,
        peers: Sequence[int] = (),
        silent: Sequence[int] = (),
        reason: str = "",
        expected: object = None,
        seen: object = None,
        elapsed_s: float | None = None,
        timeout_s: float | None = None,
        history: Sequence[str] = (),
        advice: str = "",
    ) -> None:
        super().__init__(problem, advice=advice or self._advice)
        self.rank = rank
        self.activity = activity
        self.call = call
        self.sequence = sequence
        self.communicator = communicator
        self.peers = tuple(peers)
        self.silent = tuple(silent)
        self.reason = reason
        self.expected = None if expected is None else str(expected)
        self.seen = None if seen is None else str(seen)
        self.elapsed_s = None if elapsed_s is None else round(elapsed_s, 3)
        self.timeout_s = timeout_s
        self.history = tuple(history)

    def _appendix(self) -> str:
        if not self.history:
            return ""
        return "\nlast calls on this communicator:\n  " + "\n  ".join(self.history)


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """A collective did not complete before its deadline; ``peers`` names the ranks that came late, or not yet."""

    _shown = _facts("late ranks")

    @classmethod
    def of(cls, late: Sequence[int], deadline_s: float, rank: int, **facts: Any) -> CollectiveTimeoutError:
        """The error that names the ranks which came late, or not yet: the same on all ranks, and on these.

        Args:
            late: global ranks that did not come in time; empty if they are not known.
            deadline_s: seconds that the first rank that gave up had waited.
            rank: global rank that raises.
            facts: other arguments of the class.

        Example:
            >>> error = CollectiveTimeoutError.of((2,), 3.0, rank=0)
            >>> error.problem, error.reason
            ('the call did not complete before its deadline', 'it did not come within 3 s')
            >>> CollectiveTimeoutError.of((2,), 3.0, rank=2).problem
            'this rank came late: others gave the call up after 3 s'
        """
        late = tuple(late)
        problem = "the call did not complete before its deadline"
        if rank in late:
            problem = f"this rank came late: others gave the call up after {deadline_s:g} s"
        elif not late:
            problem += ", and which rank is late is not known"
        others = f", nor did {', '.join(map(str, late[1:]))}" if late[1:] else ""
        return cls(
            problem,
            peers=late,
            reason=f"it did not come within {deadline_s:g} s{others}" if late else "",
            advice="Look at what the late ranks do, or allow more time with timeout=.",
            **{"timeout_s": deadline_s, **facts},
        )


class PeerLostError(CommunicationError, ConnectionError):
    """A peer died, left, or broke the communicator; ``peers`` names it where known."""

    _shown = _facts("")
    _advice = "Look first at the output of the ranks named here. Then restart the job from its last checkpoint."
    _left_advice = (
        "Look first at its output. If it came to its end, it had fewer batches, or made fewer calls, than the others: "
        "give all ranks as many, or train inside model.join()."
    )

    @classmethod
    def of(cls, culprit: int, reason: str, **facts: Any) -> PeerLostError:
        """The error that names ``culprit``, worded alike on all ranks.

        Args:
            culprit: global rank that is lost.
            reason: account of what the culprit did; begins with "it".
            facts: other arguments of the class.

        Example:
            >>> error = PeerLostError.of(3, "it closed its communicator", rank=0)
            >>> error.problem, error.peers
            ('lost rank 3: it closed its communicator', (3,))
        """
        if reason.endswith("closed its communicator"):  # It may have done so by mistake, without any error to look for.
            facts.setdefault("advice", cls._left_advice)
        return cls(f"lost rank {culprit}: {reason}", peers=(culprit,), reason=reason, **facts)


class CollectiveMismatchError(CommunicationError):
    """Ranks disagree on what they are doing; ``expected`` and ``seen`` hold both sides."""


class CommunicatorClosedError(CommunicationError):
    """The communicator was closed, aborted, or broken by an earlier error."""


class ConcurrentUseError(CommunicationError):
    """Two threads used one communicator at the same time."""


class TransportUnavailableError(CommunicationError):
    """The requested transport cannot run here; the message says why.

    Attributes:
        agreed: ranks that all raise it, and know that: together they may try another transport.
    """

    agreed: tuple[int, ...] = ()


class StoreLostError(CommunicationError, ConnectionError):
    """The store through which islands meet does not answer."""

    _advice = "Look at the process or the servers that keep it, and whether this host reaches them."


class TooFewMembersError(CommunicationError, TimeoutError):
    """Too few islands are there to begin or to go on; ``peers`` names the seats that are missed."""

    _shown = _facts("missing seats")


class LeftOutError(CommunicationError, ConnectionError):
    """The other islands went on without this one, which they took for dead."""

    _advice = "The model of this process is intact. Start the process again to join as a newcomer."


__all__ = [name for name, kind in vars().items() if isinstance(kind, type) and issubclass(kind, BaguaError)]
