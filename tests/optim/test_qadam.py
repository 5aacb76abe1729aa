"""The optimizer of QAdam by itself: Adam, and then its formula with a frozen second moment."""

from __future__ import annotations

import copy

import pytest
import torch

from bagua.errors import ConfigurationError
from bagua.optim import QAdamOptimizer, qadam
from tests.harness import assert_close, loss_of, mlp, snapshot, train_steps


def trained(make_optimizer, steps: int = 12):
    model = mlp()
    train_steps(model, make_optimizer(model.parameters()), 0, range(steps))
    return snapshot(model)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_until_the_end_of_the_warm_up_it_is_adam(weight_decay):
    options = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": weight_decay}
    ours = trained(lambda parameters: QAdamOptimizer(parameters, warmup_steps=12, **options))
    assert_close(ours, trained(lambda parameters: torch.optim.Adam(parameters, **options)))


def formula(steps: int, warmup: int, lr: float, beta1: float, beta2: float, eps: float, decay: float):
    """Element by element in double precision, from the paper."""
    model = mlp().double()
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    for t in range(1, steps + 1):
        model.zero_grad()
        loss_of(lambda inputs: model(inputs.double()).float(), 0, t - 1).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad + decay * p
                m, v = moments[name]
                m = beta1 * m + (1 - beta1) * g
                if t <= warmup:
                    v = beta2 * v + (1 - beta2) * g * g
                moments[name] = [m, v]
                m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2 ** min(t, warmup))
                p.sub_(lr * m_hat / (v_hat.sqrt() + eps))
    return {name: value.float() for name, value in snapshot(model).items()}


def test_after_the_warm_up_the_second_moment_and_its_correction_are_frozen_and_weights_still_decay():
    ours = trained(
        lambda parameters: QAdamOptimizer(
            parameters, lr=0.01, warmup_steps=4, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1
        )
    )
    assert_close(ours, formula(12, 4, 0.01, 0.8, 0.9, 0.01, 0.1))


def _after_warm_up() -> tuple[torch.nn.Parameter, QAdamOptimizer]:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = QAdamOptimizer([weight], lr=0.1, warmup_steps=1)
    for _ in range(2):
        weight.grad = torch.arange(1.0, 5.0)
        optimizer.step()
    return weight, optimizer


def test_a_frozen_denominator_is_made_once(monkeypatch):
    weight, optimizer = _after_warm_up()
    monkeypatch.setattr(qadam, "denominators", None)
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
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = QAdamOptimizer([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1, warmup_steps=2)
    for step in range(4):
        first.grad = torch.ones(2)
        second.grad = torch.ones(2) if step == 3 else None
        optimizer.step()
    assert torch.allclose(first, torch.full((2,), 0.6), atol=1e-6)
    assert torch.allclose(second, torch.full((2,), 0.5), atol=1e-6)


def test_a_closure_is_called_with_gradients_enabled():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = QAdamOptimizer([weight], lr=0.1)

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert weight.item() == pytest.approx(0.9)


def test_gradients_that_it_cannot_use_are_refused_before_anything_changes():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ConfigurationError, match="sparse"):
        QAdamOptimizer([other, weight]).step()
    assert torch.equal(other, torch.ones(2))


def with_gradients(gradients: list[list[float]], warmup: int, **options: float) -> list[torch.Tensor]:
    """How far each step moves a weight that gets these gradients, divided by the learning rate."""
    weight = torch.nn.Parameter(torch.zeros(len(gradients[0])))
    optimizer = QAdamOptimizer([weight], lr=1.0, warmup_steps=warmup, **options)
    moves = []
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        moves.append(before - weight.detach())
    return moves


@pytest.mark.parametrize("before", [0.0, 1e-4])
def test_an_element_that_wakes_up_after_the_warm_up_moves_like_the_others(before):
    warming, awake = [[2.0, -2.0, before]] * 20, [[2.0, -2.0, 2.0]] * 60
    moves = with_gradients(warming + awake, 20)
    assert torch.stack(moves[20:]).abs().max() <= 1.0 + 1e-5
    assert moves[-1].tolist() == pytest.approx([1.0, -1.0, 1.0], rel=0.01)


def test_small_gradients_that_were_there_are_not_taken_for_none():
    """A hundredth of the others: they keep their own estimate, to the last bit."""
    moves = with_gradients([[2.0, -2.0, 0.02]] * 40, 20)
    assert moves[-1].tolist() == pytest.approx([1.0, -1.0, 1.0], rel=0.001)


def test_a_tensor_that_wakes_up_after_the_warm_up_takes_its_first_gradient_as_the_scale():
    gradients = [[0.0, 0.0, 0.0]] * 25 + [[3.0, 0.0, -3.0]] * 60
    moves = with_gradients(gradients, 20)
    assert not torch.stack(moves[:25]).any()
    assert torch.stack(moves[25:]).abs().max() <= 1.0 + 1e-5
    assert moves[-1].tolist() == pytest.approx([1.0, 0.0, -1.0], rel=0.01)


def test_a_tensor_that_sleeps_is_known_to_a_checkpoint():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = QAdamOptimizer([weight], lr=1.0, warmup_steps=2)
    for _ in range(3):
        weight.grad = torch.zeros(2)
        optimizer.step()
    other = torch.nn.Parameter(torch.zeros(2))
    resumed = QAdamOptimizer([other], lr=1.0, warmup_steps=2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.grad = torch.tensor([1.0, -1.0])
    resumed.step()
    assert 0.0 < other.abs().max() <= 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_empty_parameters_are_frozen_alike(dtype):
    weights = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (4, 0)]
    optimizer = QAdamOptimizer(weights, lr=0.1, warmup_steps=2)
    for step in range(4):
        weights[0].grad = torch.tensor([1.0, 1.0, 1.0, 0.0 if step < 2 else 1.0], dtype=dtype)
        weights[1].grad = torch.zeros(0, dtype=dtype)
        optimizer.step()
    assert weights[0].isfinite().all()
    assert weights[0].abs().max() < 1
