"""``bagua watch``: how much of a step of any torch job waits for the network, without a change to its script."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from bagua import env
from bagua.cli.interrupts import handled

#: Torch calls what it finds by this name, at the end of its own import.
_NAME = "bagua_watch"
_ENTRY_POINT = f"[torch.backends]\n{_NAME} = bagua.cli.watch:at_start\n"
_MARK = "watched"


def at_start() -> None:
    """Have this process watched from its ``init_process_group`` on. What is raised here would end the job."""
    modules = [one for name, one in sys.modules.items() if name.startswith("torch.")]
    having = [one for one in modules if "init_process_group" in getattr(one, "__dict__", ())]
    if not having:  # a torch without torch.distributed
        return
    initialize: Any = having[0].init_process_group
    mark = Path(str(distribution(_NAME).locate_file(_MARK)))  # while it is on the path, which a script may change

    def init_process_group(*arguments: Any, **options: Any) -> Any:
        initialize(*arguments, **options)
        from bagua.advise import watch

        with contextlib.suppress(OSError):  # The command, and its folder, may be gone.
            mark.touch()
        watch()

    for module in having:  # Some of torch's modules have imported it from each other.
        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and have its processes watched.

    Args:
        arguments: words that follow ``bagua watch`` on the command line.

    Returns:
        The command's exit status.
    """
    parser = argparse.ArgumentParser(
        prog="bagua watch",
        description="Say how much of a step of a torch job waits for the network, and what would wait less.",
        epilog="bagua watch -- torchrun --nproc-per-node 2 train.py",
    )
    parser.add_argument("command", help="a Python script, or a command that starts some")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options = parser.parse_args(arguments)
    command = [options.command, *options.arguments]
    if options.command.endswith(".py"):
        command.insert(0, sys.executable)
    with tempfile.TemporaryDirectory(prefix="bagua-watch-") as folder:
        about = Path(folder, f"{_NAME}-1.dist-info")
        about.mkdir()
        (about / "entry_points.txt").write_text(_ENTRY_POINT, encoding="utf-8")
        variables = env.for_child(env.first_on_path(folder), {})
        process = subprocess.Popen(command, env=variables)  # noqa: S603 - what the user names
        # A terminal sends Ctrl-C to the command as well, which ends when it has said what was seen.
        with handled(lambda *_: None, signal.SIGINT), handled(lambda *_: process.terminate(), signal.SIGTERM):
            status = process.wait()
        if not Path(folder, _MARK).exists():
            print(
                "bagua watch: no process called init_process_group of torch.distributed; nor is one seen that has "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or is started with python -I or -E",
                file=sys.stderr,
            )
    return status if status >= 0 else 128 - status
