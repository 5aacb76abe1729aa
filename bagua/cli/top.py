"""The command ``bagua top``: a live table of the ranks of a running job."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua import env
from bagua.checks import install_command
from bagua.cli.arguments import some_seconds

if TYPE_CHECKING:
    from bagua.comm import Beats

Beat = Mapping[str, Any]
COLUMNS = (
    *("rank", "host", "seen", "step", "steps/s", "in calls", "exposed", "waiting"),
    *("MB/s sent", "late", "last call"),
)
_LATE = COLUMNS.index("late")
_SUMS = ("running_s", "time_s", "exposed_s", "waiting_s", "sent_bytes")
#: Who keeps others waiting for less than this part of their time is not late: the table shows whole percents.
_LEAST_WAIT = 0.01
#: Seconds in which the address must turn out to be that of a store.
_FOUND_S = 2.0
#: Requests of torch's ``TCPStore``: who asks has to give its magic number first.
_VALIDATE, _MAGIC, _CHECK = 0, 0x3C85F7CE, 5
#: Its answers to ``_CHECK``.
_THERE, _NOT_THERE = b"\0", b"\1"
#: A beat is a matter of the past after so many seconds.
_STALE_S = 10.0
#: The store of a job that was seen is given up after so many seconds: its host may be stopped.
_ANSWER_S = 10.0
_LAST_PORT = 65535


def main(arguments: Sequence[str]) -> int:
    """Show the ranks of a running job until Ctrl-C.

    Args:
        arguments: words that follow ``bagua top``.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="bagua top",
        description="Show what each rank of a running job does. The job is found through its store.",
        epilog="Ranks say how they are once in a second, when a call ends. With baguarun and torchrun on one machine, "
        "give --master-port to the launcher and the same here.",
    )
    parser.add_argument(
        "store", nargs="?", default="127.0.0.1:29500", metavar="HOST:PORT", help="MASTER_ADDR:MASTER_PORT of the job"
    )
    parser.add_argument("--interval", type=some_seconds, default=1.0, metavar="S", help="seconds between looks (1)")
    parser.add_argument("--once", action="store_true", help="print the table once, and end")
    parsed = parser.parse_args(arguments)
    host, _, port = parsed.store.rpartition(":")
    if not host or not port.isdigit() or int(port) > _LAST_PORT:
        parser.error(f"expected HOST:PORT, as 10.0.0.1:29500 or [::1]:29500, got {parsed.store}")
    print(f"looking for a job at {parsed.store}", file=sys.stderr)
    found = False
    try:
        if not _has_ranks(host.strip("[]"), int(port)):
            print(
                f"bagua top: no rank has said anything at {parsed.store}. The first word of a rank takes a second; "
                "a job of one rank says nothing."
            )
            return 1
        found = True
        with env.with_defaults({"TORCH_CPP_LOG_LEVEL": "FATAL"}):  # Else torch has pages to say when the job ends.
            from bagua.comm import connect_beats
        _show(connect_beats(host.strip("[]"), int(port)), parsed.interval, once=parsed.once)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # Who reads the table has seen enough. Python writes the rest when it ends.
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 0
    except (RuntimeError, OSError) as error:
        what = "the job has ended, or answers no more," if found else "no job answers"
        print(f"bagua top: {what} at {parsed.store}: {str(error).splitlines()[0]}", file=sys.stderr)
        if not found:
            print("On one machine, a launcher takes any free port unless it gets --master-port.", file=sys.stderr)
        return 1
    return 0


def _has_ranks(host: str, port: int) -> bool:
    """Whether rank 0 of a job has left its beat in the store at an address.

    Asked without torch: its import takes seconds, and so does its client with somebody who is no store.
    """
    token = env.token()
    key = f"{'/' if token else ''}{token}/bagua/beat/0".encode()
    until = time.monotonic() + _FOUND_S
    with socket.create_connection((host, port), _FOUND_S) as store:
        store.sendall(struct.pack(f"=BIBQQ{len(key)}s", _VALIDATE, _MAGIC, _CHECK, 1, len(key), key))
        store.settimeout(max(until - time.monotonic(), 0.1))
        try:
            answer = store.recv(1)
        except TimeoutError:
            raise TimeoutError(f"who listens there gives no answer within {_FOUND_S:g} s") from None
    if answer not in (_THERE, _NOT_THERE):
        raise ConnectionError("who listens there is no store")
    return answer == _THERE


