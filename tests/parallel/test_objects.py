"""A wrapped module stays an ordinary object: names, copies, files, evaluation, one process alone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import bagua.comm
import bagua.torch_api
from bagua.algorithms import GradientAllReduceAlgorithm
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    gradients,
    loss_of,
    mean_gradients,
    mlp,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import WRAPS, Loop, by_bagua_init, by_with_bagua, on_ranks


def _trained(wrap: str) -> Loop:
    loop = Loop(wrap)
    loop.train(3)
    return loop


@pytest.mark.parametrize("wrap", ["bagua_init", "with_bagua"])
@on_ranks(2)
def test_state_dict_has_the_keys_of_the_plain_module_and_loads_back(wrap):
    loop = _trained(wrap)
    state = loop.wrapped.state_dict()
    assert list(state) == list(mlp().state_dict())
    plain = mlp(seed=3)
    plain.load_state_dict(state)
    loop.train(2)
    result = loop.wrapped.load_state_dict(plain.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same_on_all_ranks([snapshot(loop.model), snapshot(plain)])


@on_ranks(2)
def test_state_dict_of_the_ddp_like_class_has_the_prefix_that_its_users_know():
    loop = _trained("data_parallel")
    model, wrapped = loop.model, loop.wrapped
    theirs = [f"module.{name}" for name in mlp().state_dict()]
    assert list(wrapped.state_dict()) == theirs
    assert list(wrapped.module.state_dict()) == list(mlp().state_dict())
    wrapped.load_state_dict({f"module.{name}": value for name, value in mlp(seed=3).state_dict().items()})
    assert_same_on_all_ranks([snapshot(model), snapshot(mlp(seed=3))])


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("what", ["state_dict", "one tensor", "gradient"])
@on_ranks(2)
def test_saved_tensors_do_not_drag_a_bucket_into_the_file(wrap, what):
    wrapped = _trained(wrap).wrapped
    first = next(iter(wrapped.parameters()))
    saved, plain = {
        "state_dict": (wrapped.state_dict(), mlp().state_dict()),
        "one tensor": (next(iter(wrapped.state_dict().values())), next(mlp().parameters()).detach()),
        "gradient": (first.grad.clone(), torch.zeros_like(first)),
    }[what]
    assert _file_bytes(saved) <= _file_bytes(plain) * 1.2 + 500


def _file_bytes(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size", assert_same_on_all_ranks)
def test_a_copy_is_a_plain_module_without_engine_and_the_original_trains_on(wrap, way, size) -> State:
    loop = _trained(wrap)
    copied = {"deepcopy": copy.deepcopy, "pickle": _pickled, "torch.save": _saved}[way](loop.wrapped)
    before = snapshot(loop.model)
    assert_same_on_all_ranks([before, {n.removeprefix("module."): v for n, v in snapshot(copied).items()}])
    assert type(copied) is type(mlp()), "a plain unwrapped module of the user's class"
    assert vars(copied).keys() == vars(mlp()).keys(), "no attribute of ours"
    if loop.rank == 0:  # One rank alone: nothing of the engine can be left in the copy.
        train_steps(copied, sgd(copied.parameters()), 0, range(2))
    assert_same_on_all_ranks([before, snapshot(loop.model)])
    return loop.train(3)


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2)
def test_with_bagua_keeps_the_identity_and_class_of_the_module():
    model = mlp()
    children, names = list(model.children()), [name for name, _ in model.named_modules()]
    wrapped = by_with_bagua(model, sgd(model.parameters()))
    assert wrapped is model
    assert isinstance(wrapped, nn.Sequential)
    assert isinstance(wrapped, bagua.torch_api.BaguaModule)
    assert list(wrapped.children()) == children
    assert [name for name, _ in wrapped.named_modules()] == names
    assert type(wrapped).__name__ == "Sequential"
    assert len(wrapped) == 5


def _hooks(module: nn.Module) -> int:
    """Per-parameter hooks, as autograd sees them."""
    return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in module.parameters())


@pytest.mark.parametrize("wrap", WRAPS)
def test_one_rank_alone_has_no_hooks_on_its_parameters(thread_ranks, wrap):
    def check() -> int:
        loop = _trained(wrap)  # Without its wrapper, a model loses the hooks.
        return _hooks(loop.model)

    assert thread_ranks(1, check) == [0]
    assert all(count > 0 for count in thread_ranks(2, check)), "this test can fail"


def test_wrapping_leaves_initial_values_of_rank_0_everywhere(thread_ranks):
    def check() -> State:
        rank = bagua.comm.get_rank()
        model = nn.Sequential(mlp(seed=rank), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(float(rank + 5))
        by_bagua_init(model, sgd(model.parameters()))
        return snapshot(model)

    results = thread_ranks(3, check)
    assert_same_on_all_ranks(results)
    assert results[2]["1.running_mean"].tolist() == [5.0] * 4


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_of_two_engines_on_one_model_only_the_later_one_works(thread_ranks, find_unused_parameters):
    """The sum over ranks, unlike the mean, shows when gradients are exchanged twice."""

    def train() -> tuple[State, int]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        options = {"find_unused_parameters": find_unused_parameters, "bucket_bytes": 10**6}
        total = GradientAllReduceAlgorithm(average=False)
        first = by_with_bagua(model, optimizer, algorithm=total, **options)
        for step in range(2):
            model.zero_grad()
            loss_of(first, rank, step).backward()
        second = bagua.torch_api.bagua_init(first, optimizer, total, **options)[0]
        for step in range(3):
            model.zero_grad()
            loss_of(second, rank, step).backward()
        before = bagua.comm.stats()["allreduce"].calls
        model.zero_grad()
        loss_of(second, rank, 3).backward()
        return gradients(model), bagua.comm.stats()["allreduce"].calls - before

    results = thread_ranks(2, train)
    assert [calls for _, calls in results] == [2 if find_unused_parameters else 1] * 2
    expected = mlp()
    mean_gradients(expected, 2, lambda model, rank: 2 * loss_of(model, rank, 3))
    assert_close(results[0][0], gradients(expected))


@on_ranks(1)
def test_modules_of_one_class_are_still_of_one_class():
    first, second = (by_with_bagua(mlp(), []) for _ in range(2))
    assert type(first) is type(second)
    with pytest.raises(TypeError, match="optimizer"):
        by_with_bagua(mlp(), ["not an optimizer"])
