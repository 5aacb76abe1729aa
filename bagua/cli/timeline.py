"""The command ``bagua timeline``: one timeline of all ranks, from the traces that they wrote."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bagua.errors import ConfigurationError
from bagua.observe import write_timeline

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Write one Chrome trace of all ranks.

    Args:
        arguments: what follows ``bagua timeline``.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="bagua timeline",
        description="Put the traces of all ranks together: a file for ui.perfetto.dev or chrome://tracing.",
        epilog="Ranks write their traces if the job was started with BAGUA_TRACE=DIR.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder with the traces of all ranks")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write; default: DIR/timeline.json")
    parsed = parser.parse_args(arguments)
    path = Path(parsed.output or Path(parsed.folder) / "timeline.json")
    try:
        events = write_timeline(parsed.folder, path)
    except (ConfigurationError, OSError) as error:
        print(f"bagua timeline: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {events} events. Open it at https://ui.perfetto.dev, which keeps it on your machine.")
    return 0
