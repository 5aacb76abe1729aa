"""The engine by itself: buckets, what is remembered in them, and the parts of it that no model is needed for."""

import contextlib
import copy
import doctest
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.comm
import bagua.torch_api
from bagua import errors
from bagua.algorithms import Algorithm, Every, Exchange, Flight, Gradients, How, Model, Replace, Then, Weights
from bagua.buckets import Bucket, form_buckets, padded_numel
from bagua.comm import ProcessGroup, RankKilled, solo_group
from bagua.engine.buckets.registration import Registration, tensors_in
from bagua.engine.formation import Formation
from bagua.engine.options import EngineOptions
from bagua.engine.schedule import lanes, scheduler
from bagua.engine.schedule.courses import Clock, Course, memory_for
from bagua.engine.schedule.phases import Phases
from bagua.engine.schedule.scheduler import Scheduler
from bagua.engine.state.saving import collect, restore
from bagua.parallel import OverlappingWrapper, allreduce_optimizer_state, broadcast_optimizer_state, with_bagua
from bagua.primitives import State
from bagua.testing import ThreadRanks
from tests.architecture.rules import REPOSITORY
from tests.harness import assert_same_on_all_ranks, loss_of, mlp, seeded, sgd, snapshot
from tests.parallel.wrapping import Branches, Loop, Made, branch_loss, on_ranks


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=40), st.integers(1, 120))
def test_buckets_come_in_the_order_in_which_they_are_complete(sized, bucket_bytes):
    rules = {"key": lambda place: sized[place][0], "nbytes": lambda place: sized[place][1]}
    lasts = [bucket[-1] for bucket in form_buckets(range(len(sized)), **rules, bucket_bytes=bucket_bytes)]
    assert lasts == sorted(lasts)


def test_the_first_bucket_may_be_smaller_than_the_others():
    form = partial(form_buckets, [1, 1, 2, 3, 3, 4], key=lambda _: 0, nbytes=lambda size: size)
    assert form(bucket_bytes=6, first_bytes=2) == [[1, 1], [2, 3, 3], [4]]
    expected = [[1, 1], [2], [3], [3], [4]]
    assert form(bucket_bytes=2, first_bytes=6) == form(bucket_bytes=2, first_bytes=None) == expected


