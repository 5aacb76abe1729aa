"""The command ``bagua``."""

import argparse
import sys
from collections.abc import Sequence

from bagua import __version__

__all__ = ["main"]

COMMANDS = """\
commands:
  demo        train a small language model on this machine, on a few processes

"bagua COMMAND --help" describes one of them. Your own script starts with
"baguarun --nproc_per_node 2 train.py".
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
    parser.add_argument("command", choices=["demo"], metavar="COMMAND", help="what to do: demo")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    parsed = parser.parse_args(arguments)

    from bagua.cli.demo.command import main as demo  # imports torch, which takes seconds and --help does not need

    return demo(parsed.arguments)


if __name__ == "__main__":
    sys.exit(main())