def _show(beats: Beats, interval_s: float, *, once: bool) -> None:
    def looks() -> Iterator[list[tuple[str, ...]]]:
        seen = Seen()
        while True:
            now = beats.read_within(_ANSWER_S)
            seen.look(now)
            yield rows_of(now, seen.before, time.time())
            if once:
                return
            time.sleep(interval_s)

    stays = not once and sys.stdout.isatty()
    if stays and importlib.util.find_spec("rich") is not None:
        from rich.live import Live

        with Live() as live:
            for rows in looks():
                live.update(rich_table(rows), refresh=True)
        return
    if stays:
        print(f"({install_command('cli')} keeps the table in one place)")
    for rows in looks():
        print(plain_table(rows), flush=True)


class Seen:
    """The last beats of each rank. Ranks speak less often than somebody looks, so a look may find nothing new.

    Attributes:
        before: beat of each rank before its latest one.
    """

    def __init__(self) -> None:
        self.before: dict[int, Beat] = {}
        self._latest: dict[int, Beat] = {}

    def look(self, now: Mapping[int, Beat]) -> None:
        """``now``: the latest beat of each rank."""
        for rank, beat in now.items():
            latest = self._latest.get(rank)
            if latest is not None and latest["at"] != beat["at"]:
                self.before[rank] = latest
            self._latest[rank] = beat


def rich_table(rows: Sequence[Sequence[str]]) -> Any:
    """The table for a terminal. Names of groups are the user's, so no cell is read as markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*map(Text, row), style="red" if row[_LATE] else "")
    return table


def rows_of(now: Mapping[int, Beat], before: Mapping[int, Beat], wall_s: float) -> list[tuple[str, ...]]:
    """One row for each rank, in the order of ``COLUMNS``.

    Args:
        now: the last beat of each rank.
        before: beat of each rank before that one, for what lies between them.
        wall_s: time of the display, as ``time.time()`` gives it.
    """
    # An earlier job of the same store has left its own beats; names of jobs are in order of time.
    latest = max(now.values(), key=_job_of, default={})
    now = {rank: beat for rank, beat in now.items() if _job_of(beat) == _job_of(latest)}
    spent = {rank: _spent(now[rank], before.get(rank)) for rank in sorted(now)}
    late = _late(now, spent)
    size = int(latest.get("world_size", 0))
    rows = [_row(rank, now[rank], spent[rank], late, wall_s) for rank in spent]
    blank = [""] * (len(COLUMNS) - 2)
    return rows + [(str(rank), *blank, "has said nothing yet") for rank in range(size) if rank not in now]


def _spent(beat: Beat, before: Beat | None) -> dict[str, float]:
    """What a rank did between its last two beats, or since its beginning."""
    if before is None or _life_of(before) != _life_of(beat):
        before = dict.fromkeys(_SUMS, 0.0)
    made, made_before = ((one.get("steps") or (0,))[0] for one in (beat, before))  # None before the first step.
    return {"steps": made - made_before, **{key: beat[key] - before[key] for key in _SUMS}}


def _late(now: Mapping[int, Beat], spent: Mapping[int, Mapping[str, float]]) -> int:
    """The rank for which others wait in what the table shows; -1 if they wait for none.

    Where no rank sees who comes when, as on Gloo, what ranks wait for others is part of ``exposed``.
    """
    from bagua.observe import latest_of

    rank = latest_of(now)
    lost = {one: (sums["exposed_s"] + sums["waiting_s"]) / _running_s(sums) for one, sums in spent.items()}
    waits = [share - lost[rank] for one, share in lost.items() if one != rank] if rank in lost else []
    return rank if max(waits, default=0.0) >= _LEAST_WAIT else -1


def _running_s(spent: Mapping[str, float]) -> float:
    return max(spent["running_s"], 1e-9)


def _row(rank: int, beat: Beat, spent: Mapping[str, float], late: int, wall_s: float) -> tuple[str, ...]:
    running_s, steps = _running_s(spent), beat.get("steps")
    age_s = max(wall_s - beat["at"], 0.0)
    return (
        str(rank),
        f"{beat['host']}:{beat['pid']}",
        f"{age_s:.0f} s ago" + (" !" if age_s > _STALE_S else ""),
        *(("", "") if steps is None else (str(steps[1]), f"{spent['steps'] / running_s:.1f}")),
        *(f"{spent[key] / running_s:.0%}" for key in ("time_s", "exposed_s", "waiting_s")),
        f"{spent['sent_bytes'] / running_s / 1e6:.2f}",
        "late" if rank == late else "",
        str(beat["call"]),
    )


def _life_of(beat: Beat) -> tuple[Any, ...]:
    """What a beat counts from the beginning of: a process, in a job."""
    return beat["host"], beat["pid"], _job_of(beat)


def _job_of(beat: Beat) -> str:
    return str(beat.get("job", ""))


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """The table as text."""
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [COLUMNS, *rows]]
    return "\n".join(line.rstrip() for line in lines)
