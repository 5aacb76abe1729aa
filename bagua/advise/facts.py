"""What the model is made of: facts about steps and machines, and what a rank does in the steps of an algorithm."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

from bagua.errors import ConfigurationError


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: its dtype, as ``float32``.
        arrival_s: seconds from the beginning of a step until its gradient is there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    arrival_s: float


@dataclass(frozen=True)
class ModelFacts:
    """The steps of a model on one rank, without any communication.

    Attributes:
        parameters: parameters, in the order in which their gradients arrive.
        steps_s: seconds of each measured step.
        optimizer: name of the optimizer's class.

    Raises:
        ConfigurationError: no step, or no parameter.
    """

    parameters: tuple[ParameterFacts, ...]
    steps_s: tuple[float, ...]
    optimizer: str = "SGD"

    def __post_init__(self) -> None:
        if not self.parameters or not self.steps_s:
            raise ConfigurationError(
                "nothing was measured",
                argument="steps_s" if self.parameters else "parameters",
                expected="a model that was trained for some steps",
                seen=f"{len(self.parameters)} parameters with gradients, {len(self.steps_s)} steps",
                advice="Train at least 5 steps of a model that was given to with_bagua.",
            )

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median."""
        return statistics.median(self.steps_s)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Measured steps as multiples of the median."""
        return tuple(step / self.step_s for step in self.steps_s)


@dataclass(frozen=True)
class CallFacts:
    """What calls of one kind cost: two ranks on a network without limit and delay, or all ranks on a certain link.

    Attributes:
        kind: as ``Message.kind``.
        message_s: seconds of each message of a small call.
        points: bytes that a rank sends, rising, and the seconds that they add to a small call; below 0 where large
            calls take a shorter way.
        busy: part of the time of a small call for which a rank keeps a core busy.
        busy_bytes: part of the time that bytes add for which a rank keeps a core busy.
    """

    kind: str
    message_s: float
    points: tuple[tuple[float, float], ...]
    busy: float = 1.0
    busy_bytes: float = 1.0

    def byte_s(self, sent: float) -> float:
        """Seconds for each of ``sent`` bytes: on the line between the points next to them.

        Example:
            >>> CallFacts("allreduce", 0.0, ((100.0, 1.0), (200.0, 4.0))).byte_s(150.0)
            0.016666666666666666
        """
        before = (0.0, 0.0)
        for point in self.points:
            if sent <= point[0] or point is self.points[-1]:
                slope = (point[1] - before[1]) / (point[0] - before[0])
                return max(before[1] + slope * (sent - before[0]), 0.0) / sent if sent > 0 else max(slope, 0.0)
            before = point
        return 0.0


#: Kinds that are measured, the first of which stands for what is not here, and those that take the same way.
ALIKE = {
    "allreduce": ("reduce", "barrier"),
    "allgather": ("gather", "scatter"),
    "alltoall": ("alltoall_v", "reduce_scatter"),
    "sendrecv": ("broadcast", "send", "recv"),
}


def calls_like(calls: tuple[CallFacts, ...], kind: str) -> CallFacts | None:
    """What was measured of calls of ``kind``, or of one that takes the same way; None if nothing was."""
    return next((one for one in calls if kind in (one.kind, *ALIKE.get(one.kind, ()))), None)


@dataclass(frozen=True)
class MachineFacts:
    """What calls cost on a machine, whatever the network.

    Attributes:
        message_s: seconds of one message between two ranks on a network without delay.
        byte_s: seconds for which a rank's processor is busy with each byte that it sends while it receives one.
        local_message_s: seconds of one message between ranks that share memory.
        local_byte_s: seconds for each byte of it.
        cores: processor cores of a host.
        calls: the first two by kind of call, where they were measured.
        after_calls: factor on the time of what is computed after a call, while caches are cold.
        others: part of the cores that other processes had while all this was measured.
        ranks: ranks that made these calls together, on the cores of one machine.
    """

    message_s: float = 60e-6
    byte_s: float = 0.5e-9
    local_message_s: float = 20e-6
    local_byte_s: float = 0.3e-9
    cores: int = 1
    calls: tuple[CallFacts, ...] = ()
    after_calls: float = 1.0
    others: float = 0.0
    ranks: int = 2

    def call_of(self, kind: str) -> CallFacts:
        """What calls of ``kind`` cost, or any call where that was not measured."""
        return calls_like(self.calls, kind) or CallFacts(kind, self.message_s, ((1.0, self.byte_s),))

    def waiting_s(self, call: CallFacts) -> float:
        """Seconds of each message of ``call`` in which the rank's share of the cores had nothing to do."""
        share = min(1.0, self.cores / self.ranks)
        return max(call.message_s * (1.0 - call.busy / share), 0.0)


@dataclass(frozen=True)
class Message:
    """One call of a communicator.

    Attributes:
        kind: as ``bagua.comm.Call.kind``.
        nbytes: bytes of this rank's input, or of its output where that is larger.
        ranks: ranks of the communicator.
        hosts: hosts on which they are.
    """

    kind: str
    nbytes: float
    ranks: int
    hosts: int

    @property
    def input_bytes(self) -> float:
        """Bytes of this rank's input."""
        return self.nbytes / self.ranks if self.kind in ("allgather", "gather") else self.nbytes

    @property
    def pairwise(self) -> bool:
        """Whether it waits for one other rank only."""
        return self.kind in ("send", "recv", "sendrecv")


@dataclass(frozen=True)
class Run:
    """One exchange of one bucket, from its first call to its last.

    Attributes:
        items: messages, and the seconds of work before, between and after them.
        lane: name of the background thread that runs it; empty if the thread that computes starts it.
    """

    items: tuple[Message | float, ...]
    lane: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages."""
        return tuple(item for item in self.items if isinstance(item, Message))


@dataclass(frozen=True)
class Moment:
    """Something that the thread which computes does.

    Attributes:
        what: ``arrival``: gradient number ``number`` is there, in the order of a backward pass. ``stepped``: the
            optimizer has stepped, which ends the step. ``start`` and ``wait``: of run number ``number``.
        number: number of the gradient or of the run.
        periods_ago: for a run that is waited for: how many repetitions of the steps ago it started.
    """

    what: Literal["arrival", "stepped", "start", "wait"]
    number: int = 0
    periods_ago: int = 0


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in a number of steps that repeat.

    Attributes:
        name: name of the algorithm.
        steps: moments of each step, in order.
        runs: all runs.
        extra_s: seconds that the thread which computes spends on the algorithm, in each step on an average, beside the
            runs.
        keeps_equal: True if ranks hold equal weights after each step.
        needs_optimizer: name of the optimizer without which the algorithm does not work; empty if any will do.
        options: options of the algorithm, if it is not used with its defaults.
    """

    name: str
    steps: tuple[tuple[Moment, ...], ...]
    runs: tuple[Run, ...]
    extra_s: float = 0.0
    keeps_equal: bool = True
    needs_optimizer: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> float:
        """Bytes that enter calls in each step, on an average."""
        return sum(message.input_bytes for run in self.runs for message in run.messages) / max(len(self.steps), 1)

    @property
    def meeting(self) -> int:
        """How many ranks wait for each other at most."""
        found = [2 if message.pairwise else message.ranks for run in self.runs for message in run.messages]
        return max(found, default=1)

    @property
    def steps_alone(self) -> float:
        """Steps from one wait for others to the next, on an average."""
        busy = sum(any(moment.what == "wait" for moment in step) for step in self.steps)
        return len(self.steps) / busy if busy else float(len(self.steps))
