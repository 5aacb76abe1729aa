"""The command ``bagua``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from bagua import __version__

#: Of each command, where its function ``main`` is, and what it does.
_COMMANDS = {
    "advise": (
        "bagua.cli.advise",
        "predict which algorithm is the fastest for a script, on a network of any speed",
    ),
    "demo": ("bagua.cli.demo", "train a small language model on this machine, on a few processes"),
    "doctor": ("bagua.cli.doctor", "say what this machine offers, how fast it is, and what to set"),
    "explain": (
        "bagua.cli.explain",
        "say what the flight records of a job tell: who did something else, who did not come",
    ),
    "islands": ("bagua.cli.islands", "delete what islands have left in a bucket"),
    "lab": ("bagua.cli.lab.command", "run a script on hosts with slow links, all of them on this machine"),
    "timeline": ("bagua.cli.timeline", "put the traces of all ranks of a job together, for Perfetto"),
    "top": ("bagua.cli.top", "show the ranks of a running job"),
    "watch": ("bagua.cli.watch", "say how much of a step of any torch job waits for the network"),
}
_EPILOG = """\
commands:
{}

"bagua COMMAND --help" describes one of them. Your own script starts with
"baguarun --nproc 2 train.py".
"""


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
        epilog=_EPILOG.format("\n".join(f"  {name:<11} {does}" for name, (_, does) in _COMMANDS.items())),
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
    status: int = importlib.import_module(_COMMANDS[parsed.command][0]).main(parsed.arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
