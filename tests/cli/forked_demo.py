"""The command ``bagua`` in a forked interpreter, with ranks that are forked from it: none of them imports torch again.

It leads a group of processes, as a command at a terminal does, and says which processes there are.
"""

import functools
import os
import sys
from typing import Any

from bagua.cli import demo, launch
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
    # On a part of the held-out text: the whole of it takes longer than a few steps.
    demo.Trainer.held_out_loss = functools.partialmethod(demo.Trainer.held_out_loss, count=32)
    launch.CommandRanks._start = _start_and_tell  # type: ignore[method-assign]
    sys.exit(main())