@given(
    st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([8, 16, 128, 1024]), st.integers(1, 7)
)
def test_padding_is_the_smallest_that_splits_into_aligned_shares(numel, itemsize, align_bytes, shares):
    padded = padded_numel(numel, itemsize, align_bytes, shares)
    assert padded >= max(numel, 1)
    assert padded % shares == 0
    assert padded // shares * itemsize % align_bytes == 0
    smaller = range(max(numel, 1), padded)
    assert not any(size % shares == 0 and size // shares * itemsize % align_bytes == 0 for size in smaller)


def _bucket(*sizes: int, **options) -> Bucket:
    names, parameters = map(str, range(len(sizes))), [nn.Parameter(torch.randn(size)) for size in sizes]
    return Bucket(0, [*names], parameters, solo_group().global_communicator, **options)


def test_each_parameter_begins_at_a_multiple_of_64_bytes_and_padding_belongs_to_none():
    assert _bucket(3, 20, 1).offsets == (0, 16, 48)
    bucket = _bucket(3, 20, 1, align_bytes=64)
    owned = torch.cat([view.flatten() for view in bucket.views(torch.arange(float(bucket.numel)))]).tolist()
    assert sorted([*owned, *bucket.padding().tolist()]) == list(range(bucket.numel))


def test_changing_one_parameter_does_not_invalidate_what_autograd_saved_of_another():
    bucket = _bucket(3, 3)
    first, second = bucket.parameters
    bucket.fuse_weights()
    product = (first * first).sum()
    with torch.no_grad():
        second.add_(1.0)
    product.backward()
    assert torch.equal(first.grad, 2 * first.detach())


def test_a_rank_by_itself_makes_what_acts_alone():
    phases = Phases(1)
    phases.bind(Algorithm.init("gradient_allreduce"), Model({}))
    phases.enter()
    assert (phases.exchanges, phases.coming) == ((), ())


@on_ranks(2)
def test_buckets_that_cannot_be_made_end_training_on_all_ranks():
    formation = Formation(mlp(), [], Algorithm.init("gradient_allreduce"), None, EngineOptions())
    if bagua.comm.get_rank() == 1:
        formation.scheduler.execute = Mock(side_effect=MemoryError("no memory for buckets"))  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            formation.form([[*range(len(formation.registration.names))]])
        with pytest.raises(errors.CommunicatorClosedError, match="no memory for buckets"):
            formation.failure.check()
    else:
        with pytest.raises(errors.PeerLostError, match="the making of its buckets"):
            formation.group.global_communicator.barrier()
        formation.failure.check()


def test_what_is_owed_belongs_to_the_step_in_which_it_became_due(thread_ranks, monkeypatch):
    started, start = [], Course.start

    def note(self: Course, clock: Clock) -> None:
        started.append((bagua.comm.get_rank(), clock.t))
        start(self, clock)

    monkeypatch.setattr(Course, "start", note)

    def train() -> None:
        loop = Loop("with_bagua", algorithm=Algorithm.init("local_sgd", sync_every=3))
        loop.train(2)
        loss = loop.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        loop.optimizer.step()

    thread_ranks(2, train)
    assert set(started) == {(0, 3), (1, 3)}


REENTRANT = partial(Made, lambda model, x: checkpoint(model.inner, x.requires_grad_(), use_reentrant=True), inner=mlp)


@pytest.mark.parametrize(
    ("algorithm", "make", "begun", "unseen"),
    [
        (Algorithm.init("local_sgd", sync_every=4), mlp, [0, 3, 4, 7], [1, 2, 5, 6]),
        (Algorithm.init("local_sgd", sync_every=4), REENTRANT, [0, 3, 4, 7], []),
        (Algorithm.init("diloco", sync_every=6, overlap=2), mlp, [0, 3, 4, 5, 6], [1, 2, 7]),  # From step 3 to step 5.
        ("gradient_allreduce", mlp, [*range(8)], []),
    ],
)
def test_steps_in_which_nothing_is_due_are_only_counted(thread_ranks, monkeypatch, algorithm, make, begun, unseen):
    begin = create_autospec(Scheduler.begin, side_effect=Scheduler.begin)
    monkeypatch.setattr(Scheduler, "begin", begin)

    def train() -> tuple[int, Any, list[int], int]:
        model, rank, without = make(), bagua.comm.get_rank(), []
        halves = [sgd([*model.parameters()][half]) for half in (slice(2), slice(2, None))]
        with_bagua(model, halves, "decentralized")
        reducer = with_bagua(model, halves, algorithm)._bagua_engine.reducer
        for step in range(8):
            without += [] if model._forward_hooks else [step]
            model.zero_grad()
            if step in unseen[1:2]:  # A hook starts a pass inside this one, which is a part of it.
                inside = map(torch.Tensor.backward, [loss_of(model, rank, step)])
                next(model.parameters()).register_hook(lambda _, inside=inside: next(inside, None))
            loss_of(model, rank, step).backward()
            [half.step() for half in halves]
        model.bagua_finish()  # The next forward pass is seen again.
        return reducer.step, reducer.group.recorder.steps, without, len(model._forward_hooks)

    assert thread_ranks(2, train) == [(8, (8, 8), unseen, 1)] * 2
    assert sorted(call.args[1].step for call in begin.call_args_list) == sorted(2 * begun)


@on_ranks(2)
def test_gradients_may_be_told_of_by_hand_in_a_step_in_which_nothing_is_due():
    loop = Loop("with_bagua", algorithm=Algorithm.init("local_sgd", sync_every=8))
    loop.train()
    for _ in range(3):
        for parameter in loop.model.parameters():
            loop.reducer.mark_tensor_ready(parameter)
        loop.reducer.mark_on_complete()
    assert loop.reducer.step == 4


#: Remembers residuals from the first step on.
SIGNS = Algorithm.init("sign_sgd", warmup_steps=0)


def test_what_belongs_to_a_bucket_goes_where_its_first_parameter_goes():
    """And to wherever one of them is, if it was made while training."""

    def places_of(layout: Sequence[str]) -> list[Any]:
        places = []
        for index, names in enumerate(layout):
            parameters = [nn.Parameter(torch.zeros(2)) for _ in names]
            bucket = Bucket(index, names, parameters, solo_group().global_communicator)
            memory = memory_for(bucket)
            memory.declare([State("count", lambda _: torch.zeros(()), per="flat"), State("outer", per="family")])
            places.append(SimpleNamespace(label="inner", names=bucket.names, memory=memory, views=bucket.views))
        return places

    old, new = places_of(["ab", "cd", "ef"]), places_of(["bc", "f", "ade"])
    for number, place in enumerate(old, start=1):
        place.memory.state["count"].fill_(number)
        place.memory.state["outer.step"] = torch.tensor(number)
    restore(new, collect(old))
    assert [int(place.memory.state["count"]) for place in new] == [2, 0, 1]
    assert [int(place.memory.state["outer.step"]) for place in new] == [1, 3, 1]


@on_ranks(2)
def test_a_saved_state_does_not_change_with_the_training():
    loop = Loop("with_bagua", algorithm=SIGNS)
    loop.train(2)
    saved = loop.wrapped.bagua_state_dict()[f"rank{loop.rank}"]["parameters"]
    before = copy.deepcopy(saved)
    loop.train(2)
    assert before
    torch.testing.assert_close(saved, before, rtol=0.0, atol=0.0)


#: What rank 0 makes of its checkpoint, and what it is told.
UNUSABLE: dict[str, tuple[Callable[[dict], dict | None], str]] = {
    "nothing": (lambda _: None, "no algorithm, step, rank, world_size"),
    "rank": (lambda saved: {**saved, "rank": 1}, "no rank1"),
    "own": (lambda saved: {**saved, "rank0": {}}, "no parameters, others, flights"),
    "cut": (lambda saved: {**saved, "others": None}, "a list as others"),
    "other": (lambda saved: {**saved, "others": [1]}, r"a dict as others\[0\]"),
    "flight": (lambda saved: {**saved, "rank0": {**saved["rank0"], "flights": [{}]}}, "no label, names, step"),
    "no tensors": (lambda saved: {**saved, "parameters": {"0.bias": 3}}, r"a dict as parameters\['0.bias'\]"),
    "shape": (lambda saved: {**saved, "parameters": {"0.bias": {"residual": torch.ones(3)}}},
              r"residual of 0.bias has another shape"),
    "number": (lambda saved: {**saved, "algorithm": 3}, "state_dict has the wrong type"),
    "step": (lambda saved: {**saved, "step": "x"}, "state_dict has the wrong type"),
    "algorithm": (lambda saved: {**saved, "algorithm": "TopKAlgorithm()"}, "another algorithm"),
    "names": (lambda saved: {**saved, "buckets": [["nobody"]] * len(saved["buckets"])}, "nobody"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), UNUSABLE.values(), ids=UNUSABLE)
@on_ranks(2)
def test_ranks_do_not_wait_for_one_that_cannot_load_its_checkpoint(change, words):
    loop = Loop("with_bagua", algorithm=SIGNS)
    loop.train(2)
    saved = loop.wrapped.bagua_state_dict()
    error = errors.ConfigurationError if loop.rank == 0 else errors.CollectiveMismatchError
    with pytest.raises(error, match=words if loop.rank == 0 else "cannot be used"):
        loop.wrapped.bagua_load_state_dict(change(saved) if loop.rank == 0 else saved)
    loop.train(2)


def _remembered(algorithm: Algorithm | str) -> dict:
    loop = Loop("with_bagua", algorithm=algorithm)
    loop.train(2)
    return loop.wrapped.bagua_state_dict()


def _load(algorithm: Algorithm | str, saved: list[dict]) -> int:
    wrapped = Loop(with_bagua, algorithm=algorithm).wrapped
    wrapped.bagua_load_state_dict(saved[bagua.comm.get_rank()])
    return wrapped.bagua_state_dict()["step"]


def _loop_of_the_page() -> dict[str, Any]:
    """The functions that docs/save_and_resume.md shows for a script that is started again."""
    found: dict[str, Any] = {"bagua": bagua.torch_api, "torch": torch}
    page = (REPOSITORY / "docs" / "save_and_resume.md").read_text(encoding="utf-8")
    for example in doctest.DocTestParser().get_examples(page):
        if example.source.startswith("def "):
            exec(example.source, found)
    return found


@pytest.mark.parametrize("dies_after", [2, 7, 9, 11])
@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm.init("diloco", sync_every=6),
        Algorithm.init("diloco", sync_every=6, overlap=2),
        Algorithm.init("local_sgd", sync_every=5),
        *("gradient_allreduce", SIGNS, "decentralized"),
    ],
    ids=["diloco", "overlapping", "local_sgd", "gradient_allreduce", "sign_sgd", "decentralized"],
)
def test_a_run_that_is_started_again_after_a_death_ends_as_one_that_was_not(algorithm, dies_after, tmp_path):
    """Between exchanges ranks do not wait for a dead one: they train on, and save steps that it does not have."""
    page, steps, size = _loop_of_the_page(), 14, 3

    def attempt(folder: Path, dies: bool) -> tuple[dict[str, torch.Tensor], Any]:
        loop = Loop("with_bagua", algorithm=algorithm)
        batches = torch.randn(steps, 5, 8, generator=torch.Generator().manual_seed(loop.rank))
        if dies and loop.rank == 1:
            page["train"](folder, loop.wrapped, loop.optimizer, batches[:dies_after], 3)
            raise RankKilled
        page["train"](folder, loop.wrapped, loop.optimizer, batches, 3)
        loop.wrapped.bagua_finish()
        return snapshot(loop.model), sorted(page["own_files"](folder))

    def load_newest(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
        begun.append(load(folder, model, optimizer))
        return begun[-1]

    load, page["load_newest"], begun = page["load_newest"], load_newest, list[int]()
    pool, again = ThreadRanks(size), tmp_path / "again"
    again.mkdir()
    (tmp_path / "once").mkdir()
    expected = pool.run(attempt, tmp_path / "once", False)
    assert any(outcome.error is not None for outcome in pool.outcomes(attempt, again, True))
    begun.clear()
    for (weights, kept), (wanted, _) in zip(pool.run(attempt, again, False), expected, strict=True):
        assert kept == [12]
        assert_same_on_all_ranks([weights, wanted])
    assert begun == [dies_after // 3 * 3] * size


@on_ranks(2)
def test_checkpoints_of_different_steps_are_an_error_that_says_what_to_load():
    loop = Loop("with_bagua", algorithm=Algorithm.init("diloco", sync_every=100))
    saved = []
    for _ in range(2):
        loop.train()
        saved.append(loop.wrapped.bagua_state_dict())
    with pytest.raises(errors.CollectiveMismatchError, match="newest step that all ranks have") as caught:
        loop.wrapped.bagua_load_state_dict(saved[loop.rank])
    assert {caught.value.expected, caught.value.seen} == {"saved after step 1", "saved after step 2"}


@pytest.mark.parametrize("algorithm", [SIGNS, "power_sgd", "decentralized", "low_precision_decentralized"], ids=str)
def test_files_that_were_swapped_between_ranks_are_noticed(thread_ranks, algorithm):
    first, second = thread_ranks(2, _remembered, algorithm)
    assert [(saved["rank"], saved["world_size"]) for saved in (first, second)] == [(0, 2), (1, 2)]
    thread_ranks(2, _load, algorithm, [first, second])
    with pytest.raises(errors.ConfigurationError, match=r"rank . of 2 was given the state of rank . of 2") as caught:
        thread_ranks(2, _load, algorithm, [second, first])
    assert {caught.value.expected, caught.value.seen} == {"rank 0 of 2", "rank 1 of 2"}


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "async"])
def test_what_all_ranks_have_in_common_may_come_from_any_of_them(thread_ranks, algorithm):
    _, second = thread_ranks(2, _remembered, algorithm)
    for size in (1, 2, 3):
        assert thread_ranks(size, _load, algorithm, [second] * size) == [2] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_file_serves_any_number_of_ranks(thread_ranks, caplog, size):
    """What was rank 1's own begins anew on all ranks, which is said; what all had in common goes on."""

    def residuals() -> list[float]:
        loop = Loop("with_bagua", algorithm=SIGNS)
        loop.wrapped.bagua_load_state_dict(second)
        places = loop.reducer.scheduler.places
        found = [float(value.abs().sum()) for place in places for value in place.memory.state.values()]
        loop.train()
        assert size == 1 or loop.reducer.step == 3
        return found

    _, second = thread_ranks(2, _remembered, SIGNS)
    assert any(value.abs().sum() for state in second["rank1"]["parameters"].values() for value in state.values())
    assert not any(sum(found) for found in thread_ranks(size, residuals))
    assert len(re.findall("state of rank 1 of 2.*begin anew", caplog.text)) == size


