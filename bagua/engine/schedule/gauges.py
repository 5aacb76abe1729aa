"""What the results of exchanges say about training: how far ranks are apart, how stale results are, what is left over.

Everything is estimated from a sample of the elements, at most once in a second for what is not new in each result.
"""

from __future__ import annotations

import math

import torch

from bagua.algorithms import DifferenceMix, Exchange, Flight, Mix, Replace, Weights
from bagua.comm import ProcessGroup, Recorder
from bagua.errors import ConfigurationError
from bagua.topology import consensus_rate, create

#: What is left in ``group.gauges``.
_NAMES = ("comm/consensus_distance", "comm/outer_cosine", "comm/residual_norm", "comm/staleness_steps")
#: Elements of a bucket that are looked at, at most.
_SAMPLE = 4096
#: Buckets whose last mean difference is remembered: 16 KiB each.
_REMEMBERED = 64
#: Seconds between two looks.
_PAUSE_S = 1.0
#: The rate at which more ranks agree is not computed: it takes the cube of their number.
_MOST_RANKS = 64


def forget_gauges(group: ProcessGroup) -> None:
    """Take away what the exchanges of an earlier phase have left; what others measure there stays."""
    for name in _NAMES:
        group.gauges.pop(name, None)


class Gauges:
    """Looks at the results of one exchange, and leaves numbers in ``group.gauges``.

    Args:
        exchange: exchange whose results are looked at.
        group: group whose ranks exchange.
    """

    def __init__(self, exchange: Exchange, group: ProcessGroup) -> None:
        self._recorder: Recorder = group.recorder
        self._values = group.gauges
        self._exchange = exchange
        self._next = -math.inf
        self._round = -1
        self._factor = _distance_factor(exchange, group)
        #: By bucket: squared distance; and sample, product with the one before, and both squared lengths.
        self._distances: dict[int, float] = {}
        self._residuals: dict[int, float] = {}
        self._samples: dict[int, torch.Tensor] = {}
        self._products: dict[int, tuple[float, float, float]] = {}
        self._has_residual = any(one.name == "residual" for one in exchange.states())
        self._is_difference = exchange.what is not None and exchange.what.has_anchor
        self._is_blind = not (self._factor or self._has_residual or self._is_difference or exchange.lag)

    def look(self, flight: Flight, t: int) -> None:
        """``flight`` has come back in step ``t`` of the phase, and is about to be folded."""
        if not self._is_blind and flight.finite:
            self._read(flight, t)

    @torch.no_grad()
    def _read(self, flight: Flight, t: int) -> None:
        gauges = self._values
        gauges["comm/staleness_steps"] = float(t - flight.t)
        key = id(flight.memory)
        if self._is_difference:
            self._turn(key, _sampled_result(flight))
        now = self._recorder.clock()
        if now >= self._next and flight.round != self._round:
            self._next, self._round = now + _PAUSE_S, flight.round
        if flight.round != self._round:  # All buckets of a round are looked at, or none.
            return
        if self._factor and self._exchange.lag == 0:
            self._distances[key] = _squared(_distance_from_mean(flight), flight.flat.numel())
            gauges["comm/consensus_distance"] = self._factor * math.sqrt(sum(self._distances.values()))
        if self._has_residual:
            self._residuals[key] = _squared(_sampled(flight.state["residual"]), flight.flat.numel())
            gauges["comm/residual_norm"] = math.sqrt(sum(self._residuals.values()))

    def _turn(self, key: int, sample: torch.Tensor) -> None:
        """Compare the direction of a sampled mean difference with that of the one before."""
        before = self._samples.get(key)
        if before is None and len(self._samples) >= _REMEMBERED:
            return
        self._samples[key] = sample.float()
        if before is None:
            return
        product = torch.stack([sample @ before.double(), sample @ sample, before.double() @ before.double()])
        self._products[key] = (float(product[0]), float(product[1]), float(product[2]))
        dot, new, old = (sum(part) for part in zip(*self._products.values(), strict=True))
        if new > 0 and old > 0 and math.isfinite(new * old):
            self._values["comm/outer_cosine"] = dot / math.sqrt(new * old)


def _distance_factor(exchange: Exchange, group: ProcessGroup) -> float:
    """By what the distance of a rank from its result is multiplied; 0 if the result says nothing about other ranks.

    One round of mixing removes a part of the distance from the mean: ``||x - mean|| <= ||x - mixed|| / (1 - rate)``.
    """
    what, how, size = exchange.what, exchange.how, group.size
    if how is None or what is None or size == 1 or not (isinstance(what, Weights) or what.has_anchor):
        return 0.0
    if isinstance(what, Weights) and not isinstance(exchange.then, Replace):
        return 0.0
    if how.uniform or not isinstance(how, Mix | DifferenceMix):
        return 1.0
    if size > _MOST_RANKS:
        return 0.0
    try:
        rate = consensus_rate(create(how.topology), size, group.nodes)
    except ConfigurationError:  # It is meant for hosts, and does not exist for so many ranks.
        return 0.0
    return 1.0 / (1.0 - rate) if rate < 1.0 else 0.0


def _distance_between(numel: int) -> int:
    """From one element of a sample to the next. It is odd: even ones might always hit the same column of a matrix."""
    return max(1, numel // _SAMPLE) | 1


def _sampled(flat: torch.Tensor) -> torch.Tensor:
    """Some elements."""
    return flat[:: _distance_between(flat.numel())].double()


def _sampled_weights(flight: Flight) -> torch.Tensor:
    """The same elements of the weights."""
    return flight.bucket.sample_weights(_distance_between(flight.bucket.numel)).double()


def _sampled_result(flight: Flight) -> torch.Tensor:
    """The same elements of what came back."""
    if flight.unfilled is None:
        return _sampled(flight.flat)
    return _sampled(flight.state["anchor"]) - _sampled_weights(flight)


def _squared(sample: torch.Tensor, numel: int) -> float:
    """The squared length of ``numel`` elements, by a sample of them; 0.0 if that is not finite."""
    squared = float(sample.square().sum()) * numel / sample.numel()
    return squared if math.isfinite(squared) else 0.0


def _distance_from_mean(flight: Flight) -> torch.Tensor:
    """A sample of the difference between the weights and what the ranks have agreed on."""
    agreed = _sampled_result(flight)
    if "anchor" in flight.reads:  # What came back is the mean of the anchor minus the weights.
        agreed = _sampled(flight.state["anchor"]) - agreed
    return _sampled_weights(flight) - agreed
