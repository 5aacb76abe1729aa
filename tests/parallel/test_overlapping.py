"""``OverlappingWrapper`` and ``Reducer``, used directly as they are documented."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
import bagua.torch_api
from bagua.algorithms import DecentralizedAlgorithm, ScatterGatherAllReduceAlgorithm
from bagua.errors import ConfigurationError
from bagua.torch_api.distributed import BucketType, DistributedModule, OverlappingWrapper, Reducer
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    gradients,
    loss_of,
    mean_gradients,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)

pytestmark = pytest.mark.threads


def _reducer(model: torch.nn.Module, **options: object) -> Reducer:
    return Reducer(model, [], BucketType.Gradient, False, 8, False, True, bucket_bytes=1000, **options)


def test_the_documented_life_of_a_reducer(thread_ranks):
    """Collected in the first iteration, marked one by one in the later ones; without any hook."""

    def train() -> list[State]:
        rank = bagua.comm.get_rank()
        model = mlp()
        reducer = _reducer(model)
        seen = []
        for step in range(3):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            order = list(reversed(list(model.parameters())))
            if step == 0:
                for parameter in order:
                    reducer.add_param(parameter)
                buckets = reducer.initialize_buckets()
                assert sum(len(bucket) for bucket in buckets) == len(order)
                reducer.begin_step()
                for bucket in reducer.buckets:
                    reducer.mark_bucket_ready(bucket)
            else:
                reducer.begin_step()
                for parameter in order:
                    reducer.mark_tensor_ready(parameter)
            reducer.mark_on_complete()
            for parameter in order:
                assert torch.equal(reducer.fill_slot(parameter), parameter.grad)
            seen.append(gradients(model))
        return seen

    for step, states in enumerate(zip(*thread_ranks(2, train), strict=True)):
        expected = mlp()
        mean_gradients(expected, 2, lambda model, rank, step=step: loss_of(model, rank, step))
        assert_same_on_all_ranks(list(states))
        assert_close(states[0], gradients(expected))


def test_buckets_are_marked_by_the_lists_and_places_that_were_returned(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        reducer = _reducer(model)
        assert not reducer.bucket_initialized
        with pytest.raises(ConfigurationError, match="not been formed"):
            reducer.fill_slot(model[0].weight)
        loss_of(model, rank, 0).backward()
        for parameter in model.parameters():
            assert reducer.fill_slot(parameter) is parameter.grad
            reducer.add_param(parameter)
        buckets = reducer.initialize_buckets()
        assert reducer.bucket_initialized
        assert len(buckets) > 1
        for wrong in (1, len(buckets)):
            with pytest.raises(ConfigurationError, match="not in this place"):
                reducer.mark_bucket_ready(buckets[0], wrong)
        for index, bucket in enumerate(buckets):
            reducer.mark_bucket_ready(bucket, index)
        reducer.mark_on_complete()
        return gradients(model)

    states = thread_ranks(2, train)
    expected = mlp()
    mean_gradients(expected, 2, lambda model, rank: loss_of(model, rank, 0))
    assert_same_on_all_ranks(states)
    assert_close(states[0], gradients(expected))


def test_a_tensor_that_is_no_parameter_is_refused_where_it_is_given(thread_ranks):
    def check() -> None:
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

    thread_ranks(2, check)


def test_buckets_of_parameters_are_buckets_of_weights(thread_ranks):
    def check() -> list[object]:
        kinds = (BucketType.Weight, BucketType.Param)
        reducers = [Reducer(mlp(), [], kind, False, 8, False, True) for kind in kinds]
        parameter = next(reducers[1].module.parameters())
        assert torch.equal(reducers[1].fill_slot(parameter), parameter)
        return [reducer.formation.declaration for reducer in reducers]

    assert thread_ranks(1, check) == [[DecentralizedAlgorithm(hierarchical=False)] * 2]


def test_a_reducer_can_be_given_its_buckets(thread_ranks):
    def check() -> list[int]:
        model = mlp()
        wanted = [["4.weight", "4.bias"], [model[2].weight, model[2].bias, "0.bias"], ["0.weight"]]
        reducer = Reducer(model, [], BucketType.Gradient, False, 8, False, True, False, wanted)
        return [len(bucket.parameters) for bucket in reducer.buckets]

    assert thread_ranks(2, check) == [[2, 3, 1]] * 2


@pytest.mark.parametrize(
    "buckets",
    [[["0.weight"]], [["0.weight", "no such parameter"]], [["0.weight"]] * 6],
    ids=["few", "unknown", "twice"],
)
def test_buckets_that_are_not_the_parameters_are_refused(thread_ranks, buckets):
    def check() -> None:
        with pytest.raises(ConfigurationError, match="buckets"):
            Reducer(mlp(), [], BucketType.Gradient, False, 8, False, True, False, buckets)

    thread_ranks(2, check)


@pytest.mark.parametrize("align_bytes", [0, 4, 12, -8, 8.0])
def test_impossible_alignments_are_refused(thread_ranks, align_bytes):
    def check() -> None:
        with pytest.raises(ConfigurationError, match="align_bytes"):
            Reducer(mlp(), [], BucketType.Gradient, False, align_bytes, False, True)

    thread_ranks(1, check)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, True])
def test_impossible_bucket_sizes_are_refused(thread_ranks, bucket_bytes):
    def check() -> None:
        with pytest.raises(ConfigurationError, match="bucket_bytes"):
            OverlappingWrapper(mlp(), [], bucket_bytes=bucket_bytes)

    thread_ranks(1, check)


def test_the_wrapper_trains_and_unwraps(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = OverlappingWrapper(model, optimizer, align_bytes=64, bucket_bytes=1000)
        assert isinstance(wrapped, DistributedModule)
        assert wrapped.unwrap() is model
        train_steps(wrapped, optimizer, rank, range(3))
        wrapped.create_hooks()  # Idempotent.
        train_steps(wrapped, optimizer, rank, range(3, 6))
        return snapshot(model)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks(results)
    assert_close(results[0], reference(mlp(), sgd, 2, range(6)))


def test_reset_reducer_goes_on_with_other_buckets_and_hierarchy(thread_ranks):
    def train() -> tuple[State, list[int], bool]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = OverlappingWrapper(model, [optimizer], bucket_bytes=10**6)
        train_steps(wrapped, optimizer, rank, range(2))
        names = [name for name, _ in model.named_parameters()]
        wrapped.reset_reducer(hierarchical_reduce=True, buckets=[names[4:], names[:4]])
        train_steps(wrapped, optimizer, rank, range(2, 4))
        sizes = [len(bucket.names) for bucket in wrapped.reducer.buckets]
        return snapshot(model), sizes, "reduce" in bagua.comm.stats()

    results = thread_ranks(3, train, hosts=[2, 1])
    assert [sizes for _, sizes, _ in results] == [[2, 4]] * 3
    assert any(reduced for _, _, reduced in results)
    assert_same_on_all_ranks([state for state, _, _ in results])
    assert_close(results[0][0], reference(mlp(), sgd, 3, range(4)))


FLAGS = [
    ({"bucket_type": BucketType.Weight}, DecentralizedAlgorithm(hierarchical=False)),
    ({"decentralize_reduce": True, "hierarchical_reduce": True}, DecentralizedAlgorithm(hierarchical=True)),
    ({"chunking": True}, ScatterGatherAllReduceAlgorithm(hierarchical=False)),
]


@pytest.mark.parametrize(("flags", "algorithm"), FLAGS, ids=str)
def test_flags_choose_an_algorithm(thread_ranks, flags, algorithm):
    def check() -> None:
        assert OverlappingWrapper(mlp(), [], **flags).reducer.formation.declaration == algorithm

    thread_ranks(1, check)


def test_parameter_managers_are_refused(thread_ranks):
    def check() -> None:
        with pytest.raises(ConfigurationError, match="parameter_manager"):
            OverlappingWrapper(mlp(), [], parameter_manager=object())

    thread_ranks(1, check)


def test_unknown_keywords_are_a_type_error_that_names_the_known_ones(thread_ranks):
    def check() -> None:
        with pytest.raises(TypeError, match="bucket_bytes"):
            OverlappingWrapper(mlp(), [], bucket_size=3)
        with pytest.raises(TypeError, match="bucket_bytes"):
            Reducer(mlp(), [], BucketType.Gradient, False, 8, False, True, priority=1)

    thread_ranks(1, check)


@pytest.mark.parametrize("chunking", [False, True])
def test_chunking_pads_buckets_so_that_they_split_evenly(thread_ranks, chunking):
    def check() -> list[tuple[int, float]]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped, _ = bagua.torch_api.bagua_init(model, optimizer, chunking=chunking, align_bytes=64)
        train_steps(wrapped, optimizer, rank, range(2))
        (bucket,) = wrapped.bagua_buckets
        used = torch.zeros_like(bucket.gradients, dtype=torch.bool)
        for view in bucket.views(used):
            view.fill_(True)
        return bucket.gradients.nbytes, bucket.gradients[~used].abs().sum().item()

    for nbytes, padding in thread_ranks(3, check):
        assert nbytes % 64 == 0
        assert (nbytes % (3 * 64) == 0) == chunking
        assert padding == 0.0
