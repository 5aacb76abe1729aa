"""Random programs: whatever a user does between steps, ranks stay equal to one process with all the data."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bagua.comm
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    loss_of,
    mean_gradients,
    mlp,
    snapshot,
)
from tests.parallel.wrapping import WRAPS

#: One action: its name and a number that some of them use.
Action = tuple[str, int]

SCALE = 2.0**10


class Training:
    """One model being trained, on a rank or as the reference."""

    def __init__(self) -> None:
        self.model = mlp()
        self.step = 0
        self.scale = SCALE
        self.renew_optimizer()

    def renew_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def gradients(self, way: str, losses: int) -> None:
        """Leave the mean over ranks of the gradients of some batches in ``.grad``, computed in that way."""
        raise NotImplementedError

    def update(self, way: str, losses: int, number: int = 0) -> None:
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        self.gradients(way, losses)
        self.optimizer.step()

    def state(self) -> State:
        return {**snapshot(self.model), "scale": torch.tensor(self.scale)}

    # Actions, in alphabetical order. They are the same on a rank and in the reference, unless overridden.

    def accumulate(self, number: int) -> None:
        """All but the last of several backward passes in ``no_sync``."""
        self.update("accumulate", 2 + number % 2)

    def add_up(self, number: int) -> None:
        """Each synchronized backward pass averages what is in ``.grad``; averaging an average changes nothing."""
        self.update("add up", 2, number)

    def assign(self, number: int) -> None:
        state = {name: value + 0.01 * number for name, value in snapshot(self.model).items()}
        self.model.load_state_dict(state, assign=True)
        self.renew_optimizer()

    def clip(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.gradients("train", 1)
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 0.01)
        self.optimizer.step()

    def fill(self, number: int) -> None:
        """Each rank begins with gradients of its own."""
        raise NotImplementedError

    def freeze(self, number: int) -> None:
        layer = self.model[(0, 2)[number % 2]]
        layer.requires_grad_(not layer.weight.requires_grad)

    def load(self, number: int) -> None:
        self.model.load_state_dict({name: value * 0.9 for name, value in snapshot(self.model).items()})

    def look(self, number: int) -> None:
        """Evaluate, copy, forget: things that must not matter."""

    def overflow(self, number: int) -> None:
        """The loss of one rank is not finite: no rank makes this update."""
        raise NotImplementedError

    def repeat(self, number: int) -> None:
        """Two backward passes of one graph."""
        self.update("repeat", 1, number)

    def together(self, number: int) -> None:
        """Two forward passes and one backward pass; one of these may be in ``no_sync``, which the other overrules."""
        self.update(("together", "first in no_sync", "second in no_sync")[number % 3], 2)

    def train(self, number: int) -> None:
        self.update("train", 1, number)

    def wrap_again(self, number: int) -> None:
        """On a rank: another algorithm, another wrapper."""


class Reference(Training):
    """All ranks' data, one after the other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def gradients(self, way: str, losses: int) -> None:
        steps = [*range(self.step, self.step + losses)] * (2 if way == "repeat" else 1)
        self.step += losses
        mean_gradients(self.model, self.size, lambda model, rank: sum(loss_of(model, rank, step) for step in steps))

    def fill(self, number: int) -> None:
        self.gradients("train", 1)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad += (self.size - 1) / 2
        self.optimizer.step()

    def overflow(self, number: int) -> None:
        self.step += 1
        self.scale /= 2


