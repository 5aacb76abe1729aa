"""How much longer ``import bagua.torch_api`` takes than ``import torch`` alone.

Each sample is a new interpreter, from its start to its end, which finds compiled sources, as those of an installed
package are. ``python -m benchmarks.import_time``
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.paired import add_arguments, compare, conclude, measure

LIMIT = 1.15


def run_python(code: str, compiled: str) -> None:
    """Run one line in a new interpreter that keeps compiled sources in the folder ``compiled``."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    settings["PYTHONPYCACHEPREFIX"] = compiled
    subprocess.run([sys.executable, "-c", code], check=True, env=settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_time", description=__doc__)
    add_arguments(parser, rounds=20)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as compiled:
        alone = functools.partial(run_python, "import torch", compiled)
        with_bagua = functools.partial(run_python, "import torch, bagua.torch_api", compiled)
        with_bagua()  # The first one compiles.
        samples = measure(alone, with_bagua, rounds=options.rounds)
    comparison = compare("import bagua.torch_api : import torch", samples, LIMIT)
    return conclude([comparison], options)


if __name__ == "__main__":
    sys.exit(main())
