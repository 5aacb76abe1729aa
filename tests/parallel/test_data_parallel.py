"""The class with torch DDP's arguments: each is honoured or refused, none is ignored."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua.comm
from bagua.errors import BaguaError, ConfigurationError
from bagua.parallel import with_bagua
from bagua.parallel.data_parallel import _moved, bucket_bytes_from, input_device
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    reference,
    seeded,
    sgd,
    snapshot,
)
from tests.parallel.wrapping import Branches, Loop, assert_trained, branch_loss, of_this_rank, on_ranks


def test_it_takes_every_argument_of_torch_in_the_same_order():
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    ours = list(inspect.signature(DistributedDataParallel).parameters)
    assert ours[: len(theirs)] == theirs


@on_ranks(1)
def test_what_contradicts_itself_or_is_not_offered_is_refused():
    with pytest.raises(ConfigurationError, match="requires"):
        DistributedDataParallel(nn.ReLU())
    with pytest.raises(ConfigurationError, match="contradict"):
        DistributedDataParallel(mlp(), broadcast_buffers=True, forward_sync_buffers=False)
    with pytest.raises(BaguaError, match="algorithm"):
        DistributedDataParallel(mlp()).register_comm_hook(None, lambda state, bucket: None)


def wrapped_by(**options: Any) -> Loop:
    return Loop(lambda model, _: DistributedDataParallel(model, **options))


def test_bucket_cap_mb_is_the_size_of_the_buckets(thread_ranks):
    def count(bucket_cap_mb: float) -> int:
        loop = wrapped_by(bucket_cap_mb=bucket_cap_mb)
        loop.train(3)
        before = bagua.comm.stats()["allreduce"].calls
        loop.train()
        return bagua.comm.stats()["allreduce"].calls - before

    assert thread_ranks(2, count, 25) == [1, 1]
    assert all(calls >= 3 for calls in thread_ranks(2, count, 0.0001))


def test_init_sync_false_leaves_the_values_of_each_rank(thread_ranks):
    def check(init_sync: bool) -> State:
        model = mlp(seed=bagua.comm.get_rank())
        DistributedDataParallel(model, init_sync=init_sync)
        return snapshot(model)

    first, second = thread_ranks(2, check, False)
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert_same_on_all_ranks(thread_ranks(2, check, True))


@pytest.mark.parametrize(
    ("options", "at_the_start", "before_forward"),
    [
        ({}, True, True),
        ({"broadcast_buffers": True}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": True}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": True, "forward_sync_buffers": True}, True, True),
        ({"broadcast_buffers": False, "forward_sync_buffers": False}, True, False),
    ],
    ids=str,
)
def test_buffers_come_from_rank_0_when_torch_would_bring_them(thread_ranks, options, at_the_start, before_forward):
    class Counting(nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("seen", torch.tensor(start))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.observed = self.seen.item()
            return self.linear(inputs)

    def check() -> tuple[float, float]:
        rank = bagua.comm.get_rank()
        model = Counting(float(rank))
        wrapped = DistributedDataParallel(model, **options)
        at_start = model.seen.item()
        model.seen.fill_(10.0 + rank)
        wrapped(batch(rank, 0)[0])
        return at_start, model.observed

    _, (at_start, observed) = thread_ranks(2, check)
    assert at_start == (0.0 if at_the_start else 1.0)
    assert observed == (10.0 if before_forward else 11.0)


@pytest.mark.parametrize("affine", [True, False])
def test_several_forward_passes_through_a_batch_normalization_have_one_backward_pass(thread_ranks, affine):
    """As torch's DDP does: rank 0's buffers come before each forward pass, and autograd does not mind."""

    def train() -> tuple[State, State, torch.Tensor]:
        rank = bagua.comm.get_rank()
        with seeded():
            plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=affine), nn.Linear(8, 4))
        alone = copy.deepcopy(plain)
        wrapped = DistributedDataParallel(plain)
        inputs, _ = batch(rank, 0)
        for model in (wrapped, alone):
            (model(inputs) * model(-inputs)).sum().backward()
        return gradients(plain), gradients(alone), plain[1].running_mean.clone()

    results = thread_ranks(2, train)
    for ours, _, _ in results:
        assert_close(ours, {name: (results[0][1][name] + results[1][1][name]) / 2 for name in ours})
    assert not torch.equal(results[0][2], results[1][2])  # until the next forward pass


def in_bucket(loop: Loop, addresses: list[int]) -> int:
    """How many of them lie in the bucket of gradients."""
    flat = loop.wrapped.bagua_buckets[0].gradients
    return sum(flat.data_ptr() <= address < flat.data_ptr() + flat.nbytes for address in addresses)


def test_gradient_as_bucket_view_decides_where_gradients_live(thread_ranks):
    def check(as_view: bool) -> int:
        loop = wrapped_by(gradient_as_bucket_view=as_view)
        loop.train(3)
        return in_bucket(loop, [parameter.grad.data_ptr() for parameter in loop.model.parameters()])

    assert thread_ranks(2, check, True) == [6, 6]
    assert thread_ranks(2, check, False) == [0, 0]


@on_ranks(2)
def test_gradients_are_copied_into_their_bucket():
    loop, made = wrapped_by(), []
    loop.train(2)
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    loop.train()
    assert len(made) == 6
    assert in_bucket(loop, made) == 0


@on_ranks(2, assert_same_on_all_ranks)
def test_static_graph_allows_parameters_that_are_never_used() -> State:
    def wrap(model: nn.Module, _: object) -> nn.Module:
        return DistributedDataParallel(model, static_graph=True)

    return Loop(wrap, Branches, losses=branch_loss).train(4)


def test_a_sub_group_can_be_used(thread_ranks):
    def train() -> State | None:
        group = bagua.comm.new_group([0, 2])
        return wrapped_by(process_group=group).train(3) if group else None

    first, none, third = thread_ranks(3, train)
    assert none is None
    assert_same_on_all_ranks([first, third])


@pytest.mark.parametrize("name", ["gradient_allreduce", "diloco", "decentralized"])
@on_ranks(2)
def test_the_number_of_steps_counts_what_ended_one_and_goes_on_after_a_checkpoint(name):
    loop, other = (Loop(lambda model, optimizer: with_bagua(model, [optimizer], name)) for _ in range(2))
    told = [loop.wrapped.bagua_step]
    with loop.wrapped.no_sync():
        loop.backward()
    told.append(loop.wrapped.bagua_step)
    for _ in range(2):
        loop.train()
        told.append(loop.wrapped.bagua_step)
    other.wrapped.bagua_load_state_dict(loop.wrapped.bagua_state_dict())
    assert [*told, other.wrapped.bagua_step] == [0, 0, 1, 2, 2]


# The meaning of torch's arguments, without training.


class Pair(NamedTuple):
    first: Any
    second: Any


META = torch.device("meta")


def test_sizes_of_buckets():
    assert bucket_bytes_from(None, None) == 25 * 2**20
    assert bucket_bytes_from(0.5, None) == 2**19
    assert bucket_bytes_from(1e-9, None) == 1
    assert bucket_bytes_from(None, 7) == 7
    with pytest.raises(ConfigurationError, match="both"):
        bucket_bytes_from(25, 7)


def test_inputs_go_to_the_one_device_that_holds_the_module():
    module = nn.Linear(2, 2, device="meta")
    assert input_device(module, None, None) is None
    assert input_device(module, [], None) is None
    assert input_device(module, [META], None) == META
    assert input_device(module, [META], META) == META


@pytest.mark.parametrize(
    ("device_ids", "output_device", "argument"),
    [
        ([META, META], None, "device_ids"),
        ([torch.device("cpu")], None, "device_ids"),
        ([0], None, "device_ids"),
        ([META], "cpu", "output_device"),
        (None, META, "output_device"),
    ],
)
def test_other_devices_are_refused(device_ids, output_device, argument):
    with pytest.raises(ConfigurationError) as caught:
        input_device(nn.Linear(2, 2, device="meta"), device_ids, output_device)
    assert caught.value.argument == argument


def test_tensors_in_nested_inputs_are_moved():
    tensor = torch.zeros(2)
    moved = _moved(((tensor, [tensor, 3]), {"a": Pair(tensor, "text"), "b": None}), META)
    (first, (second, three)), keywords = moved
    assert {first.device, second.device, keywords["a"].first.device} == {META}
    assert (three, keywords["a"].second, keywords["b"]) == (3, "text", None)
    assert isinstance(keywords["a"], Pair)


# Groups and meshes of torch.distributed, where a group of bagua could be passed.


def _train_on_torch_groups() -> dict[str, State]:
    return {
        name: Loop(lambda model, _, given=options: DistributedDataParallel(model, **given), of_this_rank).train(3)
        for name, options in {
            "group": {"process_group": dist.new_group([0, 1])},
            "world": {"process_group": dist.group.WORLD},
            "mesh": {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2,))},
        }.items()
    }


def test_groups_and_meshes_of_torch_are_taken(process_ranks):
    first, second = process_ranks(2, _train_on_torch_groups)
    expected = reference(mlp(), sgd, 2, range(3))
    for name, state in first.items():
        assert_trained([state, second[name]], expected)