class Rank(Training):
    """One of several ranks, with bagua."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rank, self.size = bagua.comm.get_rank(), bagua.comm.get_world_size()
        self.wrap = wrap
        self.wrap_again(0)

    def loss(self) -> torch.Tensor:
        self.step += 1
        return loss_of(self.wrapped, self.rank, self.step - 1)

    def gradients(self, way: str, losses: int) -> None:
        if way == "repeat":
            loss = self.loss()
            loss.backward(retain_graph=True)
            loss.backward()
        elif way in ("together", "first in no_sync", "second in no_sync"):
            first = self.without_sync(self.loss) if way == "first in no_sync" else self.loss()
            second = self.without_sync(self.loss) if way == "second in no_sync" else self.loss()
            (first + second).backward()
        else:
            for _ in range(losses - 1):
                self.without_sync(self.backward) if way == "accumulate" else self.backward()
            self.backward()

    def without_sync(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns in a ``no_sync`` block, in which nothing is sent."""
        before = bagua.comm.stats().get("allreduce")
        with self.wrapped.no_sync():
            result = function()
        assert bagua.comm.stats().get("allreduce") == before
        return result

    def backward(self) -> None:
        self.loss().backward()

    def clip(self, number: int) -> None:
        if number % 2 == 0:
            super().clip(number)
            return
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        self.optimizer.zero_grad()
        scaler.scale(self.loss()).backward()
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 0.01)
        scaler.step(self.optimizer)

    def fill(self, number: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float(self.rank)) if parameter.requires_grad else None
        self.gradients("train", 1)
        self.optimizer.step()

    def look(self, number: int) -> None:
        if self.rank != number % self.size:
            return  # Nobody waits for a rank that looks.
        inputs, _ = batch(self.rank, number)
        if number == 0:
            self.wrapped.eval()
            with torch.no_grad():
                self.wrapped(inputs)
            self.wrapped.train()
        elif number == 1:
            self.wrapped(inputs)
        elif number == 2:
            with torch.inference_mode():
                self.wrapped(inputs)
        elif number == 3:
            output = self.wrapped(inputs.requires_grad_()).sum()
            assert torch.autograd.grad(output, inputs, retain_graph=True)[0].any()
        elif number == 4:
            doubled = {name: value.detach() * 2 for name, value in self.model.named_parameters()}
            torch.func.functional_call(self.model, doubled, (inputs,))
        else:
            copied = copy.deepcopy(self.wrapped)
            copied(inputs).sum().backward()

    def overflow(self, number: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        self.optimizer.zero_grad()
        scaler.scale(self.loss() * (torch.inf if self.rank == number % self.size else 1.0)).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.scale = scaler.get_scale()

    def wrap_again(self, number: int) -> None:
        # Small buckets and large ones.
        self.wrapped = self.wrap(self.model, self.optimizer, bucket_bytes=1000 if number % 2 else 10**6)


ACTIONS = (
    "accumulate", "add_up", "assign", "clip", "fill", "freeze", "load", "look", "overflow", "repeat", "together",
    "train", "train", "wrap_again",
)  # fmt: skip
PROGRAMS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=3, max_size=12)


def _run(wrap: str, program: list[Action]) -> State:
    rank = Rank(WRAPS[wrap])
    for name, number in program:
        getattr(rank, name)(number)
    return rank.state()


def _check(per_rank: list[State], program: list[Action]) -> None:
    reference = Reference(len(per_rank))
    for name, number in program:
        getattr(reference, name)(number)
    assert_same_on_all_ranks(per_rank)
    assert_close(per_rank[0], reference.state())


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("action", sorted({*ACTIONS}))
def test_each_action_before_and_between_steps(thread_ranks, wrap, action):
    program = [one for number in range(6) for one in ((action, number), ("train", number))]
    _check(thread_ranks(2, _run, wrap, program), program)


@pytest.mark.parametrize("wrap", WRAPS)
def test_random_programs(thread_pool, wrap):
    @given(program=PROGRAMS, size=st.integers(2, 3))
    def check(program: list[Action], size: int) -> None:
        program = [*program, ("train", 0)]
        _check(thread_pool.run(_run, wrap, program, size=size, timeout_s=10.0), program)

    check()


def _run_all(programs: list[list[Action]]) -> list[State]:
    return [_run(list(WRAPS)[number % len(WRAPS)], program) for number, program in enumerate(programs)]


def test_random_programs_on_processes(process_ranks):
    dice = random.Random(0)
    programs = [[(dice.choice(ACTIONS), dice.randrange(6)) for _ in range(8)] + [("train", 0)] for _ in range(12)]
    per_rank = process_ranks(2, _run_all, programs)
    for program, states in zip(programs, zip(*per_rank, strict=True), strict=True):
        _check(list(states), program)
