"""One-bit LAMB and 0/1 Adam against their formulas, for all ranks at once in one process; and what must not pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bagua.comm
from bagua.algorithms import Algorithm, OneBitLambAlgorithm, ZeroOneAdamAlgorithm
from bagua.algorithms.gradients.zero_one_adam import Doubling, Thinning
from bagua.errors import ConfigurationError
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer, ZeroOneAdamOptimizer
from bagua.parallel import with_bagua
from tests import harness
from tests.algorithms.lossy_simulation import Layout
from tests.algorithms.stacked import (
    SIZE,
    STEPS,
    CodedSlices,
    Flats,
    differs,
    flatten,
    gradients_of,
    loss_of,
    model_of,
    one_bit_of_rows,
    only_parameters,
    train,
    whole_layout,
    write,
)
from tests.harness import State, assert_close, assert_same_on_all_ranks, mlp, snapshot, train_steps

pytestmark = pytest.mark.threads

BLOCK, BETA1, BETA2, EPS, LR = 16, 0.9, 0.99, 1e-3, 0.003


class SignsOfSlices:
    """The sum of what everyone has, slice by slice in signs, with a residual for what either coding loses."""

    def __init__(self, places: list[tuple[str, int]], *, feedback: bool = True, exact: bool = False) -> None:
        self.exchange = CodedSlices(lambda rows: one_bit_of_rows(rows, BLOCK), places)
        self.feedback, self.exact, self.residuals = feedback, exact, torch.zeros(SIZE, 1, dtype=torch.float64)

    def __call__(self, flats: Flats) -> torch.Tensor:
        """The mean of ``flats``, or what is left of it."""
        if self.exact:
            return torch.stack(flats).mean(dim=0)
        result, lost = self.exchange(torch.stack(flats) / SIZE + self.residuals)
        self.residuals = lost if self.feedback else self.residuals
        return only_parameters(result, self.exchange.places)


def at(flat: torch.Tensor, name: str, places: list[tuple[str, int]]) -> torch.Tensor:
    shape = model_of().get_parameter(name).shape
    offset = dict(places)[name]
    return flat[offset : offset + shape.numel()].view(shape)


# One-bit LAMB.

LAMB_WARMUP, DECAY = 20, 0.1


def lamb(parameters):
    return OneBitLambOptimizer(
        parameters, lr=LR, warmup_steps=LAMB_WARMUP, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY
    )


class Lamb:
    """The published rule for all tensors of one model; momenta of the compressed stage are given to it."""

    def __init__(self, model: torch.nn.Module, *, freshens: bool = True) -> None:
        self.x = {name: one.detach() for name, one in model.named_parameters()}
        zeros = {name: torch.zeros_like(one) for name, one in self.x.items()}
        self.m, self.v, self.w = zeros, dict(zeros), dict(zeros)
        self.ratios: dict[str, float] = {}
        self.factors = dict.fromkeys(self.x, 1.0)
        self.freshens = freshens

    def step(self, t: int, momenta: State) -> None:
        for name, x in self.x.items():
            gradient = (momenta[name] - BETA1 * self.m[name]) / (1 - BETA1)
            self.m[name] = momenta[name]
            if t <= LAMB_WARMUP:
                self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * gradient**2
            self.w[name] = BETA2 * self.w[name] + (1 - BETA2) * gradient**2
            denominator = (self.v[name] / (1 - BETA2 ** min(t, LAMB_WARMUP))).sqrt() + EPS
            direction = self.m[name] / (1 - BETA1**t) / denominator + DECAY * x
            if t <= LAMB_WARMUP:
                ratio = min(max(float(x.norm() / direction.norm()), 0.01), 10.0)
                self.ratios[name] = 0.9 * self.ratios[name] + 0.1 * ratio if name in self.ratios else ratio
            else:
                fresh = (self.w[name] / (1 - BETA2**t)).sqrt() + EPS
                before = self.factors[name]
                factor = min(max(float((denominator / fresh).max()), 0.5, 0.9 * before), 4.0, 1.1 * before)
                self.factors[name] = factor if self.freshens else 1.0
                ratio = self.factors[name] * self.ratios[name]
            x.sub_(LR * ratio * direction)
            if t == LAMB_WARMUP:  # Elements that were as good as dead get the mean of the others.
                alive = self.v[name] >= 2.0**-16 * self.v[name].mean()
                mean = self.v[name].sum() / alive.sum()
                self.v[name] = torch.where(alive, self.v[name], mean)
                self.w[name] = self.v[name].clone()


def simulate_lamb(
    layout: Layout, *, scaled: bool = True, feedback: bool = True, exact: bool = False, freshens: bool = True
) -> State:
    model = model_of()
    rule = Lamb(model, freshens=freshens)
    exchanges = [SignsOfSlices(places, feedback=feedback, exact=exact) for _, places in layout]
    scaling = dict.fromkeys(rule.x, 1.0)
    for t in range(1, STEPS + 1):
        of_ranks = [gradients_of(model, rank, t - 1) for rank in range(SIZE)]
        own = [{name: BETA1 * rule.m[name] + (1 - BETA1) * g for name, g in one.items()} for one in of_ranks]
        if t == LAMB_WARMUP + 1 and scaled:
            sizes = {name: float(m.square().mean().sqrt()) for name, m in rule.m.items()}
            scaling = {name: sum(sizes.values()) / len(sizes) / size for name, size in sizes.items()}
        momenta: State = {}
        for exchange, (numel, places) in zip(exchanges, layout, strict=True):
            flats = [flatten({name: m * scaling[name] for name, m in one.items()}, numel, places) for one in own]
            result = exchange(flats) if t > LAMB_WARMUP else torch.stack(flats).mean(dim=0)
            momenta.update({name: at(result, name, places) / scaling[name] for name, _ in places})
        with torch.no_grad():
            rule.step(t, momenta)
    return snapshot(model)


def test_one_bit_lamb_is_the_formula(thread_ranks):
    results = thread_ranks(SIZE, train, OneBitLambAlgorithm(block_numel=BLOCK), lamb)
    assert_same_on_all_ranks([state for state, _ in results])
    state, layout = results[0]
    assert len(layout) > 1
    assert_close(state, simulate_lamb(layout))
    for mutant in ({"scaled": False}, {"feedback": False}, {"exact": True}, {"freshens": False}):
        assert differs(state, simulate_lamb(layout, **mutant)), mutant


class Reads(TorchDispatchMode):
    """Counts what waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **keywords or {})


