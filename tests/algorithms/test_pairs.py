"""Exchanges of all fields against the same on stacked tensors: a few cases that hold every legal pair of values."""

import contextlib
import functools
import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import bagua.comm
from bagua import algorithms
from bagua.compression import Codec, registry
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua
from bagua.primitives import AllGatherReducer, ErrorFeedback
from bagua.topology import available, create
from tests.algorithms.stacked import Layout, Places, layout_of, loss_of, model_of, whole_layout
from tests.harness import State, batch, coded, snapshot

#: Topologies with the same neighbours in each round.
STATIC = {"complete", "ring", "torus"}

_SGD = algorithms.Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
_SUBJECTS: dict[str, tuple[algorithms.What, algorithms.Then]] = {
    "gradients": (algorithms.Gradients(), algorithms.Replace()),
    "weights": (algorithms.Weights(), algorithms.Replace()),
    "added": (algorithms.Weights(), algorithms.Add(0.5)),
    "difference": (algorithms.Difference(), algorithms.OuterStep(_SGD)),
    "blended": (algorithms.Difference(), algorithms.OuterStep(_SGD, land=algorithms.Blend(0.25))),
    "learned": (algorithms.Difference(), algorithms.OuterStep(_SGD, land=algorithms.Add())),
}


@dataclass(frozen=True)
class Case:
    """Values of all fields. With neighbours, the codec is one of differences."""

    subject: str = "weights"  # What is sent, and what becomes of the result.
    period: int = 1
    lag: int = 0
    parts: int = 1
    codec: str = ""
    topology: str = ""  # Empty for the mean of all ranks.
    by_host: bool = False  # Hierarchical, on two hosts of two ranks.
    feedback: bool = False  # What the codec loses is added to the next one.
    resumed: bool = False  # Training is interrupted half-way, and goes on from a checkpoint.
    #: How a step is made: "accumulated" of two backward passes, the first without synchronization; with gradients that
    #: are "clipped"; "scaled" with a ``GradScaler``.
    loop: str = "plain"
    at: str = "stepped"  # Where in a step weights are sent; gradients are when they are there.
    offset: int = 0  # Number of the step, within a period, after which the first part is sent.

    @property
    def exchange(self) -> algorithms.Exchange:
        """Raises ``ConfigurationError`` if the values contradict each other."""
        what, then = _SUBJECTS[self.subject]
        if isinstance(what, algorithms.Difference) and self.topology:
            what = algorithms.Difference("local")
        parts = algorithms.Parts() if self.parts == 1 else algorithms.Parts(self.parts, "strided")
        at: Any = self.at
        if self.subject == "gradients":
            at = "backward ends" if self.parts > 1 else None
        until: Any = at if at == "bucket ready" else None
        when = algorithms.Every(self.period, self.offset)
        return algorithms.Exchange(what, when, self.how, then, at=at, until=until, lag=self.lag, parts=parts)

    @property
    def until(self) -> str:
        """Where weights that were sent come in."""
        return "backward ends" if self.at == "backward begins" else self.at

    @property
    def how(self) -> algorithms.How:
        codec = Codec.init(self.codec) if self.codec else None
        if self.topology and codec is not None:
            return algorithms.DifferenceMix(self.topology, codec, self.by_host)
        if self.topology:
            return algorithms.Mix(self.topology, self.by_host)
        if codec is None:
            return algorithms.Mean(hierarchical=self.by_host)
        reducer = AllGatherReducer(codec)
        return algorithms.Mean(ErrorFeedback(reducer) if self.feedback else reducer, self.by_host)

    @property
    def algorithm(self) -> algorithms.Algorithm:
        return algorithms.Algorithm.of(self.exchange)

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
    "lag": [0, 1, 2, 5], "period": [1, 3, 6], "parts": [1, 3],
    "by_host": [False, True], "feedback": [False, True], "resumed": [False, True],
    "loop": ["plain", "accumulated", "clipped", "scaled"],
    "at": ["safe", "backward begins", "bucket ready", "backward ends", "stepped"],
}  # fmt: skip

