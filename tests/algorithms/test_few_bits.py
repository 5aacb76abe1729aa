"""Algorithms in few bits against their formulas, written plainly, over fifty steps; and what must not pass for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagua.algorithms import (
    Algorithm,
    DiLoCoAlgorithm,
    Every,
    Exchange,
    Gradients,
    Mean,
    OneBitAdamAlgorithm,
    OneBitLambAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    Replace,
    SparseLoCoAlgorithm,
    TopKAlgorithm,
)
from bagua.compression import BlockTopK, Codec, Int2, Int4, MinMaxUInt8, Sign, TopK
from bagua.errors import ConfigurationError
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.primitives import AllGatherReducer, MomentumCorrection
from bagua.testing import ThreadRanks
from tests.algorithms.replicas import Replicas, plain_sgd
from tests.algorithms.stacked import (
    SIZE,
    STEPS,
    Combine,
    Flats,
    Layout,
    MeanOfSlices,
    PowerSgd,
    assert_only,
    differs,
    exact,
    flatten,
    gradients_of,
    loss_of,
    mean,
    model_of,
    simulate,
    simulate_local,
    train,
    train_alike,
    whole_layout,
    write,
)
from tests.harness import State, assert_close, coded, sgd, snapshot
from tests.parallel.wrapping import Loop

# Deep gradient compression.


class DeepGradientCompression:
    """u <- m u + g; v <- v + u; the largest of v are sent, and then both are zero there."""

    def __init__(self, ratio: float, *, momentum: float = 0.9, clip: float = 1e9, feedback: bool = True) -> None:
        self.ratio, self.momentum, self.clip, self.feedback = ratio, momentum, clip, feedback
        self.u: dict[int, Flats] = {}
        self.v: dict[int, Flats] = {}

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        zeros = [torch.zeros_like(flat) for flat in flats]
        us, vs = self.u.setdefault(index, zeros), self.v.setdefault(index, [one.clone() for one in zeros])
        total = torch.zeros_like(flats[0])
        for rank, flat in enumerate(flats):
            share = flat / len(flats)
            share = share * min(1.0, self.clip / float(share.norm()))
            u = self.momentum * us[rank] + share
            v = vs[rank] + u if self.feedback else u
            sent = coded(TopK(self.ratio), v)
            us[rank], vs[rank] = torch.where(sent != 0, 0, u), v - sent
            total += sent
        return total


def test_top_k_with_momentum_is_deep_gradient_compression(thread_ranks):
    algorithm = TopKAlgorithm(ratio=0.1, momentum=0.8, clip_norm=0.05, warmup_steps=0, density_steps=0)
    state, layout = train_alike(thread_ranks, algorithm, plain_sgd)
    assert len(layout) > 1
    right = DeepGradientCompression(0.1, momentum=0.8, clip=0.05)
    mutants: dict[str, Combine] = {
        "no feedback": DeepGradientCompression(0.1, momentum=0.8, clip=0.05, feedback=False),
        "no momentum": DeepGradientCompression(0.1, momentum=0.0, clip=0.05),
        "no clipping": DeepGradientCompression(0.1, momentum=0.8),
        "exact": mean,
        "nothing": lambda _, flats: flats[0],
    }
    run = functools.partial(simulate, layout, make=plain_sgd)
    assert_only(state, run(right), {name: run(mutant) for name, mutant in mutants.items()})


INSIDE = Mean(MomentumCorrection(AllGatherReducer(TopK(0.1)), 0.8), over="inside")


@pytest.mark.parametrize(
    ("algorithm", "hosts", "warmup"),
    [
        (TopKAlgorithm(ratio=0.1, momentum=0.8, warmup_steps=2, density_steps=0), [1], 2),
        (Algorithm.of(Exchange(Gradients(), Every(), INSIDE, Replace())), [1, 1], 0),
    ],
    ids=["alone", "alone on a host"],
)
def test_momenta_in_place_of_gradients_go_on_without_other_ranks(thread_ranks, algorithm, hosts, warmup):
    """The optimizer has no momentum of its own."""
    state, layout = thread_ranks(len(hosts), train, algorithm, plain_sgd, 12, hosts=hosts)[0]
    rule, calls = DeepGradientCompression(0.1, momentum=0.8), iter(range(12 * len(layout)))

    def combine(index: int, flats: Flats) -> torch.Tensor:
        return flats[0] if next(calls) < warmup * len(layout) else rule(index, flats)

    assert_close(state, simulate(layout, combine, plain_sgd, 12, size=1))


def test_the_density_falls_in_stages(thread_ranks):
    """Each stage sends what its part says; residuals stay from one to the next."""
    algorithm = TopKAlgorithm(ratio=0.25 / 16, warmup_steps=2, density_steps=8)
    assert algorithm.phases == ("warm-up", 0.25, 0.125, 0.0625, 0.03125, "reduced")
    found = [algorithm.phase(step, None) for step in range(12)]
    assert found == ["warm-up"] * 2 + [0.25] * 2 + [0.125] * 2 + [0.0625] * 2 + [0.03125] * 2 + ["reduced"] * 2
    state, layout = thread_ranks(SIZE, train, algorithm, plain_sgd, 12)[0]

    def simulated(first: float) -> State:
        rule = DeepGradientCompression(1.0, momentum=0.0)
        calls = iter(range(12 * len(layout)))

        def combine(index: int, flats: Flats) -> torch.Tensor:
            step = next(calls) // len(layout)
            rule.ratio = 1.0 if step < 2 else max(first / 2 ** ((step - 2) // 2), 0.25 / 16)
            return rule(index, flats)

        return simulate(layout, combine, plain_sgd, 12)

    assert_close(state, simulated(0.25))
    assert differs(state, simulated(0.25 / 16))


# PowerSGD with momentum.


def test_power_sgd_adds_the_momentum_after_decompression(thread_ranks):
    state, layout = thread_ranks(SIZE, train, PowerSGDAlgorithm(matrix_rank=2, momentum=0.8), plain_sgd)[0]

    def simulated(momentum: float, inner: Callable[[Layout], Combine]) -> State:
        rule, velocity = inner(layout), {}

        def combine(index: int, flats: Flats) -> torch.Tensor:
            found = rule(index, [flat / SIZE for flat in flats])
            velocity[index] = momentum * velocity.get(index, 0) + found
            return found + velocity[index]

        return simulate(layout, combine, plain_sgd)

    def low_rank(layout: Layout) -> Combine:
        return PowerSgd(layout, 2, torch.float64)

    assert_close(state, simulated(0.8, low_rank))
    assert differs(state, simulated(0.7, low_rank))
    assert differs(state, simulated(0.8, lambda _: exact))


# Adam in few bits.

WARMUP = 20


def adam(parameters):
    return QAdamOptimizer(parameters, lr=0.003, warmup_steps=WARMUP, weight_decay=0.1)


def simulate_momenta(layout: Layout, codec: Codec, **options: bool) -> State:
    """Momenta of everyone, whose mean is taken in coded slices after the warm-up; ``m`` is the optimizer's."""
    model, left = model_of(), WARMUP * len(layout)
    optimizer = adam(model.parameters())
    exchanges = [MeanOfSlices(codec, places, **options) for _, places in layout]

    def combine(index: int, flats: Flats) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left >= 0:
            return mean(index, flats)
        numel, places = layout[index]
        m = flatten({name: optimizer.momentum(model.get_parameter(name)) for name, _ in places}, numel, places)
        return (exchanges[index]([0.9 * m + 0.1 * flat for flat in flats]) - 0.9 * m) / 0.1

    return simulate(layout, combine, lambda _: optimizer, model=model)


