"""What was measured: one cell in each line of a file, so that a run that was cut off goes on where it was."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bagua.advise.measure import Others
from bagua.cli.launch import RanksFailedError
from bagua.errors import BaguaError

__all__ = ["ALONE", "Cell", "CellTimeoutError", "Folder"]

#: Times do not count where other processes had more of the cores.
ALONE = 0.05


class CellTimeoutError(Exception):
    """A cell took longer than it may."""


@dataclass(frozen=True)
class Cell:
    """One thing that was measured, or that failed.

    Args:
        kind: of measurement.
        settings: what was measured.
        result: what came out; empty if it failed.
        error: why it failed.
        took_s: seconds that it took to measure.
        others: part of the machine's cores that other processes had meanwhile.
    """

    kind: str
    settings: dict[str, Any]
    result: dict[str, Any]
    error: str = ""
    took_s: float = 0.0
    others: float = 0.0


class Folder:
    """All cells of a folder.

    Args:
        path: folder; made if it is missing.
        limit_s: seconds that a cell may take.
        resume: whether to go on with cells that are there. Failed ones are not tried again: remove their lines.

    Raises:
        FileExistsError: there are cells, and ``resume`` was not asked for.
    """

    def __init__(self, path: Path, limit_s: float = 1200.0, *, resume: bool = True) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.file, self.limit_s = path / "cells.jsonl", limit_s
        if self.file.exists() and not resume:
            raise FileExistsError(f"{self.file} holds cells already; add to them with --resume, or take another folder")
        text = self.file.read_text() if self.file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # The last line was cut off.
            self.file.write_text(whole)
        self.cells = [Cell(**json.loads(line)) for line in whole.splitlines()]

    def find(self, kind: str, settings: Mapping[str, Any]) -> Cell | None:
        """The cell that was measured so."""
        found = (cell for cell in self.cells if cell.kind == kind and cell.settings == dict(settings))
        return next(found, None)

    def measure(self, kind: str, settings: Mapping[str, Any], function: Callable[[], dict[str, Any]]) -> Cell:
        """The cell that was measured so, measured now if it is not known."""
        if (known := self.find(kind, settings)) is not None:
            return known
        others, begun, result, error = Others(), time.monotonic(), {}, ""
        try:
            with limited(self.limit_s):
                result = function()
        except CellTimeoutError:
            error = f"took longer than {self.limit_s:g} s"
        except (RanksFailedError, BaguaError, ImportError) as failed:
            error = f"{type(failed).__name__}: {failed}"
        cell = Cell(kind, dict(settings), result, error, time.monotonic() - begun, others.share())
        self.add(cell)
        return cell

    def add(self, cell: Cell) -> None:
        """Keep a cell, and say so."""
        self.cells.append(cell)
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
        named = ", ".join(f"{value}" for value in cell.settings.values())
        said = cell.error or ("other processes had the cores" if cell.others > ALONE else "done")
        print(f"{cell.kind}: {named}: {said} ({cell.took_s:.0f} s)", file=sys.stderr, flush=True)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise in the main thread when time is over."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise CellTimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
