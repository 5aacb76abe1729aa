"""What the lab found out: numbers of one contender at one rate, what is promised of them, and where it pays."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.network.ranks import Sample
from benchmarks.paired import Comparison, Rounds, compare

__all__ = ["LIMITS", "Limit", "Line", "Loss", "Run", "make_line", "pays_up_to"]


@dataclass(frozen=True)
class Limit:
    """What is promised of a contender against a baseline, on the perceptron of its default size.

    Args:
        hosts: with one rank each.
        rate_mbit_s: of their links.
        baseline: what it is compared with.
        contender: of whom it is promised.
        step_time: the largest share of the baseline's step time; None where nothing is promised.
        sent_bytes: the largest share of the baseline's bytes; None where nothing is promised.
    """

    hosts: int
    rate_mbit_s: float
    baseline: str
    contender: str
    step_time: float | None = None
    sent_bytes: float | None = None


LIMITS = (
    Limit(2, 100, "ddp", "bytegrad", step_time=0.30, sent_bytes=0.27),
    Limit(2, 100, "ddp_fp16", "bytegrad", step_time=0.58),
    Limit(2, 100, "ddp", "ddp_8bit", step_time=0.32),
    Limit(2, 100, "bytegrad", "ddp_8bit", step_time=1.1),
    Limit(2, 100, "ddp", "sign_sgd:warmup_steps=0", sent_bytes=0.055),
    Limit(2, 100, "ddp", "top_k:warmup_steps=0,density_steps=0", sent_bytes=0.06),
    Limit(2, 100, "ddp", "power_sgd", sent_bytes=0.01),
    Limit(2, 100, "ddp", "one_bit_adam:warmup_steps=3", step_time=0.08),
    Limit(4, 1000, "ddp", "bytegrad", step_time=0.58),
    Limit(4, 1000, "ddp", "decentralized:peer_selection_mode='shift_one'", step_time=0.75),
    Limit(4, 1000, "ddp", "decentralized_data_parallel", step_time=0.8),
)


@dataclass(frozen=True)
class Loss:
    """How far a contender came.

    Args:
        steps: as many as all others.
        after_steps: held-out loss after these.
        steps_in_time: what it takes in the time in which the baseline takes ``steps``.
        after_time: held-out loss after these.
        capped: whether there was time for more than ``steps_in_time``, which were not trained.
    """

    steps: int
    after_steps: float
    steps_in_time: int
    after_time: float
    capped: bool


@dataclass(frozen=True)
class Line:
    """One contender at one rate.

    Args:
        contender: who.
        rate_mbit_s: of the links; None is unlimited.
        step: its step time against the baseline's.
        sent_bytes: by one host in one step, headers included; mean over hosts.
        baseline_sent_bytes: the same of the baseline.
        sent_limit: what is promised of ``sent_bytes`` over ``baseline_sent_bytes``.
        loss: of training, where that was asked for.
    """

    contender: str
    rate_mbit_s: float | None
    step: Comparison
    sent_bytes: float
    baseline_sent_bytes: float
    sent_limit: float | None = None
    loss: Loss | None = None

    @property
    def sent_ratio(self) -> float:
        """Its bytes over the baseline's."""
        return self.sent_bytes / self.baseline_sent_bytes if self.baseline_sent_bytes else math.nan

    @property
    def sent_verdict(self) -> str:
        """Whether the limit on the bytes is kept."""
        if self.sent_limit is None:
            return ""
        return "met" if self.sent_ratio <= self.sent_limit else "MISSED"

    @property
    def missed(self) -> bool:
        """Whether a promise was broken."""
        return "MISSED" in (self.step.verdict, self.sent_verdict)


@dataclass(frozen=True)
class Run:
    """All lines that were measured on the same hosts against the same baseline.

    Args:
        hosts: how many.
        ranks_per_host: on each.
        task: its title.
        baseline: what all others are compared with.
        rounds: turns of each contender at each rate.
        lines: of all contenders at all rates.
        failures: why contenders are missing.
        delay_ms: between two hosts, one way.
    """

    hosts: int
    ranks_per_host: int
    task: str
    baseline: str
    rounds: int
    lines: list[Line]
    failures: dict[str, str] = field(default_factory=dict)
    delay_ms: float = 0.0


def make_line(
    contender: str,
    rate: float | None,
    of_ranks: Sequence[tuple[list[Sample], list[Sample], list[Sample]]],
    hosts: int,
    limit: Limit | None,
) -> Line:
    """Reduce samples to a line.

    Args:
        contender: who.
        rate: of the links.
        of_ranks: for each rank the samples of the baseline, of the contender and of the baseline once more.
        hosts: how many.
        limit: what is promised.
    """
    baseline, candidate, again = (slowest_steps([samples[which] for samples in of_ranks]) for which in range(3))
    baseline_sent, sent = (mean_sent([samples[which] for samples in of_ranks], hosts) for which in range(2))
    step_limit = None if limit is None else limit.step_time
    comparison = compare(contender, Rounds(baseline, candidate, again), step_limit)
    return Line(contender, rate, comparison, sent, baseline_sent, None if limit is None else limit.sent_bytes)


def slowest_steps(of_ranks: Sequence[list[Sample]]) -> list[float]:
    """For each round the step time of the rank that took longest."""
    return [max(sample.step_s for sample in samples) for samples in zip(*of_ranks, strict=True)]


def mean_sent(of_ranks: Sequence[list[Sample]], hosts: int) -> float:
    """Bytes that one host sent in one step: the mean over hosts, the median over rounds."""
    sums = [sum(sample.sent_bytes for sample in samples) for samples in zip(*of_ranks, strict=True)]
    return float(statistics.median(sums)) / hosts


def find_limit(hosts: int, rate: float | None, baseline: str, contender: str) -> Limit | None:
    """What is promised in this case; None where nothing is."""
    case = (hosts, rate, baseline, contender)
    found = (entry for entry in LIMITS if (entry.hosts, entry.rate_mbit_s, entry.baseline, entry.contender) == case)
    return next(found, None)


def pays_up_to(lines: Sequence[Line]) -> str:
    """Up to which rate a contender is faster than the baseline, as far as its measured rates tell.

    Args:
        lines: of one contender at several rates, in any order.

    Between two rates the ratio is taken for a straight line over the logarithm of the rate.
    """
    ordered = sorted(lines, key=lambda line: math.inf if line.rate_mbit_s is None else line.rate_mbit_s)
    if ordered[0].step.result.median >= 1:
        return f"not at {rate_name(ordered[0].rate_mbit_s)}, the lowest rate that was measured"
    for below, above in itertools.pairwise(ordered):
        if above.step.result.median >= 1:
            return f"up to {rate_name(crossing(below, above))}"
    return f"at every measured rate, up to {rate_name(ordered[-1].rate_mbit_s)}"


def crossing(below: Line, above: Line) -> float:
    """The rate at which the ratio is 1, between two lines on either side; the lower rate if the upper has no limit."""
    assert below.rate_mbit_s is not None
    if above.rate_mbit_s is None:
        return below.rate_mbit_s
    slower, faster = below.step.result.median, above.step.result.median
    share = (1 - slower) / (faster - slower)
    return float(below.rate_mbit_s * (above.rate_mbit_s / below.rate_mbit_s) ** share)


def rate_name(rate: float | None) -> str:
    """A rate with its unit."""
    if rate is None:
        return "no limit"
    return f"{rate:.3g} Mbit/s" if rate < 1000 else f"{rate / 1000:.3g} Gbit/s"
