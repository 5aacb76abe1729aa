"""Algorithms that sum with a loss, Dion and LoCo: they train exactly as their formulas say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

import bagua.comm
from bagua.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    DionAlgorithm,
    LoCoAlgorithm,
    PowerSGDAlgorithm,
    ScatterGatherAllReduceAlgorithm,
    SignSGDAlgorithm,
    TopKAlgorithm,
)
from bagua.buckets import Bucket
from bagua.compression import Int4, MinMaxUInt8, Sign, TopK
from bagua.engine.schedule.courses import memory_for
from bagua.errors import InvalidTensorError
from bagua.optim import DionOptimizer
from bagua.parallel import with_bagua
from tests.algorithms import stacked
from tests.algorithms.replicas import plain_sgd
from tests.algorithms.stacked import (
    SIZE,
    CodedSlices,
    Combine,
    Flats,
    Layout,
    PowerSgd,
    WithFeedback,
    assert_only,
    byte_grad,
    exact,
    layout_of,
    mean,
    model_of,
    of_hosts,
    simulate,
    train_alike,
)
from tests.contract.algorithms import (
    INF_STEP,
    STEPS,
    AlgorithmContract,
    exchange_exact_mean,
    replace_exchanges,
    spread,
    train_with_an_inf,
)
from tests.contract.algorithms import train as train_small
from tests.harness import State, assert_close, assert_same_on_all_ranks, coded, loss_of, mlp, seeded, sgd, snapshot
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


def nothing(_: int, flats: Flats) -> torch.Tensor:
    """The mutant that does not communicate."""
    return flats[0]


# LoCo.


class LoCo:
    """h = g + e in four bits, slice by slice; e is a running average of what they lose, in eight bits."""

    def __init__(
        self, layout: Layout, averaging: float, reset: int, *, bytes_only: bool = True, early: int = 0
    ) -> None:
        self.exchanges = [CodedSlices(Int4(64), places) for _, places in layout]
        self.averaging, self.reset, self.bytes_only, self.early = averaging, reset, bytes_only, early
        self.e: dict[int, torch.Tensor] = {}
        self.calls = 0

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        step, self.calls = self.calls // len(self.exchanges), self.calls + 1
        g = torch.stack(flats) / SIZE
        before = self.e[index] if step and (step + self.early) % self.reset else torch.zeros_like(g)
        result, lost = self.exchanges[index](g + before)
        after = (1 - self.averaging) * before + self.averaging * lost
        self.e[index] = coded(MinMaxUInt8(), after) if self.bytes_only else after
        return result


def test_loco_feeds_an_average_of_what_is_lost_back(thread_ranks):
    algorithm = LoCoAlgorithm(block_numel=64, averaging=0.4, reset_every=20, warmup_steps=0)
    state, layout = train_alike(thread_ranks, algorithm, sgd)
    mutants: dict[str, Combine] = {
        "no average": LoCo(layout, 1.0, 20),
        "never reset": LoCo(layout, 0.4, 1000),
        "no feedback": LoCo(layout, 0.4, 1),
        "reset a step early": LoCo(layout, 0.4, 20, early=1),
        "reset a step late": LoCo(layout, 0.4, 20, early=-1),
        "remembers more": LoCo(layout, 0.4, 20, bytes_only=False),
        "exact": mean,
        "nothing": nothing,
    }
    wrong = {name: simulate(layout, mutant, sgd) for name, mutant in mutants.items()}
    assert_only(state, simulate(layout, LoCo(layout, 0.4, 20), sgd), wrong)


# Dion.

RANK, MU, DION_LR, DECAY, EPS = 2, 0.9, 0.02, 0.1, 1e-8


def dion(parameters):
    return DionOptimizer(parameters, lr=DION_LR, matrix_rank=RANK, momentum=MU, weight_decay=DECAY, adam_lr=0.2)


def simulate_dion(layout: Layout, size: int = SIZE, *, keeps: float = MU, exact: bool = False) -> State:
    """The rule on stacked momenta; bases by a singular value decomposition would have other signs, so by QR."""
    model = model_of()
    weights = dict(model.named_parameters())
    order = [name for _, places in layout for name, _ in places]
    large = [
        name for name in order if weights[name].dim() == 2 and RANK * sum(weights[name].shape) < weights[name].numel()
    ]
    q: State = {}
    for _, places in layout:
        names = [name for name, _ in places if name in large]
        sides = [min(weights[name].shape) for name in names]
        drawn = torch.randn(sum(sides), RANK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        q.update(zip(names, drawn.split(sides), strict=True))
    momenta = {name: [torch.zeros_like(weights[name]) for _ in range(size)] for name in large}
    adam = torch.optim.AdamW(
        [weights[name] for name in order if name not in large],
        lr=0.2 * DION_LR, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY,
    )  # fmt: skip
    for step in range(stacked.STEPS):
        of_ranks = []
        for rank in range(size):
            model.zero_grad()
            stacked.loss_of(model, rank, step).backward()
            of_ranks.append({name: one.grad.clone() for name, one in weights.items()})
        for name, one in weights.items():
            one.grad = torch.stack([grads[name] for grads in of_ranks]).mean(dim=0)
        with torch.no_grad():
            for name in large:
                rows, columns = weights[name].shape
                turn = (lambda x: x) if rows >= columns else torch.t
                own = [turn(m + grads[name]) for m, grads in zip(momenta[name], of_ranks, strict=True)]
                mean_m = torch.stack(own).mean(dim=0)
                p = torch.linalg.qr(mean_m @ q[name]).Q
                r = mean_m.t() @ p
                momenta[name] = [turn(m - (1 - keeps) * p @ r.t()) for m in own]
                q[name] = r / (r.norm(dim=0) + 1e-8)
                step_of = turn(mean_m) if exact else math.sqrt(rows / columns) * turn(p @ q[name].t())
                weights[name].mul_(1 - DION_LR * DECAY).sub_(DION_LR * step_of)
        adam.step()
    return snapshot(model)


def test_dion_steps_along_common_directions(thread_ranks):
    state, layout = train_alike(thread_ranks, DionAlgorithm(matrix_rank=RANK, momentum=MU), dion)
    assert len(layout) > 1
    mutants = ({"keeps": 1.0}, {"keeps": 0.0}, {"exact": True}, {"size": 1})
    assert_only(state, simulate_dion(layout), {str(one): simulate_dion(layout, **one) for one in mutants})


@on_ranks(1)
def test_alone_dion_is_its_optimizer():
    """On one rank the exchange and the optimizer by itself are the same rule."""

    def layer() -> torch.nn.Module:
        with seeded():
            return torch.nn.Linear(8, 4).double()

    algorithm = DionAlgorithm(matrix_rank=RANK, momentum=MU)
    alone = Loop(lambda model, _: model, layer, dion, stacked.loss_of).train(10)
    assert_close(alone, Loop("with_bagua", layer, dion, stacked.loss_of, algorithm=algorithm).train(10))


# The contract, but for what holds of gradients only: on one rank these step along directions, too.


class QuickDion(DionAlgorithm):
    """Dion with an optimizer of its rank."""

    optimizer_class = staticmethod(lambda parameters: DionOptimizer(parameters, lr=0.001, matrix_rank=2))


@pytest.fixture(params=[QuickDion(matrix_rank=2)], ids=repr)
def algorithm(request) -> Algorithm:
    return request.param


class TestDirections(AlgorithmContract):
    sizes = (2, 3)

    def test_an_exact_mean_in_place_of_the_exchange_gives_something_else(self, algorithm, pool, monkeypatch):
        """Where the exchange makes directions, the steps with mean gradients are no measure."""
        own = pool.run(train_small, algorithm, size=2)
        replace_exchanges(algorithm, monkeypatch, exchange_exact_mean)
        mutated = pool.run(train_small, algorithm, size=2)
        assert max(map(spread, zip(own, mutated, strict=True))) > 1e-4