@pytest.mark.parametrize("steps", [LAMB_WARMUP // 2, LAMB_WARMUP + 2], ids=["in the warm-up", "after it"])
def test_one_bit_lamb_does_not_read_a_number_for_each_tensor(steps):
    counts = []
    for size in (1, 9):
        optimizer = lamb([torch.nn.Parameter(torch.ones(3) * (1 + number)) for number in range(size)])
        for _ in range(steps):
            optimizer.zero_grad()
            sum(one.square().sum() for one in optimizer.param_groups[0]["params"]).backward()
            with Reads() as reads:
                optimizer.step()
        counts.append(reads.count)
    assert counts[0] == counts[1]


# 0/1 Adam.

TOGETHER, COUNT, PERIOD, LONGEST = 24, 3, 9, 4


def zero_one(parameters):
    return ZeroOneAdamOptimizer(parameters, lr=LR, warmup_steps=TOGETHER, betas=(BETA1, BETA2), eps=EPS)


def decaying(optimizer: torch.optim.Optimizer, step: int) -> None:
    """A schedule of learning rates, so that their sum is not a number of steps."""
    for group in optimizer.param_groups:
        group["lr"] = LR / (1 + 0.1 * step)


def train_zero_one(algorithm: Algorithm) -> tuple[State, Layout]:
    rank = bagua.comm.get_rank()
    model = model_of(rank)
    optimizer = zero_one(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm, bucket_bytes=1500)
    layout = []
    for step in range(STEPS):
        decaying(optimizer, step)
        optimizer.zero_grad()
        loss_of(wrapped, rank, step).backward()
        optimizer.step()
        if step == TOGETHER - 1:
            layout = [(one.numel, list(zip(one.names, one.offsets, strict=True))) for one in wrapped.bagua_buckets]
    return snapshot(model), layout


#: Steps from 1 whose gradients are exact, and those after which ranks exchange what they have learned.
EXACT = {1, 2, 3, 4, 6, 8, 12, 16, 20, 24}
EXCHANGED = {24 + t for t in (*range(1, 10), 10, 12, 14, 16, 18, 20, 24, 28, 32, 36)}


def simulate_zero_one(
    layout: Layout,
    *,
    exact: frozenset[int] | set[int] = frozenset(EXACT),
    exchanged: frozenset[int] | set[int] = frozenset(EXCHANGED),
    feedback: bool = True,
    bits: bool = True,
    sets_momentum: bool = True,
) -> State:
    models = [model_of() for _ in range(SIZE)]
    numel, places = whole_layout()
    x = flatten(snapshot(models[0]), numel, places)
    common, m, v, k, rates = x.clone(), [torch.zeros(numel).double()] * SIZE, torch.zeros(numel).double(), 0, 0.0
    xs = [x.clone() for _ in range(SIZE)]
    signs = {i: SignsOfSlices(places, feedback=feedback, exact=not bits) for i, (_, places) in enumerate(layout)}
    last = SignsOfSlices(places, feedback=feedback, exact=not bits)
    for t in range(1, STEPS + 1):
        lr = LR / (1 + 0.1 * (t - 1))
        for model, weights in zip(models, xs, strict=True):
            write(model, weights, places)
        of_ranks = [gradients_of(model, rank, t - 1) for rank, model in enumerate(models)]
        gradients = [flatten(one, numel, places) for one in of_ranks]
        if t <= TOGETHER:
            mean = torch.stack(gradients).mean(dim=0)
            if t not in exact:
                mean = combined(signs, layout, of_ranks, numel, places)
            else:
                k, v = k + 1, BETA2 * v + (1 - BETA2) * mean**2
            gradients = [mean] * SIZE
        m = [BETA1 * own + (1 - BETA1) * g for own, g in zip(m, gradients, strict=True)]
        denominator = (v / (1 - BETA2**k)).sqrt() + EPS
        if t == TOGETHER + 1:
            common = xs[0].clone()
        xs = [own - lr / (1 - BETA1**t) * moment / denominator for own, moment in zip(xs, m, strict=True)]
        if t == TOGETHER:
            v = without_dead(v, places)
        rates += lr / (1 - BETA1**t) if t > TOGETHER else 0.0
        if t in exchanged:
            total = last([(common - own) * denominator for own in xs])
            common = common - total / denominator
            xs = [common.clone() for _ in range(SIZE)]
            m = [total / rates] * SIZE if sets_momentum else m
            rates = 0.0
    write(models[0], xs[0], places)
    return snapshot(models[0])


def combined(signs, layout: Layout, of_ranks: list[State], numel: int, places) -> torch.Tensor:
    """What buckets of gradients become, laid out as the whole."""
    found: State = {}
    for index, (size, own) in enumerate(layout):
        result = signs[index]([flatten(one, size, own) for one in of_ranks])
        found.update({name: at(result, name, own) for name, _ in own})
    return flatten(found, numel, places)


def without_dead(v: torch.Tensor, places) -> torch.Tensor:
    found: State = {}
    for name, _ in places:
        one = at(v, name, places)
        alive = one >= 2.0**-16 * one.mean()
        found[name] = torch.where(alive, one, one.sum() / alive.sum())
    return flatten(found, len(v), places)


def algorithm_of() -> ZeroOneAdamAlgorithm:
    return ZeroOneAdamAlgorithm(block_numel=BLOCK, variance_steps=COUNT, period_steps=PERIOD, longest_period=LONGEST)


def test_zero_one_adam_is_the_formula(thread_ranks):
    results = thread_ranks(SIZE, train_zero_one, algorithm_of())
    states, layout = [state for state, _ in results], results[0][1]
    assert len(layout) > 1
    assert_close(states[0], simulate_zero_one(layout))
    mutants = {
        "every gradient exact": {"exact": set(range(1, TOGETHER + 1))},
        "an exchange after each step": {"exchanged": set(range(TOGETHER + 1, STEPS + 1))},
        "no feedback": {"feedback": False},
        "exact": {"bits": False},
        "no common momentum": {"sets_momentum": False},
        "nothing": {"exchanged": set()},
    }
    for name, mutant in mutants.items():
        assert differs(states[0], simulate_zero_one(layout, **mutant)), name


def test_schedules_are_those_of_the_paper():
    assert {t for t in range(1, TOGETHER + 1) if Thinning(count=COUNT).due(t)} == EXACT
    doubling = Doubling(period_steps=PERIOD, longest=LONGEST)
    assert {TOGETHER + t for t in range(1, 37) if doubling.due(t)} == EXCHANGED
    for t in range(1, 60):
        assert doubling.round(t) == sum(doubling.due(one) for one in range(1, t + 1))


def test_skipped_updates_leave_the_second_moments_equal(thread_ranks):
    """A GradScaler may skip some; ranks that train alone must not estimate for themselves."""

    def train_with_a_skip() -> list[torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = ZeroOneAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=5, eps=0.01)
        wrapped = with_bagua(model, [optimizer], ZeroOneAdamAlgorithm(period_steps=2, longest_period=2))
        for step in range(12):
            optimizer.zero_grad()
            harness.loss_of(wrapped, rank, step).backward()
            if step != 2:
                optimizer.step()
        return [optimizer.state[one]["exp_avg_sq"].clone() for one in model.parameters()]

    first, *others = thread_ranks(3, train_with_a_skip)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_a_tensor_without_gradients_in_the_warm_up_moves_alike_on_all_ranks(thread_ranks):
    def train_late() -> tuple[State, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp()
        late = model[4].bias
        optimizer = ZeroOneAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3, eps=0.01)
        wrapped = with_bagua(model, [optimizer], ZeroOneAdamAlgorithm(longest_period=1), find_unused_parameters=True)
        for step in range(8):
            optimizer.zero_grad()
            harness.loss_of(wrapped, rank, step).backward()
            if step < 3:
                late.grad.zero_()
            optimizer.step()
        return snapshot(model), optimizer.state[late]["exp_avg_sq"].clone()

    results = thread_ranks(2, train_late)
    assert_same_on_all_ranks([state for state, _ in results])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[0][1] > 0).all()


def test_what_has_no_estimate_does_not_move():
    """Its first gradients were no exact ones: to divide by nothing would throw it away."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = ZeroOneAdamOptimizer([weight], lr=0.1, warmup_steps=5)
    for exact in (False, False, True):
        before = weight.detach().clone()
        weight.grad = torch.full((3,), 2.0)
        optimizer.note(weight, exact=exact)
        optimizer.step()
        assert torch.equal(weight, before) is not exact
    assert (weight - 1).abs().max() <= 0.1 * 1.001
    fresh = torch.nn.Parameter(torch.ones(3))
    optimizer = ZeroOneAdamOptimizer([fresh])
    optimizer.freeze(fresh)
    fresh.grad = torch.ones(3)
    with pytest.raises(ConfigurationError, match="no second moment was estimated"):
        optimizer.step()


def test_alone_they_are_adam_and_lamb():
    """One rank: 0/1 Adam is Adam in its warm-up; nothing is exchanged."""
    model, other = mlp(), mlp()
    optimizer = ZeroOneAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=20)
    train_steps(model, optimizer, 0, range(10))
    train_steps(other, torch.optim.Adam(other.parameters(), lr=0.01), 0, range(10))
    assert_close(snapshot(model), snapshot(other))


@pytest.mark.parametrize(
    ("make", "kind"), [(OneBitLambAlgorithm, "OneBitLambOptimizer"), (ZeroOneAdamAlgorithm, "ZeroOneAdamOptimizer")]
)
def test_another_optimizer_is_refused(thread_ranks, make, kind):
    def wrap() -> None:
        model = mlp()
        with pytest.raises(ConfigurationError, match=kind):
            with_bagua(model, [QAdamOptimizer(model.parameters())], make())

    thread_ranks(2, wrap)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OneBitLambAlgorithm(block_numel=12),
        lambda: ZeroOneAdamAlgorithm(block_numel=0),
        lambda: ZeroOneAdamAlgorithm(variance_steps=0),
        lambda: ZeroOneAdamAlgorithm(period_steps=0),
        lambda: ZeroOneAdamAlgorithm(longest_period=3),
        lambda: OneBitLambOptimizer([torch.nn.Parameter(torch.ones(1))], ratio_beta=1.0),
        lambda: OneBitLambOptimizer([torch.nn.Parameter(torch.ones(1))], warmup_steps=0),
    ],
)
def test_options_out_of_range_are_refused_at_once(make):
    with pytest.raises(ConfigurationError):
        make()