#: Values that stand for all others where it matters whether a case is legal.
_KINDS: dict[str, Sequence[Any]] = {
    **FACTORS,
    "codec": ["", "sign", "minmax_uint8"],
    "topology": ["", "ring", "shift_one"],
    "resumed": [False], "loop": ["plain"], "at": ["stepped", "backward begins", "bucket ready"],
}  # fmt: skip

#: Two fields with a value each.
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> Iterator[Pair]:
    return itertools.combinations([(name, getattr(case, name)) for name in FACTORS], 2)


def all_pairs() -> Iterator[Pair]:
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
        drawn = [{name: chance.choice(values) for name, values in FACTORS.items()} | dict(pair) for _ in range(60)]
        candidates = [found, *(case for values in drawn if not (case := Case(**values)).refusal)]
        best = max(candidates, key=lambda case: sum(one in missing for one in pairs_of(case)) / (case.steps + 4))
        chosen.append(best)
        for one in pairs_of(best):
            missing.pop(one, None)
    return tuple(chosen)


SIZE, HOSTS = 4, ((0, 1), (2, 3))
RATE = 0.1
#: What losses are scaled by, the largest norm of clipped gradients, and how the numbers of earlier batches differ.
SCALE, LONGEST, EARLIER = 2.0**10, 0.3, 100

#: What becomes of what ranks send, a row for each: (it, number of the round) -> what each receives.
Rule = Callable[[torch.Tensor, int], torch.Tensor]


def exact_mean(rows: torch.Tensor, number: int) -> torch.Tensor:
    return rows.mean(dim=0).expand_as(rows)


def nothing(rows: torch.Tensor, number: int) -> torch.Tensor:
    return rows


def rule_of(case: Case, kept: torch.Tensor) -> Rule:
    """What ``case`` says; ``kept`` is 1 where a row has a parameter, and 0 in the gaps."""
    if case.topology:
        return Neighbours(case, kept)
    return LossySum(case, kept) if case.codec else exact_mean


