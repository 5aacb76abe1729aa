"""Ranks with more data than others: no rank waits without end, and results are those of torch."""

from __future__ import annotations

import functools

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm
from bagua.errors import CollectiveMismatchError, ConfigurationError, PeerLostError
from bagua.parallel import BaguaModule, with_bagua
from tests.algorithms.replicas import Anchored
from tests.algorithms.test_toys import QuickOneBitAdam, QuickOneBitLamb, QuickQAdam
from tests.contract.algorithms import optimizer_maker
from tests.harness import adam, assert_same_on_all_ranks, loss_of, mlp, reference, sgd, snapshot, train_steps
from tests.parallel.wrapping import Loop, on_ranks

ONE_BUCKET_BYTES = 10**9
RANKS = 3
#: Batches of each rank.
BATCHES = (2, 6, 4)


def wrapped(*algorithm, **options):
    """A model of this rank."""
    return Loop(lambda model, optimizer: with_bagua(model, [optimizer], *algorithm, **options))


def losses_of(batches, by_initial_size=True):
    """Ranks that have no data left have gradients of zero; the mean is that of all ranks, or of those who have data."""

    def loss(model, rank, step):
        here = len(batches) if by_initial_size else sum(step < one for one in batches)
        return loss_of(model, rank, step) * (step < batches[rank]) * len(batches) / here

    return loss


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET_BYTES, 64])
def test_gradients_of_those_who_have_data_are_averaged_as_in_torch(thread_ranks, by_initial_size, bucket_bytes):
    def rank_trains():
        loop = wrapped(bucket_bytes=bucket_bytes, check_every=1)
        with loop.wrapped.join(divide_by_initial_world_size=by_initial_size):
            loop.train(BATCHES[loop.rank])
        return snapshot(loop.model), loop.train()  # All go on together, and are compared.

    rows = thread_ranks(RANKS, rank_trains)
    expected = reference(mlp(), sgd, RANKS, range(max(BATCHES)), losses_of(BATCHES, by_initial_size))
    for in_the_end, _ in rows:
        torch.testing.assert_close(in_the_end, expected)
    assert_same_on_all_ranks([later for _, later in rows])


def trained_by(algorithm, losses=loss_of):
    make = optimizer_maker(algorithm)
    return Loop("with_bagua", mlp, make, losses, algorithm=algorithm, bucket_bytes=ONE_BUCKET_BYTES)


PERIOD = 3
#: Batches of each rank in the three periods of a run, the first of which comes before the ``join`` block.
IN_PERIOD = ((3, 3, 3), (2, 3, 3), (0, 3, 1))


def expected_alone(outer):
    """In plain torch: ranks train alone, and all count alike in a mean, with data or without."""
    ranks, made = Anchored(RANKS, outer, make_optimizer=sgd), [0] * RANKS
    for batches in IN_PERIOD:
        for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
            train_steps(model, optimizer, rank, range(made[rank], made[rank] + batches[rank]))
            made[rank] += batches[rank]
        ranks.outer_step()
    return snapshot(ranks.models[0])


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_ranks_that_train_alone_all_count_alike(thread_ranks, name):
    options = {"outer_lr": 0.7, "outer_momentum": 0.5} if name == "diloco" else {}
    inside = {"lr": 0.7, "momentum": 0.5, "nesterov": True} if options else {"lr": 1.0}

    def rank_trains():
        loop = wrapped(Algorithm.init(name, sync_every=PERIOD, **options))
        loop.train(PERIOD)
        with loop.wrapped.join():
            loop.train(sum(batches[loop.rank] for batches in IN_PERIOD[1:]))
        return snapshot(loop.model)

    expected = expected_alone(functools.partial(torch.optim.SGD, **inside))
    for state in thread_ranks(RANKS, rank_trains):
        torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("batches", [(0, 8), (1, 8), (5, 8)])
@pytest.mark.parametrize(
    "algorithm",
    [
        QuickQAdam(),
        QuickOneBitAdam(),
        QuickOneBitLamb(),
        *map(Algorithm.init, ("gradient_allreduce", "bytegrad", "dion")),
    ],
    ids=repr,
)
def test_a_rank_without_data_is_one_whose_gradients_are_zero(thread_ranks, algorithm, batches):
    """Momenta, too: one that stood still would add what is old in every step that follows."""

    def rank_trains(joins):
        loop = trained_by(algorithm, losses_of(batches))
        with loop.wrapped.join(enable=joins):
            loop.train(batches[loop.rank] if joins else max(batches))
        return snapshot(loop.model)

    assert_same_on_all_ranks(thread_ranks(2, rank_trains, True) + thread_ranks(2, rank_trains, False))


