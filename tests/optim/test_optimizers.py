"""AccumAdam and the optimizer of QAdam by themselves, against their formulas."""

import copy

import pytest
import torch
from torch import nn

from bagua import optim
from bagua.errors import ConfigurationError
from tests.harness import assert_close, loss_of, mlp, snapshot, train_steps

LR, BETA1, BETA2, EPS = 0.1, 0.8, 0.9, 1e-8


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.full((4,), -2.0))]


def by_formula(steps: int, period: int, decay: float, decoupled: bool) -> list[torch.Tensor]:
    """The published update, in float64, one number after the other."""
    weights = [parameter.detach().double() for parameter in parameters()]
    first, second, sums = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    for step in range(steps):
        t = step // period + 1
        for position, gradient in enumerate(gradients(step)):
            g, x = gradient.double(), weights[position]
            g, x = (g, x * (1 - LR * decay)) if decoupled else (g + decay * x, x)
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
@pytest.mark.parametrize("kind", [optim.AccumAdam, optim.AccumAdamW])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_published_update(kind, period, decay):
    held = parameters()
    optimizer = kind(held, LR, (BETA1, BETA2), EPS, decay, period)
    expected = by_formula(10, period, decay, kind is optim.AccumAdamW)
    for found, wanted in zip(trained(optimizer, held, range(10)), expected, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_it_goes_on_where_its_state_was_taken():
    held = parameters()
    optimizer = optim.AccumAdam(held, LR, accum_iter=4)
    trained(optimizer, held, range(5))  # in the middle of a period
    others = [nn.Parameter(parameter.detach().clone()) for parameter in held]
    again = optim.AccumAdam(others, LR, accum_iter=4)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(trained(optimizer, held, range(5, 10)), trained(again, others, range(5, 10)), strict=True):
        assert torch.equal(one, other)


def test_parameters_that_skip_steps_have_periods_of_their_own():
    held = parameters()
    optimizer = optim.AccumAdam(held, LR, (BETA1, BETA2), EPS, 0.0, 2)
    for step in range(6):
        held[0].grad = gradients(step)[0]
        held[1].grad = gradients(step)[1] if step >= 3 else None
        optimizer.step()
    assert [int(optimizer.state[parameter]["step"]) for parameter in held] == [6, 3]
    alone = parameters()
    late = optim.AccumAdam(alone, LR, (BETA1, BETA2), EPS, 0.0, 2)
    for step in range(3, 6):
        alone[1].grad = gradients(step)[1]
        late.step()
    assert torch.equal(alone[1], held[1])


@pytest.mark.parametrize(
    "make", [optim.optim_fn_adam, optim.optim_fn_adamw, optim.optim_fn_accum_adam, optim.optim_fn_accum_adamw]
)
def test_weight_decay_is_for_matrices(make):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(3, 2))
    groups = make(list(model.named_parameters()), lr=0.5, weight_decay=0.25).param_groups
    names, matrices = {one: name for name, one in model.named_parameters()}, ("0.weight", "2.weight", "4.weight")
    decay = {names[one]: group["weight_decay"] for group in groups for one in group["params"]}
    assert decay == {name: 0.25 if name in matrices else 0.0 for name in names.values()}
    assert {group["lr"] for group in groups} == {0.5}


@pytest.mark.parametrize("make", [optim.optim_fn_adam, optim.optim_fn_accum_adamw])
def test_a_bucket_of_biases_only(make):
    bias = nn.Parameter(torch.ones(3))
    bias.grad = torch.ones(3)
    make([("bias", bias)]).step()
    assert bool((bias < 1).all())


@pytest.mark.parametrize("kind", [optim.AccumAdam, optim.QAdamOptimizer])
def test_gradients_that_cannot_be_used_are_refused_before_anything_changes(kind):
    first, second = parameters()
    optimizer = kind([first, second])
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second).to_sparse()
    with pytest.raises(ConfigurationError, match="sparse"):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(first, torch.ones(3, 2))


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # Old versions of torch pass it themselves.
def test_the_schedule_rises_and_falls():
    optimizer, options = torch.optim.SGD(parameters(), lr=2.0), {"cosine_eta_min": 0.5, "warmup_decay": 0.1}
    schedule = optim.lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=10, t_warmup=4, **options)
    rates = []
    for _ in range(15):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [rates[step] for step in (0, 2, 9, 14)] == pytest.approx([0.2, 2.0 * 0.55, 1.25, 0.5])
    assert rates[4] == max(rates) == 2.0
    without_a_rise = optim.lr_scheduler_fn_cosine_with_warmup(torch.optim.SGD(parameters(), lr=2.0), 10, 0)
    assert without_a_rise.get_last_lr() == [2.0]


@pytest.mark.parametrize(
    ("warmup", "beta2", "eps", "decay"), [(12, 0.99, 1e-8, 0.0), (12, 0.99, 1e-8, 0.1), (4, 0.9, 0.01, 0.1)]
)
def test_after_the_warm_up_the_second_moment_and_its_correction_are_frozen(warmup, beta2, eps, decay):
    """Element by element in double precision, from the paper: until then it is Adam, and weights decay all the time."""
    model, expected = mlp(), mlp().double()
    options = {"lr": 0.01, "betas": (0.8, beta2), "eps": eps, "weight_decay": decay}
    train_steps(model, optim.QAdamOptimizer(model.parameters(), warmup_steps=warmup, **options), 0, range(12))
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in expected.named_parameters()}
    for t in range(1, 13):
        expected.zero_grad()
        loss_of(lambda inputs: expected(inputs.double()).float(), 0, t - 1).backward()
        with torch.no_grad():
            for name, p in expected.named_parameters():
                g = p.grad + decay * p
                m, v = moments[name]
                m = 0.8 * m + (1 - 0.8) * g
                if t <= warmup:
                    v = beta2 * v + (1 - beta2) * g * g
                moments[name] = [m, v]
                m_hat, v_hat = m / (1 - 0.8**t), v / (1 - beta2 ** min(t, warmup))
                p.sub_(0.01 * m_hat / (v_hat.sqrt() + eps))
    assert_close(snapshot(model), snapshot(expected.float()))


