"""One exchange of any fields, on the stacked tensors of all ranks: what the engine must arrive at.

Written from the rules, not from the engine. Codecs, and the weights with which ranks of a round mix, are taken as they
are: they have tests of their own. So is the layout of flat memory, on which codecs depend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from bagua.compression import Codec
from bagua.topology import create
from tests.algorithms.pairs import Case
from tests.algorithms.stacked import Layout, model_of
from tests.harness import State, batch, coded

SIZE, HOSTS = 4, ((0, 1), (2, 3))
RATE = 0.1
#: What losses are scaled by, the largest norm of clipped gradients, and how the numbers of earlier batches differ.
SCALE, LONGEST, EARLIER = 2.0**10, 0.3, 100

#: What becomes of what ranks send, a row for each: (it, number of the round) -> what each receives.
Rule = Callable[[torch.Tensor, int], torch.Tensor]
#: Name and offset of each parameter in a row.
Places = list[tuple[str, int]]


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
    """All ranks.

    Args:
        loop: how a step is made.
        exchanges: their fields, each with the layout of its buckets or parts, in the order of the tuple.
        mutant: in the place of how one of them communicates.
        place: of that one in the tuple.
    """

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
        inputs, targets = (
            torch.stack(one).double() for one in zip(*(batch(rank, number) for rank in range(SIZE)), strict=True)
        )
        hidden = inputs
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
        for one in gradients.values():
            one.mul_(SCALE if self.loop == "scaled" else 1.0)
        self.exchange_weights("backward begins", number + 1)
        for piece in self.of_gradients:
            piece.exchange_gradients(gradients, number + 1)
        self.exchange_weights("bucket ready", number + 1)
        self.exchange_weights("backward ends", number + 1)
        for one in gradients.values():
            one.div_(SCALE if self.loop == "scaled" else 1.0)
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
            landed = {
                "weights": lambda now, sent, result: result,
                "added": lambda now, sent, result: now + 0.5 * (result - sent),
                "difference": lambda now, sent, result: self.stepped(result),
                "blended": lambda now, sent, result: 0.25 * now + 0.75 * self.stepped(result),
                "learned": lambda now, sent, result: now + sent - self.anchors + self.stepped(result),
            }[self.case.subject]
            self.scatter(landed(now, sent, result), weights)

    def stepped(self, gradient: torch.Tensor) -> torch.Tensor:
        """The anchors after a step of SGD with Nesterov's momentum of 0.9, at rate 0.7."""
        self.momenta = 0.9 * self.momenta + gradient
        self.anchors = self.anchors - 0.7 * (gradient + 0.9 * self.momenta)
        return self.anchors
