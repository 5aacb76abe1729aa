"""What ``baguarun`` says when ranks have failed, and the folder where it leaves the rest."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bagua.errors import how_it_ended

_PREFIX = "bagua-run-"
_KEPT_S = 24 * 3600.0
_MOST_LINES = 16
#: The file in which ``bagua explain`` finds what was said.
SUMMARY = "summary.txt"


@contextlib.contextmanager
def flight_folder() -> Iterator[str]:
    """A folder of this run for flight records. It goes at the end if nothing is in it, else after a day."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not old.is_symlink() and time.time() - old.stat().st_mtime > _KEPT_S:
                shutil.rmtree(old)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{time.strftime('%H%M%S')}-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # It is not empty: a rank has failed.
            Path(folder).rmdir()


def summary(failures: Mapping[int, Any], folder: str) -> str:
    """Which rank was the cause, with its own traceback, a line for each other rank, and where to read more.

    Args:
        failures: by global rank a ``ProcessFailure`` of ``torch.distributed.elastic``.
        folder: folder with the flight records, where full tracebacks and the summary are written, too.
    """
    told = {rank: _facts(failure) for rank, failure in failures.items()}
    # An error in which a rank blames itself comes before a death, a death before an error that blames another rank.
    cause = min(
        failures, key=lambda rank: (_distance(rank, failures[rank], told[rank]), failures[rank].timestamp, rank)
    )
    lines = [f"baguarun: rank {cause} {_how(failures[cause], told[cause])}"]
    lines += [f"  {line}" for line in told[cause].get("own", "").splitlines()]
    others = [rank for rank in sorted(failures) if rank != cause]
    lines += [f"rank {rank} {_how(failures[rank], told[rank])}" for rank in others[:_MOST_LINES]]
    if len(others) > _MOST_LINES:
        lines.append(f"and {len(others) - _MOST_LINES} other ranks")
    lines.append(f"Full tracebacks and last calls: bagua explain {folder}")
    with contextlib.suppress(OSError):
        for rank, facts in told.items():
            if facts:
                (Path(folder) / f"traceback_{rank}.txt").write_text(facts["py_callstack"], encoding="utf-8")
        (Path(folder) / SUMMARY).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "\n".join(lines)


def _facts(failure: Any) -> dict[str, Any]:
    """What the rank has written of its error; empty if it ended without a word."""
    message = failure.message if isinstance(failure.message, dict) else {}
    facts: dict[str, Any] = message.get("extraInfo", {})
    return {"message": message.get("message", ""), "own": "", "culprit": None, **facts} if facts else {}


def _distance(rank: int, failure: Any, facts: Mapping[str, Any]) -> int:
    if facts:
        return 0 if facts["culprit"] in (rank, None) else 2
    return 3 if failure.exitcode == -signal.SIGTERM else 1


def _how(failure: Any, facts: Mapping[str, Any]) -> str:
    if facts:
        return f"failed: {facts['message']}"
    if failure.exitcode == -signal.SIGTERM:  # the launcher's own way to end what is left
        return "was ended by SIGTERM, which baguarun sends when another rank fails"
    said = "" if failure.exitcode < 0 else "; what it said is above"
    return how_it_ended(failure.exitcode) + said
