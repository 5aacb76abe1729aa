"""The command ``bagua`` in a forked interpreter, with ranks that are forked from it: none of them imports torch again.

It leads a group of processes, as a command at a terminal does, and says which processes there are.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from bagua.cli import launch
from bagua.cli.main import main

_start = launch.start


def _start_and_tell(*arguments: Any) -> launch.Started:
    started = _start(*arguments)
    print("rank is process", started.process.pid, flush=True)
    return started


if __name__ == "__main__":
    os.setpgrp()
    print("this is process", os.getpid(), flush=True)
    fork = multiprocessing.get_context("fork")
    launch.multiprocessing.get_context = lambda _: fork  # type: ignore[attr-defined,assignment]
    launch.start = _start_and_tell
    sys.exit(main())
