"""The command ``bagua`` in a forked interpreter, with ranks that are forked from it: none of them imports torch again.

It leads a group of processes, as a command at a terminal does, and says which processes there are.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from bagua.cli import launch
from bagua.cli.main import main

_start = launch.CommandRanks._start


def _start_and_tell(*arguments: Any) -> Any:
    started = _start(*arguments)
    print("rank is process", started.process.pid, flush=True)
    return started


if __name__ == "__main__":
    os.setpgrp()
    print("this is process", os.getpid(), flush=True)
    launch.CommandRanks.method = "fork"
    launch.CommandRanks._start = _start_and_tell  # type: ignore[method-assign]
    sys.exit(main())
