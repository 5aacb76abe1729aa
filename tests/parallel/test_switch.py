"""``ModelSwitchWrapper``: changing the algorithm while a model is trained."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
import bagua.torch_api
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.errors import CommunicationError, ConfigurationError, UnsupportedAlgorithmException
from bagua.torch_api import DistributedAlgorithm, bagua_init
from bagua.torch_api.distributed import ModelSwitchWrapper, allreduce_parameters, broadcast_parameters
from tests.algorithms.toys import LocalSgd
from tests.harness import (
    adam,
    assert_close,
    assert_same_on_all_ranks,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import WRAPS, assert_trained

pytestmark = pytest.mark.threads


def test_switching_to_the_same_algorithm_again_changes_nothing(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp(seed=rank)
        optimizer = adam(model.parameters())
        wrapped = ModelSwitchWrapper(model, optimizer, message_size=1000)
        assert wrapped.switch_to(DistributedAlgorithm.GradientAllReduce) is wrapped
        train_steps(wrapped, optimizer, rank, range(3))
        wrapped.switch_to("allreduce")
        train_steps(wrapped, optimizer, rank, range(3, 6))
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(mlp(), adam, 2, range(6)))


@pytest.mark.parametrize("wrap", ["bagua_init", "with_bagua"])
def test_a_no_sync_block_goes_on_after_a_switch(thread_ranks, wrap):
    """Ranks may make another number of backward passes in it, and the next one after it is a step of all."""

    def train() -> dict[str, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = WRAPS[wrap](model, optimizer)
        train_steps(wrapped, optimizer, rank, range(1))
        with wrapped.no_sync():
            wrapped.switch_to("bytegrad")
            for step in range(rank):
                loss_of(wrapped, rank, step).backward()
        train_steps(wrapped, optimizer, rank, range(1, 3))
        assert wrapped.bagua_step == 2
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


@pytest.mark.parametrize("first", ["gradient_allreduce", "low_precision_decentralized", LocalSgd(2)])
@pytest.mark.parametrize("warm_up", [0, 2])
def test_what_a_no_sync_block_has_accumulated_survives_a_switch(thread_ranks, first, warm_up):
    """As in plain torch, nothing but ``zero_grad`` takes gradients away."""

    def train() -> list[dict[str, torch.Tensor]]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = bagua_init(model, optimizer, first)[0]
        train_steps(wrapped, optimizer, rank, range(warm_up))
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, rank, 5).backward()
            own = {name: one.grad.clone() for name, one in model.named_parameters()}
            wrapped.switch_to("gradient_allreduce")
            loss_of(wrapped, rank, 6).backward()
        loss_of(wrapped, rank, 7).backward()
        together = {name: one.grad.clone() for name, one in model.named_parameters()}
        optimizer.zero_grad()
        with wrapped.no_sync():  # The same weights: what came after the switch, by itself.
            for step in (6, 7):
                loss_of(wrapped, rank, step).backward()
        return [own, together, {name: one.grad.clone() for name, one in model.named_parameters()}]

    ends = thread_ranks(2, train)
    for _, together, _ in ends:
        for name, gradient in together.items():
            mean = torch.stack([own[name] + later[name] for own, _, later in ends]).mean(0)
            torch.testing.assert_close(gradient, mean)


@pytest.mark.parametrize("wrap", ["bagua_init", "with_bagua"])
def test_a_switch_in_a_join_block_is_refused_and_nobody_waits(thread_ranks, wrap):
    """Ranks that are at the end of the block make the steps of the engine with which it began."""

    def train() -> None:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = WRAPS[wrap](model, optimizer)
        why, error = ("join.. block", ConfigurationError) if rank else ("rank 1", CommunicationError)
        with pytest.raises(error, match=why), wrapped.join():
            train_steps(wrapped, optimizer, rank, range(1 + rank))
            if rank:
                wrapped.switch_to("bytegrad")

    thread_ranks(2, train)


def test_a_switch_averages_what_ranks_did_apart(thread_ranks):
    """Weights, momentum and running statistics that drifted are averaged, as documented."""

    def train() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        rank = bagua.comm.get_rank()
        model = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4))
        optimizer = sgd(model.parameters())
        wrapped, optimizer = bagua_init(model, optimizer)
        train_steps(wrapped, optimizer, rank, range(2))
        with torch.no_grad():
            model[0][0].weight.fill_(float(rank))
            optimizer.state[model[0][0].weight]["momentum_buffer"].fill_(float(10 * rank))
            model[1].running_mean.fill_(float(rank))
            model[1].num_batches_tracked.fill_(rank + 7)
        wrapped.switch_to(DistributedAlgorithm.GradientAllReduce)
        momentum = optimizer.state[model[0][0].weight]["momentum_buffer"]
        return snapshot(model), {"momentum": momentum.clone()}

    results = thread_ranks(3, train)
    assert_same_on_all_ranks([state for state, _ in results])
    state, momentum = results[0]
    assert state["0.0.weight"].unique().tolist() == [1.0]
    assert momentum["momentum"].unique().tolist() == [10.0]
    assert state["1.running_mean"].unique().tolist() == [1.0]
    assert state["1.num_batches_tracked"].item() == 7


@pytest.mark.parametrize("name", ["no such thing", "Quantize"])
def test_algorithms_that_do_not_exist_are_refused_and_those_that_do_are_named(thread_ranks, name):
    def check() -> None:
        model = mlp()
        wrapped = ModelSwitchWrapper(model, sgd(model.parameters()))
        with pytest.raises(UnsupportedAlgorithmException, match="gradient_allreduce"):
            wrapped.switch_to(name)

    thread_ranks(2, check)


def test_a_refused_switch_leaves_the_model_as_it_was(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp()
        wrapped, optimizer = bagua_init(model, sgd(model.parameters()))
        train_steps(wrapped, optimizer, rank, range(2))
        with pytest.raises(UnsupportedAlgorithmException):
            wrapped.switch_to("decentralised")
        train_steps(wrapped, optimizer, rank, range(2, 4))
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(mlp(), sgd, 2, range(4)))


def test_training_before_the_first_switch_is_an_error(thread_ranks):
    def check() -> None:
        model = mlp()
        wrapped = ModelSwitchWrapper(model, sgd(model.parameters()))
        with pytest.raises(ConfigurationError, match="switch_to"):
            wrapped(torch.zeros(1, 8))

    thread_ranks(1, check)


def test_bagua_init_returns_what_it_was_given(thread_ranks):
    def check() -> None:
        model = mlp()
        one = sgd(model.parameters())
        wrapped, same = bagua_init(model, one)
        assert isinstance(wrapped, ModelSwitchWrapper)
        assert same is one
        several = [sgd(mlp().parameters())]
        other = mlp()
        several = [sgd(other[:2].parameters()), sgd(other[2:].parameters())]
        assert bagua_init(other, several)[1] is several

    thread_ranks(1, check)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"hierarchical": True}, "hierarchical_reduce"),
        ({"bucket_size": 5}, "bucket_bytes"),
        ({"compressor": "MinMaxUInt8"}, "compressor"),
    ],
)
def test_unknown_keywords_are_a_type_error_that_names_the_known_ones(thread_ranks, options, pattern):
    def check() -> None:
        model = mlp()
        with pytest.raises(TypeError, match=pattern):
            bagua_init(model, sgd(model.parameters()), **options)

    thread_ranks(1, check)


@pytest.mark.parametrize("intra_comm_root_rank", [-1, 5])
def test_a_leader_that_does_not_exist_is_refused(thread_ranks, intra_comm_root_rank):
    def check() -> None:
        model = mlp()
        with pytest.raises(ConfigurationError, match="intra_comm_root_rank"):
            wrapper = ModelSwitchWrapper(model, sgd(model.parameters()), intra_comm_root_rank=intra_comm_root_rank)
            wrapper.switch_to("allreduce")

    thread_ranks(2, check)


def test_broadcast_parameters_takes_buffers_only_if_asked(thread_ranks):
    def check() -> list[float]:
        rank = bagua.comm.get_rank()
        seen = []
        for broadcast_buffers in (False, True):
            model = torch.nn.BatchNorm1d(2)
            with torch.no_grad():
                model.weight.fill_(float(rank))
                model.running_mean.fill_(float(rank))
            broadcast_parameters(model, broadcast_buffers)
            seen += [model.weight[0].item(), model.running_mean[0].item()]
        return seen

    assert thread_ranks(2, check) == [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]


def test_allreduce_parameters_averages_floats_and_takes_counters_from_rank_0(thread_ranks):
    def check() -> list[float]:
        rank = bagua.comm.get_rank()
        model = torch.nn.BatchNorm1d(2)
        with torch.no_grad():
            model.weight.fill_(float(rank))
            model.running_mean.fill_(float(rank))
            model.num_batches_tracked.fill_(rank + 3)
        allreduce_parameters(model)
        return [model.weight[0].item(), model.running_mean[0].item(), model.num_batches_tracked.item()]

    assert thread_ranks(3, check) == [[1.0, 1.0, 3]] * 3


def test_switching_there_and_back_again(thread_ranks):
    """Apart with one algorithm, averaged at the switch, together with the other, and so on."""

    def train() -> list[dict[str, torch.Tensor]]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = ModelSwitchWrapper(model, optimizer, message_size=1000)
        states, start = [], 0
        for algorithm in (DistributedAlgorithm.GradientAllReduce, LocalSgd(period=100)) * 2:
            wrapped.switch_to(algorithm)
            states.append(snapshot(model))
            train_steps(wrapped, optimizer, rank, range(start, start + 3))
            states.append(snapshot(model))
            start += 3
        return states

    first, second = thread_ranks(2, train)
    together = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(first, second, strict=True)]
    assert together == [True, True, True, False, True, True, True, False]
    mean = {name: (first[3][name] + second[3][name]) / 2 for name in first[3]}
    assert_close(first[4], mean)


@pytest.mark.parametrize(
    ("algorithm", "hierarchical_reduce", "expected"),
    [
        ("allreduce", None, GradientAllReduceAlgorithm(hierarchical=False)),
        ("allreduce", True, GradientAllReduceAlgorithm(hierarchical=True)),
        (GradientAllReduceAlgorithm(hierarchical=True, average=False), None, ...),
        (GradientAllReduceAlgorithm(hierarchical=True), False, GradientAllReduceAlgorithm(hierarchical=False)),
        (LocalSgd(), None, ...),
        (LocalSgd(), False, ...),
    ],
)
def test_hierarchical_reduce_decides_where_it_says_something(thread_ranks, algorithm, hierarchical_reduce, expected):
    def check() -> None:
        wrapped, _ = bagua_init(mlp(), [], algorithm, hierarchical_reduce=hierarchical_reduce)
        assert wrapped.bagua_algorithm.options == (algorithm if expected is ... else expected)

    thread_ranks(1, check)


def test_an_algorithm_without_a_hierarchical_form_cannot_be_made_hierarchical(thread_ranks):
    def check() -> None:
        with pytest.raises(ConfigurationError, match="hierarchical"):
            bagua_init(mlp(), [], LocalSgd(), hierarchical_reduce=True)

    thread_ranks(1, check)


@pytest.mark.parametrize("wrap", WRAPS)
def test_every_way_in_names_the_known_keywords(thread_ranks, wrap):
    def check() -> None:
        with pytest.raises(TypeError, match=r"bucket_size.*find_unused_parameters"):
            WRAPS[wrap](mlp(), [], bucket_size=5)

    thread_ranks(1, check)
