"""Train on several processes out of a notebook."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from bagua import env
from bagua.checks import check_whole, install_command
from bagua.cli.launch import CommandRanks
from bagua.errors import ConfigurationError
from bagua.testing import this_rank

__all__ = ["notebook_launch"]


def notebook_launch(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """Call ``function(*arguments)`` on ``ranks`` new processes of this machine, and wait for all of them.

    The function may come from a cell. It finds what a script finds under ``baguarun``: it begins with
    ``bagua.init_process_group()``. What rank 0 prints appears at once, and warnings of all ranks. Other ranks print
    nothing. Interrupting the cell ends all ranks.

    The processes are new: they get copies of what the function uses, and nothing else of the notebook. To get a
    trained model back, return its ``state_dict()``. Each process has one compute thread. For several machines use
    ``baguarun``.

    Args:
        function: function of a cell, or of a module.
        arguments: arguments of the function. Each rank gets copies.
        ranks: number of processes, from 1.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        ConfigurationError: the extra ``notebook`` is not installed, ``ranks`` is no positive number, or the function
            uses something that cannot be copied, such as an open file.
        Exception: error that a rank raised; of several errors the likeliest cause, with a note on each rank.

    Example:
        >>> def train(steps):
        ...     import bagua
        ...
        ...     bagua.init_process_group()
        ...     bagua.print_rank_0(f"{steps} steps on {bagua.get_world_size()} ranks")
        >>> results = notebook_launch(train, 100, ranks=2)  # doctest: +SKIP
        100 steps on 2 ranks
    """
    check_whole(1, ranks=ranks)
    job = _copied(function, arguments)
    results = CommandRanks(ranks, _show).run(_run_copy, job, ranks)
    return [_cloudpickle().loads(result) for result in results]


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as missing:
        raise ConfigurationError(
            "functions of a notebook are copied by the package cloudpickle",
            argument="function",
            expected="cloudpickle installed",
            seen="no such package",
            advice=f"Run: {install_command('notebook')}",
        ) from missing
    return cloudpickle


def _copied(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    pickle = _cloudpickle()
    try:
        copied: bytes = pickle.dumps((function, arguments))
    except Exception as problem:  # pickling lets anything through
        raise ConfigurationError(
            "the function cannot be copied into other processes",
            argument="function, arguments",
            expected="objects that can be pickled",
            seen=f"{function!r}: {problem}",
            advice="Make what cannot be copied, such as an open file, inside the function.",
        ) from problem
    return copied


def _show(report: Any) -> None:
    """Print what a rank printed, where the cell shows it."""
    stream, text = report
    print(text, end="", file=getattr(sys, stream), flush=True)


class _Cell(io.TextIOBase):
    """A stream of a rank that appears in the notebook, line by line: ranks do not cut into each other's lines."""

    def __init__(self, name: str, report: Callable[[object], None]) -> None:
        self._name, self._report, self._line = name, report, ""

    def write(self, text: str) -> int:
        self._line += text
        if text.endswith(("\n", "\r")):
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._line = self._line, ""
        if text:
            self._report((self._name, text))


def _run_copy(job: bytes, ranks: int) -> bytes:
    """What each process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts all. The notebook's own process ends the others.
    here = this_rank.get()
    assert here.report is not None
    sys.stderr = _Cell("stderr", here.report)
    sys.stdout = _Cell("stdout", here.report) if here.rank == 0 else open(os.devnull, "w")  # noqa: SIM115
    env.overlay(
        {
            "RANK": str(here.rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(here.rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(here.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # The notebook's process serves the store.
        }
    )
    pickle = _cloudpickle()
    function, arguments = pickle.loads(job)
    result: bytes = pickle.dumps(function(*arguments))
    sys.stdout.flush()
    return result