@on_ranks(2)
def test_models_that_share_some_parameters_cannot_both_be_wrapped():
    shared = nn.Linear(4, 4)
    first = nn.Sequential(shared, nn.Linear(4, 2))
    kept = OverlappingWrapper(first, sgd(first.parameters()))
    second = nn.Sequential(shared, nn.Linear(4, 3))
    with pytest.raises(errors.ConfigurationError, match=r"0\.weight is exchanged by the engine of another model"):
        OverlappingWrapper(second, sgd(second.parameters()))
    assert shared.weight._post_accumulate_grad_hooks, "the first model lost its hooks"
    del kept


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    # Its memory begins where it did.
    "shortened": (
        lambda model: setattr(model[0].bias, "data", model[0].bias.data[:1]),
        "0.bias had 16 elements and has 1 now",
    ),
    "replaced": (lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(16, 8))), "0.weight"),
    "unfrozen": (lambda model: model[2].bias.requires_grad_(True), "2.bias"),
    "added": (lambda model: model.append(nn.Linear(4, 4)), "added"),
    "in the place of None": (lambda model: setattr(model[1], "scale", nn.Parameter(torch.ones(1))), "added"),
    "of another type": (nn.Module.double, "0.weight"),
    "moved": (lambda model: setattr(model[0].bias, "data", model[0].bias.data.clone()), "0.bias"),
    "another module": (lambda model: model.__setitem__(4, nn.Linear(16, 4)), "4 is another module now"),
    "added without parameters": (lambda model: model.append(nn.Identity()), "None"),
    "another without parameters": (lambda model: model.__setitem__(1, nn.Dropout()), "None"),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_what_is_a_difference_from_the_model_that_was_wrapped(change, told):
    model = mlp()
    model[1].register_parameter("scale", None)
    model[2].bias.requires_grad_(False)
    registration = Registration(model)
    assert registration.difference() is None
    change(model)
    assert told in str(registration.difference())


