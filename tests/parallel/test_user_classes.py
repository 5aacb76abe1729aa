"""A wrapped module is of its own class still, which works as before, and so do tools that change classes."""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import bagua.comm
import bagua.torch_api as bagua_api
from bagua.errors import ConfigurationError
from tests.harness import assert_same_on_all_ranks, gradients, mlp, snapshot
from tests.parallel.wrapping import WRAPS, Loop, on_ranks


class Named(nn.Module):
    """Has submodules and a method with names that other libraries would take for their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.join, self.no_sync, self.global_average = nn.Identity(), nn.Identity(), nn.Identity()

    def switch_to(self, task: str) -> str:
        return task

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(self.join(self.no_sync(self.global_average(inputs))))


class Registered(nn.Sequential):
    """Keeps a registry of its subclasses, and asks each for a keyword."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, task: str) -> None:
        if task in cls.known:
            raise ValueError(f"{task} already registered")
        cls.known.append(task)


class Classifier(Registered, task="classify"):
    pass


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(8, 4), "weight", Scaled())


@on_ranks(2)
def test_names_of_the_user_stay_the_users():
    loop = Loop("with_bagua", Named)
    loop.train(2)
    assert loop.wrapped.switch_to("segment") == "segment"
    assert isinstance(loop.wrapped.join, nn.Identity)
    assert isinstance(copy.deepcopy(loop.wrapped).no_sync, nn.Identity)
    assert loop.wrapped.bagua_step == 2


def test_a_registry_of_subclasses_sees_nothing_of_us(thread_ranks):
    def train() -> None:
        loop = Loop("with_bagua", lambda: Classifier(*mlp()))
        loop.train(2)
        assert type(loop.wrapped) is Classifier

    thread_ranks(2, train)
    assert Registered.known == ["classify"]


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_a_parametrized_root_is_copied_and_loses_its_parametrization(when):
    loop = Loop("with_bagua", _parametrized if when == "before" else lambda: nn.Linear(8, 4))
    if when == "after":
        parametrize.register_parametrization(loop.model, "weight", Scaled())
    loop.train(2)
    copied = copy.deepcopy(loop.wrapped)
    assert not isinstance(copied, bagua_api.BaguaModule)
    torch.testing.assert_close(copied(torch.ones(1, 8)), loop.wrapped(torch.ones(1, 8)))
    parametrize.remove_parametrizations(loop.model, "weight")
    assert type(loop.model) is nn.Linear


def _globals_of(value: object) -> set[str]:
    """What a file of ``torch.save`` makes its reader import."""
    file = io.BytesIO()
    torch.save(value, file)
    archive = zipfile.ZipFile(file)
    text = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return {str(argument) for code, argument, _ in pickletools.genops(text) if code.name == "GLOBAL"}


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
@pytest.mark.parametrize("inside", [False, True])
def test_the_file_of_a_wrapped_model_is_that_of_the_plain_one(thread_ranks, algorithm, inside):
    def save() -> None:
        loop = Loop("with_bagua", algorithm=bagua_api.algorithms.Algorithm.init(algorithm))
        loop.train(2)
        plain = mlp()
        saved = nn.Sequential(loop.wrapped) if inside else loop.wrapped
        assert _globals_of(saved) == _globals_of(nn.Sequential(plain) if inside else plain)
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_same_on_all_ranks([snapshot(saved), snapshot(loaded)])

    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU, set]):
        thread_ranks(2, save)


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2)
def test_the_plain_module_behind_a_wrapped_one(wrap):
    loop = Loop(wrap)
    loop.train(2)
    plain = bagua_api.unwrap(loop.wrapped)
    assert type(plain) is nn.Sequential
    assert not isinstance(plain, bagua_api.BaguaModule)
    assert all(one is other for one, other in zip(plain.parameters(), loop.model.parameters(), strict=True))
    assert "bagua" not in str(_globals_of(plain))
    assert bagua_api.unwrap(plain) is plain


class Referring(nn.Sequential):
    """Refers to itself, as a module with a table of its own methods does."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.table = {"forward": self.forward, "self": [self]}


@on_ranks(2)
def test_a_module_that_refers_to_itself_is_copied():
    loop = Loop("with_bagua", Referring)
    loop.train(1)
    copied = copy.deepcopy(loop.wrapped)
    assert copied.table["self"][0] is copied
    loop.train(1)
    assert isinstance(copy.copy(loop.wrapped), Referring)
    assert not isinstance(copy.copy(loop.wrapped), bagua_api.BaguaModule)


def _gradients_of_two(wrap: str, switch: str) -> dict[str, torch.Tensor]:
    """Gradients of two micro-steps, of which the first is not to be exchanged."""
    loop = Loop(wrap)
    loop.train(1)
    loop.model.zero_grad()
    calls = bagua.comm.stats()["allreduce"].calls
    if switch == "no_sync":
        with loop.wrapped.no_sync():
            assert not loop.wrapped.require_backward_grad_sync
            loop.backward()
    else:
        loop.wrapped.require_backward_grad_sync = False
        loop.backward()
        loop.wrapped.require_backward_grad_sync = True
    assert bagua.comm.stats()["allreduce"].calls == calls
    assert loop.wrapped.require_backward_grad_sync
    loop.backward()
    return gradients(loop.model)


@pytest.mark.parametrize("wrap", ["with_bagua", "data_parallel"])
def test_the_switch_that_nanogpt_turns_does_what_no_sync_does(thread_ranks, wrap):
    assert_same_on_all_ranks(
        [*thread_ranks(2, _gradients_of_two, wrap, "no_sync"), *thread_ranks(2, _gradients_of_two, wrap, "attribute")]
    )


@on_ranks(1)
def test_a_plain_module_says_that_it_was_not_wrapped():
    loop = Loop("with_bagua")
    plain: Any = copy.deepcopy(loop.wrapped)
    assert plain.bagua_step is None
    assert [name for name in dir(plain) if not hasattr(plain, name)] == []
    with pytest.raises(ConfigurationError, match=r"bagua_finish is a call of a wrapped module.*Sequential"):
        plain.bagua_finish()
    outer: Any = torch.compile(loop.wrapped, backend="eager")
    assert outer.bagua_step == 0
