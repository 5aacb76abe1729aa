"""Ranks that are programs of their own, started with what a launcher would tell them."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from bagua.comm.store.serving import serve_store
from tests.interpreters import interpreter

REPOSITORY = Path(__file__).parents[1]
#: How long a program may take at most, in seconds.
PATIENCE_S = 240


def free_port() -> int:
    """A port of the loopback device that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Where programs find the package."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


@contextlib.contextmanager
def launched(
    size: int, *command: str, each: Sequence[str] = (), python: Sequence[str] = (), port: int | None = None,
    stderr: int = subprocess.STDOUT, **variables: str,
) -> Iterator[list[subprocess.Popen[str]]]:  # fmt: skip
    """Ranks of a program, which end with the block.

    Args:
        size: number of ranks.
        command: what follows the name of the interpreter.
        each: one more argument for each rank.
        python: interpreter with its options; by default a forked one.
        port: of the store; by default, of one that is served meanwhile, as an agent does.
        stderr: where ranks write errors.
        variables: more of the environment.
    """
    store, place = serve_store() if port is None else (None, port)
    told = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place), WORLD_SIZE=str(size))
    told |= {"TORCHELASTIC_USE_AGENT_STORE": str(port is None), **variables}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(size):
            process = subprocess.Popen(
                [*(python or interpreter()), *command, *each[rank : rank + 1]],
                env={**told, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=REPOSITORY,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield ranks
    del store


def finished(*command: str, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """How a program ended and what it said; it finds the package from any folder."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def ends(ranks: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit status and output of each rank."""
    said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, said, strict=True)]
