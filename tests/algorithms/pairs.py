"""Combinations of the fields of an exchange: which are legal, and few of them that hold all legal pairs of values.

About a hundred combinations are enough. Each is compared with stacked tensors, and with a mutant.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from bagua.algorithms import (
    Add,
    Algorithm,
    Blend,
    Difference,
    DifferenceMix,
    Every,
    Exchange,
    Gradients,
    How,
    Mean,
    Mix,
    Outer,
    OuterStep,
    Parts,
    Replace,
    Then,
    Weights,
    What,
)
from bagua.compression import Codec, registry
from bagua.primitives import AllGatherReducer, ErrorFeedback
from bagua.topology import available

#: Topologies with the same neighbours in each round.
STATIC = {"complete", "ring", "torus"}

_SGD = Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
_SUBJECTS: dict[str, tuple[What, Then]] = {
    "gradients": (Gradients(), Replace()),
    "weights": (Weights(), Replace()),
    "added": (Weights(), Add(0.5)),
    "difference": (Difference(), OuterStep(_SGD)),
    "blended": (Difference(), OuterStep(_SGD, land=Blend(0.25))),
    "learned": (Difference(), OuterStep(_SGD, land=Add())),
}


@dataclass(frozen=True)
class Case:
    """Values of all fields.

    Attributes:
        subject: what is sent, and what becomes of the result.
        codec: a name; empty for none.
        topology: a name; empty for the mean of all ranks.
        by_host: hierarchical, on two hosts of two ranks.
        feedback: what the codec loses is added to the next one; with neighbours, the codec is one of differences.
        resumed: training is interrupted half-way, and goes on from a checkpoint.
        loop: how a step is made: of two backward passes, the first without synchronization; with gradients that are
            clipped; with a ``GradScaler``.
        at: where in a step weights are sent; gradients are when they are there.
        offset: number of the step, within a period, after which the first part is sent.
    """

    subject: str = "weights"
    period: int = 1
    lag: int = 0
    parts: int = 1
    codec: str = ""
    topology: str = ""
    by_host: bool = False
    feedback: bool = False
    resumed: bool = False
    loop: str = "plain"
    at: str = "stepped"
    offset: int = 0

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Layout of four ranks."""
        return {"hosts": [2, 2]} if self.by_host else {}

    @property
    def exchange(self) -> Exchange:
        """What the engine executes.

        Raises:
            ConfigurationError: the values contradict each other.
        """
        what, then = _SUBJECTS[self.subject]
        if isinstance(what, Difference) and self.topology:
            what = Difference("local")
        parts = Parts() if self.parts == 1 else Parts(self.parts, "strided")
        at: Any = self.at
        if self.subject == "gradients":
            at = "backward ends" if self.parts > 1 else None
        until: Any = at if at == "bucket ready" else None
        return Exchange(
            what, Every(self.period, self.offset), self.how, then, at=at, until=until, lag=self.lag, parts=parts
        )

    @property
    def until(self) -> str:
        """Where weights that were sent come in."""
        return "backward ends" if self.at == "backward begins" else self.at

    @property
    def how(self) -> How:
        """How ranks communicate."""
        codec = Codec.init(self.codec) if self.codec else None
        if self.topology and codec is not None:
            return DifferenceMix(self.topology, codec, self.by_host)
        if self.topology:
            return Mix(self.topology, self.by_host)
        if codec is None:
            return Mean(hierarchical=self.by_host)
        reducer = AllGatherReducer(codec)
        return Mean(ErrorFeedback(reducer) if self.feedback else reducer, self.by_host)

    @property
    def algorithm(self) -> Algorithm:
        """The exchange, and nothing else."""
        return Algorithm.of(self.exchange)

    @property
    def remembers(self) -> bool:
        """Whether what one exchange leaves behind goes into the next."""
        return bool(self.codec) and (bool(self.topology) or self.feedback)

    @property
    def refusal(self) -> str:
        """Why the values contradict each other; empty if they do not. By the text of the rules, not by the code."""
        of_how = self._refusal_of_codec if self.codec and self.topology else ""
        if self.at == "bucket ready" and self.parts > 1 and self.subject != "gradients" and not of_how:
            return "only parts by arrival"
        if self.codec and self._refusal_of_codec:
            return self._refusal_of_codec
        if self.subject == "gradients":
            if self.lag and self.parts > 1:
                return "late gradients would take the place"
            return "a flight has to come back" if self.remembers and self.lag > self.period - 1 else ""
        if self.subject in ("weights", "difference") and self.lag >= self.period:
            return "undo every update"
        limit = self.period if self.until == self.at else self.period - 1
        return "a flight has to come back" if self.lag > limit else ""

    @property
    def _refusal_of_codec(self) -> str:
        kept = Codec.init(self.codec).contraction
        loses = kept is not None and kept < 0.5
        if self.topology:
            if loses:
                return "would drop most of each update"
            return "" if self.topology in STATIC else "neighbours follow each other's changes"
        return "weights would become what is left" if loses and self.subject in ("weights", "added") else ""

    @property
    def steps(self) -> int:
        """Enough for two results, the second of which depends on what the first left behind."""
        return max(5, 2 * self.period + self.lag + 1)

    @property
    def lossy(self) -> bool:
        """Whether the result is not the exact mean, which two hosts that mix take, too."""
        neighbours = self.topology not in ("", "complete", "alternating_exp_ring") and not self.by_host
        return neighbours or self.codec not in ("", "identity")

    def __str__(self) -> str:
        return "-".join(str(getattr(self, one.name)) for one in fields(self))