@pytest.mark.parametrize(
    ("algorithm", "codec", "feedback"),
    [(OneBitAdamAlgorithm(block_numel=16), Sign(16), True), (QAdamAlgorithm(), MinMaxUInt8(), False)],
    ids=["signs", "bytes"],
)
def test_momenta_are_sent_in_few_bits_after_the_warm_up(thread_ranks, algorithm, codec, feedback):
    state, layout = train_alike(thread_ranks, algorithm, adam)
    assert len(layout) > 1
    mutants = ({"feedback": not feedback}, {"exact": True})
    wrong = {str(one): simulate_momenta(layout, codec, **one) for one in mutants}
    assert_only(state, simulate_momenta(layout, codec, feedback=feedback), wrong)


# One-bit LAMB.

DECAY = 0.1
BLOCK, BETA1, BETA2, EPS, LR = 16, 0.9, 0.99, 1e-3, 0.003


def at(flat: torch.Tensor, name: str, places: list[tuple[str, int]]) -> torch.Tensor:
    shape = model_of().get_parameter(name).shape
    offset = dict(places)[name]
    return flat[offset : offset + shape.numel()].view(shape)


def lamb(parameters, beta2=BETA2):
    return OneBitLambOptimizer(
        parameters, lr=LR, warmup_steps=WARMUP, betas=(BETA1, beta2), eps=EPS, weight_decay=DECAY
    )


