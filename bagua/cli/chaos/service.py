"""What members need and no fault hits: the store where islands meet, or a program that the user names."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from bagua.cli.chaos.places import Home
from bagua.cli.chaos.processes import end_all, start_marked
from bagua.cli.interrupts import signals_deferred
from bagua.errors import how_it_ended

_SAYS_WHERE = "Islands meet at "


class ServiceError(RuntimeError):
    """The program beside the members ended before they could use it."""


def store_command(place: Home) -> list[str]:
    """Command of a store where islands meet."""
    return [sys.executable, "-m", "bagua.cli.baguarun", "--serve-islands", f"{place.address}:0"]


@contextlib.contextmanager
def open_service(
    command: Sequence[str], place: Home, mark: str, echo: Callable[[str], object], *, is_store: bool
) -> Iterator[str]:
    """Run a program until the end of the block.

    Args:
        command: its words.
        place: place in which it lives.
        mark: mark by which its processes are found.
        echo: told each line that it prints.
        is_store: True if it is a store, which says where it is.

    Returns:
        Where the store is; empty for another program.

    Raises:
        ServiceError: it ended at once.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(end_all, mark)
        with signals_deferred():
            process = start_marked(command, place, mark, {}, {})
            output = process.stdout
            assert output is not None
            stack.callback(_finish, process, output, mark)
        where = _find_store(output, echo) if is_store else ""
        if is_store and not where:
            raise ServiceError(f"the store where islands meet {how_it_ended(process.wait())}")
        listener = threading.Thread(target=_pass_on, args=(output, echo), daemon=True)
        listener.start()
        stack.callback(listener.join)
        stack.callback(end_all, mark)
        yield where


def _find_store(output: IO[str], echo: Callable[[str], object]) -> str:
    """Where a store says that it is; empty if it ends without a word of it."""
    for line in output:
        echo(line)
        if line.startswith(_SAYS_WHERE):
            return line.removeprefix(_SAYS_WHERE).strip().rstrip(".")
    return ""


def _pass_on(output: IO[str], echo: Callable[[str], object]) -> None:
    for line in output:
        echo(line)


def _finish(process: subprocess.Popen[str], output: IO[str], mark: str) -> None:
    end_all(mark)
    process.wait()
    output.close()
