"""How everything here is measured: two things in turn, and the median of their ratios.

Absolute times on a shared machine say little, and two runs of the same program differ by more than most effects. So a
measurement is a number of rounds. Each round times the baseline (A), the candidate (B) and the baseline once more, in
an order that rotates from round to round. B / A of each round gives one ratio; reported are the median of the ratios
and its 95 % interval from a bootstrap. The two times of the baseline give the same statistic for something that is
known to be 1, the A/A line: an interval of B/A says nothing where that of A/A is as far from 1. What is promised in
microseconds is measured alike, with B - A in place of B / A.

Across processes, all ranks time the same rounds, each sample begun by a barrier, and the time of a sample is the
slowest rank's.

A limit is missed when the interval lies above it, and met when the interval lies below; in between, the run cannot
tell.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "Comparison",
    "Interval",
    "Rounds",
    "add_arguments",
    "compare",
    "compare_added",
    "conclude",
    "joined",
    "measure",
    "median_interval",
    "slowest",
]

LEAST_ROUNDS = 20
RESAMPLES = 2000


@dataclass(frozen=True)
class Rounds:
    """Seconds of each sample, round by round.

    Args:
        baseline: of A.
        candidate: of B.
        baseline_again: of A, timed apart.
    """

    baseline: list[float]
    candidate: list[float]
    baseline_again: list[float]


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Comparison:
    """One line of a benchmark's table.

    Args:
        name: what was compared with what.
        baseline_s: median seconds of A.
        candidate_s: median seconds of B.
        unit: of the three below: ``x`` for B / A, ``us`` for B - A.
        result: B compared with A.
        same: A compared with A.
        limit: what is promised; None where nothing is.
    """

    name: str
    baseline_s: float
    candidate_s: float
    unit: str
    result: Interval
    same: Interval
    limit: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the limit is kept, as far as this run can tell."""
        if self.limit is None:
            return ""
        if self.result.low > self.limit:
            return "MISSED"
        return "met" if self.result.high <= self.limit else "cannot tell"

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"{self.limit:.2f} {self.unit}"
        return (
            f"{self.name:<50} {readable(self.baseline_s):>9} {readable(self.candidate_s):>9}  "
            f"{self.result!s} {self.unit:<3} {self.same!s} {self.unit:<3} {limit:>7}  {self.verdict}"
        )


HEADING = f"{'B against A':<50} {'A':>9} {'B':>9}  {'B : A':<24} {'A : A':<24} {'limit':>9}"


def measure(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    rounds: int,
    calls: int = 1,
    settle: int = 1,
    before_each: Callable[[], object] = lambda: None,
) -> Rounds:
    """Time two functions in turn.

    Args:
        baseline: A.
        candidate: B.
        rounds: how many pairs there will be.
        calls: calls in one sample, for functions that are too quick for the clock.
        settle: calls before each sample that are not timed. What ran before, also the barrier, belongs to one side:
            neither pays for the change.
        before_each: called before each sample and not timed; a barrier where ranks measure together.

    Returns:
        Seconds per call, in this process.
    """
    samples: tuple[list[float], list[float], list[float]] = ([], [], [])
    functions = (baseline, candidate, baseline)
    for function in functions[:2]:  # warm up caches and allocators
        before_each()
        seconds_per_call(function, calls)
    for index in range(rounds):
        for position in range(3):
            chosen = (index + position) % 3
            before_each()
            for _ in range(settle):
                functions[chosen]()
            samples[chosen].append(seconds_per_call(functions[chosen], calls))
    return Rounds(*samples)


def seconds_per_call(function: Callable[[], object], calls: int) -> float:
    """Mean seconds of ``calls`` calls in a row."""
    start_s = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start_s) / calls


def slowest(of_ranks: Sequence[Rounds]) -> Rounds:
    """For each sample the time of the rank that took longest."""
    return Rounds(
        [max(times) for times in zip(*(rounds.baseline for rounds in of_ranks), strict=True)],
        [max(times) for times in zip(*(rounds.candidate for rounds in of_ranks), strict=True)],
        [max(times) for times in zip(*(rounds.baseline_again for rounds in of_ranks), strict=True)],
    )


def joined(parts: Sequence[Rounds]) -> Rounds:
    """The rounds of several measurements of the same, as one."""
    return Rounds(
        [seconds for part in parts for seconds in part.baseline],
        [seconds for part in parts for seconds in part.candidate],
        [seconds for part in parts for seconds in part.baseline_again],
    )


def compare(name: str, rounds: Rounds, limit: float | None = None) -> Comparison:
    """Reduce rounds to B / A.

    Args:
        name: of the line.
        rounds: what was measured.
        limit: the largest ratio that is promised.
    """
    return reduce_rounds(name, rounds, "x", lambda over, under: over / under, limit)


def compare_added(name: str, rounds: Rounds, limit_us: float | None = None) -> Comparison:
    """Reduce rounds to B - A in microseconds.

    Args:
        name: of the line.
        rounds: what was measured.
        limit_us: the largest difference that is promised.
    """
    return reduce_rounds(name, rounds, "us", lambda over, under: (over - under) * 1e6, limit_us)


def reduce_rounds(
    name: str, rounds: Rounds, unit: str, of_pair: Callable[[float, float], float], limit: float | None
) -> Comparison:
    """Reduce rounds to one line of the table, whatever is made of each pair."""
    return Comparison(
        name,
        statistics.median(rounds.baseline),
        statistics.median(rounds.candidate),
        unit,
        median_interval([of_pair(*pair) for pair in zip(rounds.candidate, rounds.baseline, strict=True)]),
        median_interval([of_pair(*pair) for pair in zip(rounds.baseline_again, rounds.baseline, strict=True)]),
        limit,
    )


def median_interval(values: Sequence[float]) -> Interval:
    """The median, with a bootstrap interval that is always the same for the same values."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Interval(statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1])


def readable(seconds: float) -> str:
    """Seconds with a unit that fits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds:.2f} s"


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options that all benchmarks have.

    Args:
        parser: of the benchmark.
        rounds: the default of ``--rounds``.
    """
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help="pairs per line; at least 20 to judge")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")


def conclude(
    comparisons: Sequence[Comparison], options: argparse.Namespace, notes: Mapping[str, object] | None = None
) -> int:
    """Print the table and what else was measured, and write both as JSON if asked.

    Args:
        comparisons: the lines of the table.
        options: what ``add_arguments`` parsed.
        notes: further numbers by name.

    Returns:
        The exit status: 1 when a limit was missed in enough rounds to judge.
    """
    notes = notes or {}
    print(HEADING)
    for comparison in comparisons:
        print(comparison)
    for name, value in notes.items():
        print(f"{name}: {value}")
    judged = options.rounds >= LEAST_ROUNDS
    if not judged:
        print(f"({options.rounds} rounds are too few to judge; the least is {LEAST_ROUNDS})")
    if options.json is not None:
        lines = [{**asdict(comparison), "verdict": comparison.verdict} for comparison in comparisons]
        numbers = {"rounds": options.rounds, "comparisons": lines, "notes": dict(notes)}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return int(judged and any(comparison.verdict == "MISSED" for comparison in comparisons))
