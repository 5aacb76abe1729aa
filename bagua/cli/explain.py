"""The command ``bagua explain``: what the flight records of a job say."""

import argparse
import sys
from collections.abc import Sequence

from bagua import observe
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
        epilog="Ranks write their records when a call fails, or on SIGUSR2, if the job was started with "
        "BAGUA_FLIGHT_DIR=DIR, to a folder of the job in DIR. calls_RANK.txt there shows the last calls of a rank. "
        "Torch's analyzer reads the same records: "
        "python -m torch.distributed.flight_recorder.fr_trace DIR/JOB --prefix flight_rank_",
    )
    parser.add_argument("folder", metavar="DIR", help="BAGUA_FLIGHT_DIR, for the latest job; or the folder of a job")
    parsed = parser.parse_args(arguments)
    try:
        sentences = observe.explain(parsed.folder)
    except ConfigurationError as error:
        print(f"bagua explain: {error}", file=sys.stderr)
        return 1
    print("\n".join(sentences))
    return 0