FACTORS: dict[str, Sequence[Any]] = {
    "codec": ["", *registry],
    "topology": ["", *available()],
    "subject": list(_SUBJECTS),
    "lag": [0, 1, 2, 5],
    "period": [1, 3, 6],
    "parts": [1, 3],
    "by_host": [False, True],
    "feedback": [False, True],
    "resumed": [False, True],
    "loop": ["plain", "accumulated", "clipped", "scaled"],
    "at": ["safe", "backward begins", "bucket ready", "backward ends", "stepped"],
}

#: Values that stand for all others where it matters whether a case is legal.
_KINDS: dict[str, Sequence[Any]] = {
    **FACTORS,
    "codec": ["", "sign", "minmax_uint8"],
    "topology": ["", "ring", "shift_one"],
    "resumed": [False],
    "loop": ["plain"],
    "at": ["stepped", "backward begins", "bucket ready"],
}

#: Two fields with a value each.
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> Iterator[Pair]:
    """All of its pairs of values."""
    return itertools.combinations([(name, getattr(case, name)) for name in FACTORS], 2)


def all_pairs() -> Iterator[Pair]:
    """Whether they are legal or not."""
    for one, other in itertools.combinations(FACTORS, 2):
        for here, there in itertools.product(FACTORS[one], FACTORS[other]):
            yield (one, here), (other, there)


def kind_of(name: str, value: Any) -> Any:
    """What stands for ``value``."""
    if name == "codec" and value:
        kept = Codec.init(value).contraction
        return "sign" if kept is not None and kept < 0.5 else "minmax_uint8"
    if name == "topology" and value:
        return "ring" if value in STATIC else "shift_one"
    return value


def cases_of(pair: Pair | tuple[()] = ()) -> Iterator[Case]:
    """With the two values of ``pair``, and all kinds of others."""
    known = dict(pair)
    free = {name: values for name, values in _KINDS.items() if name not in known}
    for values in itertools.product(*free.values()):
        yield Case(**known, **dict(zip(free, values, strict=True)))


@functools.cache
def _legal_kind(pair: Pair) -> Case | None:
    return next((case for case in cases_of(pair) if not case.refusal), None)


def legal_case(pair: Pair) -> Case | None:
    """One with the two values of ``pair``; None if they contradict each other whatever the others are."""
    (one, here), (other, there) = pair
    found = _legal_kind(((one, kind_of(one, here)), (other, kind_of(other, there))))
    return None if found is None else replace(found, **dict(pair))


@functools.cache
def cover() -> tuple[Case, ...]:
    """Legal cases that hold each legal pair: each the best of some for the first pair that is still missing."""
    chance, chosen = random.Random(0), list[Case]()
    missing = {pair: case for pair in all_pairs() if (case := legal_case(pair)) is not None}
    while missing:
        pair, found = next(iter(missing.items()))
        drawn = [
            Case(**{name: chance.choice(values) for name, values in FACTORS.items()} | dict(pair)) for _ in range(60)
        ]
        candidates = [found, *(case for case in drawn if not case.refusal)]
        best = max(candidates, key=lambda case: sum(one in missing for one in pairs_of(case)) / (case.steps + 4))
        chosen.append(best)
        for one in pairs_of(best):
            missing.pop(one, None)
    return tuple(chosen)