class LossySum:
    """Of shares of the mean, those of hosts if hosts exchange; what codecs lost comes with the next."""

    def __init__(self, case: Case, kept: torch.Tensor) -> None:
        self.case, self.kept, self.codec, self.residuals = case, kept, Codec.init(case.codec), torch.tensor(0.0)

    def __call__(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        shares = rows / SIZE
        if self.case.by_host:
            shares = torch.stack([shares[list(host)].sum(dim=0) for host in HOSTS])
        if self.case.feedback:
            shares = shares + self.residuals
        sent = coded(self.codec, shares)
        self.residuals = (shares - sent) * self.kept
        return (sent.sum(dim=0) * self.kept).expand_as(rows)  # What a codec makes of gaps must not matter.


class Neighbours:
    """Ranks mix with ranks, or the means of hosts with those of hosts; with a codec, by what has changed."""

    def __init__(self, case: Case, kept: torch.Tensor) -> None:
        self.kept, self.topology = kept, create(case.topology)
        self.members = HOSTS if case.by_host else tuple((rank,) for rank in range(SIZE))
        self.nodes = None if case.by_host else (0,) * SIZE
        self.codec = Codec.init(case.codec) if case.codec else None
        self.estimates: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        means = torch.stack([rows[list(member)].mean(dim=0) for member in self.members]) * self.kept
        weights = self.topology.round(len(self.members), number, self.nodes).matrix()
        if self.codec is None:
            means = weights @ means
        elif self.estimates is None:
            self.estimates = means
        else:
            change = means - self.estimates + weights @ self.estimates - self.estimates
            means = self.estimates = self.estimates + coded(self.codec, change) * self.kept
        return means.repeat_interleave(torch.tensor([len(member) for member in self.members]), dim=0)


def clip(gradients: State) -> None:
    norms = torch.stack([one.flatten(1).square().sum(dim=1) for one in gradients.values()]).sum(dim=0).sqrt()
    for one in gradients.values():
        one.mul_((LONGEST / (norms + 1e-6)).clamp(max=1).view(-1, *[1] * (one.dim() - 1)))


class Simulation:
    """All ranks, with exchanges in layouts of buckets or parts; a ``mutant`` is how that at ``place`` communicates."""

    def __init__(self, loop: str, *exchanges: tuple[Case, Layout], mutant: Rule | None = None, place: int = 0) -> None:
        self.loop = loop
        weights = {name: one.detach() for name, one in model_of().named_parameters()}
        self.weights = {name: torch.stack([one] * SIZE) for name, one in weights.items()}
        pieces = [
            Piece(case, part, numel, places, mutant if here == place else None)
            for here, (case, layout) in enumerate(exchanges)
            for part, (numel, places) in enumerate(layout)
        ]
        self.of_gradients = [piece for piece in pieces if piece.case.subject == "gradients"]
        self.of_weights = [piece for piece in pieces if piece.case.subject != "gradients"]
        for piece in pieces:
            piece.anchors = piece.gather(self.weights)

    def gradients(self, number: int) -> State:
        weights = {name: one.clone().requires_grad_() for name, one in self.weights.items()}
        of_ranks = zip(*(batch(rank, number) for rank in range(SIZE)), strict=True)
        hidden, targets = (torch.stack(one).double() for one in of_ranks)
        for layer in (0, 2, 4):
            hidden = hidden @ weights[f"{layer}.weight"].mT + weights[f"{layer}.bias"].unsqueeze(1)
            hidden = hidden.relu() if layer < 4 else hidden
        losses = functional.mse_loss(hidden, targets, reduction="none").mean(dim=(1, 2))
        found = torch.autograd.grad(losses.sum(), list(weights.values()))
        return dict(zip(weights, found, strict=True))

    def step(self, number: int, skips: frozenset[tuple[int, int]]) -> None:
        """One step of all ranks; those in ``skips``, by rank and number, leave their update out."""
        self.exchange_weights("safe", number + 1)
        gradients = self.gradients(number)
        if self.loop == "accumulated":
            gradients = {name: one + gradients[name] for name, one in self.gradients(number + EARLIER).items()}
        scale = SCALE if self.loop == "scaled" else 1.0
        gradients = {name: one * scale for name, one in gradients.items()}
        self.exchange_weights("backward begins", number + 1)
        for piece in self.of_gradients:
            piece.exchange_gradients(gradients, number + 1)
        self.exchange_weights("bucket ready", number + 1)
        self.exchange_weights("backward ends", number + 1)
        gradients = {name: one / scale for name, one in gradients.items()}
        if self.loop == "clipped":
            clip(gradients)
        for rank in range(SIZE):
            for name, one in self.weights.items() if (rank, number) not in skips else ():
                one[rank] -= RATE * gradients[name][rank]
        self.exchange_weights("stepped", number + 1)

    def exchange_weights(self, point: str, t: int) -> None:
        """What is due comes in first, then come exchanges that are over at once, then others start."""
        at_once = [one for one in self.of_weights if not one.case.lag and one.case.at == one.case.until]
        late = [one for one in self.of_weights if one not in at_once]
        for piece in late:
            if piece.case.until == point:
                piece.fold(self.weights, t)
        for piece in at_once:
            if piece.case.at == point:
                piece.send_weights(self.weights, t)
                piece.fold(self.weights, t)
        for piece in late:
            if piece.case.at == point:
                piece.send_weights(self.weights, t)

    def run(self, steps: int, skips: frozenset[tuple[int, int]] = frozenset()) -> list[State]:
        """What each rank ends with."""
        for number in range(steps):
            self.step(number, skips)
        return [{name: one[rank] for name, one in self.weights.items()} for rank in range(SIZE)]


class Piece:
    """A bucket or part, with its flights: when each started, what was sent, and what comes of it."""

    def __init__(self, case: Case, part: int, numel: int, places: Places, mutant: Rule | None) -> None:
        self.case, self.numel, self.places = case, numel, places
        self.shift = (part + 1) * case.period // case.parts % case.period if case.parts > 1 else 0
        ones = {name: torch.ones(SIZE, *one.shape) for name, one in model_of().named_parameters()}
        self.rule = mutant or rule_of(case, self.gather(ones)[0])
        self.flights: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.rounds = 0
        self.anchors = self.momenta = torch.tensor(0.0)

    def gather(self, named: State) -> torch.Tensor:
        rows = torch.zeros(SIZE, self.numel, dtype=torch.float64)
        for name, offset in self.places:
            one = named[name].reshape(SIZE, -1)
            rows[:, offset : offset + one.shape[1]] = one
        return rows

    def scatter(self, rows: torch.Tensor, named: State) -> None:
        for name, offset in self.places:
            one = named[name]
            one.copy_(rows[:, offset : offset + one[0].numel()].view_as(one))

    def is_due(self, t: int) -> bool:
        return (t - self.shift - self.case.offset) % self.case.period == 0

    def send(self, t: int, rows: torch.Tensor) -> None:
        self.rounds += 1
        self.flights.append((t, rows, self.rule(rows, self.rounds)))

    def back(self, t: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Flights that are folded now."""
        found = [(sent, result) for start, sent, result in self.flights if start + self.case.lag <= t]
        self.flights = [one for one in self.flights if one[0] + self.case.lag > t]
        return found

    def exchange_gradients(self, gradients: State, t: int) -> None:
        """What is sent late is taken out of its step."""
        if self.is_due(t):
            self.send(t, self.gather(gradients))
            self.scatter(torch.zeros(SIZE, self.numel), gradients)
        for _, result in self.back(t):
            self.scatter(result, gradients)

    def send_weights(self, weights: State, t: int) -> None:
        if self.is_due(t):
            now = self.gather(weights)
            self.send(t, now if self.case.subject in ("weights", "added") else self.anchors - now)

    def fold(self, weights: State, t: int) -> None:
        for sent, result in self.back(t):
            now = self.gather(weights)
            before = self.anchors
            after = self.stepped(result)
            landed = {
                "weights": result, "added": now + 0.5 * (result - sent),
                "difference": after, "blended": 0.25 * now + 0.75 * after, "learned": now + sent - before + after,
            }  # fmt: skip
            self.scatter(landed[self.case.subject], weights)

    def stepped(self, gradient: torch.Tensor) -> torch.Tensor:
        """The anchors after a step of SGD with Nesterov's momentum of 0.9, at rate 0.7."""
        self.momenta = 0.9 * self.momenta + gradient
        self.anchors = self.anchors - 0.7 * (gradient + 0.9 * self.momenta)
        return self.anchors


#: Rank 1 leaves this update out, where ranks may differ.
SKIPPED = frozenset({(1, 2)})
BUCKET_BYTES, ONE_BUCKET_BYTES = 1500, 10**9


class Trainer:
    def __init__(self, loop: str, algorithm: algorithms.Algorithm, bucket_bytes: int, seed: int = 0) -> None:
        self.loop, model = loop, model_of(seed)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=loop == "scaled")
        options = {"grad_scaler": self.scaler} if loop == "scaled" else {}
        self.model = with_bagua(model, [self.optimizer], algorithm, bucket_bytes=bucket_bytes, **options)

    def steps(self, numbers: Iterable[int], skips: frozenset[tuple[int, int]]) -> None:
        rank = bagua.comm.get_rank()
        for number in numbers:
            self.optimizer.zero_grad()
            if self.loop == "accumulated":
                with self.model.no_sync():
                    loss_of(self.model, rank, number + EARLIER).backward()
            self.scaler.scale(loss_of(self.model, rank, number)).backward()
            if self.loop == "clipped":
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST)
            if (rank, number) not in skips:
                self.scaler.step(self.optimizer)
                self.scaler.update()


