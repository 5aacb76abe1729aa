"""Ranks with more data than others: no rank waits without end, and results are those of torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithm, LocalUpdates, registry
from bagua.errors import CollectiveMismatchError, ConfigurationError, PeerLostError
from bagua.parallel import BaguaModule, DistributedDataParallel, with_bagua
from tests.algorithms.toys import QuickOneBitAdam, QuickOneBitLamb, QuickQAdam
from tests.contract.algorithms import optimizer_maker
from tests.harness import loss_of, mlp, sgd
from tests.parallel.wrapping import Loop, on_ranks

ONE_BUCKET_BYTES = 10**9
RANKS = 3
#: Batches of each rank.
BATCHES = (2, 6, 4)


def train(model, optimizer, rank, batches=BATCHES, before=lambda step: None):
    for step in range(batches[rank]):
        before(step)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def wrapped(*arguments, **options):
    """A model of this rank with its optimizer, and the rank."""
    model = mlp()
    optimizer = sgd(model.parameters())
    with_bagua(model, [optimizer], *arguments, **options)
    return model, optimizer, bagua.comm.get_rank()


def assert_equal(rows):
    for row in rows:
        assert all(torch.equal(one, other) for one, other in zip(row, rows[0], strict=True))


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def expected(by_initial_size):
    """In plain torch: gradients of the ranks that have data, divided by the number of all, or of these."""
    model = mlp()
    optimizer = sgd(model.parameters())
    for step in range(max(BATCHES)):
        here = [rank for rank in range(RANKS) if step < BATCHES[rank]]
        optimizer.zero_grad()
        sum(loss_of(model, rank, step) for rank in here).div(RANKS if by_initial_size else len(here)).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET_BYTES, 64])
def test_gradients_of_those_who_have_data_are_averaged_as_in_torch(thread_ranks, by_initial_size, bucket_bytes):
    def rank_trains():
        model, optimizer, rank = wrapped(bucket_bytes=bucket_bytes, check_every=1)
        with model.join(divide_by_initial_world_size=by_initial_size):
            train(model, optimizer, rank)
        in_the_end = weights_of(model)
        train(model, optimizer, rank, (1, 1, 1))  # All go on together, and are compared.
        return in_the_end, weights_of(model)

    rows = thread_ranks(RANKS, rank_trains)
    for in_the_end, _ in rows:
        for mine, wanted in zip(in_the_end, expected(by_initial_size), strict=True):
            torch.testing.assert_close(mine, wanted)
    assert_equal([later for _, later in rows])


@pytest.mark.parametrize("name", list(registry))
def test_no_algorithm_hangs(thread_ranks, name):
    kind = registry.get(name)
    short = [field.name for field in dataclasses.fields(kind) if field.name in ("sync_every", "warmup_steps")]
    algorithm = kind(**dict.fromkeys(short, 2))

    def rank_trains():
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = optimizer_maker(algorithm)(model.parameters())
        with_bagua(model, [optimizer], algorithm, bucket_bytes=ONE_BUCKET_BYTES)
        if isinstance(algorithm, AsyncModelAverageAlgorithm):
            with pytest.raises(ConfigurationError, match="do not wait for each other's steps"), model.join():
                pass
            model.bagua_algorithm.abort(model)
            return None
        for _ in range(2):
            with model.join():
                train(model, optimizer, rank, (2, 6))
        if isinstance(algorithm, LocalUpdates) or model.bagua_algorithm.declaration.ranks_differ:
            return None
        return weights_of(model)

    rows = thread_ranks(2, rank_trains)
    if rows[0] is not None:
        assert_equal(rows)


PERIOD = 3
#: Batches of each rank in the three periods of a run, the first of which comes before the ``join`` block.
IN_PERIOD = ((3, 3, 3), (2, 3, 3), (0, 3, 1))


def expected_alone(outer=None):
    """In plain torch: ranks train alone, and all count alike in a mean, with data or without.

    Args:
        outer: makes the outer optimizer; None for the mean itself.
    """
    anchor, models = list(mlp().parameters()), [mlp() for _ in range(RANKS)]
    optimizers = [sgd(model.parameters()) for model in models]
    stepper, made = outer and outer(anchor), [0] * RANKS
    for batches in IN_PERIOD:
        for rank, model in enumerate(models):
            for _ in range(batches[rank]):
                optimizers[rank].zero_grad()
                loss_of(model, rank, made[rank]).backward()
                optimizers[rank].step()
                made[rank] += 1
        for place, one in enumerate(anchor):
            ends = torch.stack([list(model.parameters())[place].detach() for model in models])
            one.grad = one.detach() - ends.mean(0)
        if stepper:
            stepper.step()
        for place, one in enumerate(anchor):
            if not stepper:
                one.data -= one.grad
            for model in models:
                list(model.parameters())[place].data.copy_(one.data)
    return weights_of(models[0])


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_ranks_that_train_alone_all_count_alike(thread_ranks, name):
    options = {"outer_lr": 0.7, "outer_momentum": 0.5} if name == "diloco" else {}

    def outer(parameters):
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)

    def rank_trains():
        model, optimizer, rank = wrapped(Algorithm.init(name, sync_every=PERIOD, **options))
        train(model, optimizer, rank, IN_PERIOD[0])
        with model.join():
            for step in range(PERIOD, sum(batches[rank] for batches in IN_PERIOD)):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        return weights_of(model)

    rows = thread_ranks(RANKS, rank_trains)
    for row in rows:
        for mine, wanted in zip(row, expected_alone(outer if options else None), strict=True):
            torch.testing.assert_close(mine, wanted)


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
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = optimizer_maker(algorithm)(model.parameters())
        with_bagua(model, [optimizer], algorithm, bucket_bytes=ONE_BUCKET_BYTES)
        with model.join(enable=joins):
            for step in range(batches[rank] if joins else max(batches)):
                optimizer.zero_grad()
                (loss_of(model, rank, step) * (step < batches[rank])).backward()
                optimizer.step()
        return weights_of(model)

    assert_equal(thread_ranks(2, rank_trains, True) + thread_ranks(2, rank_trains, False))


@on_ranks(2, assert_equal)
def test_weights_are_exchanged_although_no_optimizer_tells_of_its_steps():
    rank = bagua.comm.get_rank()
    model = mlp()
    optimizer = sgd(model.parameters())
    with_bagua(model, [], Algorithm.init("local_sgd", sync_every=1))
    with model.join():
        train(model, optimizer, rank, (1, 3))
    return weights_of(model)


def test_state_of_the_optimizer_comes_from_a_rank_that_has_stepped(thread_ranks):
    def rank_trains():
        loop = Loop("with_bagua", mlp, lambda own: torch.optim.Adam(own, lr=0.01))
        with loop.model.join():
            train(loop.model, loop.optimizer, loop.rank, (1, 3))
        return [float(state["step"]) for state in loop.optimizer.state_dict()["state"].values()]

    rows = thread_ranks(2, rank_trains)
    assert rows[0] == rows[1] == [3.0] * len(rows[0])


def test_buffers_come_from_a_rank_that_has_data(thread_ranks):
    def rank_trains():
        rank = bagua.comm.get_rank()
        inner = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4))
        model = DistributedDataParallel(inner)
        optimizer = sgd(model.parameters())
        with model.join():
            train(model, optimizer, rank, (1, 4))
        return int(inner[1].num_batches_tracked), inner[1].running_mean.clone()

    first, second = thread_ranks(2, rank_trains)
    assert first[0] == second[0] == 4
    assert torch.equal(first[1], second[1])


@on_ranks(2, assert_equal)
def test_accumulated_gradients_are_no_steps():
    model, optimizer, rank = wrapped()
    with model.join():
        for step in range((2, 3)[rank]):
            with model.no_sync():
                loss_of(model, rank, 2 * step).backward()
            loss_of(model, rank, 2 * step + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        with model.no_sync():  # What is left over of the data.
            loss_of(model, rank, 9).backward()
    return weights_of(model)


def test_early_ends_are_errors_on_all_ranks_if_that_is_wanted(thread_ranks):
    def rank_trains():
        model, optimizer, rank = wrapped()
        caught = pytest.raises(CollectiveMismatchError, match="some ranks have no data left")
        with caught as told, model.join(throw_on_early_termination=True):
            train(model, optimizer, rank)
        train(model, optimizer, rank, (1, 1, 1))
        return told.value.peers, weights_of(model)

    rows = thread_ranks(RANKS, rank_trains)
    assert [peers for peers, _ in rows] == [(0,)] * RANKS
    assert_equal([weights for _, weights in rows])


def test_nothing_changes_if_it_is_off_or_nobody_ends_early(thread_ranks):
    def rank_trains(enable):
        model, optimizer, rank = wrapped()
        with model.join(enable=enable):
            train(model, optimizer, rank, (3, 3))
        return weights_of(model)

    (off, _), (on, _) = (thread_ranks(2, rank_trains, enable) for enable in (False, True))
    assert_equal([off, on])


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


@on_ranks(2, assert_equal)
def test_a_forward_pass_without_a_backward_pass_is_made_a_step():
    model, optimizer, rank = wrapped()
    with model.join():
        train(model, optimizer, rank, (1, 3))
        if rank == 0:
            loss_of(model, rank, 1)
    return weights_of(model)


@pytest.mark.parametrize(
    ("algorithm", "options", "why"),
    [
        ("diloco", {"divide_by_initial_world_size": False}, "only gradients of the same step"),
        ("gradient_allreduce", {"enable": 1}, "argument enable"),
    ],
)
@on_ranks(2)
def test_bad_use_is_refused(algorithm, options, why):
    model, _, _ = wrapped(algorithm)
    with pytest.raises(ConfigurationError, match=why), model.join(**options):
        pass


@on_ranks(2)
def test_a_step_that_ranks_without_data_do_not_know_of_is_refused():
    """Two forward passes announce one step, so two backward passes behind them would be one too many."""
    model, _, rank = wrapped()
    why, error = ("without a forward pass of its own", ConfigurationError) if rank else ("rank 1", PeerLostError)
    with pytest.raises(error, match=why), model.join():
        first, second = loss_of(model, rank, 0), loss_of(model, rank, 1)
        first.backward()
        if rank:
            second.backward()