def _after_warm_up() -> tuple[nn.Parameter, optim.QAdamOptimizer]:
    weight = nn.Parameter(torch.ones(4))
    optimizer = optim.QAdamOptimizer([weight], lr=0.1, warmup_steps=1)
    for _ in range(2):
        weight.grad = torch.arange(1.0, 5.0)
        optimizer.step()
    return weight, optimizer


def test_a_frozen_denominator_is_made_once(monkeypatch):
    weight, optimizer = _after_warm_up()
    monkeypatch.setattr(optim.qadam, "denominators", None)
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("change", ["in place", "loaded", "eps", "beta2", "warm-up"])
def test_a_frozen_denominator_follows_what_it_was_made_of(change):
    weight, optimizer = _after_warm_up()
    state, group = optimizer.state[weight], optimizer.param_groups[0]
    if change == "in place":
        state["exp_avg_sq"].mul_(4)
    elif change == "loaded":
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["exp_avg_sq"].fill_(9.0)
        optimizer.load_state_dict(saved)
        before, loaded = state["exp_avg_sq"], optimizer.state[weight]["exp_avg_sq"]
        while loaded._version < before._version:  # It is another tensor that was changed as often.
            loaded.fill_(9.0)
    elif change == "eps":
        group["eps"] = 1.0
    elif change == "beta2":
        group["betas"] = (0.9, 0.5)
    else:
        optimizer.warmup_steps = 2
    optimizer.step()
    state, (beta1, beta2) = optimizer.state[weight], group["betas"] if change == "beta2" else (0.9, 0.999)
    scale = (state["exp_avg_sq"] / (1 - beta2**optimizer.warmup_steps)).sqrt() + (1.0 if change == "eps" else 1e-8)
    expected = weight.detach() - 0.1 / (1 - beta1**4) * state["exp_avg"].lerp(weight.grad, 1 - beta1) / scale
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


def test_parameters_without_a_gradient_rest_and_count_for_themselves():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.QAdamOptimizer([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1, warmup_steps=2)
    for step in range(4):
        first.grad = torch.ones(2)
        second.grad = torch.ones(2) if step == 3 else None
        optimizer.step()
    assert torch.allclose(first, torch.full((2,), 0.6), atol=1e-6)
    assert torch.allclose(second, torch.full((2,), 0.5), atol=1e-6)


def test_a_closure_is_called_with_gradients_enabled():
    weight = nn.Parameter(torch.ones(1))
    optimizer = optim.QAdamOptimizer([weight], lr=0.1)

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert weight.item() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("asleep", "steps", "awake", "moves", "rel"),
    [
        ([2.0, -2.0, 0.0], 20, [2.0, -2.0, 2.0], [1.0, -1.0, 1.0], 0.01),
        ([2.0, -2.0, 1e-4], 20, [2.0, -2.0, 2.0], [1.0, -1.0, 1.0], 0.01),
        # A hundredth of the others: it keeps its own estimate, to the last bit.
        ([2.0, -2.0, 0.02], 20, [2.0, -2.0, 0.02], [1.0, -1.0, 1.0], 0.001),
        ([0.0, 0.0, 0.0], 25, [3.0, 0.0, -3.0], [1.0, 0.0, -1.0], 0.01),
    ],
    ids=["an element", "one that hardly moved", "none: it is small", "a tensor, later"],
)
def test_what_wakes_up_after_the_warm_up_moves_like_the_others(asleep, steps, awake, moves, rel):
    weight = nn.Parameter(torch.zeros(3))
    optimizer, seen = optim.QAdamOptimizer([weight], lr=1.0, warmup_steps=20), [torch.zeros(3)]
    for gradient in [asleep] * steps + [awake] * 60:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        seen.append(weight.detach().clone())
    found = -torch.stack(seen).diff(dim=0)
    assert found[:steps].any() == any(asleep)
    assert found[steps:].abs().max() <= 1.0 + 1e-5
    assert found[-1].tolist() == pytest.approx(moves, rel=rel)


def test_a_tensor_that_sleeps_is_known_to_a_checkpoint():
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer, resumed = (optim.QAdamOptimizer([one], lr=1.0, warmup_steps=2) for one in (weight, other))
    for _ in range(3):
        weight.grad = torch.zeros(2)
        optimizer.step()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.grad = torch.tensor([1.0, -1.0])
    resumed.step()
    assert 0.0 < other.abs().max() <= 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_empty_parameters_are_frozen_alike(dtype):
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (4, 0)]
    optimizer = optim.QAdamOptimizer(weights, lr=0.1, warmup_steps=2)
    for step in range(4):
        weights[0].grad = torch.tensor([1.0, 1.0, 1.0, 0.0 if step < 2 else 1.0], dtype=dtype)
        weights[1].grad = torch.zeros(0, dtype=dtype)
        optimizer.step()
    assert weights[0].isfinite().all()
    assert weights[0].abs().max() < 1