class Lamb:
    """The published rule for all tensors of one model; momenta of the compressed stage are given to it."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        freshens: bool = True,
        beta2: float = BETA2,
        change: tuple[float, float] = (0.9, 1.1),
        limits: tuple[float, float] = (0.5, 4.0),
    ) -> None:
        self.x = {name: one.detach() for name, one in model.named_parameters()}
        zeros = {name: torch.zeros_like(one) for name, one in self.x.items()}
        self.m, self.v, self.w = zeros, dict(zeros), dict(zeros)
        self.ratios: dict[str, float] = {}
        self.factors = dict.fromkeys(self.x, 1.0)
        self.freshens, self.beta2, self.change, self.limits = freshens, beta2, change, limits

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
    exchanges = [MeanOfSlices(Sign(BLOCK), places, feedback=feedback, exact=exact) for _, places in layout]
    scaling = dict.fromkeys(rule.x, 1.0)
    for t in range(1, STEPS + 1):
        of_ranks = [gradients_of(model, rank, t - 1) for rank in range(SIZE)]
        own = [{name: BETA1 * rule.m[name] + (1 - BETA1) * g for name, g in one.items()} for one in of_ranks]
        if t == WARMUP + 1 and scaled:
            sizes = {name: float(m.square().mean().sqrt()) for name, m in rule.m.items()}
            scaling = {name: sum(sizes.values()) / len(sizes) / size for name, size in sizes.items()}
        momenta: State = {}
        for exchange, (numel, places) in zip(exchanges, layout, strict=True):
            flats = [flatten({name: m * scaling[name] for name, m in one.items()}, numel, places) for one in own]
            result = exchange(flats) if t > WARMUP else torch.stack(flats).mean(dim=0)
            momenta.update({name: at(result, name, places) / scaling[name] for name, _ in places})
        with torch.no_grad():
            rule.step(t, momenta)
    return snapshot(model)


def test_one_bit_lamb_is_the_formula(thread_ranks):
    state, layout = train_alike(thread_ranks, OneBitLambAlgorithm(block_numel=BLOCK), lamb)
    assert len(layout) > 1
    mutants = ({"scaled": False}, {"feedback": False}, {"exact": True}, {"freshens": False})
    assert_only(state, simulate_lamb(layout), {str(one): simulate_lamb(layout, **one) for one in mutants})


def _ratios_when_gradients_jump(make_step) -> State:
    """The weights when gradients have become a hundredth after the warm-up, and grow a thousandfold then."""
    model = model_of()
    step = make_step(model)
    for t in range(1, WARMUP + 61):
        gradients = gradients_of(model, 0, t % 3)
        size = 1.0 if t <= WARMUP else 0.01 if t <= WARMUP + 30 else 10.0
        step(t, {name: size * one for name, one in gradients.items()})
    return snapshot(model)


def test_trust_ratios_follow_gradients_that_jump_no_faster_and_no_farther_than_is_said():
    beta2 = 0.5  # It has seen what is new after a few steps.

    def by_optimizer(model):
        optimizer = lamb(model.parameters(), beta2)

        def step(_, gradients):
            for name, one in model.named_parameters():
                one.grad = gradients[name]
            optimizer.step()

        return step

    def by_rule(**mutant):
        def made(model):
            rule = Lamb(model, beta2=beta2, **mutant)

            def step(t, gradients):
                momenta = {name: BETA1 * rule.m[name] + (1 - BETA1) * one for name, one in gradients.items()}
                with torch.no_grad():
                    rule.step(t, momenta)

            return step

        return made

    found = _ratios_when_gradients_jump(by_optimizer)
    assert_close(found, _ratios_when_gradients_jump(by_rule()))
    changes = [{"change": one} for one in ((0.8, 1.1), (0.95, 1.1), (0.9, 1.2), (0.9, 1.05))]
    for mutant in (*changes, {"limits": (0.4, 4.0)}, {"limits": (0.5, 5.0)}):
        assert differs(found, _ratios_when_gradients_jump(by_rule(**mutant))), mutant


class Reads(TorchDispatchMode):
    """Counts what waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **keywords or {})


