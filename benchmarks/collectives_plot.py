"""Time against size of an allreduce of two ranks, one line for each transport."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paired import Comparison

__all__ = ["draw", "lines"]

#: Names of the comparisons between ``shm`` and one of its peers.
_NAME = re.compile(r"2 ranks, +(?P<size>\d+) B(?P<memory>, empty\(\))?: shm allreduce : (?P<peer>.+)")
_GLOO = "gloo"


def lines(comparisons: Sequence[Comparison]) -> dict[str, list[tuple[int, float]]]:
    """Bytes and median seconds of each transport, in the order of the sizes.

    Times of ``shm`` are those measured beside Gloo.
    """
    found: dict[str, dict[int, float]] = {}
    for comparison in comparisons:
        match = _NAME.fullmatch(comparison.name)
        if match is None:
            continue
        size, peer = int(match["size"]), match["peer"]
        if not match["memory"]:
            found.setdefault(peer, {})[size] = comparison.baseline_s
        if peer == _GLOO:
            ours = "shm, communicator.empty()" if match["memory"] else "shm"
            found.setdefault(ours, {})[size] = comparison.candidate_s
    return {name: sorted(points.items()) for name, points in found.items()}


def draw(comparisons: Sequence[Comparison], path: Path) -> bool:
    """Draw the lines into ``path``.

    Returns:
        False, and nothing drawn, where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines(comparisons).items():
        sizes, seconds = zip(*points, strict=True)
        axes.loglog(sizes, [1e6 * each for each in seconds], marker="o", label=name)
    axes.set_xlabel("bytes of each rank")
    axes.set_ylabel("microseconds, median")
    axes.set_title("allreduce, 2 ranks")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True
