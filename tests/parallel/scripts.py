"""Scripts that a launcher would start: interpreters of their own, with its variables."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from tests.interpreters import interpreter

__all__ = ["start_scripts"]


def start_scripts(script: str, endings: Sequence[str], port: int, *, by_agent: bool) -> list[subprocess.Popen[str]]:
    """One rank for each of ``endings``, which ``script`` finds in ``sys.argv[1]``.

    Args:
        script: source text.
        endings: how each rank shall end.
        port: of the store on this host.
        by_agent: whether the store is there already; otherwise rank 0 hosts it.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(endings)),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": str(by_agent),
        "BAGUA_TIMEOUT_S": "60",
    }
    return [
        subprocess.Popen(
            [*interpreter(), "-c", script, ending],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, ending in enumerate(endings)
    ]
