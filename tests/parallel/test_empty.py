"""The empty case of each thing that is counted, with every algorithm: parts, gradients, buffers, data, steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, DiLoCoAlgorithm, LocalUpdates, registry
from bagua.errors import ConfigurationError
from bagua.parallel import BaguaModule, with_bagua
from tests.contract.algorithms import optimizer_maker
from tests.harness import State, assert_same_on_all_ranks, batch, loss_of, mlp, snapshot

NAMES = list(registry)
#: What they send is made by an optimizer: all ranks are told so at once.
NEED_OPTIMIZERS = ("low_precision_decentralized", "qadam", "one_bit_adam", "one_bit_lamb", "dion")


def declared(name: str) -> Algorithm:
    """An algorithm whose exchanges become due in a few steps."""
    kind = registry.get(name)
    if kind is DiLoCoAlgorithm:
        return DiLoCoAlgorithm(2, fragments=2, average_buffers=True)
    return kind(2, average_buffers=True) if issubclass(kind, LocalUpdates) else kind()


class Run:
    """A model of one rank with its optimizer."""

    def __init__(self, name: str, model: nn.Module | None = None, *, frozen: bool = False) -> None:
        self.rank, self.algorithm = bagua.comm.get_rank(), declared(name)
        model = mlp() if model is None else model
        self.optimizer = optimizer_maker(self.algorithm)(model.parameters())
        model.requires_grad_(not frozen)
        wrapped = with_bagua(model, [self.optimizer], self.algorithm)
        assert isinstance(wrapped, BaguaModule)
        self.model = wrapped

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, self.rank, number).backward()
        self.optimizer.step()

    def train_through(self) -> None:
        """As a generator trains through a frozen discriminator: only the inputs get gradients."""
        inputs = batch(self.rank, 0)[0].requires_grad_()
        self.model.requires_grad_(False)
        self.model(inputs).sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.any()
        self.model.requires_grad_(True)

    def end(self) -> State:
        self.model.bagua_finish()
        found = snapshot(self.model)
        self.model.bagua_close()
        return found


def frozen_at_wrapping(name: str) -> State:
    run = Run(name, frozen=True)
    run.train_through()
    run.model.requires_grad_(False)
    run.train_through()
    before = run.model.bagua_step
    assert before == 0
    for number in range(4):
        run.step(number)
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
    run.step(0)
    run.model.requires_grad_(False)
    run.model[4].bias.requires_grad_(True)
    for number in range(1, 4):
        run.step(number)
    run.model.requires_grad_(True)
    for number in range(4, 7):
        run.step(number)
    return run.end()


def no_gradient(name: str) -> State:
    run = Run(name)
    for number in range(4):
        run.step(number)
        inputs = batch(run.rank, 0)[0].requires_grad_()
        (found,) = torch.autograd.grad(run.model(inputs).sum(), inputs)
        assert found.any()
    assert run.model.bagua_step == 4
    return run.end()


def no_step(name: str) -> State:
    run = Run(name)
    with run.model.bagua_global_average():
        pass
    run.model.bagua_load_state_dict(run.model.bagua_state_dict())
    return run.end()


def no_optimizer(name: str) -> State:
    algorithm, model = declared(name), mlp()
    if name in NEED_OPTIMIZERS:
        with pytest.raises(ConfigurationError, match="argument optimizers"):
            with_bagua(model, [], algorithm)
        return {}
    model = with_bagua(model, [], algorithm)
    for number in range(4):
        model.zero_grad()
        loss_of(model, bagua.comm.get_rank(), number).backward()
    model.bagua_finish()
    return snapshot(model)


def joined(run: Run) -> contextlib.AbstractContextManager[None]:
    """Where ranks exchange between steps, nobody waits for data of others."""
    return contextlib.nullcontext() if run.algorithm.in_background else run.model.join()


def no_data_on_one_rank(name: str) -> State:
    run = Run(name)
    with joined(run):
        for number in range(4 * run.rank):
            run.step(number)
    return run.end()


def no_data(name: str) -> State:
    run = Run(name)
    with joined(run):
        pass
    return run.end()


def no_elements(name: str) -> State:
    model = mlp()
    model[0].register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    model[2].register_buffer("none", torch.empty(0))
    run = Run(name, model)
    for number in range(4):
        run.optimizer.zero_grad()
        (loss_of(run.model, run.rank, number) + model[0].nothing.sum()).backward()
        run.optimizer.step()
    return run.end()


def empty_group(name: str) -> State:
    run = Run(name)
    run.optimizer.add_param_group({"params": []})
    for number in range(4):
        run.step(number)
    return run.end()


def no_rows(name: str) -> State:
    run = Run(name)
    for number in range(4):
        run.optimizer.zero_grad()
        inputs, _ = batch(run.rank, number)
        run.model(inputs[: 6 * (run.rank == 0)]).square().sum().backward()
        run.optimizer.step()
    return run.end()


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
        no_data,
        no_elements,
        empty_group,
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
    for number in range(6):
        run.step(number)
        if frozen:
            run.train_through()
    return run.end()


@pytest.mark.parametrize("name", [name for name in NAMES if not registry.get(name)().in_background])
def test_a_model_that_is_frozen_for_a_while_trains_as_if_it_had_not_been(thread_ranks, name):
    """As a discriminator in each step: what is remembered, and what is under way, stay."""
    for ours, theirs in zip(thread_ranks(2, toggled, name, True), thread_ranks(2, toggled, name, False), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
