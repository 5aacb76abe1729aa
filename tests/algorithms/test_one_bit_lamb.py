"""One-bit LAMB against its formula, for all ranks at once in one process; and what must not pass for it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagua.algorithms import OneBitLambAlgorithm
from bagua.compression import Sign
from bagua.errors import ConfigurationError
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.parallel import with_bagua
from tests.algorithms.stacked import (
    SIZE,
    STEPS,
    Layout,
    MeanOfSlices,
    assert_only,
    differs,
    flatten,
    gradients_of,
    model_of,
    train_alike,
)
from tests.harness import State, assert_close, mlp, snapshot
from tests.parallel.wrapping import on_ranks

BLOCK, BETA1, BETA2, EPS, LR = 16, 0.9, 0.99, 1e-3, 0.003


def at(flat: torch.Tensor, name: str, places: list[tuple[str, int]]) -> torch.Tensor:
    shape = model_of().get_parameter(name).shape
    offset = dict(places)[name]
    return flat[offset : offset + shape.numel()].view(shape)


# One-bit LAMB.

LAMB_WARMUP, DECAY = 20, 0.1


def lamb(parameters, beta2=BETA2):
    return OneBitLambOptimizer(
        parameters, lr=LR, warmup_steps=LAMB_WARMUP, betas=(BETA1, beta2), eps=EPS, weight_decay=DECAY
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
            if t <= LAMB_WARMUP:
                self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * gradient**2
            self.w[name] = self.beta2 * self.w[name] + (1 - self.beta2) * gradient**2
            denominator = (self.v[name] / (1 - self.beta2 ** min(t, LAMB_WARMUP))).sqrt() + EPS
            direction = self.m[name] / (1 - BETA1**t) / denominator + DECAY * x
            if t <= LAMB_WARMUP:
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
    exchanges = [MeanOfSlices(Sign(BLOCK), places, feedback=feedback, exact=exact) for _, places in layout]
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
    state, layout = train_alike(thread_ranks, OneBitLambAlgorithm(block_numel=BLOCK), lamb)
    assert len(layout) > 1
    mutants = ({"scaled": False}, {"feedback": False}, {"exact": True}, {"freshens": False})
    assert_only(state, simulate_lamb(layout), {str(one): simulate_lamb(layout, **one) for one in mutants})


def _ratios_when_gradients_jump(make_step) -> State:
    """The weights when gradients have become a hundredth after the warm-up, and grow a thousandfold then."""
    model = model_of()
    step = make_step(model)
    for t in range(1, LAMB_WARMUP + 61):
        gradients = gradients_of(model, 0, t % 3)
        size = 1.0 if t <= LAMB_WARMUP else 0.01 if t <= LAMB_WARMUP + 30 else 10.0
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


@on_ranks(2)
def test_another_optimizer_is_refused():
    model = mlp()
    with pytest.raises(ConfigurationError, match="OneBitLambOptimizer"):
        with_bagua(model, [QAdamOptimizer(model.parameters())], OneBitLambAlgorithm())