@pytest.mark.parametrize(
    ("make", "problem"),
    [(lambda: nn.LazyLinear(3), "no shape yet"), (lambda: nn.Linear(2, 2, device="meta"), "no memory"),
     (lambda: nn.Embedding(4, 2, sparse=True), "sparse gradients")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_that_cannot_be_put_into_a_bucket_are_named(make, problem):
    with pytest.raises(errors.InvalidTensorError, match=f"weight .*{problem}"):
        Registration(make())


@on_ranks(3)
def test_a_model_that_only_one_rank_cannot_wrap_is_an_error_on_every_rank():
    alone = bagua.comm.get_rank() == 1
    model = nn.Sequential(nn.Embedding(4, 2, sparse=alone), nn.Linear(2, 2))
    with pytest.raises(errors.BaguaError, match=r"0\.weight has sparse gradients") as caught:
        OverlappingWrapper(model, sgd(model.parameters()))
    assert caught.type is (errors.InvalidTensorError if alone else errors.CollectiveMismatchError)
    assert str(caught.value).startswith("0.weight") == alone


@dataclass(frozen=True)
class Does(How):
    """What a function does."""

    act: Callable[[Flight, ProcessGroup], None] = field(repr=False)  # Ranks compare what they show.

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        self.act(flight, group)


def many_sums(flight: Flight, group: ProcessGroup) -> None:
    """They go on for a while."""
    for _ in range(20):
        group.global_communicator.allreduce(flight.flat)


@dataclass(frozen=True)
class Ignore(Then):
    """Nobody uses the result."""

    def fold(self, flight: Flight) -> None:
        pass


@on_ranks(2)
def test_gradients_that_no_rank_has_stay_none_with_every_lag():
    # Sums that nobody uses, in a background thread that goes on until the next step.
    in_background = Algorithm.of(Exchange(Gradients(), Every(), Does(many_sums), Ignore(), lag=1))
    for algorithm in (Algorithm.init("gradient_allreduce"), in_background):
        loop = Loop(OverlappingWrapper, Branches, algorithm=algorithm, find_unused_parameters=True, bucket_bytes=1)
        for step in range(4):
            loop.model.zero_grad()
            branch_loss(loop.wrapped, loop.rank, step).backward()
        branches = loop.model.left, loop.model.right, loop.model.never
        assert [branch.weight.grad is not None for branch in branches] == [True, True, False]


def test_devices_that_the_group_does_not_serve_are_named():
    registration = Registration(mlp())
    registration.refuse_other_devices({"cpu", "cuda"})
    with pytest.raises(errors.InvalidTensorError, match=r"parameter 0\.weight is on a device"):
        registration.refuse_other_devices({"cuda"})


@pytest.mark.parametrize(("seen", "changed"), [("None", lambda _: None), ("torch.sparse_coo", torch.Tensor.to_sparse)])
@on_ranks(2)
def test_a_hook_of_the_user_that_drops_gradients_or_makes_them_sparse_is_an_error(seen, changed):
    model = mlp()
    model[0].bias.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", changed(one.grad)))
    words = rf"the gradient of 0\.bias cannot be put into a bucket.*seen {seen}"
    with pytest.raises(errors.ConfigurationError, match=words):
        Loop(OverlappingWrapper, lambda: model).train(2)


@on_ranks(2)
def test_an_error_in_an_exchange_after_the_optimizer_ends_every_rank():
    def fail(flight: Flight, group: ProcessGroup) -> None:
        if group.rank == 1 and flight.step == 1:
            raise ArithmeticError("no such block")
        group.global_communicator.allreduce(flight.flat)

    loop = Loop(OverlappingWrapper, algorithm=Algorithm.of(Exchange(Weights(), Every(), Does(fail), Ignore())))
    with pytest.raises(ArithmeticError if loop.rank else errors.PeerLostError, match="no such block"):
        loop.train(5)
    with pytest.raises(errors.CommunicationError):
        loop.train()


@pytest.mark.parametrize(
    ("algorithm", "factor"),  # By which the sum of the gradients of two ranks is multiplied.
    [("gradient_allreduce", 0.5), (Algorithm.of(Exchange(Gradients(), Every(), Does(many_sums), Replace())), 2.0**19)],
    ids=["scaled", "as they are"],
)
@on_ranks(2)
def test_gradients_are_put_into_their_bucket_together_and_before_they_take_much_memory(algorithm, factor):
    """The large one brings all that came before it into the bucket; those after it wait for the last one."""

    def made() -> nn.Sequential:
        with seeded():
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5000), nn.Linear(5000, 2))

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model.zero_grad()
        model(torch.full((1, 4), 1.0 + rank + step)).square().sum().backward()

    loop = Loop(OverlappingWrapper, made, algorithm=algorithm)
    model, wrapped, rank = loop.model, loop.wrapped, loop.rank
    backward(wrapped, rank, 0)
    (bucket,) = wrapped.bagua_buckets
    views = dict(zip(bucket.names, bucket.gradient_views, strict=True))
    gathered = []

    def look(_: nn.Parameter) -> None:
        gathered.append([name for name, one in model.named_parameters() if one.grad is views[name]])

    model[0].bias.register_post_accumulate_grad_hook(look)
    for step in (1, 2):
        backward(wrapped, rank, step)
        alone = [made(), made()]
        for other, one in enumerate(alone):
            backward(one, other, step)
        for name, parameter in model.named_parameters():
            local = [one.get_parameter(name).grad for one in alone]
            torch.testing.assert_close(parameter.grad, factor * (local[0] + local[1]))
            assert parameter.grad is views[name]
    assert gathered == [["1.weight", "1.bias", "2.weight", "2.bias"]] * 2


