"""``bagua watch``: how much of a step of any torch job waits for the network, without a change to its script."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from bagua import env
from bagua.cli.interrupts import handled

_INITIALIZES = "torch.distributed.distributed_c10d"
_MARK = "watched"
#: Python imports it when it starts. One that was there already is imported instead of it, and comes to its right.
_AT_START = """\
import importlib.util
import sys
folder = {folder!r}
sys.path.remove(folder)
own = sys.modules.pop("sitecustomize")
if importlib.util.find_spec("sitecustomize"):
    import sitecustomize
sys.modules.setdefault("sitecustomize", own)
from bagua.cli.watch import at_start
at_start(folder)
"""


class _Finder:
    """Puts ``watch`` behind ``init_process_group`` when torch's module is imported.

    Args:
        found: called with the module.
    """

    def __init__(self, found: Callable[[Any], None]) -> None:
        self._found = found

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name != _INITIALIZES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                self._found(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def at_start(folder: str) -> None:
    """Have this process watched from its ``init_process_group`` on."""

    def found(module: Any) -> None:
        initialize = module.init_process_group

        def init_process_group(*arguments: Any, **options: Any) -> Any:
            initialize(*arguments, **options)
            from bagua.advise import watch

            Path(folder, _MARK).touch()
            watch()

        module.init_process_group = init_process_group

    sys.meta_path.insert(0, _Finder(found))


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
        Path(folder, "sitecustomize.py").write_text(_AT_START.format(folder=folder), encoding="utf-8")
        try:
            variables = env.for_child(env.first_on_path(folder), {})
            process = subprocess.Popen(command, env=variables)  # noqa: S603 - what the user names
        except OSError as error:
            print(f"bagua watch: {error}", file=sys.stderr)
            return 1
        # A terminal sends Ctrl-C to the command as well, which ends when it has said what was seen.
        with handled(lambda *_: None, signal.SIGINT), handled(lambda *_: process.terminate(), signal.SIGTERM):
            status = process.wait()
        if not Path(folder, _MARK).exists():
            print("bagua watch: no process called init_process_group of torch.distributed", file=sys.stderr)
    return status if status >= 0 else 128 - status
