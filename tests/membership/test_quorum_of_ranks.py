"""Islands of two ranks that merge by a quorum: what one rank takes in, all of its island do in the same step."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bagua.algorithms import Algorithm, OverIslands
from bagua.comm import get_rank
from bagua.errors import CommunicationError, ConfigurationError
from bagua.membership import ElasticSampler
from bagua.testing.ranks import RankDiedError
from tests.membership.test_islands_of_ranks import check, train, wrapped
from tests.membership.training import RANKS, new_store, run_islands, together, vanish

pytestmark = pytest.mark.threads


def diloco(**options):
    return Algorithm.init("diloco", **{"sync_every": 2, "quorum": 1, "outer_lr": 0.7, "outer_momentum": 0.9, **options})


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def step_of(islands, model, before_the_optimizer=lambda: None):
    """One step; the weights after it."""
    (optimizer,) = model.bagua_optimizers
    generator = torch.Generator().manual_seed(10 * islands.seat + get_rank())
    optimizer.zero_grad()
    model(torch.randn(2, 3, generator=generator, dtype=torch.float64)).square().sum().backward()
    before_the_optimizer()
    optimizer.step()
    return model.weight.detach().clone()


def finished(islands, model):
    model.bagua_finish()
    return model.weight.detach().clone(), model.bagua_state_digest(), islands.tape()


def check_one_model(ends):
    first, digest, tape = ends[0]
    for weights, other, theirs in ends[1:]:
        assert torch.equal(first, weights)
        assert other == digest
        shorter = min(len(tape), len(theirs))
        assert tape[len(tape) - shorter :] == theirs[len(theirs) - shorter :]


def test_a_quorum_of_all_is_diloco():
    store = new_store()

    def rank(_):
        with together(store, 2) as islands:
            return train(islands, wrapped(islands, diloco(quorum=2, grace=0.0, weight="equal", merge="mean")), 6)

    rows = run_islands(2, rank)
    assert check("diloco", [*rows[0], *rows[1]]) == [(0, 1)] * 3


def test_ranks_of_an_island_take_in_the_same_in_each_step():
    """Also if one of them hears of a merge before its optimizer steps, and the others after that."""
    store, stepped = new_store(), threading.Event()

    def rank(_):
        with together(store, 2) as islands:
            model = wrapped(islands, diloco(sync_every=4, grace=0.0))

            rows = []
            for step in range(4):
                late = islands.seat == 0 and get_rank() == 1 and step == 1
                assert islands.seat == 0 or stepped.wait(60)
                rows.append(step_of(islands, model, (lambda: until(islands.tape)) if late else lambda: None))
                if islands.seat == 0 and get_rank() == 0 and step == 1:
                    stepped.set()
            return rows, finished(islands, model)

    found = run_islands(2, rank)
    for (rows, _), (others, _) in found:
        assert all(torch.equal(here, there) for here, there in zip(rows, others, strict=True))
    check_one_model([end for island in found for _, end in island])


@pytest.mark.parametrize("codec", [None, "int4"])
def test_islands_train_at_their_own_pace_on_samples_of_their_own(codec):
    store, trained = new_store(), []
    options = {} if codec is None else {"codec": codec, "error_feedback": 0.9}

    def rank(number):
        with together(store, 2) as islands:
            sampler = ElasticSampler(range(80), islands)
            model = wrapped(islands, diloco(sync_every=4, fragments=1, overlap=1, **options))
            drawn, rows = iter(sampler), []
            for _ in range(5 + 4 * number):
                trained.append(next(drawn))
                sampler.record(1)
                rows.append(step_of(islands, model))
            return rows, finished(islands, model)

    found = run_islands(2, rank)
    for (rows, _), (others, _) in found:
        assert all(torch.equal(here, there) for here, there in zip(rows, others, strict=True))
    check_one_model([end for island in found for _, end in island])
    assert len(trained) == len(set(trained)) == RANKS * (5 + 9)


def test_a_rank_that_dies_takes_its_island_out_and_no_other():
    store = new_store()

    def rank(_):
        with together(store, 2) as islands:
            model = wrapped(islands, diloco())
            for step in range(8):
                if (islands.seat, get_rank(), step) == (1, 1, 5):
                    vanish(islands)
                step_of(islands, model)
            return finished(islands, model)

    ends = [end for island in run_islands(2, rank) for end in island]
    assert sum(isinstance(end, RankDiedError) for end in ends) == 1, ends
    assert sum(isinstance(end, CommunicationError) for end in ends) == 1, ends
    check_one_model([end for end in ends if not isinstance(end, BaseException)])


def test_a_newcomer_receives_the_state_of_one_step_on_all_ranks():
    store, done = new_store(), threading.Event()

    def rank(number):
        if number == 2:
            until(lambda: len(begun) == 2 * RANKS)
        with together(store, 2) as islands:
            model = wrapped(islands, diloco(overlap=1))
            start, steps = model.weight.detach().clone(), 0
            # Ranks of an island make the same steps.
            while steps < 6 or (number < 2 and more.setdefault((number, steps), not done.is_set())):
                step_of(islands, model)
                steps += 1
                if steps == 3:
                    begun.append(number)
                if number == 2:
                    done.set()
            return start, finished(islands, model)

    begun, more = [], {}
    found = run_islands(3, rank)
    check_one_model([end for island in found for _, end in island])
    for (start, _), (other, _) in found:
        assert torch.equal(start, other)


def test_an_island_that_makes_no_step_does_not_make_others_wait_for_a_newcomer():
    """Another one gives the newcomer the state, though the first one is asked, too."""
    store, rested, goes_on = new_store(), threading.Event(), threading.Event()
    rests, more = threading.Barrier(RANKS, action=rested.set), {}

    def rank(number):
        assert number < 2 or rested.wait(60)
        with together(store, 2) as islands:
            model, steps = wrapped(islands, diloco(grace=0.0)), 0
            # Ranks of an island make the same steps.
            while steps < 2 or more.setdefault((number, steps), not goes_on.is_set()):
                step_of(islands, model)
                steps += 1
                if islands.seat == 0 and steps == 2:
                    rests.wait(60)
                    assert goes_on.wait(60)
                if number == 2 and any(2 in one.seats for one in islands.tape()):
                    goes_on.set()
            return finished(islands, model)

    ends = [end for island in run_islands(3, rank) for end in island]
    check_one_model(ends)
    assert {seat for one in ends[0][2] for seat in one.seats} == {0, 1, 2}


def test_ranks_may_leave_one_after_the_other():
    store, left = new_store(), threading.Event()

    def rank(_):
        with together(store, 1) as islands:
            model = wrapped(islands, diloco())
            for step in range(3):
                late = get_rank() == 1 and step == 2
                step_of(islands, model, (lambda: left.wait(60)) if late else lambda: None)
            left.set()
        return len(islands.tape())

    assert [isinstance(end, int) for end in run_islands(1, rank)[0]] == [True, True]


def test_shards_are_refused():
    store = new_store()

    def rank(_):
        with together(store, 1) as islands, pytest.raises(ConfigurationError, match="has but one shard"):
            OverIslands(diloco(), islands, sharded=True)

    assert run_islands(1, rank) == [[None, None]]
