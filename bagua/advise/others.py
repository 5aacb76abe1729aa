"""How much of a machine other processes have while something is measured on it."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: A measurement has the machine for itself if others have less of its cores.
ALONE = 0.05
_FILE = Path("/proc/stat")


class Others:
    """Counts what processes that are none of ours have of the cores, from its beginning on; nothing outside Linux."""

    def __init__(self) -> None:
        self._begun = self._look()

    def share(self) -> float:
        """Part of all cores. Child processes of ours must have ended."""
        busy_s, own_s, passed_s = (now - then for now, then in zip(self._look(), self._begun, strict=True))
        return max(busy_s - own_s, 0.0) / (passed_s * (os.cpu_count() or 1))

    @staticmethod
    def _look() -> tuple[float, float, float]:
        """Processor seconds of all processes, of ours, and the time."""
        own_s = sum(os.times()[:4])  # user and system, of this process and of its children
        if not _FILE.exists():
            return own_s, own_s, time.monotonic()
        # User, nice and system; what interrupts take is that of packets, and ours.
        busy_s = sum(map(int, _FILE.read_text().split()[1:4])) / os.sysconf("SC_CLK_TCK")
        return busy_s, own_s, time.monotonic()
