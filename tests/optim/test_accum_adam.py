"""AccumAdam and AccumAdamW against their formulas, and the functions that make optimizers of buckets."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from bagua.errors import ConfigurationError
from bagua.optim import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)

LR, BETA1, BETA2, EPS = 0.1, 0.8, 0.9, 1e-8


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.full((4,), -2.0))]


def by_formula(steps: int, period: int, decay: float, decoupled: bool) -> list[torch.Tensor]:
    """The published update, in float64, one number after the other."""
    weights = [parameter.detach().double() for parameter in parameters()]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    sums = [torch.zeros_like(weight) for weight in weights]
    for step in range(steps):
        t = step // period + 1
        for position, gradient in enumerate(gradients(step)):
            g, x = gradient.double(), weights[position]
            if decoupled:
                x = x * (1 - LR * decay)
            else:
                g = g + decay * x
            m = BETA1 * first[position] + (1 - BETA1) * g
            v = BETA2 * second[position] + (1 - BETA2) * g**2
            weights[position] = x - LR * (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS)
            sums[position] += g
            if step % period == period - 1:
                mean = sums[position] / period
                first[position] = BETA1 * first[position] + (1 - BETA1) * mean
                second[position] = BETA2 * second[position] + (1 - BETA2) * mean**2
                sums[position] = torch.zeros_like(mean)
    return weights


def trained(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], steps: range) -> list[torch.Tensor]:
    for step in steps:
        for parameter, gradient in zip(held, gradients(step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for parameter, gradient in zip(held, gradients(step), strict=True):
            assert torch.equal(parameter.grad, gradient), "gradients are not changed"
    return [parameter.detach().clone() for parameter in held]


@pytest.mark.parametrize("period", [1, 3, 4])
@pytest.mark.parametrize("kind", [AccumAdam, AccumAdamW])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_published_update(kind, period, decay):
    held = parameters()
    optimizer = kind(held, LR, (BETA1, BETA2), EPS, decay, period)
    expected = by_formula(10, period, decay, kind is AccumAdamW)
    for found, wanted in zip(trained(optimizer, held, range(10)), expected, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_it_goes_on_where_its_state_was_taken():
    held = parameters()
    optimizer = AccumAdam(held, LR, accum_iter=4)
    trained(optimizer, held, range(5))  # in the middle of a period
    others = [nn.Parameter(parameter.detach().clone()) for parameter in held]
    again = AccumAdam(others, LR, accum_iter=4)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(trained(optimizer, held, range(5, 10)), trained(again, others, range(5, 10)), strict=True):
        assert torch.equal(one, other)


def test_parameters_that_skip_steps_have_periods_of_their_own():
    held = parameters()
    optimizer = AccumAdam(held, LR, (BETA1, BETA2), EPS, 0.0, 2)
    for step in range(6):
        held[0].grad = gradients(step)[0]
        held[1].grad = gradients(step)[1] if step >= 3 else None
        optimizer.step()
    assert [int(optimizer.state[parameter]["step"]) for parameter in held] == [6, 3]
    alone = parameters()
    late = AccumAdam(alone, LR, (BETA1, BETA2), EPS, 0.0, 2)
    for step in range(3, 6):
        alone[1].grad = gradients(step)[1]
        late.step()
    assert torch.equal(alone[1], held[1])


@pytest.mark.parametrize("make", [optim_fn_adam, optim_fn_adamw, optim_fn_accum_adam, optim_fn_accum_adamw])
def test_weight_decay_is_for_matrices(make):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(3, 2))
    named = list(model.named_parameters())
    optimizer = functools.partial(make, lr=0.5, weight_decay=0.25)(named)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(named)
    decays = {name for name, parameter in named if decay[id(parameter)] == 0.25}
    assert decays == {"0.weight", "2.weight", "4.weight"}
    assert all(decay[id(parameter)] == 0.0 for name, parameter in named if name not in decays)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize("make", [optim_fn_adam, optim_fn_accum_adamw])
def test_a_bucket_of_biases_only(make):
    bias = nn.Parameter(torch.ones(3))
    optimizer = make([("bias", bias)])
    bias.grad = torch.ones(3)
    optimizer.step()
    assert bool((bias < 1).all())


def test_gradients_that_it_cannot_use_are_refused_before_anything_changes():
    first, second = parameters()
    optimizer = AccumAdam([first, second])
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second).to_sparse()
    with pytest.raises(ConfigurationError, match="sparse"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # Old versions of torch pass it themselves.
def test_the_schedule_rises_and_falls():
    optimizer = torch.optim.SGD(parameters(), lr=2.0)
    schedule = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=10, t_warmup=4, cosine_eta_min=0.5, warmup_decay=0.1)
    rates = []
    for _ in range(15):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.2)
    assert rates[2] == pytest.approx(2.0 * 0.55)
    assert rates[4] == max(rates) == 2.0
    assert rates[9] == pytest.approx(1.25)
    assert rates[14] == pytest.approx(0.5)


def test_a_schedule_without_a_rise():
    optimizer = torch.optim.SGD(parameters(), lr=2.0)
    schedule = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=10, t_warmup=0)
    assert schedule.get_last_lr() == [2.0]
