"""The wrappers: the class with torch DDP's arguments, each honoured or refused, and those of bagua's documentation."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua.comm
import bagua.torch_api
from bagua.algorithms import DecentralizedAlgorithm, GradientAllReduceAlgorithm, ScatterGatherAllReduceAlgorithm
from bagua.errors import BaguaError, CommunicationError, ConfigurationError, UnsupportedAlgorithmException
from bagua.parallel import ModelSwitchWrapper
from bagua.parallel.data_parallel import _moved, bucket_bytes_from, input_device
from bagua.torch_api import DistributedAlgorithm, bagua_init
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.distributed import BucketType, DistributedModule, OverlappingWrapper, Reducer, broadcast_parameters
from tests import harness
from tests.algorithms.test_toys import LocalSgd
from tests.harness import State, assert_same_on_all_ranks, gradients, loss_of, mlp, reference, sgd, snapshot
from tests.parallel.wrapping import WRAPS, Branches, Loop, Made, assert_trained, branch_loss, of_this_rank, on_ranks


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


def wrapped_by(make: Callable[[], nn.Module] = mlp, **options: Any) -> Loop:
    return Loop(lambda model, _: DistributedDataParallel(model, **options), make)


@on_ranks(2)
def test_bucket_cap_mb_is_the_size_of_the_buckets():
    for bucket_cap_mb, buckets in ((25, 1), (0.0001, 3)):
        loop = wrapped_by(bucket_cap_mb=bucket_cap_mb)
        loop.train(2)
        assert len(loop.wrapped.bagua_buckets) == buckets


@on_ranks(2)
def test_init_sync_false_leaves_the_values_of_each_rank():
    model, own = (mlp(seed=bagua.comm.get_rank()) for _ in range(2))
    DistributedDataParallel(model, init_sync=False)
    assert_same_on_all_ranks([snapshot(own), snapshot(model)])


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
@on_ranks(2)
def test_buffers_come_from_rank_0_when_torch_would_bring_them(options, at_the_start, before_forward):
    def forward(model: Made, inputs: torch.Tensor) -> torch.Tensor:
        observed.append(model.seen.item())
        return model.linear(inputs)

    rank, model = bagua.comm.get_rank(), Made(forward, linear=lambda: nn.Linear(8, 4))
    model.register_buffer("seen", torch.tensor(float(rank)))
    wrapped = DistributedDataParallel(model, **options)
    observed = [model.seen.item()]
    model.seen.fill_(10.0 + rank)
    wrapped(harness.batch(rank, 0)[0])
    assert observed == [0.0 if at_the_start else rank, 10.0 if before_forward else 10.0 + rank]


@pytest.mark.parametrize("affine", [True, False])
def test_several_forward_passes_through_a_batch_normalization_have_one_backward_pass(thread_ranks, affine):
    """As torch's DDP does: rank 0's buffers come before each forward pass, and autograd does not mind."""

    def train() -> tuple[State, State, torch.Tensor]:
        with harness.seeded():
            plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=affine), nn.Linear(8, 4))
        alone = copy.deepcopy(plain)
        inputs, _ = harness.batch(bagua.comm.get_rank(), 0)
        for model in (DistributedDataParallel(plain), alone):
            (model(inputs) * model(-inputs)).sum().backward()
        return gradients(plain), gradients(alone), plain[1].running_mean.clone()

    (ours, first, mean), (others, second, other_mean) = thread_ranks(2, train)
    assert_trained([ours, others], {name: (first[name] + second[name]) / 2 for name in ours})
    assert not torch.equal(mean, other_mean)  # until the next forward pass


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_gradient_as_bucket_view_decides_where_gradients_live_and_not_where_they_are_made(as_view):
    loop, made = wrapped_by(gradient_as_bucket_view=as_view), []
    loop.train(2)
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    loop.train()
    flat = loop.wrapped.bagua_buckets[0].gradients
    bucket = range(flat.data_ptr(), flat.data_ptr() + flat.nbytes)
    assert [parameter.grad.data_ptr() in bucket for parameter in loop.model.parameters()] == [as_view] * 6
    assert [address in bucket for address in made] == [False] * 6


@on_ranks(2, assert_same_on_all_ranks)
def test_static_graph_allows_parameters_that_are_never_used() -> State:
    return Loop("data_parallel", Branches, losses=branch_loss, static_graph=True).train(4)


@on_ranks(3, lambda states: assert_same_on_all_ranks(states[::2]))
def test_a_sub_group_can_be_used() -> State | None:
    group = bagua.comm.new_group([0, 2])
    assert bool(group) == (bagua.comm.get_rank() != 1)
    return wrapped_by(process_group=group).train(3) if group else None


@pytest.mark.parametrize("name", ["gradient_allreduce", "diloco", "decentralized"])
@on_ranks(2)
def test_the_number_of_steps_counts_what_ended_one_and_goes_on_after_a_checkpoint(name):
    loop, other = (Loop("with_bagua", algorithm=name) for _ in range(2))
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

META = torch.device("meta")


def test_sizes_of_buckets():
    sizes = {(None, None): 25 * 2**20, (0.5, None): 2**19, (1e-9, None): 1, (None, 7): 7}
    assert {asked: bucket_bytes_from(*asked) for asked in sizes} == sizes
    with pytest.raises(ConfigurationError, match="both"):
        bucket_bytes_from(25, 7)


def test_inputs_go_to_the_one_device_that_holds_the_module():
    for *asked, device in ((None, None, None), ([], None, None), ([META], None, META), ([META], META, META)):
        assert input_device(nn.Linear(2, 2, device="meta"), *asked) == device


@pytest.mark.parametrize(
    ("device_ids", "output_device", "argument"),
    [
        *((ids, None, "device_ids") for ids in ([META, META], [torch.device("cpu")], [0])),
        *((ids, output, "output_device") for ids, output in (([META], "cpu"), (None, META))),
    ],
)
def test_other_devices_are_refused(device_ids, output_device, argument):
    with pytest.raises(ConfigurationError, check=lambda error: error.argument == argument):
        input_device(nn.Linear(2, 2, device="meta"), device_ids, output_device)


def test_tensors_in_nested_inputs_are_moved():
    class Pair(NamedTuple):
        first: Any
        second: Any

    tensor = torch.zeros(2)
    inputs = (tensor, [tensor, 3]), {"a": Pair(tensor, "text"), "b": None}
    (first, (second, three)), keywords = _moved(inputs, META)
    assert {first.device, second.device, keywords["a"].first.device} == {META}
    assert (three, keywords["a"].second, keywords["b"]) == (3, "text", None)
    assert isinstance(keywords["a"], Pair)


# Groups and meshes of torch.distributed, where a group of bagua could be passed.


GIVEN = {
    "group": lambda: {"process_group": dist.new_group([0, 1])},
    "world": lambda: {"process_group": dist.group.WORLD},
    "mesh": lambda: {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2,))},
}


@pytest.mark.parametrize("name", GIVEN)
@on_ranks(2, lambda states: assert_trained(states, reference(mlp(), sgd, 2, range(3))), pool="process_pool")
def test_groups_and_meshes_of_torch_are_taken(name) -> State:
    return wrapped_by(of_this_rank, **GIVEN[name]()).train(3)


# ``ModelSwitchWrapper``, ``OverlappingWrapper`` and ``Reducer``, used as they are documented.


@on_ranks(2, lambda states: assert_trained(states, reference(mlp(), harness.adam, 2, range(6))))
def test_switching_to_the_same_algorithm_again_changes_nothing() -> State:
    loop = Loop(ModelSwitchWrapper, of_this_rank, harness.adam, message_size=1000)
    assert loop.wrapped.switch_to(DistributedAlgorithm.GradientAllReduce) is loop.wrapped
    loop.train(3)
    loop.wrapped.switch_to("allreduce")
    return loop.train(3)


@pytest.mark.parametrize("wrap", ["bagua_init", "with_bagua"])
@on_ranks(2, assert_same_on_all_ranks)
def test_a_no_sync_block_goes_on_after_a_switch(wrap) -> State:
    """Ranks may make another number of backward passes in it, and the next one after it is a step of all."""
    loop = Loop(wrap)
    loop.train()
    with loop.wrapped.no_sync():
        loop.switch_to("bytegrad")
        for _ in range(loop.rank):
            loop.backward()
    loop.train(2)
    assert loop.wrapped.bagua_step == 2
    return snapshot(loop.model)


@pytest.mark.parametrize("first", ["gradient_allreduce", "low_precision_decentralized", LocalSgd(2)])
@pytest.mark.parametrize("warm_up", [0, 2])
def test_what_a_no_sync_block_has_accumulated_survives_a_switch(thread_ranks, first, warm_up):
    """As in plain torch, nothing but ``zero_grad`` takes gradients away."""

    def train() -> list[State]:
        loop = Loop(distributed_algorithm=first)
        loop.train(warm_up)
        loop.optimizer.zero_grad()
        with loop.wrapped.no_sync():
            loop.backward()
            own = gradients(loop.model)
            loop.wrapped.switch_to("gradient_allreduce")
            loop.backward()
        loop.backward()
        together = gradients(loop.model)
        loop.optimizer.zero_grad()
        loop.step -= 2
        with loop.wrapped.no_sync():  # The same weights: what came after the switch, by itself.
            loop.backward()
            loop.backward()
        return [own, together, gradients(loop.model)]

    ends = thread_ranks(2, train)
    for _, together, _ in ends:
        for name, gradient in together.items():
            mean = torch.stack([own[name] + later[name] for own, _, later in ends]).mean(0)
            torch.testing.assert_close(gradient, mean)


@pytest.mark.parametrize("wrap", ["bagua_init", "with_bagua"])
@on_ranks(2)
def test_a_switch_in_a_join_block_is_refused_and_nobody_waits(wrap):
    """Ranks that are at the end of the block make the steps of the engine with which it began."""
    loop = Loop(wrap)
    why, error = ("join.. block", ConfigurationError) if loop.rank else ("rank 1", CommunicationError)
    with pytest.raises(error, match=why), loop.wrapped.join():
        loop.train(1 + loop.rank)
        if loop.rank:
            loop.switch_to("bytegrad")


@on_ranks(3, assert_same_on_all_ranks)
def test_a_switch_averages_what_ranks_did_apart() -> State:
    """Weights, momentum and running statistics that drifted are averaged, as documented."""
    loop = Loop(make=lambda: torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4)))
    loop.train(2)
    weight, norm = loop.model[0][0].weight, loop.model[1]
    momentum = loop.optimizer.state[weight]["momentum_buffer"]
    with torch.no_grad():
        weight.fill_(float(loop.rank))
        momentum.fill_(float(10 * loop.rank))
        norm.running_mean.fill_(float(loop.rank))
        norm.num_batches_tracked.fill_(loop.rank + 7)
    loop.wrapped.switch_to(DistributedAlgorithm.GradientAllReduce)
    momentum = loop.optimizer.state[weight]["momentum_buffer"]
    averaged = weight, momentum, norm.running_mean, norm.num_batches_tracked
    assert [tensor.unique().tolist() for tensor in averaged] == [[1.0], [10.0], [1.0], [7]]
    return {**snapshot(loop.model), "momentum": momentum.clone()}


@pytest.mark.parametrize("name", ["no such thing", "Quantize", "decentralised"])
@on_ranks(2, lambda states: assert_trained(states, reference(mlp(), sgd, 2, range(4))))
def test_a_switch_to_nothing_names_what_there_is_and_leaves_the_model_as_it_was(name) -> State:
    loop = Loop()
    loop.train(2)
    with pytest.raises(UnsupportedAlgorithmException, match="gradient_allreduce"):
        loop.wrapped.switch_to(name)
    return loop.train(2)


@on_ranks(1)
def test_training_before_the_first_switch_is_an_error():
    model = mlp()
    wrapped = ModelSwitchWrapper(model, sgd(model.parameters()))
    with pytest.raises(ConfigurationError, match="switch_to"):
        wrapped(torch.zeros(1, 8))


@on_ranks(1)
def test_bagua_init_returns_what_it_was_given():
    one, other = mlp(), mlp()
    for model, given in ((one, sgd(one.parameters())), (other, [sgd(part.parameters()) for part in other[::2]])):
        wrapped, same = bagua_init(model, given)
        assert isinstance(wrapped, ModelSwitchWrapper)
        assert same is given


@pytest.mark.parametrize("broadcast_buffers", [False, True])
@on_ranks(2)
def test_broadcast_parameters_takes_buffers_only_if_asked(broadcast_buffers):
    rank, model = bagua.comm.get_rank(), torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        model.weight.fill_(float(rank))
        model.running_mean.fill_(float(rank))
    broadcast_parameters(model, broadcast_buffers)
    assert (model.weight[0].item(), model.running_mean[0].item()) == (0.0, 0.0 if broadcast_buffers else rank)


FLAT, HIERARCHICAL = (GradientAllReduceAlgorithm(hierarchical=one) for one in (False, True))
SUM = GradientAllReduceAlgorithm(hierarchical=True, average=False)


@pytest.mark.parametrize(
    ("algorithm", "hierarchical_reduce", "expected"),
    [("allreduce", None, FLAT), ("allreduce", True, HIERARCHICAL), (SUM, None, SUM), (HIERARCHICAL, False, FLAT),
     (LocalSgd(), None, LocalSgd()), (LocalSgd(), False, LocalSgd())],
)  # fmt: skip
@on_ranks(1)
def test_hierarchical_reduce_decides_where_it_says_something(algorithm, hierarchical_reduce, expected):
    wrapped, _ = bagua_init(mlp(), [], algorithm, hierarchical_reduce=hierarchical_reduce)
    assert wrapped.bagua_algorithm.options == expected


@on_ranks(1)
def test_an_algorithm_without_a_hierarchical_form_cannot_be_made_hierarchical():
    with pytest.raises(ConfigurationError, match="hierarchical"):
        bagua_init(mlp(), [], LocalSgd(), hierarchical_reduce=True)


def _reducer(model: torch.nn.Module, optimizers: object = (), **options: object) -> Reducer:
    given = {"align_bytes": 8, "bucket_bytes": 1000, **options}
    return Reducer(model, [], BucketType.Gradient, False, given.pop("align_bytes"), False, True, **given)


KEYWORDS = {"bucket_size": "bucket_bytes", "hierarchical": "hierarchical_reduce", "compressor": "compressor"}


@pytest.mark.parametrize("wrap", [*WRAPS.values(), OverlappingWrapper, _reducer], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("keyword", KEYWORDS)
@on_ranks(1)
def test_every_way_in_names_the_known_keywords(wrap, keyword):
    with pytest.raises(TypeError, match=f"{keyword}.*(find_unused_parameters|bucket_bytes)") as caught:
        wrap(mlp(), [], **{keyword: 5})
    assert KEYWORDS[keyword] in str(caught.value) or wrap is not WRAPS["bagua_init"]


@pytest.mark.parametrize("by_place", [False, True])
def test_the_documented_life_of_a_reducer(thread_ranks, by_place):
    """Collected in the first iteration, marked one by one in the later ones; without any hook."""

    def train() -> list[State]:
        loop, seen = Loop(lambda model, _: model), []
        reducer, order = _reducer(loop.model), list(reversed(list(loop.model.parameters())))
        assert not reducer.bucket_initialized
        for early in (reducer.mark_tensor_ready, reducer.fill_slot, lambda _: reducer.mark_on_complete()):
            with pytest.raises(ConfigurationError, match="not been formed"):
                early(order[0])
        for step in range(3):
            loop.model.zero_grad()
            loop.backward()
            if step == 0:
                for parameter in order:
                    assert reducer.fill_slot(parameter) is parameter.grad
                    reducer.add_param(parameter)
                buckets = reducer.initialize_buckets()
                assert reducer.bucket_initialized
                assert sum(len(bucket) for bucket in buckets) == len(order)
                reducer.begin_step()
                for wrong in (1, len(buckets)):
                    with pytest.raises(ConfigurationError, match="not in this place"):
                        reducer.mark_bucket_ready(buckets[0], wrong)
                for index, bucket in enumerate(buckets if by_place else reducer.buckets):
                    reducer.mark_bucket_ready(bucket, *([index] if by_place else []))
            else:
                reducer.begin_step()
                for parameter in order:
                    reducer.mark_tensor_ready(parameter)
            reducer.mark_on_complete()
            assert all(reducer.fill_slot(parameter) is parameter.grad for parameter in order)
            seen.append(gradients(loop.model))
        reducer.close()
        assert (reducer.step, reducer.group.closed) == (3, True)
        return seen

    for step, states in enumerate(zip(*thread_ranks(2, train), strict=True)):
        expected = mlp()
        harness.mean_gradients(expected, 2, lambda model, rank, step=step: loss_of(model, rank, step))
        assert_trained(states, gradients(expected))


@on_ranks(2)
def test_a_tensor_that_is_no_parameter_is_refused_where_it_is_given():
    def refused(*calls: Callable[[nn.Parameter], object]) -> None:
        for take in calls:
            with pytest.raises(ConfigurationError, match="no trainable parameter"):
                take(torch.nn.Parameter(torch.ones(2)))

    model = mlp()
    reducer = _reducer(model)
    refused(reducer.add_param, reducer.fill_slot)
    loss_of(model, 0, 0).backward()
    for parameter in model.parameters():
        reducer.add_param(parameter)
    reducer.initialize_buckets()
    refused(reducer.mark_tensor_ready, reducer.fill_slot, lambda tensor: reducer.mark_bucket_ready([tensor]))


@on_ranks(1)
def test_buckets_of_parameters_are_buckets_of_weights():
    reducers = [Reducer(mlp(), [], kind, False, 8, False, True) for kind in (BucketType.Weight, BucketType.Param)]
    parameter = next(reducers[1].module.parameters())
    assert torch.equal(reducers[1].fill_slot(parameter), parameter)
    assert [reducer.formation.declaration for reducer in reducers] == [DecentralizedAlgorithm(hierarchical=False)] * 2


@on_ranks(2)
def test_a_reducer_can_be_given_its_buckets():
    model = mlp()
    wanted = [["4.weight", "4.bias"], [model[2].weight, model[2].bias, "0.bias"], ["0.weight"]]
    assert [len(bucket.parameters) for bucket in _reducer(model, buckets=wanted).buckets] == [2, 3, 1]


@on_ranks(3, lambda states: assert_trained(states, reference(mlp(), sgd, 3, range(4))), hosts=[2, 1])
def test_reset_reducer_goes_on_with_other_buckets_and_hierarchy() -> State:
    loop = Loop(OverlappingWrapper, bucket_bytes=10**6)
    assert isinstance(loop.wrapped, DistributedModule)
    assert loop.wrapped.unwrap() is loop.model
    loop.train(2)
    loop.wrapped.create_hooks()  # Idempotent.
    names = [name for name, _ in loop.model.named_parameters()]
    loop.wrapped.reset_reducer(hierarchical_reduce=True, buckets=[names[4:], names[:4]])
    state = loop.train(2)
    assert [len(bucket.names) for bucket in loop.wrapped.reducer.buckets] == [2, 4]
    assert "reduce" in bagua.comm.stats() or loop.rank == 2
    return state


@pytest.mark.parametrize(
    ("flags", "algorithm"),
    [
        ({"bucket_type": BucketType.Weight}, DecentralizedAlgorithm(hierarchical=False)),
        ({"decentralize_reduce": True, "hierarchical_reduce": True}, DecentralizedAlgorithm(hierarchical=True)),
        ({"chunking": True}, ScatterGatherAllReduceAlgorithm(hierarchical=False)),
    ],
    ids=str,
)
@on_ranks(1)
def test_flags_choose_an_algorithm(flags, algorithm):
    assert OverlappingWrapper(mlp(), [], **flags).reducer.formation.declaration == algorithm


@pytest.mark.parametrize("chunking", [False, True])
@on_ranks(3)
def test_chunking_pads_buckets_so_that_they_split_evenly(chunking):
    loop = Loop(chunking=chunking, align_bytes=64, bucket_bytes=10**6)
    loop.train(2)
    (bucket,) = loop.wrapped.bagua_buckets
    used = torch.zeros_like(bucket.gradients, dtype=torch.bool)
    for view in bucket.views(used):
        view.fill_(True)
    assert bucket.gradients.nbytes % 64 == 0
    assert (bucket.gradients.nbytes % (3 * 64) == 0) == chunking
    assert not bucket.gradients[~used].any()