@on_ranks(2, assert_same_on_all_ranks)
def test_weights_are_exchanged_although_no_optimizer_tells_of_its_steps():
    loop = Loop(lambda model, _: with_bagua(model, [], Algorithm.init("local_sgd", sync_every=1)))
    with loop.wrapped.join():
        loop.train((1, 3)[loop.rank])
    return snapshot(loop.model)


@on_ranks(2)
def test_state_of_the_optimizer_comes_from_a_rank_that_has_stepped():
    loop = Loop("with_bagua", mlp, adam)
    with loop.wrapped.join():
        loop.train((1, 3)[loop.rank])
    assert [float(state["step"]) for state in loop.optimizer.state_dict()["state"].values()] == [3.0] * 6


def test_buffers_come_from_a_rank_that_has_data(thread_ranks):
    def rank_trains():
        loop = Loop("data_parallel", lambda: torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4)))
        with loop.wrapped.join():
            loop.train((1, 4)[loop.rank])
        return int(loop.model[1].num_batches_tracked), loop.model[1].running_mean.clone()

    first, second = thread_ranks(2, rank_trains)
    assert first[0] == second[0] == 4
    assert torch.equal(first[1], second[1])


@on_ranks(2, assert_same_on_all_ranks)
def test_accumulated_gradients_are_no_steps():
    loop = wrapped()
    with loop.wrapped.join():
        for _ in range((2, 3)[loop.rank]):
            with loop.wrapped.no_sync():
                loop.backward()
            loop.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        with loop.wrapped.no_sync():  # What is left over of the data.
            loop.backward()
    return snapshot(loop.model)


def test_early_ends_are_errors_on_all_ranks_if_that_is_wanted(thread_ranks):
    def rank_trains():
        loop = wrapped()
        caught = pytest.raises(CollectiveMismatchError, match="some ranks have no data left")
        with caught as told, loop.wrapped.join(throw_on_early_termination=True):
            loop.train(BATCHES[loop.rank])
        return told.value.peers, loop.train()

    rows = thread_ranks(RANKS, rank_trains)
    assert [peers for peers, _ in rows] == [(0,)] * RANKS
    assert_same_on_all_ranks([weights for _, weights in rows])


def test_nothing_changes_if_it_is_off_or_nobody_ends_early(thread_ranks):
    def rank_trains(enable):
        loop = wrapped()
        with loop.wrapped.join(enable=enable):
            loop.train(3)
        return snapshot(loop.model)

    (off, _), (on, _) = (thread_ranks(2, rank_trains, enable) for enable in (False, True))
    assert_same_on_all_ranks([off, on])


def test_a_module_keeps_what_it_calls_join():
    class Joins(torch.nn.Linear):
        def join(self):
            return "mine"

    holds = torch.nn.ModuleDict({"join": torch.nn.Linear(2, 2)})
    for module, wanted in ((Joins(2, 2), "mine"), (holds, holds["join"])):
        model = with_bagua(module, [sgd(module.parameters())], "gradient_allreduce", bagua.comm.solo_group())
        assert (model.join() if wanted == "mine" else model.join) == wanted
        with BaguaModule.join(model):
            pass


@on_ranks(2, assert_same_on_all_ranks)
def test_a_forward_pass_without_a_backward_pass_is_made_a_step():
    loop = wrapped()
    with loop.wrapped.join():
        loop.train((1, 3)[loop.rank])
        if loop.rank == 0:
            loop.loss()
    return snapshot(loop.model)


@pytest.mark.parametrize(
    ("algorithm", "options", "why"),
    [
        ("diloco", {"divide_by_initial_world_size": False}, "only gradients of the same step"),
        ("gradient_allreduce", {"enable": 1}, "argument enable"),
        ("async", {}, "do not wait for each other's steps"),
    ],
)
@on_ranks(2)
def test_bad_use_is_refused(algorithm, options, why):
    with pytest.raises(ConfigurationError, match=why), wrapped(algorithm).wrapped.join(**options):
        pass


@on_ranks(2)
def test_a_step_that_ranks_without_data_do_not_know_of_is_refused():
    """Two forward passes announce one step, so two backward passes behind them would be one too many."""
    loop = wrapped()
    why, error = ("without a forward pass of its own", ConfigurationError) if loop.rank else ("rank 1", PeerLostError)
    with pytest.raises(error, match=why), loop.wrapped.join():
        first, second = loop.loss(), loop.loss()
        first.backward()
        if loop.rank:
            second.backward()
