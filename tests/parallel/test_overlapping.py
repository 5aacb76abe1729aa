"""``OverlappingWrapper`` and ``Reducer``, used directly as they are documented."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.algorithms import DecentralizedAlgorithm, ScatterGatherAllReduceAlgorithm
from bagua.errors import ConfigurationError
from bagua.torch_api.distributed import BucketType, DistributedModule, OverlappingWrapper, Reducer
from tests.harness import (
    State,
    gradients,
    loss_of,
    mean_gradients,
    mlp,
    reference,
    sgd,
)
from tests.parallel.wrapping import Loop, assert_trained, on_ranks


def _reducer(model: torch.nn.Module, optimizers: object = (), **options: object) -> Reducer:
    given = {"align_bytes": 8, "bucket_bytes": 1000, **options}
    return Reducer(model, [], BucketType.Gradient, False, given.pop("align_bytes"), False, True, **given)


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
        assert reducer.step == 3
        return seen

    for step, states in enumerate(zip(*thread_ranks(2, train), strict=True)):
        expected = mlp()
        mean_gradients(expected, 2, lambda model, rank, step=step: loss_of(model, rank, step))
        assert_trained(states, gradients(expected))


@on_ranks(2)
def test_a_tensor_that_is_no_parameter_is_refused_where_it_is_given():
    model = mlp()
    reducer = _reducer(model)
    stranger = torch.nn.Parameter(torch.ones(2))
    for take in (reducer.add_param, reducer.fill_slot):
        with pytest.raises(ConfigurationError, match="no trainable parameter"):
            take(stranger)
    loss_of(model, 0, 0).backward()
    for parameter in model.parameters():
        reducer.add_param(parameter)
    reducer.initialize_buckets()
    for take in (reducer.mark_tensor_ready, reducer.fill_slot, lambda tensor: reducer.mark_bucket_ready([tensor])):
        with pytest.raises(ConfigurationError, match="no trainable parameter"):
            take(stranger)


@on_ranks(1)
def test_buckets_of_parameters_are_buckets_of_weights():
    kinds = (BucketType.Weight, BucketType.Param)
    reducers = [Reducer(mlp(), [], kind, False, 8, False, True) for kind in kinds]
    parameter = next(reducers[1].module.parameters())
    assert torch.equal(reducers[1].fill_slot(parameter), parameter)
    assert [reducer.formation.declaration for reducer in reducers] == [DecentralizedAlgorithm(hierarchical=False)] * 2


@on_ranks(2)
def test_a_reducer_can_be_given_its_buckets():
    model = mlp()
    wanted = [["4.weight", "4.bias"], [model[2].weight, model[2].bias, "0.bias"], ["0.weight"]]
    assert [len(bucket.parameters) for bucket in _reducer(model, buckets=wanted).buckets] == [2, 3, 1]


def test_the_wrapper_trains_and_unwraps(thread_ranks):
    def train() -> State:
        loop = Loop(OverlappingWrapper, align_bytes=64, bucket_bytes=1000)
        assert isinstance(loop.wrapped, DistributedModule)
        assert loop.wrapped.unwrap() is loop.model
        loop.train(3)
        loop.wrapped.create_hooks()  # Idempotent.
        return loop.train(3)

    assert_trained(thread_ranks(2, train), reference(mlp(), sgd, 2, range(6)))


def test_reset_reducer_goes_on_with_other_buckets_and_hierarchy(thread_ranks):
    def train() -> tuple[State, list[int], bool]:
        loop = Loop(OverlappingWrapper, bucket_bytes=10**6)
        loop.train(2)
        names = [name for name, _ in loop.model.named_parameters()]
        loop.wrapped.reset_reducer(hierarchical_reduce=True, buckets=[names[4:], names[:4]])
        state = loop.train(2)
        sizes = [len(bucket.names) for bucket in loop.wrapped.reducer.buckets]
        return state, sizes, "reduce" in bagua.comm.stats()

    results = thread_ranks(3, train, hosts=[2, 1])
    assert [sizes for _, sizes, _ in results] == [[2, 4]] * 3
    assert any(reduced for _, _, reduced in results)
    assert_trained([state for state, _, _ in results], reference(mlp(), sgd, 3, range(4)))


FLAGS = [
    ({"bucket_type": BucketType.Weight}, DecentralizedAlgorithm(hierarchical=False)),
    ({"decentralize_reduce": True, "hierarchical_reduce": True}, DecentralizedAlgorithm(hierarchical=True)),
    ({"chunking": True}, ScatterGatherAllReduceAlgorithm(hierarchical=False)),
]


@pytest.mark.parametrize(("flags", "algorithm"), FLAGS, ids=str)
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
