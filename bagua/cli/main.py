"""The command ``bagua``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from bagua import __version__
from bagua.errors import BaguaError

#: What each command does. Its function ``main`` is in the module of its name.
_COMMANDS = {
    "advise": "predict which algorithm is the fastest for a script, on a network of any speed",
    "demo": "train a small language model on this machine, on a few processes",
    "doctor": "say what this machine offers, how fast it is, and what to set",
    "explain": "say what the flight records of a job tell: who did something else, who did not come",
    "islands": "delete what islands have left in a bucket",
    "lab": "run a script on hosts with slow links, all of them on this machine",
    "timeline": "put the traces of all ranks of a job together, for Perfetto",
    "top": "show the ranks of a running job",
    "watch": "say how much of a step of any torch job waits for the network",
}
#: Those that are a package.
_PACKAGES = {"lab": "lab.command"}
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
        The exit status: that of the command; 1 with a message for an error that a user can act on; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="bagua",
        description="Train PyTorch models on many processes while communicating less.",
        epilog=_EPILOG.format("\n".join(f"  {name:<11} {does}" for name, does in _COMMANDS.items())),
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
    command = importlib.import_module(f"bagua.cli.{_PACKAGES.get(parsed.command, parsed.command)}")
    try:
        status: int = command.main(parsed.arguments)
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    except (BaguaError, OSError) as error:
        print(f"bagua {parsed.command}: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
