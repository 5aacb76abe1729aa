"""Exchanges of all fields against the same on stacked tensors: a few cases that hold every legal pair of values."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm, Parts
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua
from tests.algorithms.pairs import Case, all_pairs, cases_of, cover, legal_case, pairs_of
from tests.algorithms.stacked import Layout, layout_of, loss_of, model_of, whole_layout
from tests.algorithms.stacked_exchanges import EARLIER, LONGEST, RATE, SCALE, SIZE, Simulation, exact_mean, nothing
from tests.harness import State, snapshot

#: Rank 1 leaves this update out, where ranks may differ.
SKIPPED = frozenset({(1, 2)})
BUCKET_BYTES, ONE_BUCKET_BYTES = 1500, 10**9


class Trainer:
    """A model of this rank, and the loop that its user wrote."""

    def __init__(self, loop: str, algorithm: Algorithm, bucket_bytes: int, seed: int = 0) -> None:
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
    loop: str, algorithm: Algorithm, steps: int, resumed: bool, skips: frozenset[tuple[int, int]]
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
    if case.parts == 1:
        return buckets
    return [whole_layout(names) for names in Parts(case.parts, "strided").cut(dict(model_of().named_parameters()))]


def largest_difference(states: Sequence[State], others: Sequence[State]) -> float:
    pairs = zip(states, others, strict=True)
    return max(float((one[name] - other[name]).abs().max()) for one, other in pairs for name in one)


def test_the_cases_hold_every_legal_pair_of_values():
    held = {pair for case in cover() for pair in pairs_of(case)}
    assert held == {pair for pair in all_pairs() if legal_case(pair) is not None}
    assert len(cover()) < len(held) / 4


@pytest.mark.parametrize("case", cover(), ids=str)
def test_every_pair_of_fields_is_what_it_is_on_stacked_tensors(thread_ranks, case):
    skips = SKIPPED if case.algorithm.ranks_differ else frozenset()
    arguments = case.loop, case.algorithm, case.steps, case.resumed, skips
    ended, layouts = zip(*thread_ranks(SIZE, train, *arguments, **case.hosts), strict=True)
    exchange = case, layout_for(case, layouts[0])
    assert largest_difference(ended, Simulation(case.loop, exchange).run(case.steps, skips)) < 1e-9
    mutated = Simulation(case.loop, exchange, mutant=exact_mean if case.lossy else nothing)
    assert largest_difference(ended, mutated.run(case.steps, skips)) > 1e-9


INNER = [
    Case("gradients"),
    Case("gradients", codec="int4", feedback=True),
    Case("gradients", lag=2),
    Case("weights", topology="ring"),
]
OUTER = [
    Case("difference", period=3),
    Case("blended", period=6, lag=2, parts=3, offset=-2),
    Case("learned", period=5, lag=4, parts=2, offset=-4),
    Case("added", period=3, lag=3),
    Case("difference", period=3, topology="one_peer_exponential"),
]


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("outer", OUTER, ids=str)
def test_one_exchange_around_another_is_both_on_stacked_tensors(thread_ranks, inner, outer):
    """In the order of the rules, whichever comes first in the tuple."""
    number = INNER.index(inner) + OUTER.index(outer)
    order = (inner, outer) if number % 2 else (outer, inner)
    algorithm = Algorithm.of(*(one.exchange.labelled(one.subject) for one in order))
    arguments = "plain", algorithm, outer.steps, number % 4 > 1, frozenset()
    ended, layouts = zip(*thread_ranks(SIZE, train, *arguments), strict=True)
    exchanges = [(one, layout_for(one, layouts[0])) for one in order]
    assert largest_difference(ended, Simulation("plain", *exchanges).run(outer.steps)) < 1e-9
    mutated = Simulation("plain", *exchanges, mutant=nothing, place=order.index(inner))
    assert largest_difference(ended, mutated.run(outer.steps)) > 1e-9


def test_pairs_of_values_that_contradict_each_other_are_refused(thread_ranks):
    """The same on all ranks, when the value is made or the model is wrapped; and by the rule that says why."""
    for case in cases_of():
        if case.refusal:
            with pytest.raises(ConfigurationError, match=case.refusal):
                _ = case.exchange
        else:
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
