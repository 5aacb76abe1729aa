"""A switch in user space, for what the kernel here has no queue for: delay and loss.

Each host has a TAP device. The switch takes a frame from the sender's device, keeps it until it is due, and writes it
to the receiver's. It is one process, and Python, so devices give packets of TCP before these are cut into frames, where
no frame is to be lost. How late frames leave is counted and reported, so a measurement that the switch has distorted
says so.

``python -m bagua.cli.lab.switch SETTINGS`` with the devices' descriptors inherited.
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

#: The longest time for which frames wait for a receiver's rate, or a round trip, as in the kernel's queues of the lab.
LONGEST_QUEUE_S = 0.05
#: What a device gives at most: a packet of TCP that is not cut into frames yet, and the header of virtio_net before it.
LONGEST_FRAME_BYTES = 65536 + 64
HEADER_BYTES = 10
#: Frames that are taken from one device before the others have a turn.
_BATCH = 64
#: Where delays are at least ``_LONG_S``, frames are carried in turns of this length: a process that is woken for each
#: of them takes the processor from the hosts, which share it. A frame leaves up to half a turn early, or late.
TURN_S, _LONG_S = 1e-3, 0.01
_BROADCAST = b"\xff" * 6


@dataclass
class SwitchReport:
    """What a switch has done.

    Attributes:
        frames: number of frames that were handed on.
        lost: number of frames that were dropped on purpose.
        overflowed: number of frames that were dropped because the receiver's queue was full.
        latest_s: the most seconds between due and written of a frame.
        late_frames: number of frames that left more than a millisecond after they were due.
    """

    frames: int = 0
    lost: int = 0
    overflowed: int = 0
    latest_s: float = 0.0
    late_frames: int = 0

    @property
    def warning(self) -> str | None:
        """A sentence, if the switch was the bottleneck."""
        if not self.frames or self.late_frames < 0.01 * self.frames:
            return None
        return (
            f"the switch could not keep up: {self.late_frames / self.frames:.0%} of the packets left more than 1 ms "
            f"late (at most {1e3 * self.latest_s:.0f} ms), so what was measured is slower than the link"
        )


@dataclass
class FrameSchedule:
    """When each frame goes where. Knows frames and times, no devices and no clock.

    Args:
        hosts: number of hosts; host n has the address 02:00:00:00:00:n, in hexadecimal digits.
        delay_s: from sender to receiver.
        loss: the share of frames that is dropped.
        receive_bytes_per_s: highest rate at which each host receives; None for no limit.
        seed: seed of the drops.
    """

    hosts: int
    delay_s: float = 0.0
    loss: float = 0.0
    receive_bytes_per_s: float | None = None
    seed: int = 0
    report: SwitchReport = field(default_factory=SwitchReport)

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        #: When the receiver's link has passed on all that was sent to it.
        self._free = [0.0] * self.hosts
        self._chance = random.Random(self.seed)  # noqa: S311 - no secret

    def take(self, sender: int, frame: bytes, now: float) -> None:
        """Put a frame on its way.

        Args:
            sender: number of the host.
            frame: header of virtio_net, and what follows it: a frame without checksum, or several in one.
            now: seconds on any clock.
        """
        for receiver in self._receivers(sender, frame[HEADER_BYTES : HEADER_BYTES + 6]):
            if self.loss and self._chance.random() < self.loss:
                self.report.lost += 1
                continue
            due = now + self.delay_s
            if self.receive_bytes_per_s is not None:
                free = max(self._free[receiver], due)
                if free - due > max(LONGEST_QUEUE_S, 2 * self.delay_s):
                    self.report.overflowed += wire_size(frame)[0]
                    continue
                due = self._free[receiver] = free + wire_size(frame)[1] / self.receive_bytes_per_s
            self._number += 1  # Frames that are due at one time keep their order.
            heapq.heappush(self._due, (due, self._number, receiver, frame))

    def _receivers(self, sender: int, address: bytes) -> Sequence[int]:
        if address == _BROADCAST:
            return [host for host in range(self.hosts) if host != sender]
        host = address[5]
        return (host,) if address[0] == 2 and host < self.hosts and host != sender else ()

    def ready(self, now: float, ahead_s: float = 0.0) -> Iterator[tuple[int, bytes]]:
        """The frames that are due, or will be ``ahead_s`` from now, with their receivers, in order."""
        report = self.report
        while self._due and self._due[0][0] <= now + ahead_s:
            due, _, receiver, frame = heapq.heappop(self._due)
            late_s, frames = now - due, wire_size(frame)[0]
            report.frames += frames
            report.latest_s = max(report.latest_s, late_s)
            report.late_frames += frames * (late_s > 1e-3)
            yield receiver, frame

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next frame is due; None if there is none."""
        return max(self._due[0][0] - now, 0.0) if self._due else None


def wire_size(packet: bytes) -> tuple[int, int]:
    """How many frames a packet is on a wire, and how many bytes they have.

    Args:
        packet: header of virtio_net, and a frame; or a packet of TCP that is to be cut into frames, as the header says.

    Example:
        >>> wire_size(bytes(10) + bytes(60))
        (1, 60)
        >>> wire_size(bytes([1, 1, 66, 0, *(1448).to_bytes(2, "little"), 34, 0, 16, 0]) + bytes(66 + 3000))
        (3, 3198)
    """
    kind, header_bytes, payload_bytes = packet[1], int.from_bytes(packet[2:4], "little"), packet[4:6]
    nbytes = len(packet) - HEADER_BYTES
    if not kind:
        return 1, nbytes
    frames = max(-((header_bytes - nbytes) // int.from_bytes(payload_bytes, "little")), 1)
    return frames, nbytes + (frames - 1) * header_bytes


def serve(devices: Sequence[int], schedule: FrameSchedule, over: Callable[[], bool]) -> SwitchReport:
    """Carry frames between TAP devices until ``over`` says so.

    Args:
        devices: a descriptor for each host, which does not block.
        schedule: schedule that says where each frame goes, and when.
        over: asked after each wait.
    """
    clock = time.monotonic
    turn_s = TURN_S if schedule.delay_s >= _LONG_S else 0.0
    while not over():
        wait_s = schedule.wait_s(clock())
        if turn_s and wait_s is not None:
            time.sleep(turn_s)
            wait_s = 0.0
        readable, _, _ = select.select(devices, [], [], 0.1 if wait_s is None else min(wait_s, 0.1))
        for device in readable:
            _take_from(device, devices.index(device), schedule, clock())
        for receiver, frame in schedule.ready(clock(), turn_s / 2):
            try:
                os.write(devices[receiver], frame)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EIO, errno.ENOBUFS):  # full, or the interface is down
                    raise
                schedule.report.overflowed += 1
    return schedule.report


def _take_from(device: int, sender: int, schedule: FrameSchedule, now: float) -> None:
    for _ in range(_BATCH):
        try:
            schedule.take(sender, os.read(device, LONGEST_FRAME_BYTES), now)
        except BlockingIOError:
            return


def main(arguments: Sequence[str]) -> int:
    """Serve until standard input ends or SIGTERM comes, then write the report to standard output."""
    settings = json.loads(arguments[0])
    devices: list[int] = settings.pop("devices")
    for device in devices:
        os.set_blocking(device, False)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the lab ends this process.

    def over() -> bool:
        closed = select.select([0], [], [], 0)[0] and not os.read(0, 1)  # The lab has died.
        return bool(ended or closed)

    report = serve(devices, FrameSchedule(**settings), over)
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
