"""How much longer ``import bagua.torch_api`` takes than ``import torch`` alone.

Each sample is a new interpreter, from its start to its end. ``python -m benchmarks.import_time``
"""

import argparse
import functools
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.paired import add_arguments, compare, conclude, measure

LIMIT = 1.15


def run_python(code: str) -> None:
    """Run one line in a new interpreter."""
    subprocess.run([sys.executable, "-c", code], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_time", description=__doc__)
    add_arguments(parser, rounds=20)
    options = parser.parse_args(arguments)
    alone = functools.partial(run_python, "import torch")
    with_bagua = functools.partial(run_python, "import torch, bagua.torch_api")
    comparison = compare(
        "import bagua.torch_api : import torch", measure(alone, with_bagua, rounds=options.rounds), LIMIT
    )
    return conclude([comparison], options)


if __name__ == "__main__":
    sys.exit(main())
