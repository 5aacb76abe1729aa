"""The command ``bagua``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from bagua import __version__

COMMANDS = """\
commands:
  advise      predict which algorithm is the fastest for a script, on a network of any speed
  chaos       run a training command under faults, and say what became of it
  demo        train a small language model on this machine, on a few processes
  doctor      say what this machine offers, how fast it is, and what to set
  explain     say what the flight records of a job tell: who did something else, who did not come
  lab         run a script on hosts with slow links, all of them on this machine
  timeline    put the traces of all ranks of a job together, for Perfetto
  top         show the ranks of a running job

"bagua COMMAND --help" describes one of them. Your own script starts with
"baguarun --nproc 2 train.py".
"""


#: Where the function ``main`` of each command is.
_COMMANDS = {
    "advise": "bagua.cli.advise.command",
    "chaos": "bagua.cli.chaos.command",
    "demo": "bagua.cli.demo.command",
    "doctor": "bagua.cli.doctor",
    "explain": "bagua.cli.explain",
    "lab": "bagua.cli.lab.command",
    "timeline": "bagua.cli.timeline",
    "top": "bagua.cli.top",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``bagua``.

    Args:
        arguments: words that follow ``bagua`` on the command line; ``sys.argv[1:]`` when None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="bagua",
        description="Train PyTorch models on many processes while communicating less.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bagua {__version__}")
    parser.add_argument("command", choices=[*_COMMANDS], metavar="COMMAND", help="what to do")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(given)

    # These import torch, which takes seconds and --help does not need.
    status: int = importlib.import_module(_COMMANDS[parsed.command]).main(parsed.arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
