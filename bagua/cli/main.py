"""The command ``bagua``."""

import argparse
import sys
from collections.abc import Sequence

from bagua import __version__

__all__ = ["main"]

COMMANDS = """\
commands:
  demo        train a small language model on this machine, on a few processes
  doctor      say what this machine offers, how fast it is, and what to set
  lab         run a script on hosts with slow links, all of them on this machine

"bagua COMMAND --help" describes one of them. Your own script starts with
"baguarun --nproc 2 train.py".
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``bagua``.

    Args:
        arguments: what follows ``bagua`` on the command line; ``sys.argv[1:]`` when None.

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
    parser.add_argument("command", choices=["demo", "doctor", "lab"], metavar="COMMAND", help="what to do")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(given)

    # These import torch, which takes seconds and --help does not need.
    if parsed.command == "doctor":
        from bagua.cli.doctor import main as doctor

        return doctor(parsed.arguments)
    if parsed.command == "lab":
        from bagua.cli.lab.command import main as lab

        return lab(parsed.arguments)
    from bagua.cli.demo.command import main as demo

    return demo(parsed.arguments)


if __name__ == "__main__":
    sys.exit(main())
