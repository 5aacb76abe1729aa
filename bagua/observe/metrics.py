"""The metrics of this rank, as one flat dictionary, and in a file that spreadsheets read."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Mapping
from pathlib import Path

from bagua.comm import get_default_group
from bagua.observe.straggler import Reading, latest_rank
from bagua.observe.watch import watch_of


def metrics() -> dict[str, float]:
    """What communication cost this rank since ``init_process_group``, and what it says about training.

    Local and cheap: nothing is sent, and no other rank has to call it. Seconds and bytes only grow; take differences
    for what a step costs.

    Returns:
        By name. ``comm/calls``: calls that ended. ``comm/bytes_sent``: bytes that this rank sent, at least.
        ``comm/time``: seconds in which calls were under way, which is the sum of the next three.
        ``comm/time_waiting``: peers had not come yet. ``comm/time_exposed``: all had come, and computing stood still.
        ``comm/time_hidden``: all had come, and computing went on. ``comm/overlap``: hidden part of the last two.
        ``comm/wait_on_rank/<r>``: seconds that this rank waited for global rank r, which came last.
        ``comm/straggler``: the rank that came last most often in the last seconds, or for which others waited longest;
        -1 if none stands out.
        ``comm/alive``, ``comm/epoch_members``, ``comm/contributed``: ranks that gave a sign of life, that belong to the
        job, and that took part in the last exchange; islands, if the model trains between islands.

    Raises:
        NotInitializedError: without ``init_process_group``.

    Example:
        >>> import torch, bagua.comm
        >>> bagua.comm.init_process_group()
        >>> bagua.comm.allreduce(torch.ones(4))
        >>> now = metrics()
        >>> now["comm/calls"], now["comm/bytes_sent"], now["comm/straggler"]
        (1.0, 0.0, -1.0)
        >>> bagua.comm.destroy_process_group()
    """
    group = get_default_group()
    recorder = group.recorder
    times, watch = recorder.times(), watch_of(recorder)
    moving = times.exposed_s + times.hidden_s
    reading = Reading.of(recorder)
    lately = reading.since(Reading(recorder.began, {}, 0.0) if watch is None else watch.readings[0])
    told = {} if watch is None else {rank: Reading.told(beat) for rank, beat in watch.others.items()}
    found = {
        "comm/calls": float(times.calls),
        "comm/bytes_sent": float(recorder.sent_bytes()),
        "comm/time": times.time_s,
        "comm/time_waiting": times.waiting_s,
        "comm/time_exposed": times.exposed_s,
        "comm/time_hidden": times.hidden_s,
        "comm/overlap": times.hidden_s / moving if moving > 0 else 0.0,
        "comm/straggler": float(latest_rank({group.rank: lately, **told})),
        "comm/alive": float(group.size if watch is None else watch.alive(reading.at)),
        "comm/epoch_members": float(group.size),
        "comm/contributed": float(group.size),
    }
    found.update({f"comm/wait_on_rank/{rank}": seconds for rank, seconds in sorted(recorder.waits().items())})
    found.update(recorder.gauges)
    return found


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