@pytest.mark.parametrize("steps", [WARMUP // 2, WARMUP + 2], ids=["in the warm-up", "after it"])
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


# Outer steps in few bits.

FEW = BlockTopK(block_numel=64, kept=8, value_bits=2)


class SparseOuter:
    """e <- b e + D; the largest of e are sent, in two bits; what was not stays."""

    def __init__(self, *, decay: float = 0.9, contributors: bool = False, feedback: bool = True):
        self.decay, self.contributors, self.feedback = decay, contributors, feedback
        self.residuals: Flats = []

    def __call__(self, differences: Flats) -> torch.Tensor:
        self.residuals = self.residuals or [torch.zeros_like(one) for one in differences]
        given = [d / SIZE + self.decay * e for d, e in zip(differences, self.residuals, strict=True)]
        sent = [coded(FEW, x) for x in given]
        if self.feedback:
            self.residuals = [x - q for x, q in zip(given, sent, strict=True)]
        total = torch.stack(sent)
        if not self.contributors:
            return 0.5 * total.sum(dim=0)
        return 0.5 * SIZE * total.sum(dim=0) / (total != 0).sum(dim=0).clamp(min=1)


@pytest.mark.parametrize("average", ["all", "contributors"])
def test_sparse_loco_steps_along_the_largest_elements(thread_ranks, average):
    options = {"outer_lr": 0.5, "error_feedback": 0.9, "block_numel": 64, "kept": 8, "start_after": 0}
    algorithm = SparseLoCoAlgorithm(5, average=average, **options)
    state, _ = train_alike(thread_ranks, algorithm, sgd)
    contributors = average == "contributors"
    right = SparseOuter(contributors=contributors)
    mutants = {
        "no feedback": SparseOuter(contributors=contributors, feedback=False),
        "no decay": SparseOuter(contributors=contributors, decay=1.0),
        "the other mean": SparseOuter(contributors=not contributors),
        "exact": lambda differences: 0.5 * torch.stack(differences).mean(dim=0),
        "nothing": None,
    }
    wrong = {name: simulate_local(mutant, 5, sgd)[0] for name, mutant in mutants.items()}
    assert_only(state, simulate_local(right, 5, sgd)[0], wrong)


IN_WEIGHTS = SparseLoCoAlgorithm(
    5,
    outer_lr=0.5,
    error_feedback="weights",
    block_numel=64,
    kept=8,
    average="all",
    start_after=0,
    hierarchical=False,
)


def test_what_sparse_loco_does_not_send_stays_in_the_weights_of_its_rank(thread_ranks):
    """The next difference has it: nothing is added to that from elsewhere."""

    def simulated(part: float = SIZE, **options: Any) -> list[State]:
        rule = SparseOuter(**{"decay": 0.0, **options})
        return simulate_local(rule, 5, sgd, left=lambda: [part * one for one in rule.residuals])

    states = [state for state, _ in thread_ranks(SIZE, train, IN_WEIGHTS, sgd)]
    for state, expected in zip(states, simulated(), strict=True):
        assert_close(state, expected)
    assert differs(states[0], states[1])
    mutants = {
        "added to the next one as well": simulated(decay=0.9),
        "the other mean": simulated(contributors=True),
        "as small as it was sent": simulated(1.0),
        "undone": simulated(0.0),
        "nothing is sent": simulate_local(None, 5, sgd),
    }
    for name, mutant in mutants.items():
        assert differs(states[0], mutant[0]), name


@pytest.mark.parametrize("size", [4, 9], ids=["everyone receives all", "by ranges"])
def test_an_exchange_of_few_elements_leaves_the_mean_of_weights_alone(size):
    """What all have learned is moved between them, and none of it is lost: also by who adds up for others."""
    algorithm, pool = dataclasses.replace(IN_WEIGHTS, outer_lr=1.0), ThreadRanks(size)
    after = [state for state, _ in pool.run(train, algorithm, sgd, 5)]
    before = [state for state, _ in pool.run(train, dataclasses.replace(algorithm, sync_every=6), sgd, 5)]
    for name in after[0]:
        means = [torch.stack([state[name] for state in states]).mean(dim=0) for states in (before, after)]
        torch.testing.assert_close(*means, rtol=0, atol=1e-12)
    assert differs(before[0], after[0])


def test_a_rank_without_data_keeps_what_it_has_not_sent(thread_ranks):
    """In plain torch: what it sends in the second exchange is what was left of the first."""
    batches, (numel, places) = (5, 10), whole_layout()

    def learn_while_there_is_data() -> State:
        loop = Loop("with_bagua", model_of, sgd, loss_of, algorithm=dataclasses.replace(IN_WEIGHTS, outer_lr=1.0))
        with loop.wrapped.join():
            loop.train(batches[loop.rank])
        return snapshot(loop.model)

    ranks = Replicas(2, sgd, model_of, loss_of)
    anchor = flatten(snapshot(ranks.models[0]), numel, places)
    for trained, steps in (((0, 1), range(5)), ((1,), range(5, 10))):
        for rank in trained:
            for step in steps:
                ranks.optimizers[rank].zero_grad()
                loss_of(ranks.models[rank], rank, step).backward()
                ranks.optimizers[rank].step()
        weights = [flatten(state, numel, places) for state in ranks.states()]
        sent = [coded(FEW, (anchor - one) / 2) for one in weights]
        for model, one, own in zip(ranks.models, weights, sent, strict=True):
            write(model, one + 2 * own - sum(sent), places)
        anchor = anchor - sum(sent)
    ranks.assert_equals(thread_ranks(2, learn_while_there_is_data))


@pytest.mark.parametrize("codec", ["int2", "sign", "topk", "block_topk"])
def test_a_codec_that_loses_nearly_all_needs_feedback(codec):
    with pytest.raises(ConfigurationError, match=r"error_feedback=0\.9"):
        DiLoCoAlgorithm(codec=codec)
    assert DiLoCoAlgorithm(codec="int4").codec == Int4()
    assert DiLoCoAlgorithm(codec=Int2(seed=3)).codec.unbiased