@given(st.lists(st.sampled_from([1, 17, 4096, 5000]), min_size=1, max_size=6), st.booleans(), st.data())
def test_gradients_are_multiplied_once_whatever_their_size_and_order(sizes, fusion, data):
    bucket = _bucket(*sizes, fusion=fusion)
    bucket.expect_gradients(gather=True)
    bucket.begin_backward(0.3)
    views, gradients = bucket.gradient_views, [torch.randn(size) for size in sizes]
    for parameter, view, gradient in zip(bucket.parameters, views, gradients, strict=True):
        parameter.grad = view.copy_(gradient) if data.draw(st.booleans()) else gradient.clone()
    order, cut = data.draw(st.permutations(range(len(sizes)))), data.draw(st.integers(0, len(sizes) - 1))
    for bucket.waiting, bucket.pending in ((order[:cut], len(sizes) - cut), (order[cut:], 0)):
        bucket.gather_waiting()
    for parameter, view, gradient in zip(bucket.parameters, views, gradients, strict=True):
        assert not fusion or parameter.grad is view
        assert torch.equal(view, gradient * torch.tensor(0.3))


@pytest.mark.parametrize("synchronize", [True, False])
@on_ranks(2)
def test_small_gradients_that_complete_nothing_run_nothing_of_ours(synchronize):
    """Torch tells us of as many in a pass, however many there are."""

    def calls(layers: int) -> int:
        def note(frame: Any, event: str, _: object) -> None:
            told.append(event == "call" and frame.f_code.co_name == "_arrived")

        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        loop = Loop(make=lambda: model, losses=lambda model, *_: model(torch.ones(2, 8)).mean(), bucket_bytes=10**6)
        loop.train(3)
        told: list[bool] = []
        with contextlib.nullcontext() if synchronize else loop.wrapped.no_sync():
            loss = loop.loss()
            sys.setprofile(note)
            loss.backward()
            sys.setprofile(None)
        return sum(told)

    assert calls(20) == calls(5) > 0


