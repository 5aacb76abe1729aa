"""Algorithms that sum with a loss train exactly as their formulas say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import bagua.comm
from bagua.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    PowerSGDAlgorithm,
    ScatterGatherAllReduceAlgorithm,
    SignSGDAlgorithm,
    TopKAlgorithm,
)
from bagua.buckets import Bucket
from bagua.compression import Sign, TopK
from bagua.engine.schedule.courses import memory_for
from bagua.errors import InvalidTensorError
from bagua.parallel import with_bagua
from tests.algorithms.replicas import plain_sgd
from tests.algorithms.stacked import (
    Combine,
    Layout,
    PowerSgd,
    WithFeedback,
    byte_grad,
    exact,
    layout_of,
    of_hosts,
    simulate,
)
from tests.contract.algorithms import INF_STEP, STEPS, train_with_an_inf
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, sgd, snapshot
from tests.parallel.wrapping import Loop, of_this_rank, on_ranks

Formula = Callable[[Layout], Combine]

#: Each algorithm, and its formula for a layout of buckets.
CASES: dict[str, tuple[Algorithm, Formula]] = {
    "scatter_gather_allreduce": (ScatterGatherAllReduceAlgorithm(), lambda _: exact),
    "bytegrad": (ByteGradAlgorithm(), lambda _: byte_grad),
    "top_k": (
        TopKAlgorithm(ratio=0.1, warmup_steps=0, density_steps=0),
        lambda layout: WithFeedback(layout, TopK(0.1)),
    ),
    "sign_sgd": (SignSGDAlgorithm(warmup_steps=0, block_numel=2048), lambda layout: WithFeedback(layout, Sign(2048))),
    "power_sgd": (PowerSGDAlgorithm(matrix_rank=2), lambda layout: PowerSgd(layout, 2)),
}
LOSSY = [name for name in CASES if name != "scatter_gather_allreduce"]


def train(algorithm: Algorithm, steps: int) -> tuple[State, Layout]:
    loop = Loop("with_bagua", of_this_rank, algorithm=algorithm)
    return loop.train(steps), layout_of(loop.wrapped.bagua_buckets)


def simulated(hosts: Sequence[int], steps: Sequence[int], layout: Layout, rule: Combine) -> State:
    return simulate(layout, of_hosts(rule, hosts), sgd, steps, size=sum(hosts), model=mlp(), losses=loss_of)


def assert_follows_its_formula(
    results: list[tuple[State, Layout]], hosts: Sequence[int], steps: Sequence[int], formula: Formula, *, lossy: bool
) -> None:
    """Fail unless all ranks ended where the formula does, and that is not where an exact sum ends."""
    assert_same_on_all_ranks([state for state, _ in results])
    state, layout = results[0]
    assert len(layout) > 1
    assert_close(state, simulated(hosts, steps, layout, formula(layout)))
    if lossy:
        with pytest.raises(AssertionError):
            assert_close(state, simulated(hosts, steps, layout, exact))


@pytest.mark.parametrize("hosts", [[2], [3], [5], [1, 3]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_the_formula_says(thread_ranks, name, hosts):
    """Inside hosts that are several, sums are exact; between hosts the formula holds for the hosts' sums."""
    algorithm, formula = CASES[name]
    results = thread_ranks(sum(hosts), train, algorithm, 6, hosts=hosts)
    shares = hosts if len(hosts) > 1 else [1] * sum(hosts)
    assert_follows_its_formula(results, shares, range(6), formula, lossy=name in LOSSY)


@pytest.mark.parametrize("name", LOSSY)
def test_a_step_that_a_scaler_skips_leaves_no_trace(thread_ranks, name):
    """The scale of the loss, too, changes nothing: residuals are kept without it."""
    algorithm, formula = CASES[name]
    states = thread_ranks(2, train_with_an_inf, algorithm)
    layout = thread_ranks(2, train, algorithm, 1)[0][1]
    steps = [step for step in range(STEPS) if step != INF_STEP]
    assert_follows_its_formula([(state, layout) for state in states], [1, 1], steps, formula, lossy=True)


