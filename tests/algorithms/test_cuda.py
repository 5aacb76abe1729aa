"""Algorithms on CUDA tensors, on ranks that may share a GPU. Only a machine with a GPU runs these tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.comm
import bagua.torch_api
from bagua.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    SlowMoAlgorithm,
    SparseLoCoAlgorithm,
)
from bagua.integrations.ddp_comm_hooks import HookState, bagua_hook
from bagua.parallel import with_bagua
from bagua.testing import ProcessRanks, RankPool
from tests.algorithms.test_toys import SYNCHRONOUS, of_each
from tests.contract.algorithms import (
    ONE_BUCKET_BYTES,
    assert_keeps_promises,
    optimizer_maker,
    promised_by,
    resume_and_train,
    train,
    train_and_rest,
    train_and_save,
    train_with_an_inf,
)
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    home,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)
from tests.versions import nccl_ranks

pytestmark = pytest.mark.nccl
LOCAL = [
    LocalSGDAlgorithm(4),
    LocalSGDAlgorithm(4, codec="int4", overlap=1),
    SlowMoAlgorithm(4),
    DiLoCoAlgorithm(4, fragments=2, overlap=1, codec="minmax_uint8"),
    DiLoCoAlgorithm(4, anchor_device="cpu"),
    SparseLoCoAlgorithm(4, start_after=0),
]
STEPS = 12
SLOW_CYCLES = 20_000_000


@pytest.fixture(scope="module", params=["gloo", "cpu:gloo,cuda:nccl", "nccl"])
def pool(request: pytest.FixtureRequest) -> RankPool:
    if "nccl" in request.param and nccl_ranks() < 2:
        pytest.skip("two ranks on NCCL need two GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
    return ProcessRanks(2, backend=request.param, environment={"TESTS_DEVICE": "cuda:0"})


def columns(of_ranks: list[list[Any]]) -> list[tuple[Any, ...]]:
    """What the ranks returned for each call."""
    return list(zip(*of_ranks, strict=True))


def assert_bits_equal(ours: Iterable[Sequence[State]], theirs: Iterable[Sequence[State]]) -> None:
    """For each call, or rank, the states are the same."""
    for one, other in zip(ours, theirs, strict=True):
        for before, after in zip(one, other, strict=True):
            assert_same_on_all_ranks([before, after])


def test_training_gives_what_is_promised(pool: RankPool) -> None:
    results = pool.run(of_each, train_and_rest, [(algorithm,) for algorithm in SYNCHRONOUS])
    for algorithm, states in zip(SYNCHRONOUS, columns(results), strict=True):
        expected = reference(mlp(), optimizer_maker(algorithm), 2, range(STEPS))
        assert_keeps_promises(promised_by(algorithm), list(states), expected)


def test_local_updates_end_where_they_end_on_the_cpu(pool: RankPool, thread_pool: RankPool) -> None:
    calls = [(algorithm,) for algorithm in LOCAL]
    on_cpu = columns(thread_pool.run(of_each, train, calls, size=2))
    for algorithm, found, expected in zip(LOCAL, columns(pool.run(of_each, train, calls)), on_cpu, strict=True):
        for one, other in zip(found, expected, strict=True):
            for name, value in one.items():
                assert torch.allclose(value, other[name], rtol=1e-3, atol=1e-4), (algorithm, name)


def test_training_resumes_bit_by_bit(pool: RankPool) -> None:
    calls = [(algorithm,) for algorithm in (*SYNCHRONOUS, *LOCAL)]
    whole, saved = (columns(pool.run(of_each, function, calls)) for function in (train, train_and_save))
    checkpoints = [[one for (one,) in of_ranks] for of_ranks in saved]
    again = [(*call, states, ONE_BUCKET_BYTES) for call, states in zip(calls, checkpoints, strict=True)]
    assert_bits_equal(whole, columns(pool.run(of_each, resume_and_train, again)))


def test_an_inf_on_one_rank_poisons_nothing(pool: RankPool) -> None:
    results = pool.run(of_each, train_with_an_inf, [(algorithm,) for algorithm in SYNCHRONOUS])
    for algorithm, states in zip(SYNCHRONOUS, columns(results), strict=True):
        for state in states:
            assert all(torch.isfinite(value).all() for value in state.values()), algorithm


def train_on_a_stream(algorithm: Algorithm) -> State:
    """Gradients come late, on a stream that is not the default one."""

    def slowly(gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(SLOW_CYCLES)
        return gradient * 1.0

    rank = bagua.comm.get_rank()
    with torch.cuda.stream(torch.cuda.Stream()):
        model = mlp(rank)
        optimizer = optimizer_maker(algorithm)(model.parameters())
        with_bagua(model, [optimizer], algorithm, bucket_bytes=1000)
        for parameter in model.parameters():
            parameter.register_hook(slowly)
        train_steps(model, optimizer, rank, range(STEPS))
        model.bagua_state_dict()
        torch.cuda.current_stream().synchronize()
    return snapshot(model)


def test_what_runs_late_on_a_stream_is_waited_for(pool: RankPool) -> None:
    calls = [(algorithm,) for algorithm in (*SYNCHRONOUS, *LOCAL)]
    assert_bits_equal(*(columns(pool.run(of_each, function, calls)) for function in (train, train_on_a_stream)))


def train_in_background() -> tuple[State, int]:
    model, rank = mlp(bagua.comm.get_rank()), bagua.comm.get_rank()
    optimizer = sgd(model.parameters())
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=1)
    wrapped = with_bagua(model, [optimizer], algorithm)
    train_steps(model, optimizer, rank, range(50))
    wrapped.bagua_algorithm.abort(wrapped)
    return snapshot(model), int(bagua.torch_api.metrics()["comm/averages"])


def test_averaging_in_the_background_ends_with_equal_weights(pool: RankPool) -> None:
    results = pool.run(train_in_background)
    assert_same_on_all_ranks([state for state, _ in results])
    assert all(averages > 0 for _, averages in results)


def with_hook() -> State:
    rank, model = bagua.comm.get_rank(), mlp()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(HookState("bytegrad"), bagua_hook)
    train_steps(wrapped, sgd(model.parameters()), rank, range(STEPS))
    return snapshot(model)


def test_the_hook_of_ddp_exchanges_cuda_gradients(pool: RankPool) -> None:
    states = pool.run(with_hook)
    assert_same_on_all_ranks(states)
    expected = reference(mlp(), sgd, 2, range(STEPS))
    for name, value in states[0].items():
        assert torch.allclose(value, expected[name], atol=0.02), name


def with_uneven_data() -> State:
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], GradientAllReduceAlgorithm())
    with wrapped.join():
        train_steps(wrapped, optimizer, rank, range(4 + 2 * rank))
    return snapshot(model)


def test_ranks_with_more_data_go_on_alone(pool: RankPool) -> None:
    assert_same_on_all_ranks(pool.run(with_uneven_data))


def on_the_default_device() -> list[State]:
    """As in scripts that call ``torch.set_default_device``."""
    torch.set_default_device("cuda:0")
    return of_each(train, [(algorithm,) for algorithm in (*SYNCHRONOUS, *LOCAL)])


def test_the_device_of_new_tensors_may_be_the_gpu(pool: RankPool) -> None:
    usual = pool.run(of_each, train, [(algorithm,) for algorithm in (*SYNCHRONOUS, *LOCAL)])
    assert_bits_equal(usual, pool.run(on_the_default_device))


def in_mixed_precision(with_us: bool) -> State:
    """Autocast, a ``GradScaler`` and buffers, with our wrapper or with DDP."""
    rank = bagua.comm.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(home())
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    if with_us:
        wrapped = with_bagua(model, [optimizer], GradientAllReduceAlgorithm(), grad_scaler=scaler)
    else:
        wrapped = DistributedDataParallel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(wrapped, rank, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return snapshot(model)


def test_mixed_precision_with_buffers_equals_ddp(pool: RankPool) -> None:
    ours, theirs = (pool.run(in_mixed_precision, with_us) for with_us in (True, False))
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(
            {name: value for name, value in found.items() if "running" not in name},
            {name: value for name, value in expected.items() if "running" not in name},
        )
