"""The command ``bagua explain``: what the flight records of a job say."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bagua import observe
from bagua.cli.baguarun import SUMMARY
from bagua.errors import ConfigurationError


def main(arguments: Sequence[str]) -> int:
    """Print what went wrong, as far as flight records tell it.

    Args:
        arguments: words that follow ``bagua explain``.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="bagua explain",
        description="Say in sentences which rank did something else than the others, or did not come.",
        epilog="Ranks write their records when a call fails, or on SIGUSR2, to a folder of the job in DIR. baguarun "
        "names DIR when a rank fails; elsewhere, start the job with BAGUA_FLIGHT_DIR=DIR. "
        "calls_RANK.txt there shows the last calls of a rank.",
    )
    parser.add_argument("folder", metavar="DIR", help="BAGUA_FLIGHT_DIR, for the latest job; or the folder of a job")
    parsed = parser.parse_args(arguments)
    said = Path(parsed.folder) / SUMMARY
    if said.exists():
        print(said.read_text(encoding="utf-8"), end="")
        print("".join(f"Full traceback: {path}\n" for path in sorted(said.parent.glob("traceback_*.txt"))), end="")
    try:
        sentences = observe.explain(parsed.folder)
    except ConfigurationError:
        if not said.exists():
            raise
        return 0  # No call has failed.
    print("\n".join(sentences))
    return 0
