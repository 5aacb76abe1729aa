"""Algorithms that sum with a loss, or send few bits: they train exactly as their formulas, written plainly, say."""

import copy
import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm, DionAlgorithm, Every, Exchange, Gradients, Mean, QAdamAlgorithm, Replace
from bagua.buckets import Bucket
from bagua.compression import BlockTopK, Codec, Int2, Int4, MinMaxUInt8, Sign, TopK
from bagua.engine.schedule.courses import memory_for
from bagua.errors import ConfigurationError, InvalidTensorError
from bagua.optim import DionOptimizer, OneBitLambOptimizer, QAdamOptimizer
from bagua.parallel import with_bagua
from bagua.primitives import AllGatherReducer, MomentumCorrection
from bagua.testing import ThreadRanks
from tests import harness
from tests.algorithms import stacked
from tests.algorithms.stacked import SIZE, Combine, Flats, Layout, assert_only, differs, exact, loss_of, model_of
from tests.contract import algorithms as contract
from tests.harness import State, assert_close, assert_same_on_all_ranks, coded, descend, mlp, seeded, sgd, snapshot
from tests.parallel.wrapping import Loop, Operations, of_this_rank, on_ranks

AT_ONCE = {"ratio": 0.1, "warmup_steps": 0, "density_steps": 0}
#: Options of each algorithm, and its formula for a layout of buckets.
CASES: dict[str, tuple[dict[str, Any], Callable[[Layout], Combine]]] = {
    "scatter_gather_allreduce": ({}, lambda _: exact),
    "bytegrad": ({}, lambda _: stacked.byte_grad),
    "top_k": (AT_ONCE, lambda layout: stacked.WithFeedback(layout, TopK(0.1))),
    "sign_sgd": ({"warmup_steps": 0, "block_numel": 2048}, lambda layout: stacked.WithFeedback(layout, Sign(2048))),
    "power_sgd": ({"matrix_rank": 2}, lambda layout: stacked.PowerSgd(layout, 2)),
}
LOSSY = [name for name in CASES if name != "scatter_gather_allreduce"]


def algorithm_of(name: str) -> Algorithm:
    return Algorithm.init(name, **CASES[name][0])


def train_lossy(algorithm: Algorithm, steps: int) -> tuple[State, Layout]:
    loop = Loop("with_bagua", of_this_rank, algorithm=algorithm)
    return loop.train(steps), stacked.layout_of(loop.wrapped.bagua_buckets)


def simulated(hosts: Sequence[int], steps: Sequence[int], layout: Layout, rule: Combine) -> State:
    """The rule for the sums of hosts, of gradients that are divided by the number of ranks."""

    def combine(index: int, flats: Flats) -> torch.Tensor:
        shares = (torch.stack(flats) / len(flats)).split(list(hosts))
        return rule(index, [share.sum(dim=0) for share in shares])

    return stacked.simulate(layout, combine, sgd, steps, size=sum(hosts), model=mlp(), losses=harness.loss_of)


def assert_follows_its_formula(name: str, results: list[Any], hosts: Sequence[int], steps: Sequence[int]) -> None:
    """Fail unless all ranks ended where the formula does, and that is not where an exact sum ends."""
    assert_same_on_all_ranks([state for state, _ in results])
    state, layout = results[0]
    assert len(layout) > 1
    assert_close(state, simulated(hosts, steps, layout, CASES[name][1](layout)))
    assert name not in LOSSY or differs(state, simulated(hosts, steps, layout, exact))


