"""What happens to gradients between backward and the optimizer step: unused, accumulated, scaled, clipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import TopKAlgorithm
from bagua.errors import BaguaError
from bagua.parallel import with_bagua
from tests.harness import (
    assert_close,
    assert_same_on_all_ranks,
    batch,
    gradients,
    loss_of,
    mean_gradients,
    mlp,
    reference,
    seeded,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import (
    WRAPS,
    assert_trained,
    by_bagua_init,
    check_training,
    gradients_of_two,
    wrapped_for_rank,
)

pytestmark = pytest.mark.threads


class Branches(nn.Module):
    """Uses ``left`` or ``right``, as its caller says; ``never`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.left, self.right, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, side: str) -> torch.Tensor:
        return self.left(inputs) if side == "left" else self.right(inputs)


def _side(rank: int) -> str:
    return "left" if rank == 0 else "right"


def _branch_loss(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs, _side(rank)), targets)


def _unused_counts_as_zero() -> list[dict[str, torch.Tensor]]:
    rank = bagua.comm.get_rank()
    model = Branches()
    optimizer = sgd(model.parameters())
    wrapped = by_bagua_init(model, optimizer, find_unused_parameters=True)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        _branch_loss(wrapped, rank, step).backward()
        seen.append(gradients(model))
        optimizer.step()
    return seen


def test_unused_parameters_count_as_zero_when_asked(thread_ranks):
    results = thread_ranks(2, _unused_counts_as_zero)
    expected = Branches()
    optimizer = sgd(expected.parameters())
    for step, (first, second) in enumerate(zip(*results, strict=True)):
        mean_gradients(expected, 2, lambda model, rank, step=step: _branch_loss(model, rank, step))
        for name, parameter in expected.named_parameters():
            for seen in (first[name], second[name]):
                if parameter.grad is None:
                    assert not seen.any(), name
                else:
                    torch.testing.assert_close(seen, parameter.grad, msg=name)
        optimizer.step()


def _unused_is_an_error() -> str:
    model = Branches()
    optimizer = sgd(model.parameters())
    wrapped = by_bagua_init(model, optimizer)
    with pytest.raises(BaguaError, match=r"never\.weight") as caught:
        _branch_loss(wrapped, bagua.comm.get_rank()).backward()
    return str(caught.value)


def test_unused_parameters_are_an_error_that_lists_them_on_every_rank(thread_ranks):
    left, right = thread_ranks(2, _unused_is_an_error)
    assert "right.bias" in left
    assert "left.bias" in right
    assert "find_unused_parameters" in left


def _unused_on_one_rank_only() -> str:
    rank = bagua.comm.get_rank()
    model = Branches()
    model.never = nn.Identity()
    optimizer = sgd(model.parameters())
    wrapped = by_bagua_init(model, optimizer)

    def both_or_left(inputs: torch.Tensor) -> torch.Tensor:
        left = wrapped(inputs, "left")
        return left if rank == 1 else left + wrapped(inputs, "right")

    with pytest.raises(BaguaError) as caught:
        loss_of(both_or_left, rank, 0).backward()
    return str(caught.value)


def test_a_parameter_unused_on_one_rank_only_ends_every_rank_with_an_error(thread_ranks):
    used, unused = thread_ranks(2, _unused_on_one_rank_only)
    assert "right.weight" in unused
    assert "right.weight" in used or "rank 1" in used or "peer" in used.lower()


@pytest.mark.parametrize("wrap", WRAPS)
def test_set_to_none_and_set_to_zero_give_the_same(thread_ranks, wrap):
    def train(set_to_none: bool) -> dict[str, torch.Tensor]:
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = WRAPS[wrap](model, optimizer)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(5), set_to_none=set_to_none)
        return snapshot(model)

    none, zero = thread_ranks(2, train, True), thread_ranks(2, train, False)
    assert_same_on_all_ranks([*none, *zero])


@pytest.mark.parametrize("wrap", WRAPS)
def test_no_sync_accumulates_locally_and_the_last_backward_sends_the_sum(thread_ranks, wrap):
    def train() -> tuple[dict, dict]:
        rank, model, optimizer, wrapped = wrapped_for_rank(wrap=WRAPS[wrap])
        for group in ((0, 1), (2, 3), (4, 5)):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped, rank, group[0]).backward()
                alone = gradients(model)
            loss_of(wrapped, rank, group[1]).backward()
            optimizer.step()
        return alone, snapshot(model)

    results = thread_ranks(2, train)
    assert not torch.equal(results[0][0]["0.weight"], results[1][0]["0.weight"])
    assert_same_on_all_ranks([state for _, state in results])
    expected = reference(
        mlp(), sgd, 2, (0, 2, 4), lambda m, rank, step: loss_of(m, rank, step) + loss_of(m, rank, step + 1)
    )
    assert_close(results[0][1], expected)


def test_no_sync_before_the_first_synchronized_step(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank, model, _, wrapped = wrapped_for_rank()
        with wrapped.no_sync():
            for step in (0, 1):
                loss_of(wrapped, rank, step).backward()
        loss_of(wrapped, rank, 2).backward()
        return gradients(model)

    expected = gradients_of_two(lambda m, rank: sum(loss_of(m, rank, step) for step in range(3)))
    assert_trained(thread_ranks(2, train), expected)


def test_several_backwards_of_one_step_add_up(thread_ranks):
    """Each synchronized backward averages what is in ``.grad``; averaging an average changes nothing."""

    def train() -> dict[str, torch.Tensor]:
        rank, model, _, wrapped = wrapped_for_rank()
        for step in range(2):
            model.zero_grad()
            loss_of(wrapped, rank, step).backward()
            loss_of(wrapped, rank, step + 10).backward()
        return gradients(model)

    assert_trained(thread_ranks(2, train), gradients_of_two(lambda m, rank: loss_of(m, rank, 1) + loss_of(m, rank, 11)))


def test_two_forwards_then_one_backward(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank, model, _, wrapped = wrapped_for_rank()
        for step in range(3):
            model.zero_grad()
            (loss_of(wrapped, rank, step) + loss_of(wrapped, rank, step + 10)).backward()
        return gradients(model)

    assert_trained(thread_ranks(2, train), gradients_of_two(lambda m, rank: loss_of(m, rank, 2) + loss_of(m, rank, 12)))


def test_a_forward_without_backward_does_no_harm(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        for step in range(4):
            loss_of(wrapped, rank, step + 100)  # Forgotten.
            train_steps(wrapped, optimizer, rank, [step])
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(mlp(), sgd, 2, range(4)))


def test_forwards_for_evaluation_communicate_nothing(thread_ranks):
    """Rank 0 alone evaluates, as many scripts do; nobody waits for it, and training goes on."""

    def train() -> dict[str, torch.Tensor]:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        for step in range(4):
            if rank == 0:
                with torch.no_grad():
                    wrapped(batch(rank, step)[0])
                wrapped.eval()
                wrapped(batch(rank, step)[0])
                wrapped.train()
            train_steps(wrapped, optimizer, rank, [step])
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(mlp(), sgd, 2, range(4)))


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        with seeded():
            self.first = nn.Linear(8, 16)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.last = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(
                nn.Sequential(block, nn.ReLU()), hidden, use_reentrant=self.use_reentrant
            )
        return self.last(hidden)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("delay_reduce", [False, True])
def test_activation_checkpointing(thread_ranks, use_reentrant, delay_reduce):
    check_training(thread_ranks, lambda: Checkpointed(use_reentrant), delay_reduce=delay_reduce)


def test_an_inf_on_one_rank_makes_every_rank_skip_the_step(thread_ranks):
    def train() -> tuple[list[float], dict[str, torch.Tensor]]:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(wrapped, rank, step)
            if step == 1 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, snapshot(model)

    results = thread_ranks(2, train)
    assert [scales for scales, _ in results] == [[1024.0, 512.0, 512.0, 512.0]] * 2
    assert_same_on_all_ranks([state for _, state in results])
    assert_close(results[0][1], reference(mlp(), sgd, 2, (0, 2, 3)))


def test_clipping_sees_the_mean_gradients(thread_ranks):
    def train() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(wrapped, rank, step).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return norm, snapshot(model)

    results = thread_ranks(2, train)
    assert torch.equal(results[0][0], results[1][0])
    assert_same_on_all_ranks([state for _, state in results])
    expected = mlp()
    optimizer = sgd(expected.parameters())
    for step in range(3):
        mean_gradients(expected, 2, lambda m, rank, step=step: loss_of(m, rank, step))
        nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        optimizer.step()
    assert_close(results[0][1], snapshot(expected))


def test_gradients_that_the_user_replaces_are_still_exchanged(thread_ranks):
    """``.grad`` set to a tensor of the user's own before backward: added to, exchanged, kept."""

    def train() -> dict[str, torch.Tensor]:
        rank, model, _, wrapped = wrapped_for_rank()
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank))
            loss_of(wrapped, rank, step).backward()
        return gradients(model)

    expected = gradients_of_two(lambda m, rank: loss_of(m, rank, 2))
    assert_trained(thread_ranks(2, train), {name: gradient + 0.5 for name, gradient in expected.items()})


class Sides(nn.Module):
    """Two parameters, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(64)) for _ in range(2))

    def forward(self, side: str) -> torch.Tensor:
        return (self.left * torch.arange(1.0, 65.0)).sum() if side == "left" else (self.right * 0.0).sum()


@pytest.mark.parametrize("fusion", [True, False])
def test_what_error_feedback_brings_for_unused_parameters_is_not_lost(thread_ranks, fusion):
    """A quarter of what is left is sent in each step, also when nobody uses the parameter any more."""

    def train() -> tuple[list[float], bool]:
        model, algorithm = Sides(), TopKAlgorithm(ratio=0.125, warmup_steps=0, density_steps=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapped = with_bagua(model, optimizer, algorithm, find_unused_parameters=True, do_flatten=fusion)
        for side in ("left", *("right",) * 4):
            optimizer.zero_grad()
            wrapped(side).backward()
            optimizer.step()
        return model.left.tolist(), model.left.grad is None

    assert thread_ranks(2, train) == [([-float(one) for one in range(1, 65)], True)] * 2