@on_ranks(2)
def test_what_begins_with_the_first_gradient_waits_for_no_other():
    begun = threading.Event()
    early = Exchange(Weights(), Every(), Does(lambda *_: begun.set()), Ignore(), at="backward begins", label="early")
    late = Exchange(Gradients(), Every(), Does(many_sums), Replace())
    loop = Loop(OverlappingWrapper, algorithm=Algorithm.of(early, late))
    loop.train(2)
    begun.clear()
    in_time = []
    loop.model[-1].bias.register_post_accumulate_grad_hook(lambda _: in_time.append(begun.wait(10.0)))
    loop.train()
    assert in_time == [True]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason=f"torch {torch.__version__} has no grad_dtype")
def test_a_gradient_of_a_wider_dtype_is_multiplied_before_it_is_rounded():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad_dtype = torch.float32
    bucket = Bucket(0, ["weight"], [parameter], solo_group().global_communicator, fusion=False)
    bucket.expect_gradients(gather=True)
    bucket.begin_backward(0.5)
    parameter.grad = torch.tensor([80_000.0, 2.0])
    bucket.waiting, bucket.pending = [0], 0
    bucket.gather_waiting()
    assert bucket.gradient_views[0].tolist() == [40_000.0, 1.0]


class Last(torch.autograd.Function):
    """The part of a backward pass that comes after all gradients of the model."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        context.act = act
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.act()
        return gradient, None


@on_ranks(2)
def test_the_last_bucket_waits_for_the_end_of_a_pass_that_ends_soon_and_needs_no_thread(monkeypatch):
    """One bucket is ready before the pass is over. Whether passes go on for long is found out in each of them."""
    seen: list[str] = []
    started, here = threading.Event(), threading.get_ident()

    def note_and_sum(flight: Flight, group: ProcessGroup) -> None:
        seen.append("here" if threading.get_ident() == here else "in a thread")
        started.set()
        group.global_communicator.allreduce(flight.flat)

    def rest(ahead: bool) -> None:
        if ahead:
            assert started.wait(60)
        seen.append("rest")

    sums = Algorithm.of(Exchange(Gradients(), Every(), Does(note_and_sum), Replace()))
    wrapped = Loop(OverlappingWrapper, algorithm=sums).wrapped
    for step, rest_s in enumerate((60.0, 60.0, 0.0, 60.0, 60.0)):
        bagua.comm.barrier()  # Ranks are threads of one process.
        monkeypatch.setattr(scheduler, "_REST_S", rest_s)
        started.clear()
        wrapped(Last.apply(torch.ones(6, 8, requires_grad=True), partial(rest, step == 3))).sum().backward()
    assert seen == ["rest", "here"] * 3 + ["in a thread", "rest"] + ["rest", "here"]


def test_outputs_that_contain_themselves_or_lead_everywhere_end():
    cyclic: list[Any] = [torch.zeros(1)]
    cyclic.append(cyclic)
    assert len(list(tensors_in(cyclic))) == 1
    model = nn.Linear(2, 2)
    assert list(tensors_in(SimpleNamespace(value=[model, torch, SimpleNamespace, lambda: model]))) == []
    deep = SimpleNamespace(value=torch.zeros(1))
    for _ in range(5):
        deep = SimpleNamespace(value=deep)
    assert list(tensors_in(deep)) == []


class Device:
    """Stands in for CUDA: notes what is issued on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.current = self.stream("compute")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextlib.contextmanager
    def on(self, stream: SimpleNamespace):
        before, self.current = self.current, stream
        yield
        self.current = before

    def stream(self, name: str) -> SimpleNamespace:
        def record() -> str:
            self.notes.append(f"{name} records")
            return f"event of {name}"

        return SimpleNamespace(
            name=name,
            record_event=record,
            wait_stream=lambda other: self.notes.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.notes.append(f"{name} waits for {event}"),
        )


