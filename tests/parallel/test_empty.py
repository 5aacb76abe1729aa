"""The empty case of each thing that is counted, with every algorithm: parts, gradients, buffers, data, steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua.algorithms import Algorithm, DiLoCoAlgorithm, LocalUpdates, registry
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua
from tests.contract.algorithms import optimizer_maker
from tests.harness import Losses, State, assert_same_on_all_ranks, batch, loss_of, mlp, snapshot
from tests.parallel.wrapping import Loop

NAMES = list(registry)
#: What they send is made by an optimizer: all ranks are told so at once.
NEED_OPTIMIZERS = ("low_precision_decentralized", "qadam", "one_bit_adam", "one_bit_lamb", "dion")


def declared(name: str) -> Algorithm:
    """An algorithm whose exchanges become due in a few steps."""
    kind = registry.get(name)
    if kind is DiLoCoAlgorithm:
        return DiLoCoAlgorithm(2, fragments=2, average_buffers=True)
    if issubclass(kind, LocalUpdates):
        return kind(2, average_buffers=True)
    return kind(**{field.name: 2 for field in dataclasses.fields(kind) if field.name == "warmup_steps"})


class Run(Loop):
    """A model of one rank that an algorithm trains."""

    def __init__(
        self, name: str, model: nn.Module | None = None, *, frozen: bool = False, losses: Losses = loss_of
    ) -> None:
        self.algorithm = declared(name)
        make = optimizer_maker(self.algorithm)
        super().__init__(
            "with_bagua",
            lambda: (mlp() if model is None else model).requires_grad_(not frozen),
            lambda parameters: make(list(parameters)),
            losses,
            algorithm=self.algorithm,
        )

    def train_through(self) -> None:
        """As a generator trains through a frozen discriminator: only the inputs get gradients."""
        inputs = batch(self.rank, 0)[0].requires_grad_()
        self.model.requires_grad_(False)
        self.model(inputs).sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.any()
        self.model.requires_grad_(True)

    def end(self, steps: int = 0) -> State:
        """After so many more steps."""
        self.train(steps)
        self.wrapped.bagua_finish()
        found = snapshot(self.model)
        self.wrapped.bagua_close()
        return found


def frozen_at_wrapping(name: str) -> State:
    run = Run(name, frozen=True)
    run.train_through()
    run.model.requires_grad_(False)
    run.train_through()
    before = run.model.bagua_step
    assert before == 0
    run.train(4)
    assert run.model.bagua_step == 4
    return run.end()


def frozen_to_the_end(name: str) -> State:
    run = Run(name, frozen=True)
    run.train_through()
    run.model.requires_grad_(False)
    with run.model.bagua_global_average():
        pass
    run.model.bagua_load_state_dict(run.model.bagua_state_dict())
    return run.end()


def all_but_one_frozen(name: str) -> State:
    run = Run(name)
    run.train()
    run.model.requires_grad_(False)
    run.model[4].bias.requires_grad_(True)
    run.train(3)
    run.model.requires_grad_(True)
    return run.end(3)


def no_gradient(name: str) -> State:
    run = Run(name)
    for _ in range(4):
        run.train()
        inputs = batch(run.rank, 0)[0].requires_grad_()
        (found,) = torch.autograd.grad(run.model(inputs).sum(), inputs)
        assert found.any()
    assert run.model.bagua_step == 4
    return run.end()


def no_step(name: str) -> State:
    """And no data."""
    run = Run(name)
    with joined(run):
        pass
    with run.model.bagua_global_average():
        pass
    run.model.bagua_load_state_dict(run.model.bagua_state_dict())
    return run.end()


def no_optimizer(name: str) -> State:
    if name in NEED_OPTIMIZERS:
        with pytest.raises(ConfigurationError, match="argument optimizers"):
            with_bagua(mlp(), [], declared(name))
        return {}
    loop = Loop(lambda model, _: with_bagua(model, [], declared(name)))
    for _ in range(4):
        loop.model.zero_grad()
        loop.backward()
    loop.wrapped.bagua_finish()
    return snapshot(loop.model)


def joined(run: Run) -> contextlib.AbstractContextManager[None]:
    """Where ranks exchange between steps, nobody waits for data of others."""
    return contextlib.nullcontext() if run.algorithm.in_background else run.model.join()


def no_data_on_one_rank(name: str) -> State:
    """At first; and then less than others have."""
    run = Run(name)
    for batches in ((0, 4), (2, 6)):
        with joined(run):
            run.train(batches[run.rank])
    return run.end()


def no_elements(name: str) -> State:
    """Neither in some tensors, nor in a group of the optimizer."""
    model = mlp()
    model[0].register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    model[2].register_buffer("none", torch.empty(0))
    run = Run(name, model, losses=lambda called, *at: loss_of(called, *at) + model[0].nothing.sum())
    run.optimizer.add_param_group({"params": []})
    return run.end(4)


def no_rows(name: str) -> State:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step)[0][: 6 * (rank == 0)]).square().sum()

    return Run(name, losses=loss).end(4)


CASES: dict[str, Callable[[str], State]] = {
    case.__name__: case
    for case in (
        frozen_at_wrapping,
        frozen_to_the_end,
        all_but_one_frozen,
        no_gradient,
        no_step,
        no_optimizer,
        no_data_on_one_rank,
        no_elements,
        no_rows,
    )
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_refused_and_nobody_waits(thread_ranks, case, name):
    states = thread_ranks(2, CASES[case], name)
    assert_same_on_all_ranks(states)
    assert all(value.isfinite().all() for state in states for value in state.values())


def toggled(name: str, frozen: bool) -> State:
    run = Run(name)
    for _ in range(6):
        run.train()
        if frozen:
            run.train_through()
    return run.end()


@pytest.mark.parametrize("name", [name for name in NAMES if not registry.get(name)().in_background])
def test_a_model_that_is_frozen_for_a_while_trains_as_if_it_had_not_been(thread_ranks, name):
    """As a discriminator in each step: what is remembered, and what is under way, stay."""
    for ours, theirs in zip(thread_ranks(2, toggled, name, True), thread_ranks(2, toggled, name, False), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
