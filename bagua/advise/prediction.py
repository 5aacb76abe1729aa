"""From a rehearsal and a network to the time of a step, with an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.advise.facts import MachineFacts, ModelFacts
from bagua.advise.network import Cluster
from bagua.advise.simulation import step_seconds
from bagua.advise.trace import Rehearsal

#: Nine in ten predictions of docs/advise.md are off by less than this part of the measured time.
_ERROR = 0.2
#: What was measured there.
_RATES_MBIT_S, _DELAY_MS, _HOSTS = (10.0, 10_000.0), 20.0, (2, 4)
_DRAWS = 5
#: The slowest of more ranks is hardly slower, and their draws would fill the memory.
_MOST_DRAWN = 10_000
_LEAST_SIMULATED_STEPS = 12


@dataclass(frozen=True)
class Prediction:
    """The time of a step of one algorithm.

    Attributes:
        name: name of the algorithm.
        step_s: seconds of a step.
        low_s: lower end of the interval that holds nine of ten measured times.
        high_s: upper end of it.
        sent_bytes: bytes of one rank that enter calls in each step.
        keeps_equal: True if all ranks hold equal weights after each step.
        needs_optimizer: optimizer without which the algorithm does not work; empty if any will do.
        options: options of the algorithm, if it is not used with its defaults.
    """

    name: str
    step_s: float
    low_s: float
    high_s: float
    sent_bytes: float
    keeps_equal: bool
    needs_optimizer: str
    options: dict[str, Any] = field(default_factory=dict)


def predict(
    rehearsal: Rehearsal, facts: ModelFacts, cluster: Cluster, machine: MachineFacts, *, seed: int = 0
) -> Prediction:
    """The time of a step.

    The slowest of those who wait for each other is drawn from the steps that were measured.

    Args:
        rehearsal: runs of one rank.
        facts: the model.
        cluster: hosts and links.
        machine: facts that were measured without a network.
        seed: seed of what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    arrivals_s = [one.arrival_s for one in facts.parameters]
    length = len(rehearsal.steps)
    count = length * (1 + -(-_LEAST_SIMULATED_STEPS // length))
    draws = [_stretches(rehearsal, facts, cluster, count, generator) for _ in range(_DRAWS)]
    found = [step_seconds(rehearsal, arrivals_s, facts.step_s, cluster, machine, stretches) for stretches in draws]
    mean_s, low_s, high_s = sum(found) / len(found), min(found) / (1 + _ERROR), max(found) / (1 - _ERROR)
    of = rehearsal
    return Prediction(of.name, mean_s, low_s, high_s, of.sent_bytes, of.keeps_equal, of.needs_optimizer, of.options)


def _stretches(
    rehearsal: Rehearsal, facts: ModelFacts, cluster: Cluster, count: int, generator: torch.Generator
) -> list[float]:
    """By how much the slowest of those who meet is slower than the median, for each step."""
    ratios = torch.tensor(facts.ratios, dtype=torch.float64)
    together = max(1, min(rehearsal.meeting, cluster.size, _MOST_DRAWN))
    alone = max(1, min(round(rehearsal.steps_alone), count))
    found: list[float] = []
    while len(found) < count:
        drawn = torch.randint(len(ratios), (together, alone), generator=generator)
        found += [float(ratios[drawn].mean(1).max())] * alone
    return found[:count]


def outside_calibration(cluster: Cluster) -> tuple[str, ...]:
    """A phrase for each way in which ``cluster`` is none of those on which the model was tried.

    Example:
        >>> from bagua.link import parse_link
        >>> outside_calibration(Cluster(1000, 1, parse_link("1gbit")))
        ('1000 hosts, tried with 2 to 4',)
    """
    link, rate = cluster.link, cluster.rate_mbit_s
    (few, many), (slow, fast) = _HOSTS, _RATES_MBIT_S
    told = f"{rate:g} Mbit/s" if math.isfinite(rate) else "unlimited"
    phrases = {
        f"{cluster.hosts} hosts, tried with {few} to {many}": not few <= cluster.hosts <= many,
        f"{cluster.ranks_per_host} ranks per host, tried with 1": cluster.ranks_per_host > 1,
        f"a link of {told}, tried with {slow:g} to {fast:g} Mbit/s": not slow <= rate <= fast,
        "a link that is not symmetric": link.send_mbit_s != link.receive_mbit_s,
        f"a delay of {link.delay_ms:g} ms, tried with up to {_DELAY_MS:g} ms": link.delay_ms > _DELAY_MS,
        "a link that loses packets": bool(link.loss),
    }
    return tuple(phrase for phrase, applies in phrases.items() if applies)
