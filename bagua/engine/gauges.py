"""What the results of exchanges say about training: how far ranks are apart, how stale results are, what is left over.

Everything is estimated from a sample of the elements, at most once in a second for what is not new in each result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from bagua.algorithms import Difference, DifferenceMix, Exchange, Flight, Mix, Replace, Weights
from bagua.comm import ProcessGroup, Recorder
from bagua.topology import consensus_rate, create

__all__ = ["Gauges"]

#: Elements that are looked at in a bucket, and at least in each of its parameters.
_SAMPLE, _LEAST = 4096, 16
#: Buckets whose last mean difference is remembered: 16 KiB each.
_REMEMBERED = 64
#: Seconds between two looks.
_PAUSE_S = 1.0
#: The rate at which more ranks agree is not computed: it takes the cube of their number.
_MOST_RANKS = 64


class Gauges:
    """Looks at the results of one exchange, and leaves numbers in ``Recorder.gauges``.

    Args:
        exchange: whose results.
        group: whose ranks exchange.

    Attributes:
        wanted: whether there is anything to see at ``lag`` 0 in results that lose nothing.
    """

    def __init__(self, exchange: Exchange, group: ProcessGroup) -> None:
        self._recorder: Recorder = group.recorder
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
        self._is_difference = isinstance(exchange.what, Difference)
        self._is_blind = not (self._factor or self._has_residual or self._is_difference or exchange.lag)

    @torch.no_grad()
    def look(self, flight: Flight, t: int) -> None:
        """``flight`` has come back in step ``t`` of the phase, and is about to be folded."""
        if self._is_blind or not flight.finite:
            return
        gauges = self._recorder.gauges
        gauges["comm/staleness_steps"] = float(t - flight.t)
        key = id(flight.memory)
        if self._is_difference:
            self._turn(key, flight.flat)
        now = self._recorder.clock()
        if now >= self._next and flight.round != self._round:
            self._next, self._round = now + _PAUSE_S, flight.round
        if flight.round != self._round:  # All buckets of a round are looked at, or none.
            return
        if self._factor and self._exchange.lag == 0:
            self._distances[key] = sum(_squares(flight))
            gauges["comm/consensus_distance"] = self._factor * math.sqrt(sum(self._distances.values()))
        if self._has_residual:
            residual = flight.state["residual"]
            self._residuals[key] = _squared(residual[:: _stride(residual.numel())], residual.numel())
            gauges["comm/residual_norm"] = math.sqrt(sum(self._residuals.values()))

    def _turn(self, key: int, difference: torch.Tensor) -> None:
        """Compare the direction of a mean difference with that of the one before."""
        sample = difference[:: _stride(difference.numel())].double()
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
            self._recorder.gauges["comm/outer_cosine"] = dot / math.sqrt(new * old)


def _distance_factor(exchange: Exchange, group: ProcessGroup) -> float:
    """By what the distance of a rank from its result is multiplied; 0 if the result says nothing about other ranks.

    One round of mixing removes a part of the distance from the mean: ``||x - mean|| <= ||x - mixed|| / (1 - rate)``.
    """
    what, how, size = exchange.what, exchange.how, group.size
    if how is None or size == 1 or not isinstance(what, Weights | Difference):
        return 0.0
    if isinstance(what, Weights) and not isinstance(exchange.then, Replace):
        return 0.0
    if how.uniform or not isinstance(how, Mix | DifferenceMix):
        return 1.0
    if size > _MOST_RANKS:
        return 0.0
    rate = consensus_rate(create(how.topology), size, group.nodes)
    return 1.0 / (1.0 - rate) if rate < 1.0 else 0.0


def _stride(numel: int, sample: int = _SAMPLE) -> int:
    return max(1, numel // sample)


def _squared(sample: torch.Tensor, numel: int) -> float:
    """The squared length of ``numel`` elements of which ``sample`` is a part; 0.0 if it is not finite."""
    if not sample.numel():
        return 0.0
    squared = float(sample.double().square().sum()) * numel / sample.numel()
    return squared if math.isfinite(squared) else 0.0


def _squares(flight: Flight) -> Iterator[float]:
    """For each parameter the squared distance of its weights from what the ranks have agreed on."""
    bucket, flat = flight.bucket, flight.flat
    anchor = flight.state.get("anchor") if "anchor" in flight.reads else None
    share = max(_SAMPLE // len(bucket.parameters), _LEAST)
    for offset, parameter in zip(bucket.offsets, bucket.parameters, strict=True):
        numel = parameter.numel()
        stride = _stride(numel, share)
        part = slice(offset, offset + numel, stride)
        target = flat[part] if anchor is None else anchor[part] - flat[part]
        weights = torch.as_strided(parameter.detach(), (numel,), (1,))[::stride]
        yield _squared(weights.double() - target.double(), numel)
