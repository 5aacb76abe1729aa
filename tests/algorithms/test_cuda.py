"""Algorithms on CUDA tensors, on ranks that may share a GPU. Only a machine with a GPU runs these tests."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.comm
import bagua.torch_api
from bagua.algorithms import Algorithm, DiLoCoAlgorithm, LocalSGDAlgorithm, SlowMoAlgorithm, SparseLoCoAlgorithm
from bagua.integrations.ddp_comm_hooks import HookState, bagua_hook
from bagua.parallel import with_bagua
from bagua.testing import ProcessRanks, RankPool
from tests import harness
from tests.algorithms.test_toys import SYNCHRONOUS, assert_resumes_bit_by_bit, columns, of_each
from tests.contract import algorithms as contract
from tests.contract.algorithms import train
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, sgd, snapshot, train_steps
from tests.parallel.wrapping import Loop, of_this_rank, on_ranks
from tests.versions import nccl_ranks

pytestmark = pytest.mark.nccl
LOCAL = [
    LocalSGDAlgorithm(4), LocalSGDAlgorithm(4, codec="int4", overlap=1), SlowMoAlgorithm(4),
    DiLoCoAlgorithm(4, fragments=2, overlap=1, codec="minmax_uint8"), DiLoCoAlgorithm(4, anchor_device="cpu"),
    SparseLoCoAlgorithm(4, start_after=0),
]  # fmt: skip
ALONE = [(algorithm,) for algorithm in LOCAL]
IN_STEP = [(algorithm,) for algorithm in SYNCHRONOUS]
STEPS = 12


@pytest.fixture(scope="module", params=["gloo", "cpu:gloo,cuda:nccl", "nccl"])
def pool(request: pytest.FixtureRequest) -> RankPool:
    if "nccl" in request.param and nccl_ranks() < 2:
        pytest.skip("two ranks on NCCL need two GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
    return ProcessRanks(2, backend=request.param, environment={"TESTS_DEVICE": "cuda:0"})


assert_bits_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def test_training_gives_what_is_promised(pool: RankPool) -> None:
    results = pool.run(of_each, contract.train_and_rest, IN_STEP)
    for algorithm, states in zip(SYNCHRONOUS, columns(results), strict=True):
        expected = harness.reference(mlp(), contract.optimizer_maker(algorithm), 2, range(STEPS))
        contract.assert_keeps_promises(contract.promised_by(algorithm), list(states), expected)


def test_local_updates_end_where_they_end_on_the_cpu(pool: RankPool, thread_pool: RankPool) -> None:
    on_cpu = columns(thread_pool.run(of_each, train, ALONE, size=2))
    for algorithm, found, expected in zip(LOCAL, columns(pool.run(of_each, train, ALONE)), on_cpu, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=f"{algorithm} differs")


def test_training_resumes_bit_by_bit(pool: RankPool) -> None:
    assert_resumes_bit_by_bit(pool, IN_STEP + ALONE)


def test_an_inf_on_one_rank_poisons_nothing(pool: RankPool) -> None:
    results = pool.run(of_each, contract.train_with_an_inf, IN_STEP)
    for algorithm, states in zip(SYNCHRONOUS, columns(results), strict=True):
        for state in states:
            assert all(torch.isfinite(value).all() for value in state.values()), algorithm


def train_on_a_stream(algorithm: Algorithm) -> State:
    """Gradients come late, on a stream that is not the default one."""

    def slowly(gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)
        return gradient * 1.0

    rank = bagua.comm.get_rank()
    with torch.cuda.stream(torch.cuda.Stream()):
        model = mlp(rank)
        optimizer = contract.optimizer_maker(algorithm)(model.parameters())
        with_bagua(model, [optimizer], algorithm, bucket_bytes=1000)
        for parameter in model.parameters():
            parameter.register_hook(slowly)
        train_steps(model, optimizer, rank, range(STEPS))
        model.bagua_state_dict()
        torch.cuda.current_stream().synchronize()
    return snapshot(model)


def test_what_runs_late_on_a_stream_is_waited_for(pool: RankPool) -> None:
    runs = (columns(pool.run(of_each, function, IN_STEP + ALONE)) for function in (train, train_on_a_stream))
    assert_bits_equal(*runs)


@on_ranks(2, assert_same_on_all_ranks, pool="pool")
def test_averaging_in_the_background_ends_with_equal_weights() -> State:
    loop = Loop("with_bagua", of_this_rank, algorithm=Algorithm.init("async", sync_interval_ms=1))
    loop.train(50)
    loop.wrapped.bagua_algorithm.abort(loop.wrapped)
    assert bagua.torch_api.metrics()["comm/averages"] > 0
    return snapshot(loop.model)


def with_hook() -> State:
    rank, model = bagua.comm.get_rank(), mlp()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(HookState("bytegrad"), bagua_hook)
    train_steps(wrapped, sgd(model.parameters()), rank, range(STEPS))
    return snapshot(model)


def test_the_hook_of_ddp_exchanges_cuda_gradients(pool: RankPool) -> None:
    states = pool.run(with_hook)
    assert_same_on_all_ranks(states)
    expected = harness.reference(mlp(), sgd, 2, range(STEPS))
    for name, value in states[0].items():
        assert torch.allclose(value, expected[name], atol=0.02), name


@on_ranks(2, assert_same_on_all_ranks, pool="pool")
def test_ranks_with_more_data_go_on_alone() -> State:
    loop = Loop("with_bagua")
    with loop.wrapped.join():
        loop.train(4 + 2 * loop.rank)
    return snapshot(loop.model)


def on_the_default_device() -> list[State]:
    """As in scripts that call ``torch.set_default_device``."""
    torch.set_default_device("cuda:0")
    return of_each(train, IN_STEP + ALONE)


def test_the_device_of_new_tensors_may_be_the_gpu(pool: RankPool) -> None:
    assert_bits_equal(pool.run(of_each, train, IN_STEP + ALONE), pool.run(on_the_default_device))


def in_mixed_precision(with_us: bool) -> State:
    """Autocast, a ``GradScaler`` and buffers, with our wrapper or with DDP."""
    rank = bagua.comm.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(harness.home())
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    if with_us:
        wrapped = with_bagua(model, [optimizer], "gradient_allreduce", grad_scaler=scaler)
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
    for states in zip(ours, theirs, strict=True):
        found, expected = ({name: value for name, value in one.items() if "running" not in name} for one in states)
        assert_close(found, expected)