@pytest.mark.parametrize("hosts", [[2], [3], [5], [1, 3]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_the_formula_says(thread_ranks, name, hosts):
    """Inside hosts that are several, sums are exact; between hosts the formula holds for the hosts' sums."""
    results = thread_ranks(sum(hosts), train_lossy, algorithm_of(name), 6, hosts=hosts)
    assert_follows_its_formula(name, results, hosts if len(hosts) > 1 else [1] * sum(hosts), range(6))


@pytest.mark.parametrize("name", LOSSY)
def test_a_step_that_a_scaler_skips_leaves_no_trace(thread_ranks, name):
    """The scale of the loss, too, changes nothing: residuals are kept without it."""
    states = thread_ranks(2, contract.train_with_an_inf, algorithm_of(name))
    layout = thread_ranks(2, train_lossy, algorithm_of(name), 1)[0][1]
    steps = [step for step in range(contract.STEPS) if step != contract.INF_STEP]
    assert_follows_its_formula(name, [(state, layout) for state in states], [1, 1], steps)


@pytest.mark.parametrize("name", LOSSY)
def test_sums_are_exact_while_warming_up(thread_ranks, name):
    state, layout = thread_ranks(2, train_lossy, Algorithm.init(name, warmup_steps=4), 4)[0]
    assert_close(state, simulated([1, 1], range(4), layout, exact))
    state, layout = thread_ranks(2, train_lossy, Algorithm.init(name, warmup_steps=3), 4)[0]
    assert differs(state, simulated([1, 1], range(4), layout, exact))


@pytest.mark.parametrize("name", CASES)
def test_without_average_gradients_are_summed(thread_ranks, name):
    def gradients(average: bool) -> torch.Tensor:
        algorithm = Algorithm.init(name, average=average)
        loop = Loop("with_bagua", lambda: torch.nn.Linear(8, 8, bias=False), algorithm=algorithm)
        loop.wrapped(torch.full((2, 8), float(bagua.comm.get_rank()))).sum().backward()
        return loop.model.weight.grad.clone()

    mean, total = thread_ranks(2, gradients, True)[0], thread_ranks(2, gradients, False)[0]
    torch.testing.assert_close(total, 2 * mean)
    assert total.abs().max() > 0


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, assert_same_on_all_ranks)
def test_gradients_of_16_bits_train(name) -> State:
    values, inputs = [], torch.ones(4, 8, dtype=torch.bfloat16) * (bagua.comm.get_rank() + 1)

    def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        found = model(inputs).square().mean()
        values.append(float(found.detach()))
        return found

    loop = Loop("with_bagua", lambda: mlp().bfloat16(), stacked.plain_sgd, loss, algorithm=algorithm_of(name))
    state = loop.train(8)
    assert values[-1] < 0.7 * values[0]
    return state


@pytest.mark.parametrize("name", LOSSY)
@on_ranks(2)
def test_a_dtype_that_cannot_be_compressed_is_refused_when_the_model_is_wrapped(name):
    model = torch.nn.Linear(3, 3, dtype=torch.complex64)
    with pytest.raises(InvalidTensorError, match="complex64"):
        with_bagua(model, [sgd(model.parameters())], algorithm_of(name))


def test_matrices_lie_row_by_row_in_flat_memory():
    """Rows are what lies furthest apart in memory; what has one dimension is no matrix."""
    channels_last = torch.nn.Conv2d(6, 5, 2).to(memory_format=torch.channels_last)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), channels_last)
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


class LoCo:
    """h = g + e in four bits, slice by slice; e is a running average of what they lose, in eight bits."""

    def __init__(self, layout: Layout, averaging: float, reset: int, bytes_only: bool = True, early: int = 0) -> None:
        self.exchanges = [stacked.CodedSlices(Int4(64), places) for _, places in layout]
        self.averaging, self.reset, self.bytes_only, self.early = averaging, reset, bytes_only, early
        self.e, self.calls = dict[int, torch.Tensor](), 0

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        step, self.calls = self.calls // len(self.exchanges), self.calls + 1
        g = torch.stack(flats) / SIZE
        before = self.e[index] if step and (step + self.early) % self.reset else torch.zeros_like(g)
        result, lost = self.exchanges[index](g + before)
        after = (1 - self.averaging) * before + self.averaging * lost
        self.e[index] = coded(MinMaxUInt8(), after) if self.bytes_only else after
        return result


def test_loco_feeds_an_average_of_what_is_lost_back(thread_ranks):
    algorithm = Algorithm.init("loco", block_numel=64, averaging=0.4, reset_every=20, warmup_steps=0)
    state, layout = stacked.train_alike(thread_ranks, algorithm, sgd)
    mutants: dict[str, Combine] = {
        "no average": LoCo(layout, 1.0, 20), "no reset": LoCo(layout, 0.4, 1000), "no feedback": LoCo(layout, 0.4, 1),
        "reset a step early": LoCo(layout, 0.4, 20, early=1), "reset a step late": LoCo(layout, 0.4, 20, early=-1),
        "remembers more": LoCo(layout, 0.4, 20, bytes_only=False), "exact": stacked.mean, "nothing": nothing,
    }  # fmt: skip
    wrong = {name: stacked.simulate(layout, mutant, sgd) for name, mutant in mutants.items()}
    assert_only(state, stacked.simulate(layout, LoCo(layout, 0.4, 20), sgd), wrong)


RANK, MU, DION_LR, DION_DECAY = 2, 0.9, 0.02, 0.1
OF_DION = {"lr": DION_LR, "matrix_rank": RANK, "momentum": MU, "weight_decay": DION_DECAY, "adam_lr": 0.2}
dion = functools.partial(DionOptimizer, **OF_DION)


