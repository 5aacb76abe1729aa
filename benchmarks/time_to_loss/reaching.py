"""From losses by steps, and times of steps, to the time after which a loss is reached."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.algorithms import Algorithm, registry
from benchmarks.network.contenders import read_options, split_options

__all__ = [
    "Segment",
    "first_below",
    "loss_after",
    "period_of",
    "segments",
    "split",
    "steps_within",
    "target",
    "time_of",
    "write_options",
]

#: Of full gradients: after this part of their steps they have the loss that is wanted, and so much more is allowed.
PART, TOLERANCE = 0.9, 1.01
#: Options that say how many steps are taken otherwise at the beginning.
BEGINNINGS = ("start_after", "warmup_steps", "density_steps")


@dataclass(frozen=True)
class Segment:
    """Steps in a row that all take equally long on an average.

    Args:
        steps: how many; infinite for the last.
        contender: takes such steps from its beginning on, to time them.
    """

    steps: float
    contender: str


def split(contender: str, steps: int) -> tuple[str, int]:
    """``ddp@750`` is ``ddp`` in 750 steps; who names no number takes ``steps``."""
    name, _, own = contender.partition("@")
    return name, int(own) if own else steps


def loss_after(curve: Mapping[int, float], steps: float) -> float:
    """The loss between two looks, on a straight line; after the last one, that of the last."""
    stops = sorted(curve)
    for before, after in itertools.pairwise(stops):
        if before <= steps <= after:
            return curve[before] + (curve[after] - curve[before]) * (steps - before) / (after - before)
    return curve[stops[0]] if steps < stops[0] else curve[stops[-1]]


def target(curve: Mapping[int, float]) -> float:
    """The loss that is wanted, from the curve of full gradients."""
    return TOLERANCE * loss_after(curve, PART * max(curve))


def first_below(curve: Mapping[int, float], wanted: float) -> float | None:
    """Steps after which the loss stays at ``wanted`` or below, between two looks on a straight line.

    None if the last one is above.
    """
    stops = sorted(curve)
    above = [stop for stop in stops if not curve[stop] <= wanted]  # also no number
    if not above:
        return float(stops[0])
    if above[-1] == stops[-1]:
        return None
    before, after = above[-1], stops[stops.index(above[-1]) + 1]
    return before + (after - before) * (curve[before] - wanted) / (curve[before] - curve[after])


def time_of(steps: float, of_segments: Sequence[tuple[Segment, float]]) -> float:
    """Seconds of so many steps, from the mean seconds of a step in each segment."""
    seconds = 0.0
    for segment, step_s in of_segments:
        taken = min(steps, segment.steps)
        seconds, steps = seconds + taken * step_s, steps - taken
    return seconds


def steps_within(seconds: float, of_segments: Sequence[tuple[Segment, float]]) -> float:
    """Steps that are taken in so many seconds."""
    steps = 0.0
    for segment, step_s in of_segments:
        taken = min(seconds / step_s, segment.steps)
        seconds, steps = seconds - taken * step_s, steps + taken
    return steps


def segments(contender: str) -> list[Segment]:
    """What to time of a contender: its beginning, if that is of another kind, and its steps from then on."""
    name, _, rest = contender.partition(":")
    options = read_options(rest)
    declared = Algorithm.init(name, **split_options(name, options)[0]) if name in registry else None
    begun = {key: options.get(key, getattr(declared, key, 0)) for key in BEGINNINGS}
    steps = int(str(begun["start_after"] or begun["warmup_steps"]))
    if not steps:
        return [Segment(math.inf, contender)]
    beginning = "ddp" if declared is None else str(options.get("start_with", "gradient_allreduce"))
    # The optimizer of an algorithm needs a few steps before it can go on with what they left.
    least = 0 if declared is None or hasattr(declared, "start_after") or hasattr(declared, "warmup_steps") else 3
    changed = {key: least if value else 0 for key, value in begun.items() if value}
    kept = {key: value for key, value in {**options, **changed}.items() if key != "start_with"}
    return [Segment(steps, beginning), Segment(math.inf, f"{name}:{write_options(kept)}")]


def write_options(options: Mapping[str, object]) -> str:
    """What ``read_options`` reads."""
    return ",".join(f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in options.items())


def period_of(contender: str) -> int:
    """Steps from one exchange to the next, if they are rare."""
    name, _, rest = contender.partition(":")
    options = read_options(rest)
    if name not in registry:
        return int(str(options.get("sync_every", 1)))
    own = Algorithm.init(name, **split_options(name, options)[0])
    assert isinstance(own, Algorithm)
    return math.lcm(*(exchange.when.steps for exchange in own.exchanges(own.phases[-1])))
