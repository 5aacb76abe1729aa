"""Ranks that come to hold different models by a mistake: found in steps that all ranks know, or repaired on request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm
from bagua.engine.state.equality import _plain, quick_digest
from bagua.errors import BaguaError, CollectiveMismatchError, ConfigurationError, PeerLostError
from bagua.optim import QAdamOptimizer
from bagua.parallel import bagua_init
from bagua.parallel.module import with_bagua
from bagua.testing.training import assert_same_on_all_ranks, mlp, sgd, snapshot, train_steps

pytestmark = pytest.mark.threads

DILOCO = Algorithm.init("diloco", sync_every=2, fragments=1)
Mistake = Callable[[torch.nn.Module, torch.optim.Optimizer, int], None]


def load_on_first(model: torch.nn.Module, _: torch.optim.Optimizer, rank: int) -> None:
    if rank == 0:
        model.load_state_dict(mlp(seed=7).state_dict())


def assign_on_first(model: torch.nn.Module, _: torch.optim.Optimizer, rank: int) -> None:
    if rank == 0:
        model.load_state_dict(mlp(seed=7).state_dict(), assign=True)


def forget_a_layer(model: torch.nn.Module, _: torch.optim.Optimizer, rank: int) -> None:
    if rank == 1:
        torch.nn.init.zeros_(model[2].weight)


def other_rate(_: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.2


def nothing(*_: Any) -> None:
    return


def train(
    mistake: Mistake, at: int, algorithm: Algorithm | str = "gradient_allreduce", steps: int = 6, **options: Any
) -> tuple[BaguaError | None, int, dict[str, torch.Tensor]]:
    """What ended the training, before which step, and the weights."""
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], algorithm, **options)
    step = 0
    try:
        for step in range(steps):
            if step == at:
                mistake(model, optimizer, rank)
            train_steps(wrapped, optimizer, rank, range(step, step + 1))
    except BaguaError as error:
        return error, step, snapshot(model)
    return None, steps, snapshot(model)


MISTAKES = {
    "load": (load_on_first, r"weights: 0\.weight .*Only rank 0 loaded weights, before step"),
    "init": (forget_a_layer, r"weights: 2\.weight .*Change weights on all ranks alike"),
    "rate": (other_rate, r"settings of optimizers: lr of optimizer 0 \(SGD\).*0\.1 on rank 0.*0\.2 on rank 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("at", [0, 3])
def test_ranks_that_differ_get_an_error_that_names_what_and_who(thread_ranks, name, at):
    mistake, message = MISTAKES[name]
    ends = thread_ranks(3, partial(train, check_every=1), mistake, at)
    for rank, (error, step, _) in enumerate(ends):
        assert isinstance(error, CollectiveMismatchError)
        assert step == at
        assert error.rank == rank
        assert error.peers == ((1, 2) if name == "load" else (1,))
        with pytest.raises(CollectiveMismatchError, match=message):
            raise error


@pytest.mark.parametrize("name", MISTAKES)
def test_on_request_all_ranks_go_on_with_what_rank_0_holds(thread_ranks, caplog, name):
    with caplog.at_level(logging.WARNING, "bagua"):
        ends = thread_ranks(2, partial(train, check_every=1, on_difference="repair"), MISTAKES[name][0], 3)
    assert [error for error, _, _ in ends] == [None, None]
    assert_same_on_all_ranks([state for _, _, state in ends])
    assert caplog.text.count("all ranks go on with what rank 0 holds") == 1


def test_a_checkpoint_on_rank_0_alone_is_found_in_the_first_step_by_default(thread_ranks):
    for error, step, _ in thread_ranks(2, train, load_on_first, 0):
        assert isinstance(error, CollectiveMismatchError)
        assert step == 0


def test_later_steps_are_compared_after_100_and_a_lone_load_is_told_at_once(thread_ranks, caplog):
    with caplog.at_level(logging.WARNING, "bagua"):
        ends = thread_ranks(2, partial(train, steps=105), load_on_first, 3)
    assert [(type(error), step) for error, step, _ in ends] == [(CollectiveMismatchError, 100)] * 2
    assert caplog.text.count("rank 0 loaded weights before step 3, and rank 1 did not") == 1


@pytest.mark.parametrize("algorithm", ["decentralized", "local_sgd"])
def test_where_ranks_differ_on_purpose_only_a_load_on_one_rank_is_a_mistake(thread_ranks, algorithm):
    ends = thread_ranks(2, partial(train, check_every=1), forget_a_layer, 3, algorithm)
    assert [error for error, _, _ in ends] == [None, None]
    for error, step, _ in thread_ranks(2, partial(train, check_every=1), load_on_first, 3, algorithm):
        assert isinstance(error, CollectiveMismatchError)
        assert step == 3
        assert "Only rank 0 loaded weights, before step 3" in str(error)


@pytest.mark.parametrize(("mistake", "algorithm"), [(assign_on_first, "gradient_allreduce"), (load_on_first, DILOCO)])
def test_a_model_that_changed_on_one_rank_alone_keeps_nobody_waiting(thread_ranks, mistake, algorithm):
    """Before, both waited until their timeouts, each for the other."""
    (first, _, _), (second, _, _) = thread_ranks(2, train, mistake, 2, algorithm)
    assert isinstance(first, CollectiveMismatchError)
    assert first.peers == (1,)
    assert "on every rank" in str(first)
    assert isinstance(second, PeerLostError)
    assert "change of the model that other ranks did not make" in str(second)


def load_everywhere(model: torch.nn.Module, _: torch.optim.Optimizer, __: int) -> None:
    model.load_state_dict(mlp(seed=7).state_dict())


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", DILOCO, "decentralized"])
def test_a_load_on_all_ranks_goes_on(thread_ranks, caplog, algorithm):
    with caplog.at_level(logging.WARNING, "bagua"):
        ends = thread_ranks(2, partial(train, check_every=1), load_everywhere, 3, algorithm)
    assert [error for error, _, _ in ends] == [None, None]
    assert "loaded" not in caplog.text


def _train_on_the_same_data(gradient: float) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    model = with_bagua(layer, [optimizer], "gradient_allreduce")
    for _ in range(2):
        (model(torch.ones(1, 2)).sum() * gradient).backward()
        optimizer.step()


@pytest.mark.parametrize(("size", "gradient", "times"), [(2, 1.0, 1), (1, 1.0, 0), (2, 0.0, 0)])
def test_ranks_that_read_the_same_data_are_told_once(thread_ranks, caplog, size, gradient, times):
    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(size, _train_on_the_same_data, gradient)
    assert caplog.text.count("computed the same gradient in the first step") == times


def test_ranks_that_read_other_data_are_not(thread_ranks, caplog):
    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, partial(train, steps=1), nothing, 0)
    assert "same gradient" not in caplog.text


@pytest.mark.parametrize("options", [{"check_every": -1}, {"check_every": 2.5}, {"on_difference": "ignore"}])
def test_options_are_checked_where_they_are_given(options):
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        with_bagua(layer, [], "gradient_allreduce", bagua.comm.solo_group(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("numel", [1, 3, 1000])
def test_a_digest_depends_on_each_element_and_its_place(dtype, numel):
    tensor = torch.arange(1, numel + 1).to(dtype)
    same = quick_digest([tensor.clone()])
    assert quick_digest([tensor]) == same
    for place in {0, numel // 2, numel - 1}:
        other = tensor.clone()
        other[place] += 64
        assert quick_digest([other]) != same
    if numel > 1:
        assert quick_digest([tensor.flip(0)]) != same
    assert quick_digest([tensor, tensor]) != same


@pytest.mark.parametrize(("second", "times"), [("gradient_allreduce", 1), ("bytegrad", 0)])
def test_wrapping_twice_with_the_same_algorithm_is_told(thread_ranks, caplog, second, times):
    def wrap() -> None:
        model = mlp()
        for algorithm in ("gradient_allreduce", second):
            with_bagua(model, sgd(model.parameters()), algorithm)

    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, wrap)
    assert caplog.text.count("is wrapped with it again, which averages the weights") == times


def test_another_wrapper_around_a_wrapped_model_is_told(thread_ranks, caplog):
    def wrap() -> None:
        model = mlp()
        bagua_init(with_bagua(model, [], "gradient_allreduce"), [])

    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, wrap)
    assert caplog.text.count("the earlier wrapper exchanges nothing from now on") == 1


@pytest.mark.parametrize(
    ("options", "headline"),
    [
        ([{"algorithm": "bytegrad"}, {"algorithm": "qadam"}], "ranks have different algorithms"),
        ([{"find_unused_parameters": True}, {}], r"ranks have different options \(find_unused_parameters\)"),
        ([{"seed": 1}, {}], None),
    ],
)
def test_a_mismatch_is_headed_by_what_differs(thread_ranks, options, headline):
    def wrap() -> None:
        own = {"algorithm": "gradient_allreduce", **options[bagua.comm.get_rank()]}
        model = mlp(own.pop("seed", 0))
        optimizer = QAdamOptimizer(model.parameters(), lr=0.1)
        if headline is None:
            with_bagua(model, optimizer, **own)
            return
        with pytest.raises(CollectiveMismatchError, match=headline) as caught:
            with_bagua(model, optimizer, **own)
        assert "Build the same model" not in str(caught.value)

    thread_ranks(2, wrap)


def _resume_far_on() -> int:
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], check_every=1)
    train_steps(wrapped, optimizer, rank, range(2))
    saved = {**wrapped.bagua_state_dict(), "step": 5000}
    wrapped.load_state_dict({name: value.clone() for name, value in wrapped.state_dict().items()})
    wrapped.load_bagua_state_dict(saved)
    for step in range(5000, 5003):
        if step == 5001:
            other_rate(model, optimizer, rank)
        try:
            train_steps(wrapped, optimizer, rank, range(step, step + 1))
        except CollectiveMismatchError:
            return step
    return 0


def test_a_run_that_was_resumed_is_compared_as_before(thread_ranks):
    assert thread_ranks(2, _resume_far_on) == [5001, 5001]


def load_twice_on_first(model: torch.nn.Module, _: torch.optim.Optimizer, rank: int) -> None:
    for _ in range(2 - rank):
        model.load_state_dict(mlp(seed=7).state_dict())


def test_ranks_that_loaded_more_often_than_others_before_one_step_meet(thread_ranks):
    ends = thread_ranks(2, partial(train, steps=110), load_twice_on_first, 3, DILOCO)
    assert [error for error, _, _ in ends] == [None, None]


def _train_an_expert_of_its_own() -> None:
    rank, model = bagua.comm.get_rank(), mlp()
    model._ddp_params_and_buffers_to_ignore = ["2.weight"]
    own = [model[2].weight]
    rest = [parameter for parameter in model.parameters() if parameter is not own[0]]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": own, "lr": 0.1 * (rank + 1)}], lr=0.1)
    train_steps(with_bagua(model, [optimizer], check_every=1), optimizer, rank, range(3))


def test_settings_of_what_is_not_exchanged_may_differ(thread_ranks):
    thread_ranks(2, _train_an_expert_of_its_own)


def test_settings_are_compared_without_devices_and_addresses():
    assert _plain((torch.tensor(0.5), [1, None], object())) == [0.5, [1, None], "object"]