@pytest.mark.parametrize("name", LOSSY)
def test_sums_are_exact_while_warming_up(thread_ranks, name):
    declaration = type(CASES[name][0])
    state, layout = thread_ranks(2, train, declaration(warmup_steps=4), 4)[0]
    assert_close(state, simulated([1, 1], range(4), layout, exact))
    state, layout = thread_ranks(2, train, declaration(warmup_steps=3), 4)[0]
    with pytest.raises(AssertionError):
        assert_close(state, simulated([1, 1], range(4), layout, exact))


@pytest.mark.parametrize("name", CASES)
def test_without_average_gradients_are_summed(thread_ranks, name):
    def gradients(average: bool) -> torch.Tensor:
        loop = Loop(
            "with_bagua", lambda: torch.nn.Linear(8, 8, bias=False), algorithm=type(CASES[name][0])(average=average)
        )
        loop.wrapped(torch.full((2, 8), float(bagua.comm.get_rank()))).sum().backward()
        return loop.model.weight.grad.clone()

    mean, total = thread_ranks(2, gradients, True)[0], thread_ranks(2, gradients, False)[0]
    torch.testing.assert_close(total, 2 * mean)
    assert total.abs().max() > 0


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_16_bits_train(thread_ranks, name):
    def train_half() -> tuple[list[float], State]:
        loop = Loop("with_bagua", lambda: mlp().bfloat16(), plain_sgd, algorithm=CASES[name][0])
        inputs = torch.ones(4, 8, dtype=torch.bfloat16) * (bagua.comm.get_rank() + 1)
        values = []
        for _ in range(8):
            loop.optimizer.zero_grad()
            loss = loop.wrapped(inputs).square().mean()
            loss.backward()
            loop.optimizer.step()
            values.append(float(loss.detach()))
        return values, snapshot(loop.model)

    results = thread_ranks(2, train_half)
    assert_same_on_all_ranks([state for _, state in results])
    for values, _ in results:
        assert values[-1] < 0.7 * values[0]


@pytest.mark.parametrize("name", LOSSY)
@on_ranks(2)
def test_a_dtype_that_cannot_be_compressed_is_refused_when_the_model_is_wrapped(name):
    model = torch.nn.Linear(3, 3, dtype=torch.complex64)
    with pytest.raises(InvalidTensorError, match="complex64"):
        with_bagua(model, [sgd(model.parameters())], CASES[name][0])


def test_matrices_lie_row_by_row_in_flat_memory():
    """Rows are what lies furthest apart in memory; what has one dimension is no matrix."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 6, 3), torch.nn.Conv2d(6, 5, 2).to(memory_format=torch.channels_last)
    )
    model.register_parameter("transposed", torch.nn.Parameter(torch.ones(7, 3).t()))
    model.register_parameter("positions", torch.nn.Parameter(torch.ones(1, 4, 5)))
    names, parameters = zip(*model.named_parameters(), strict=True)
    bucket = Bucket(0, names, parameters, bagua.comm.solo_group().global_communicator)
    flat = bucket.allocate_gradients()
    for view, parameter in zip(bucket.gradient_views, parameters, strict=True):
        view.copy_(torch.arange(float(parameter.numel())).view(parameter.shape))
    shapes = {"transposed": (7, 3), "positions": (4, 5), "0.weight": (6, 36), "1.weight": (5, 24)}
    blocks = dict(zip([name for name in names if name in shapes], memory_for(bucket).blocks, strict=True))
    assert {name: (block.rows, block.columns) for name, block in blocks.items()} == shapes
    for name, block in blocks.items():
        rows = flat[block.offset : block.offset + block.numel].view(block.rows, block.columns)
        axis = 0 if name.endswith("weight") else 1
        expected = torch.arange(float(block.numel)).view(model.get_parameter(name).shape).unbind(axis)
        assert [sorted(row.tolist()) for row in rows] == [sorted(row.flatten().tolist()) for row in expected], name
