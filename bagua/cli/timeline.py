"""The command ``bagua timeline``: one timeline of all ranks, from the traces that they wrote."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bagua.observe import write_timeline


def main(arguments: Sequence[str]) -> int:
    """Write one Chrome trace of all ranks.

    Args:
        arguments: words that follow ``bagua timeline``.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="bagua timeline",
        description="Put the traces of all ranks together: a file for ui.perfetto.dev or chrome://tracing.",
        epilog="Ranks write their traces if the job was started with BAGUA_TRACE=DIR.",
    )
    parser.add_argument("folder", metavar="DIR", help="BAGUA_TRACE, for the latest job; or the folder of a job")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write; default: DIR/timeline.json")
    parsed = parser.parse_args(arguments)
    path = Path(parsed.output or Path(parsed.folder) / "timeline.json")
    made = write_timeline(parsed.folder, path)
    facts = made["otherData"]
    events, offsets, late = len(made["traceEvents"]), facts["clock_offsets_us"], facts["straggler"]
    if missing := facts["ranks_without_trace"]:
        print(
            f"bagua timeline: {parsed.folder} has no trace of ranks {', '.join(map(str, missing))}, so who is late is "
            "told without them; copy the files of all hosts to one folder",
            file=sys.stderr,
        )
    unknown = [str(rank) for rank, offset in offsets.items() if offset is None]
    if unknown:
        print(
            f"bagua timeline: ranks {', '.join(unknown)} share neither a collective nor a host with rank "
            f"{min(offsets)}: how their clocks differ is unknown, so do not compare their times",
            file=sys.stderr,
        )
    if late >= 0:
        waited_s = facts["waited_for_us"][late] * 1e-6
        print(f"Rank {late} is late: the others have waited {waited_s:.2f} s for it, all together.")
    print(f"{path}: {events} events. Open it at https://ui.perfetto.dev, which keeps it on your machine.")
    return 0