def simulate_dion(layout: Layout, size: int = SIZE, *, keeps: float = MU, exact: bool = False) -> State:
    """The rule on stacked momenta; bases by a singular value decomposition would have other signs, so by QR."""
    model = model_of()
    weights = dict(model.named_parameters())
    order = [name for _, places in layout for name, _ in places]
    shapes = {name: one.shape for name, one in weights.items()}
    large = [name for name in order if len(shapes[name]) == 2 and RANK * sum(shapes[name]) < shapes[name].numel()]
    q: State = {}
    for _, places in layout:
        names = [name for name, _ in places if name in large]
        sides = [min(shapes[name]) for name in names]
        drawn = torch.randn(sum(sides), RANK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        q.update(zip(names, drawn.split(sides), strict=True))
    momenta = {name: [torch.zeros_like(weights[name]) for _ in range(size)] for name in large}
    others = [weights[name] for name in order if name not in large]
    adam = torch.optim.AdamW(others, lr=0.2 * DION_LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DION_DECAY)
    for step in range(stacked.STEPS):
        of_ranks = [stacked.gradients_of(model, rank, step) for rank in range(size)]
        for name, one in weights.items():
            one.grad = torch.stack([grads[name] for grads in of_ranks]).mean(dim=0)
        with torch.no_grad():
            for name in large:
                rows, columns = shapes[name]
                turn = (lambda x: x) if rows >= columns else torch.t
                own = [turn(m + grads[name]) for m, grads in zip(momenta[name], of_ranks, strict=True)]
                mean_m = torch.stack(own).mean(dim=0)
                p = torch.linalg.qr(mean_m @ q[name]).Q
                r = mean_m.t() @ p
                momenta[name] = [turn(m - (1 - keeps) * p @ r.t()) for m in own]
                q[name] = r / (r.norm(dim=0) + 1e-8)
                step_of = turn(mean_m) if exact else math.sqrt(rows / columns) * turn(p @ q[name].t())
                weights[name].mul_(1 - DION_LR * DION_DECAY).sub_(DION_LR * step_of)
        adam.step()
    return snapshot(model)


def test_dion_steps_along_common_directions(thread_ranks):
    state, layout = stacked.train_alike(thread_ranks, DionAlgorithm(matrix_rank=RANK, momentum=MU), dion)
    mutants = ({"keeps": 1.0}, {"keeps": 0.0}, {"exact": True}, {"size": 1})
    assert_only(state, simulate_dion(layout), {str(one): simulate_dion(layout, **one) for one in mutants})


@on_ranks(1)
def test_alone_dion_is_its_optimizer():
    def layer() -> torch.nn.Module:
        with seeded():
            return torch.nn.Linear(8, 4).double()

    algorithm = DionAlgorithm(matrix_rank=RANK, momentum=MU)
    alone = Loop(lambda model, _: model, layer, dion, loss_of).train(10)
    assert_close(alone, Loop("with_bagua", layer, dion, loss_of, algorithm=algorithm).train(10))


class QuickDion(DionAlgorithm):
    optimizer_class = staticmethod(lambda parameters: DionOptimizer(parameters, lr=0.001, matrix_rank=2))


class TestDirections(contract.AlgorithmContract):
    sizes = (2, 3)  # On one rank these step along directions, too.

    algorithm = pytest.fixture(lambda self: QuickDion(matrix_rank=2))

    def test_an_exact_mean_in_place_of_the_exchange_gives_something_else(self, algorithm, pool, monkeypatch):
        """Where the exchange makes directions, the steps with mean gradients are no measure."""
        own = pool.run(contract.train, algorithm, size=2)
        contract.replace_exchanges(algorithm, monkeypatch, contract.exchange_exact_mean)
        mutated = pool.run(contract.train, algorithm, size=2)
        assert max(map(contract.spread, zip(own, mutated, strict=True))) > 1e-4


class DeepGradientCompression:
    """u <- m u + g; v <- v + u; the largest of v are sent, and then both are zero there."""

    def __init__(self, ratio: float, *, momentum: float = 0.9, clip: float = 1e9, feedback: bool = True) -> None:
        self.ratio, self.momentum, self.clip, self.feedback = ratio, momentum, clip, feedback
        self.u, self.v = dict[int, torch.Tensor](), dict[int, torch.Tensor]()

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        shares = torch.stack(flats) / len(flats)
        shares = shares * (self.clip / shares.norm(dim=1, keepdim=True)).clamp(max=1.0)
        u = self.momentum * self.u.get(index, 0) + shares
        v = self.v.get(index, 0) + u if self.feedback else u
        sent = coded(TopK(self.ratio), v)
        self.u[index], self.v[index] = torch.where(sent != 0, 0, u), v - sent
        return sent.sum(dim=0)


def test_top_k_with_momentum_is_deep_gradient_compression(thread_ranks):
    algorithm = Algorithm.init("top_k", momentum=0.8, clip_norm=0.05, **AT_ONCE)
    state, layout = stacked.train_alike(thread_ranks, algorithm, stacked.plain_sgd)
    rule = functools.partial(DeepGradientCompression, 0.1, momentum=0.8, clip=0.05)
    mutants: dict[str, Combine] = {
        "no feedback": rule(feedback=False), "no momentum": rule(momentum=0.0), "no clipping": rule(clip=1e9),
        "exact": stacked.mean, "nothing": nothing,
    }  # fmt: skip
    run = functools.partial(stacked.simulate, layout, make=stacked.plain_sgd)
    assert_only(state, run(rule()), {name: run(mutant) for name, mutant in mutants.items()})


INSIDE = Mean(MomentumCorrection(AllGatherReducer(TopK(0.1)), 0.8), over="inside")


@pytest.mark.parametrize(
    ("algorithm", "hosts", "warmup"),
    [
        (Algorithm.init("top_k", ratio=0.1, momentum=0.8, warmup_steps=2, density_steps=0), [1], 2),
        (Algorithm.of(Exchange(Gradients(), Every(), INSIDE, Replace())), [1, 1], 0),
    ],
    ids=["alone", "alone on a host"],
)
def test_momenta_in_place_of_gradients_go_on_without_other_ranks(thread_ranks, algorithm, hosts, warmup):
    """The optimizer has no momentum of its own."""
    state, layout = thread_ranks(len(hosts), stacked.train, algorithm, stacked.plain_sgd, 12, hosts=hosts)[0]
    rule, calls = DeepGradientCompression(0.1, momentum=0.8), iter(range(12 * len(layout)))

    def combine(index: int, flats: Flats) -> torch.Tensor:
        return flats[0] if next(calls) < warmup * len(layout) else rule(index, flats)

    assert_close(state, stacked.simulate(layout, combine, stacked.plain_sgd, 12, size=1))


def test_the_density_falls_in_stages(thread_ranks):
    """Each stage sends what its part says; residuals stay from one to the next."""
    algorithm = Algorithm.init("top_k", ratio=0.25 / 16, warmup_steps=2, density_steps=8)
    assert algorithm.phases == ("warm-up", 0.25, 0.125, 0.0625, 0.03125, "reduced")
    found = [algorithm.phase(step, None) for step in range(12)]
    assert found == ["warm-up"] * 2 + [0.25] * 2 + [0.125] * 2 + [0.0625] * 2 + [0.03125] * 2 + ["reduced"] * 2
    state, layout = thread_ranks(SIZE, stacked.train, algorithm, stacked.plain_sgd, 12)[0]

    def simulated(first: float) -> State:
        rule = DeepGradientCompression(1.0, momentum=0.0)
        calls = iter(range(12 * len(layout)))

        def combine(index: int, flats: Flats) -> torch.Tensor:
            step = next(calls) // len(layout)
            rule.ratio = 1.0 if step < 2 else max(first / 2 ** ((step - 2) // 2), 0.25 / 16)
            return rule(index, flats)

        return stacked.simulate(layout, combine, stacked.plain_sgd, 12)

    assert_close(state, simulated(0.25))
    assert differs(state, simulated(0.25 / 16))


def test_power_sgd_adds_the_momentum_after_decompression(thread_ranks):
    algorithm = Algorithm.init("power_sgd", matrix_rank=2, momentum=0.8)
    state, layout = thread_ranks(SIZE, stacked.train, algorithm, stacked.plain_sgd)[0]

    def simulated(momentum: float, inner: Callable[[Layout], Combine]) -> State:
        rule, velocity = inner(layout), {}

        def combine(index: int, flats: Flats) -> torch.Tensor:
            found = rule(index, [flat / SIZE for flat in flats])
            velocity[index] = momentum * velocity.get(index, 0) + found
            return found + velocity[index]

        return stacked.simulate(layout, combine, stacked.plain_sgd)

    low_rank = functools.partial(stacked.PowerSgd, rank=2, dtype=torch.float64)
    assert_close(state, simulated(0.8, low_rank))
    assert differs(state, simulated(0.7, low_rank))
    assert differs(state, simulated(0.8, lambda _: exact))


WARMUP = 20
adam = functools.partial(QAdamOptimizer, lr=0.003, warmup_steps=WARMUP, weight_decay=0.1)


def simulate_momenta(layout: Layout, codec: Codec, **options: bool) -> State:
    """Momenta of everyone, whose mean is taken in coded slices after the warm-up; ``m`` is the optimizer's."""
    model, left = model_of(), WARMUP * len(layout)
    optimizer = adam(model.parameters())
    exchanges = [stacked.MeanOfSlices(codec, places, **options) for _, places in layout]

    def combine(index: int, flats: Flats) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left >= 0:
            return stacked.mean(index, flats)
        numel, places = layout[index]
        m = stacked.flatten({name: optimizer.momentum(model.get_parameter(name)) for name, _ in places}, numel, places)
        return (exchanges[index]([0.9 * m + 0.1 * flat for flat in flats]) - 0.9 * m) / 0.1

    return stacked.simulate(layout, combine, lambda _: optimizer, model=model)


@pytest.mark.parametrize(
    ("algorithm", "codec", "feedback"),
    [(Algorithm.init("one_bit_adam", block_numel=16), Sign(16), True), (QAdamAlgorithm(), MinMaxUInt8(), False)],
    ids=["signs", "bytes"],
)
def test_momenta_are_sent_in_few_bits_after_the_warm_up(thread_ranks, algorithm, codec, feedback):
    state, layout = stacked.train_alike(thread_ranks, algorithm, adam)
    mutants = ({"feedback": not feedback}, {"exact": True})
    wrong = {str(one): simulate_momenta(layout, codec, **one) for one in mutants}
    assert_only(state, simulate_momenta(layout, codec, feedback=feedback), wrong)


BLOCK, BETA1, BETA2, EPS, LR, DECAY = 16, 0.9, 0.99, 1e-3, 0.003, 0.1
OF_LAMB = {"lr": LR, "warmup_steps": WARMUP, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
lamb = functools.partial(OneBitLambOptimizer, **OF_LAMB)


@dataclasses.dataclass
class Lamb:
    """The published rule for all tensors of one model; momenta of the compressed stage are given to it."""

    model: torch.nn.Module
    freshens: bool = True
    beta2: float = BETA2
    change: tuple[float, float] = (0.9, 1.1)
    limits: tuple[float, float] = (0.5, 4.0)

    def __post_init__(self) -> None:
        self.x = {name: one.detach() for name, one in self.model.named_parameters()}
        zeros = {name: torch.zeros_like(one) for name, one in self.x.items()}
        self.m, self.v, self.w = zeros, dict(zeros), dict(zeros)
        self.ratios, self.factors = dict[str, float](), dict.fromkeys(self.x, 1.0)

    def momenta(self, gradients: State) -> State:
        return {name: BETA1 * self.m[name] + (1 - BETA1) * one for name, one in gradients.items()}

    @torch.no_grad()
    def step(self, t: int, momenta: State) -> None:
        for name, x in self.x.items():
            gradient = (momenta[name] - BETA1 * self.m[name]) / (1 - BETA1)
            self.m[name] = momenta[name]
            if t <= WARMUP:
                self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * gradient**2
            self.w[name] = self.beta2 * self.w[name] + (1 - self.beta2) * gradient**2
            denominator = (self.v[name] / (1 - self.beta2 ** min(t, WARMUP))).sqrt() + EPS
            direction = self.m[name] / (1 - BETA1**t) / denominator + DECAY * x
            if t <= WARMUP:
                ratio = min(max(float(x.norm() / direction.norm()), 0.01), 10.0)
                self.ratios[name] = 0.9 * self.ratios[name] + 0.1 * ratio if name in self.ratios else ratio
            else:
                fresh = (self.w[name] / (1 - self.beta2**t)).sqrt() + EPS
                before = self.factors[name]
                factor = float((denominator / fresh).max())
                for low, high in ((before * self.change[0], before * self.change[1]), self.limits):
                    factor = min(max(factor, low), high)
                self.factors[name] = factor if self.freshens else 1.0
                ratio = self.factors[name] * self.ratios[name]
            x.sub_(LR * ratio * direction)
            if t == WARMUP:  # Elements that were as good as dead get the mean of the others.
                alive = self.v[name] >= 2.0**-16 * self.v[name].mean()
                mean = self.v[name].sum() / alive.sum()
                self.v[name] = torch.where(alive, self.v[name], mean)
                self.w[name] = self.v[name].clone()


def simulate_lamb(
    layout: Layout, *, scaled: bool = True, feedback: bool = True, exact: bool = False, freshens: bool = True
) -> State:
    model = model_of()
    rule = Lamb(model, freshens=freshens)
    exchanges = [stacked.MeanOfSlices(Sign(BLOCK), places, feedback=feedback, exact=exact) for _, places in layout]
    scaling = dict.fromkeys(rule.x, 1.0)
    for t in range(1, stacked.STEPS + 1):
        of_ranks = [stacked.gradients_of(model, rank, t - 1) for rank in range(SIZE)]
        if t == WARMUP + 1 and scaled:
            sizes = {name: float(m.square().mean().sqrt()) for name, m in rule.m.items()}
            scaling = {name: sum(sizes.values()) / len(sizes) / size for name, size in sizes.items()}
        own = [{name: m * scaling[name] for name, m in rule.momenta(one).items()} for one in of_ranks]
        momenta: State = {}
        for exchange, (numel, places) in zip(exchanges, layout, strict=True):
            flats = [stacked.flatten(one, numel, places) for one in own]
            result = exchange(flats) if t > WARMUP else torch.stack(flats).mean(dim=0)
            for name, offset in places:
                x = rule.x[name]
                momenta[name] = result[offset : offset + x.numel()].view_as(x) / scaling[name]
        rule.step(t, momenta)
    return snapshot(model)


def test_one_bit_lamb_is_the_formula(thread_ranks):
    state, layout = stacked.train_alike(thread_ranks, Algorithm.init("one_bit_lamb", block_numel=BLOCK), lamb)
    mutants = ({"scaled": False}, {"feedback": False}, {"exact": True}, {"freshens": False})
    assert_only(state, simulate_lamb(layout), {str(one): simulate_lamb(layout, **one) for one in mutants})


def test_trust_ratios_follow_gradients_that_jump_no_faster_and_no_farther_than_is_said():
    """Gradients become a hundredth after the warm-up, and grow a thousandfold then."""
    beta2 = 0.5  # It has seen what is new after a few steps.

    def train_with(model: torch.nn.Module, step: Callable[[int, State], None]) -> State:
        for t in range(1, WARMUP + 61):
            size = 1.0 if t <= WARMUP else 0.01 if t <= WARMUP + 30 else 10.0
            step(t, {name: size * one for name, one in stacked.gradients_of(model, 0, t % 3).items()})
        return snapshot(model)

    model = model_of()
    optimizer = lamb(model.parameters(), betas=(BETA1, beta2))

    def by_optimizer(_: int, gradients: State) -> None:
        for name, one in model.named_parameters():
            one.grad = gradients[name]
        optimizer.step()

    def by_rule(**mutant: Any) -> State:
        rule = Lamb(model_of(), beta2=beta2, **mutant)
        return train_with(rule.model, lambda t, gradients: rule.step(t, rule.momenta(gradients)))

    found = train_with(model, by_optimizer)
    assert_close(found, by_rule())
    changes = [{"change": one} for one in ((0.8, 1.1), (0.95, 1.1), (0.9, 1.2), (0.9, 1.05))]
    for mutant in (*changes, {"limits": (0.4, 4.0)}, {"limits": (0.5, 5.0)}):
        assert differs(found, by_rule(**mutant)), mutant


@pytest.mark.parametrize("steps", [WARMUP // 2, WARMUP + 2], ids=["in the warm-up", "after it"])
def test_one_bit_lamb_does_not_read_a_number_for_each_tensor(steps):
    counts = []
    for size in (1, 9):
        optimizer = lamb([torch.nn.Parameter(torch.ones(3) * (1 + number)) for number in range(size)])
        for _ in range(steps):
            optimizer.zero_grad()
            sum(one.square().sum() for one in optimizer.param_groups[0]["params"]).backward()
            with Operations() as operations:
                optimizer.step()
        counts.append(sum(one is torch.ops.aten._local_scalar_dense.default for one, _ in operations.noted))
    assert counts[0] == counts[1]


FEW = BlockTopK(block_numel=64, kept=8, value_bits=2)
SPARSELY = {"sync_every": 5, "outer_lr": 0.5, "block_numel": 64, "kept": 8, "start_after": 0}


class SparseOuter:
    """e <- b e + D; the largest of e are sent, in two bits; what was not stays."""

    def __init__(self, *, decay: float = 0.9, contributors: bool = False, feedback: bool = True):
        self.decay, self.contributors, self.feedback = decay, contributors, feedback
        self.residuals = torch.zeros(SIZE, 1)

    def __call__(self, differences: Flats) -> torch.Tensor:
        given = torch.stack(differences) / SIZE + self.decay * self.residuals
        sent = coded(FEW, given)
        if self.feedback:
            self.residuals = given - sent
        if not self.contributors:
            return 0.5 * sent.sum(dim=0)
        return 0.5 * SIZE * sent.sum(dim=0) / (sent != 0).sum(dim=0).clamp(min=1)


@pytest.mark.parametrize("average", ["all", "contributors"])
def test_sparse_loco_steps_along_the_largest_elements(thread_ranks, average):
    algorithm = Algorithm.init("sparse_loco", average=average, error_feedback=0.9, **SPARSELY)
    state, _ = stacked.train_alike(thread_ranks, algorithm, sgd)
    rule = functools.partial(SparseOuter, contributors=average == "contributors")
    mutants = {
        "no feedback": rule(feedback=False), "no decay": rule(decay=1.0), "nothing": None,
        "the other mean": SparseOuter(contributors=average == "all"),
        "exact": lambda differences: 0.5 * torch.stack(differences).mean(dim=0),
    }  # fmt: skip
    wrong = {name: stacked.simulate_local(mutant, 5, sgd)[0] for name, mutant in mutants.items()}
    assert_only(state, stacked.simulate_local(rule(), 5, sgd)[0], wrong)


IN_WEIGHTS = Algorithm.init("sparse_loco", error_feedback="weights", average="all", hierarchical=False, **SPARSELY)


def test_what_sparse_loco_does_not_send_stays_in_the_weights_of_its_rank(thread_ranks):
    """The next difference has it: nothing is added to that from elsewhere."""

    def simulated(part: float = SIZE, **options: Any) -> list[State]:
        rule = SparseOuter(**{"decay": 0.0, **options})
        return stacked.simulate_local(rule, 5, sgd, left=lambda: list(part * rule.residuals))

    states = [state for state, _ in thread_ranks(SIZE, stacked.train, IN_WEIGHTS, sgd)]
    torch.testing.assert_close(states, simulated(), rtol=1e-4, atol=1e-6)
    assert differs(states[0], states[1])
    mutants = {
        "added to the next one as well": simulated(decay=0.9), "the other mean": simulated(contributors=True),
        "as small as it was sent": simulated(1.0), "undone": simulated(0.0),
        "nothing is sent": stacked.simulate_local(None, 5, sgd),
    }  # fmt: skip
    for name, mutant in mutants.items():
        assert differs(states[0], mutant[0]), name


def test_an_exchange_of_few_elements_leaves_the_mean_of_weights_alone():
    """What all have learned is moved between them, and none of it is lost: also by who adds up for others."""
    algorithm, pool = dataclasses.replace(IN_WEIGHTS, outer_lr=1.0), ThreadRanks(9)
    after = [state for state, _ in pool.run(stacked.train, algorithm, sgd, 5)]
    before = [state for state, _ in pool.run(stacked.train, dataclasses.replace(algorithm, sync_every=6), sgd, 5)]
    for name in after[0]:
        means = [torch.stack([state[name] for state in states]).mean(dim=0) for states in (before, after)]
        torch.testing.assert_close(*means, rtol=0, atol=1e-12)
    assert differs(before[0], after[0])


def test_a_rank_without_data_keeps_what_it_has_not_sent(thread_ranks):
    """In plain torch: what it sends in the second exchange is what was left of the first."""
    batches, (numel, places) = (5, 10), stacked.whole_layout()

    def learn_while_there_is_data() -> State:
        loop = Loop("with_bagua", model_of, sgd, loss_of, algorithm=dataclasses.replace(IN_WEIGHTS, outer_lr=1.0))
        with loop.wrapped.join():
            loop.train(batches[loop.rank])
        return snapshot(loop.model)

    ranks = stacked.Replicas(2, sgd, model_of, loss_of)
    anchor = stacked.flatten(snapshot(ranks.models[0]), numel, places)
    for trained, steps in (((0, 1), range(5)), ((1,), range(5, 10))):
        for rank in trained:
            for step in steps:
                descend(ranks.optimizers[rank], loss_of(ranks.models[rank], rank, step))
        weights = [stacked.flatten(state, numel, places) for state in ranks.states()]
        sent = [coded(FEW, (anchor - one) / 2) for one in weights]
        for model, one, own in zip(ranks.models, weights, sent, strict=True):
            stacked.write(model, one + 2 * own - sum(sent), places)
        anchor = anchor - sum(sent)
    ranks.assert_equals(thread_ranks(2, learn_while_there_is_data))


@pytest.mark.parametrize("codec", ["int2", "sign", "topk", "block_topk"])
def test_a_codec_that_loses_nearly_all_needs_feedback(codec):
    with pytest.raises(ConfigurationError, match=r"error_feedback=0\.9"):
        Algorithm.init("diloco", codec=codec)
    assert Algorithm.init("diloco", codec="int4").codec == Int4()
    assert Algorithm.init("diloco", codec=Int2(seed=3)).codec.unbiased


QADAM_LR, QADAM_WARMUP, QADAM_EPS = 0.01, 3, 0.01
qadam = functools.partial(
    QAdamOptimizer, lr=QADAM_LR, warmup_steps=QADAM_WARMUP, betas=(0.8, 0.9), eps=QADAM_EPS, weight_decay=0.1
)


def qadam_loop() -> Loop:
    return Loop("with_bagua", make_optimizer=qadam, algorithm="qadam", bucket_bytes=10**6)


@on_ranks(2)
def test_parameter_groups_keep_their_own_betas():
    """Also in one bucket. A group with ``beta1 = 0`` has the gradient as its momentum."""
    model = mlp()
    first, *others = model.parameters()
    groups = [{"params": [first], "betas": (0.0, 0.9)}, {"params": others}]
    optimizer = QAdamOptimizer(groups, lr=QADAM_LR, warmup_steps=1, eps=QADAM_EPS)
    wrapped = with_bagua(model, [optimizer], QAdamAlgorithm())
    harness.train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(4))
    assert torch.allclose(optimizer.momentum(first), first.grad, atol=1e-6)
    assert optimizer.momentum(others[0]).abs().max() > 0


def test_clipping_and_an_unknown_scaler_change_nothing_but_what_they_should(thread_ranks):
    """The gradient that is left leads to the momentum, so it may be scaled and clipped like any other."""

    def train_scaled(scale: float) -> tuple[State, list[float]]:
        loop, norms = qadam_loop(), []
        for _ in range(10):
            loop.optimizer.zero_grad()
            (loop.loss() * scale).backward()
            for parameter in loop.model.parameters():
                parameter.grad.div_(scale)
            norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)))
            loop.optimizer.step()
        return snapshot(loop.model), norms

    plain, scaled = (thread_ranks(2, train_scaled, scale) for scale in (1.0, 1024.0))
    assert_same_on_all_ranks([weights for weights, _ in scaled])
    assert plain[0][1] == pytest.approx(scaled[0][1], rel=0.2)
    assert all(norm > 0.1 for norm in plain[0][1])
    for name, value in plain[0][0].items():
        assert torch.allclose(value, scaled[0][0][name], atol=QADAM_LR)


@on_ranks(2)
def test_a_gradient_that_is_not_finite_spoils_its_own_step_only():
    """Its block becomes NaN as a whole, with the padding between parameters that lies in it."""
    loop, finite = qadam_loop(), []
    for step in range(QADAM_WARMUP + 3):
        loop.optimizer.zero_grad()
        factor = float("inf") if step == QADAM_WARMUP and loop.rank == 0 else 1.0
        (loop.loss() * factor).backward()
        finite.append(all(parameter.grad.isfinite().all() for parameter in loop.model.parameters()))
        if finite[-1]:
            loop.optimizer.step()
    assert finite == [True] * QADAM_WARMUP + [False, True, True]


def test_a_declaration_with_an_optimizer_prints_compares_and_pickles_without_it():
    optimizer = qadam(mlp().parameters())
    declaration = QAdamAlgorithm(optimizer, hierarchical=False)
    assert repr(declaration) == "QAdamAlgorithm(hierarchical=False)"
    assert declaration == QAdamAlgorithm(hierarchical=False)
    assert pickle.loads(pickle.dumps(declaration)).q_adam_optimizer is None
    assert copy.copy(declaration) == declaration
    assert declaration.reify(bagua.comm.solo_group()).options.q_adam_optimizer is optimizer


def test_the_optimizer_may_be_named(thread_ranks):
    def train_named(named: bool) -> State:
        def wrap(model: torch.nn.Module, optimizer: QAdamOptimizer, **_: object) -> torch.nn.Module:
            return with_bagua(model, [optimizer], QAdamAlgorithm(optimizer if named else None))

        return Loop(wrap, make_optimizer=qadam).train(5)

    assert_same_on_all_ranks([thread_ranks(2, train_named, True)[0], thread_ranks(2, train_named, False)[0]])