def train(
    loop: str, algorithm: algorithms.Algorithm, steps: int, resumed: bool, skips: frozenset[tuple[int, int]]
) -> tuple[State, Layout]:
    """What this rank ends with, and its buckets; a new model with other buckets goes on if training is interrupted."""
    trainer = Trainer(loop, algorithm, BUCKET_BYTES)
    trainer.steps(range(steps // 2), skips)
    if resumed:
        weights, remembered = snapshot(trainer.model), pickle.loads(pickle.dumps(trainer.model.bagua_state_dict()))
        trainer = Trainer(loop, algorithm, ONE_BUCKET_BYTES, seed=5)
        trainer.model.load_state_dict(weights)
        trainer.model.bagua_load_state_dict(remembered)
    trainer.steps(range(steps // 2, steps), skips)
    trainer.model.bagua_state_digest()  # What is a rank's own, such as its anchor among neighbours, may differ.
    return snapshot(trainer.model), layout_of(trainer.model.bagua_buckets)


def layout_for(case: Case, buckets: Layout) -> Layout:
    """Of parts: each parameter of a part at a multiple of 64 bytes; of buckets, as they were formed."""
    parts = algorithms.Parts(case.parts, "strided").cut(dict(model_of().named_parameters()))
    return buckets if case.parts == 1 else [whole_layout(names) for names in parts]


def largest_difference(states: Sequence[State], others: Sequence[State]) -> float:
    pairs = zip(states, others, strict=True)
    return max(float((one[name] - other[name]).abs().max()) for one, other in pairs for name in one)


@pytest.mark.parametrize("case", cover(), ids=str)
def test_every_pair_of_fields_is_what_it_is_on_stacked_tensors(thread_ranks, case):
    skips = SKIPPED if case.algorithm.ranks_differ else frozenset()
    arguments = case.loop, case.algorithm, case.steps, case.resumed, skips
    hosts = {"hosts": [2, 2]} if case.by_host else {}
    ended, layouts = zip(*thread_ranks(SIZE, train, *arguments, **hosts), strict=True)
    exchange = case, layout_for(case, layouts[0])
    assert largest_difference(ended, Simulation(case.loop, exchange).run(case.steps, skips)) < 1e-9
    mutated = Simulation(case.loop, exchange, mutant=exact_mean if case.lossy else nothing)
    assert largest_difference(ended, mutated.run(case.steps, skips)) > 1e-9


INNER = [
    Case("gradients"), Case("gradients", codec="int4", feedback=True), Case("gradients", lag=2),
    Case("weights", topology="ring"),
]  # fmt: skip
OUTER = [
    Case("difference", period=3), Case("blended", period=6, lag=2, parts=3, offset=-2),
    Case("learned", period=5, lag=4, parts=2, offset=-4), Case("added", period=3, lag=3),
    Case("difference", period=3, topology="one_peer_exponential"),
]  # fmt: skip


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("outer", OUTER, ids=str)
def test_one_exchange_around_another_is_both_on_stacked_tensors(thread_ranks, inner, outer):
    """In the order of the rules, whichever comes first in the tuple."""
    number = INNER.index(inner) + OUTER.index(outer)
    order = (inner, outer) if number % 2 else (outer, inner)
    algorithm = algorithms.Algorithm.of(*(one.exchange.labelled(one.subject) for one in order))
    arguments = "plain", algorithm, outer.steps, number % 4 > 1, frozenset()
    ended, layouts = zip(*thread_ranks(SIZE, train, *arguments), strict=True)
    exchanges = [(one, layout_for(one, layouts[0])) for one in order]
    assert largest_difference(ended, Simulation("plain", *exchanges).run(outer.steps)) < 1e-9
    mutated = Simulation("plain", *exchanges, mutant=nothing, place=order.index(inner))
    assert largest_difference(ended, mutated.run(outer.steps)) > 1e-9


def test_pairs_of_values_that_contradict_each_other_are_refused(thread_ranks):
    """The same on all ranks, when the value is made or the model is wrapped; and by the rule that says why."""
    for case in cases_of():
        with pytest.raises(ConfigurationError, match=case.refusal) if case.refusal else contextlib.nullcontext():
            _ = case.exchange
    refused = [next(cases_of(pair)) for pair in all_pairs() if legal_case(pair) is None]
    assert len(refused) > 50

    def try_all() -> list[str]:
        problems = []
        for case in refused:
            with pytest.raises(ConfigurationError, match=case.refusal) as caught:
                Trainer(case.loop, case.algorithm, BUCKET_BYTES)
            problems.append(caught.value.problem)
        return problems

    first, *others = thread_ranks(SIZE, try_all)
    assert all(one == first for one in others)