def test_on_a_stream_exchanges_come_after_gradients_and_before_their_use(monkeypatch):
    device = Device(monkeypatch)
    exchanges = device.stream("exchange")
    monkeypatch.setattr(lanes, "_communication_stream", lambda _: exchanges)

    def exchange() -> Any:
        device.notes.append(f"exchange on {device.current.name}")
        return SimpleNamespace(wait=lambda: device.notes.append(f"{device.current.name} waits for the work"))

    wait = lanes.StreamLane(solo_group(), torch.device("cuda", 0)).run(exchange)
    assert device.current.name == "compute"
    wait()
    assert device.notes == [
        "exchange waits for compute",
        "exchange on exchange",
        "exchange waits for the work",
        "exchange records",
        "compute waits for event of exchange",
    ]


def test_a_background_thread_works_on_the_stream_of_its_caller(monkeypatch):
    device = Device(monkeypatch)
    background = lanes.ThreadLane(solo_group().duplicate("test-streams"), torch.device("cuda", 0))
    with device.on(device.stream("side")):
        wait = background.run(lambda: device.notes.append(f"exchange on {device.current.name}"))
        background.thread.submit(lambda: None).result()
    wait()
    background.close()
    assert device.notes == ["exchange on side", "compute waits for side"]


def _optimizer(rank: int, *, groups: int = 1, steps: int = 1) -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = [{"params": layer.parameters()} for layer in model] if groups == 2 else model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=0.1 * (rank + 1))
    for _ in range(steps):
        model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("exchange", [broadcast_optimizer_state, allreduce_optimizer_state])
@on_ranks(3)
def test_optimizers_that_differ_are_named_on_every_rank(exchange):
    rank = bagua.comm.get_rank()
    with pytest.raises(errors.CollectiveMismatchError, match="parameter groups of"):
        exchange([_optimizer(rank, groups=1 + rank % 2)])


@on_ranks(2)
def test_averaging_needs_the_same_state_on_all_ranks():
    with pytest.raises(errors.CollectiveMismatchError, match="exp_avg of parameter 0"):
        allreduce_optimizer_state([_optimizer(0, steps=bagua.comm.get_rank())])
