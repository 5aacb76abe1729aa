"""Ranks on Gloo for the tests of the c10d transport: threads of this process, or processes of their own."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from typing_extensions import Self

from bagua.comm.communicator import Communicator
from bagua.comm.store.serving import serve_store
from bagua.comm.transports.base import Membership, Transport
from bagua.comm.transports.c10d.transport import C10dTransport
from tests.interpreters import interpreter

ROOT = Path(__file__).parents[2]


def membership(store: Any, rank: int, size: int, timeout_s: float = 20.0) -> Membership:
    return Membership(store, rank, tuple(range(size)), (0,) * size, timeout_s, label="test")


def run(
    size: int,
    job: Callable[[Communicator], Any],
    *,
    backend: str = "gloo",
    timeout_s: float = 20.0,
    transport: Callable[[Membership], Transport] | None = None,
) -> list[Any]:
    """What ``job(communicator)`` returns on each rank, or the error that it raises there."""
    store = HashStore()
    outcomes: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        member = membership(store, rank, size, timeout_s)
        try:
            made = transport(member) if transport else C10dTransport(backend, member)
            communicator = Communicator(made, timeout_s)
        except Exception as error:
            outcomes[rank] = error
            return
        finally:
            came[rank].set()
        # Nobody closes what another rank still connects to: at start-up the ranks agree that all are there.
        for other in came:
            other.wait(30)
        try:
            outcomes[rank] = job(communicator)
        except BaseException as error:
            outcomes[rank] = error
        finally:
            finished[rank].set()
            # Nobody closes connections that another rank still uses.
            for other in finished:
                other.wait(30)
            communicator.close()

    came, finished = ([threading.Event() for _ in range(size)] for _ in range(2))
    ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert not any(thread.is_alive() for thread in ranks), "a rank hangs"
    return outcomes


def values(outcomes: Sequence[Any]) -> list[Any]:
    """``outcomes``, none of which may be an error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return list(outcomes)


class Processes:
    """Throw-away processes that run one scenario of ``tests/comm/c10d_scenarios.py``."""

    def __init__(self, scenario: str, size: int, *, own_store: bool = False) -> None:
        self.store, port = serve_store()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [*interpreter(), "-m", "tests.comm.c10d_scenarios", scenario, str(size), str(port)]
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(int(own_store))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=environment,
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()

    def wait_for(self, word: str, rank: int) -> str:
        """The output of ``rank`` up to the line that holds ``word``."""
        output = self.ranks[rank].stdout
        assert output is not None
        lines = []
        for line in output:
            lines.append(line)
            if word in line:
                return "".join(lines)
        raise AssertionError(f"rank {rank} never said {word!r}: {''.join(lines)}")

    def end(self, rank: int, timeout_s: float = 90.0) -> tuple[int, str]:
        """Exit status and remaining output of ``rank``."""
        output, _ = self.ranks[rank].communicate(timeout=timeout_s)
        return self.ranks[rank].returncode, output
