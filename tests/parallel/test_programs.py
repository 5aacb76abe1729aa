"""Random programs: whatever a user does between steps, ranks stay equal to one process with all the data."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

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


class Training:
    """One model being trained, on a rank or as the reference."""

    def __init__(self) -> None:
        self.model = mlp()
        self.step = 0
        self.renew_optimizer()

    def renew_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def gradients(self, micro_batches: int) -> None:
        """Leave the mean over ranks of the gradients of some batches in ``.grad``."""
        raise NotImplementedError

    def act(self, name: str, number: int) -> None:
        getattr(self, name)(number)

    # Actions, in alphabetical order. They are the same on a rank and in the reference, unless overridden.

    def accumulate(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.gradients(2 + number % 2)
        self.optimizer.step()

    def assign(self, number: int) -> None:
        state = {name: value + 0.01 * number for name, value in snapshot(self.model).items()}
        self.model.load_state_dict(state, assign=True)
        self.renew_optimizer()

    def clip(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.gradients(1)
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 0.01)
        self.optimizer.step()

    def freeze(self, number: int) -> None:
        layer = self.model[(0, 2)[number % 2]]
        layer.requires_grad_(not layer.weight.requires_grad)

    def load(self, number: int) -> None:
        self.model.load_state_dict({name: value * 0.9 for name, value in snapshot(self.model).items()})

    def look(self, number: int) -> None:
        """Evaluate, copy, forget: things that must not matter."""

    def train(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        self.gradients(1)
        self.optimizer.step()

    def wrap_again(self, number: int) -> None:
        """On a rank: another algorithm, another wrapper."""


class Reference(Training):
    """All ranks' data, one after the other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def gradients(self, micro_batches: int) -> None:
        steps = range(self.step, self.step + micro_batches)
        self.step += micro_batches
        mean_gradients(self.model, self.size, lambda model, rank: sum(loss_of(model, rank, step) for step in steps))


class Rank(Training):
    """One of several ranks, with bagua."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rank = bagua.comm.get_rank()
        self.wrap = wrap
        self.wrap_again(0)

    def gradients(self, micro_batches: int) -> None:
        with self.wrapped.no_sync():
            for _ in range(micro_batches - 1):
                self.backward()
        self.backward()

    def backward(self) -> None:
        loss_of(self.wrapped, self.rank, self.step).backward()
        self.step += 1

    def look(self, number: int) -> None:
        inputs, _ = batch(self.rank, number)
        if number % 3 == 0 and self.rank == 0:
            self.wrapped.eval()
            with torch.no_grad():
                self.wrapped(inputs)
            self.wrapped.train()
        elif number % 3 == 1:
            self.wrapped(inputs)
        else:
            copied = copy.deepcopy(self.wrapped)
            copied(inputs).sum().backward()

    def wrap_again(self, number: int) -> None:
        # Small buckets and large ones.
        self.wrapped = self.wrap(self.model, self.optimizer, bucket_bytes=1000 if number % 2 else 10**6)


ACTIONS = ("accumulate", "assign", "clip", "freeze", "load", "look", "train", "train", "wrap_again")
PROGRAMS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=3, max_size=12)


def _run(wrap: str, program: list[Action]) -> State:
    rank = Rank(WRAPS[wrap])
    for action in program:
        rank.act(*action)
    return snapshot(rank.model)


@pytest.mark.threads
@pytest.mark.parametrize("wrap", WRAPS)
def test_random_programs(thread_pool, wrap):
    @given(program=PROGRAMS, size=st.integers(2, 3))
    def check(program: list[Action], size: int) -> None:
        program = [*program, ("train", 0)]
        results = thread_pool.run(_run, wrap, program, size=size, timeout_s=10.0)
        assert_same_on_all_ranks(results)
        assert_close(results[0], _expected(program, size))

    check()


def _expected(program: list[Action], size: int) -> State:
    reference = Reference(size)
    for action in program:
        reference.act(*action)
    return snapshot(reference.model)


def _run_all(programs: list[list[Action]]) -> list[State]:
    return [_run(list(WRAPS)[number % len(WRAPS)], program) for number, program in enumerate(programs)]


@pytest.mark.gloo
def test_random_programs_on_processes(process_ranks):
    dice = random.Random(0)
    programs = [[(dice.choice(ACTIONS), dice.randrange(6)) for _ in range(8)] + [("train", 0)] for _ in range(12)]
    results = process_ranks(2, _run_all, programs)
    for number, program in enumerate(programs):
        assert_same_on_all_ranks([states[number] for states in results])
        assert_close(results[0][number], _expected(program, 2))
