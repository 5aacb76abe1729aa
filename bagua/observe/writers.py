"""Writers of metrics: CSV and Prometheus text files, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from bagua.checks import install_command
from bagua.errors import ConfigurationError
from bagua.observe.folders import write_whole

#: Bytes in which the end of the last whole row is looked for at once.
_TAIL_BYTES = 4096


class MetricWriter(Protocol):
    """Takes metrics now and then. Anything with these two methods is one."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write ``values``, by name, as they were at training step ``step``."""

    def close(self) -> None:
        """Write what waits. Idempotent."""


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


class PrometheusWriter:
    """The latest values in Prometheus' text format, for the text-file collector of its node exporter.

    ``comm/wait_on_rank/3`` becomes ``bagua_comm_wait_on_rank{rank="0",of="3"}``.

    Args:
        path: path of the file, ending in ``.prom``; replaced as a whole each time.
        rank: rank of this process; the label of all values.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "bagua.prom"
        >>> PrometheusWriter(path, rank=0).write(7, {"comm/overlap": 0.5})
        >>> print(path.read_text().strip())
        bagua_step{rank="0"} 7
        bagua_comm_overlap{rank="0"} 0.5
    """

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self._path = Path(path)
        self._rank = rank

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the file."""
        lines = [f'bagua_step{{rank="{self._rank}"}} {step}']
        for name, value in values.items():
            found = re.fullmatch(r"(.*)/(\d+)", name)
            plain, of = found.groups() if found else (name, "")
            labels = f'rank="{self._rank}"' + (f',of="{of}"' if of else "")
            lines.append(f"bagua_{re.sub(r'[^a-zA-Z0-9_]', '_', plain)}{{{labels}}} {float(value)!r}")
        write_whole(self._path, ("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        """Leave the last values where they are."""


class TensorBoardWriter:
    """Scalars for TensorBoard.

    Args:
        folder: folder of the event files; one for each rank that writes.

    Raises:
        ConfigurationError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise _not_installed("TensorBoard", "tensorboard") from error
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._writer.close()


class WandbWriter:
    """Metrics of a run of Weights & Biases.

    Args:
        run: run that ``wandb.init()`` returned; None for the run that is current.

    Raises:
        ConfigurationError: Weights & Biases is not installed, or there is no run.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            try:
                import wandb  # noqa: PLC0415 - an extra
            except ImportError as error:
                raise _not_installed("Weights & Biases", "wandb") from error
            run = wandb.run
        if run is None:
            raise ConfigurationError(
                "there is no run of Weights & Biases",
                argument="run",
                expected="what wandb.init() returns",
                seen=None,
                advice="Call wandb.init() first, on the rank that writes.",
            )
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log them, beside what the script logs for this step; the step is one of them, too."""
        self._run.log({**values, "comm/step": step})

    def close(self) -> None:
        """The run belongs to the script, which ends it."""


def _not_installed(what: str, extra: str) -> ConfigurationError:
    return ConfigurationError(f"{what} is not installed", advice=f"{install_command(extra)}, or use CsvWriter.")
