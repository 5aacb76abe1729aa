"""Metrics in a file that spreadsheets read."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Mapping
from pathlib import Path

#: Bytes in which the end of the last whole row is looked for at once.
_TAIL_BYTES = 4096


class CsvWriter:
    """One row for each call, in a file that spreadsheets read: step, name, value.

    Args:
        path: path of the file; rows are added to it, after the last whole one.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> writer = CsvWriter(path)
        >>> writer.write(1, {"comm/overlap": 0.5})
        >>> writer.close()
        >>> print(path.read_text().strip())
        step,name,value
        1,comm/overlap,0.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        _drop_half_a_row(self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._rows.writerow(["step", "name", "value"])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row for each value."""
        self._rows.writerows([step, name, value] for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def _drop_half_a_row(path: Path) -> None:
    """Cut off what a process was writing when it was killed, or the disk was full: a number that has lost digits."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        end = begin = file.seek(0, os.SEEK_END)
        tail = b""
        while begin and b"\n" not in tail:
            begin = max(begin - _TAIL_BYTES, 0)
            file.seek(begin)
            tail = file.read(end - begin)
        if tail and not tail.endswith(b"\n"):
            file.truncate(begin + tail.rfind(b"\n") + 1)
