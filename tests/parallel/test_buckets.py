"""Buckets: how members are dealt into them, which cannot be made, and what is remembered when their layout changes."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bagua.comm
import bagua.torch_api
from bagua.algorithms import (
    Algorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    Model,
)
from bagua.buckets import Bucket, form_buckets, padded_numel
from bagua.comm import RankKilled, solo_group
from bagua.engine.formation import Formation
from bagua.engine.options import EngineOptions
from bagua.engine.schedule.courses import Clock, Course, memory_for
from bagua.engine.schedule.phases import Phases
from bagua.engine.schedule.scheduler import Scheduler
from bagua.engine.state.saving import collect, restore
from bagua.errors import CollectiveMismatchError, CommunicatorClosedError, ConfigurationError, PeerLostError
from bagua.parallel import with_bagua
from bagua.primitives import ReducerMemory, State
from bagua.testing import ThreadRanks
from tests.architecture.rules import REPOSITORY
from tests.harness import mlp, seeded, sgd
from tests.parallel.wrapping import Loop, on_ranks

members = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=40)


@given(members, st.integers(1, 120))
def test_every_member_is_in_exactly_one_bucket_of_its_kind(sized, bucket_bytes):
    positions = range(len(sized))
    buckets = _form(sized, bucket_bytes)
    assert sorted(itertools.chain(*buckets)) == list(positions)
    assert all(len({sized[position][0] for position in bucket}) == 1 for bucket in buckets)
    assert all(bucket == sorted(bucket) for bucket in buckets)


@given(members, st.integers(1, 120))
def test_only_the_last_bucket_of_a_kind_is_small_and_none_is_needlessly_large(sized, bucket_bytes):
    last_of_kind = {sized[bucket[0]][0]: bucket for bucket in _form(sized, bucket_bytes)}
    for bucket in _form(sized, bucket_bytes):
        held = [sized[position][1] for position in bucket]
        assert sum(held[:-1]) < bucket_bytes, "it was full before its last member"
        assert sum(held) >= bucket_bytes or bucket == last_of_kind[sized[bucket[0]][0]]


@given(members, st.integers(1, 120))
def test_buckets_come_in_the_order_in_which_they_are_complete(sized, bucket_bytes):
    lasts = [bucket[-1] for bucket in _form(sized, bucket_bytes)]
    assert lasts == sorted(lasts)


def test_the_first_bucket_may_be_smaller_than_the_others():
    def form(bucket_bytes: int, first_bytes: int | None) -> list[list[int]]:
        sizes = [1, 1, 2, 3, 3, 4]
        return form_buckets(
            sizes, key=lambda _: 0, nbytes=lambda size: size, bucket_bytes=bucket_bytes, first_bytes=first_bytes
        )

    assert form(6, 2) == [[1, 1], [2, 3, 3], [4]]
    assert form(2, 6) == form(2, None) == [[1, 1], [2], [3], [3], [4]]


def _form(sized, bucket_bytes):
    return form_buckets(
        range(len(sized)),
        key=lambda position: sized[position][0],
        nbytes=lambda position: sized[position][1],
        bucket_bytes=bucket_bytes,
    )


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


def _bucket(*parameters: nn.Parameter, **options) -> Bucket:
    names = [f"p{index}" for index in range(len(parameters))]
    return Bucket(0, names, parameters, solo_group().global_communicator, **options)


def _mixed() -> list[nn.Parameter]:
    """A matrix, a scalar, nothing, ``channels_last``, a transposed one, and one with gaps."""
    return [
        nn.Parameter(torch.randn(3, 5)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0, 4)),
        nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(6, 2).t()),
        nn.Parameter(torch.randn(8, 8)[:, ::2]),
    ]


def test_fused_weights_keep_values_identity_layout_and_alignment():
    parameters = _mixed()
    before = [(parameter.detach().clone(), parameter.stride()) for parameter in parameters]
    bucket = _bucket(*parameters)
    bucket.fuse_weights()
    assert bucket.weights is not None
    base = bucket.weights.data_ptr()
    for parameter, (value, _) in zip(bucket.parameters, before, strict=True):
        assert torch.equal(parameter, value)
        if parameter.numel():
            assert (parameter.data_ptr() - base) % 64 == 0
            assert 0 <= parameter.data_ptr() - base < bucket.weights.nbytes
    dense = list(zip(parameters, before, strict=True))[:5]
    assert all(parameter.stride() == stride for parameter, (_, stride) in dense)
    assert all(held is given for held, given in zip(bucket.parameters, parameters, strict=True))
    bucket.weights.fill_(7.0)
    assert all(bool((parameter == 7.0).all()) for parameter in parameters)


def test_views_do_not_overlap_and_leave_padding_alone():
    bucket = _bucket(*_mixed(), align_bytes=256, shares=3)
    flat = bucket.allocate_gradients()
    assert flat.numel() == bucket.numel
    assert flat.numel() % 3 == 0
    for number, view in enumerate(bucket.gradient_views, start=1):
        view.fill_(float(number))
    sizes = [parameter.numel() for parameter in bucket.parameters]
    for number, size in enumerate(sizes, start=1):
        assert int((flat == number).sum()) == size
    assert int((flat == 0).sum()) == flat.numel() - sum(sizes)


def test_changing_one_parameter_does_not_invalidate_what_autograd_saved_of_another():
    first, second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    _bucket(first, second).fuse_weights()
    product = (first * first).sum()
    with torch.no_grad():
        second.add_(1.0)
    product.backward()
    assert torch.equal(first.grad, 2 * first.detach())


@pytest.mark.parametrize("fusion", [True, False])
def test_weights_are_read_and_written_with_and_without_fusion(fusion):
    parameters = _mixed()
    before = [parameter.detach().clone() for parameter in parameters]
    bucket = _bucket(*parameters, fusion=fusion)
    bucket.fuse_weights()
    assert (bucket.weights is not None) == fusion
    flat = bucket.read_weights(bucket.empty())
    for view, value in zip(bucket.views(flat), before, strict=True):
        assert torch.equal(view, value)
    bucket.write_weights(flat.mul_(2.0))
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter, 2 * value)
        assert parameter.requires_grad


def test_padding_is_what_belongs_to_no_parameter():
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(20)), nn.Parameter(torch.randn(1))]
    bucket = _bucket(*parameters)
    owned = torch.cat([view.flatten() for view in bucket.views(torch.arange(float(bucket.numel)))]).tolist()
    assert sorted([*owned, *bucket.padding().tolist()]) == list(range(bucket.numel))
    assert not bucket.empty().any()


def layers() -> nn.Sequential:
    with seeded():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_rank_by_itself_makes_what_acts_alone():
    phases = Phases(1)
    phases.bind(GradientAllReduceAlgorithm(), Model({}))
    phases.enter()
    assert (phases.exchanges, phases.coming) == ((), ())


@on_ranks(2)
def test_buckets_that_cannot_be_made_end_training_on_all_ranks():
    formation = Formation(mlp(), [], GradientAllReduceAlgorithm(), None, EngineOptions())
    if bagua.comm.get_rank() == 1:

        def fail(*_: object) -> None:
            raise MemoryError("no memory for buckets")

        formation.scheduler.execute = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            formation.form([[*range(len(formation.registration.names))]])
        with pytest.raises(CommunicatorClosedError, match="no memory for buckets"):
            formation.failure.check()
    else:
        with pytest.raises(PeerLostError, match="the making of its buckets"):
            formation.group.global_communicator.barrier()
        formation.failure.check()


def test_what_is_owed_belongs_to_the_step_in_which_it_became_due(thread_ranks, monkeypatch):
    started: list[tuple[int, int]] = []
    start = Course.start

    def note(self: Course, clock: Clock) -> None:
        started.append((bagua.comm.get_rank(), clock.t))
        start(self, clock)

    monkeypatch.setattr(Course, "start", note)

    def train() -> None:
        loop = Loop("with_bagua", layers, algorithm=LocalSGDAlgorithm(sync_every=3))
        for _ in range(2):
            loop.model(torch.ones(2, 4)).sum().backward()
            loop.optimizer.step()
        loss = loop.model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        loop.optimizer.step()

    thread_ranks(2, train)
    assert {t for _, t in started} == {3}
    assert {rank for rank, _ in started} == {0, 1}


@pytest.mark.parametrize(
    ("algorithm", "begun"),
    [
        (LocalSGDAlgorithm(sync_every=4), [0, 3, 4, 7]),
        (DiLoCoAlgorithm(sync_every=6, overlap=2), [0, 3, 4, 5, 6]),  # Starts in step 3, and is back in step 5.
        (GradientAllReduceAlgorithm(), [*range(8)]),
    ],
)
def test_steps_in_which_nothing_is_due_are_only_counted(thread_ranks, monkeypatch, algorithm, begun):
    seen: list[tuple[int, int]] = []
    begin = Scheduler.begin

    def note(self: Scheduler, clock: Clock) -> None:
        seen.append((bagua.comm.get_rank(), clock.step))
        begin(self, clock)

    monkeypatch.setattr(Scheduler, "begin", note)

    def train() -> int:
        loop = Loop("with_bagua", layers, algorithm=algorithm)
        for _ in range(8):
            loop.model(torch.ones(2, 4)).sum().backward()
            loop.optimizer.step()
        return loop.reducer.step

    assert thread_ranks(2, train) == [8, 8]
    assert sorted(set(seen)) == [(rank, step) for rank in range(2) for step in begun]


@on_ranks(2)
def test_gradients_may_be_told_of_by_hand_in_a_step_in_which_nothing_is_due():
    loop = Loop("with_bagua", layers, algorithm=LocalSGDAlgorithm(sync_every=8))
    loop.model(torch.ones(2, 4)).sum().backward()
    loop.optimizer.step()
    for _ in range(3):
        for parameter in loop.model.parameters():
            loop.reducer.mark_tensor_ready(parameter)
        loop.reducer.mark_on_complete()
    assert loop.reducer.step == 4


#: Remembers residuals from the first step on.
SIGNS = Algorithm.init("sign_sgd", warmup_steps=0)
SHAPES = {"a": (3, 2), "b": (), "c": (5,), "d": (0,), "e": (2, 3, 1), "f": (7,)}
layouts = st.permutations(list(SHAPES)).flatmap(
    lambda names: st.lists(st.integers(1, len(names) - 1), unique=True).map(
        lambda cuts: [names[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(names)], strict=True)]
    )
)


@dataclass
class Place:
    """Holds what is remembered of a bucket."""

    label: str
    part: int
    bucket: Bucket
    memory: ReducerMemory

    @property
    def names(self) -> Sequence[str]:
        return self.bucket.names

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return self.bucket.views(flat)


def _places(layout: Sequence[Sequence[str]], shares: int = 1) -> list[Place]:
    """Buckets with a residual for each element, a counter for each bucket, and zeros in both."""
    communicator = solo_group().global_communicator
    places = []
    for index, names in enumerate(layout):
        parameters = [nn.Parameter(torch.zeros(SHAPES[name])) for name in names]
        bucket = Bucket(index, names, parameters, communicator, shares=shares)
        place = Place("inner", index, bucket, memory_for(bucket))
        place.memory.declare([State("residual"), State("count", _zero, per="flat"), State("outer", per="family")])
        places.append(place)
    return places


def _zero(_: ReducerMemory) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def _fill(places: Sequence[Place]) -> None:
    for place in places:
        place.memory.state["count"].fill_(100 + place.part)
        place.memory.state["outer.momentum"] = place.bucket.empty()
        place.memory.state["outer.step"] = torch.tensor(200 + place.part)
        for name, offset in (("residual", 0.0), ("outer.momentum", 0.5)):
            for key, view in zip(place.names, place.views(place.memory.state[name]), strict=True):
                view.copy_(torch.arange(view.numel()).view(view.shape) + 10.0 * ord(key) + offset)


def _parts(places: Sequence[Place], state: str) -> dict[str, torch.Tensor]:
    return {
        name: view
        for place in places
        for name, view in zip(place.names, place.views(place.memory.state[state]), strict=True)
    }


@given(layouts, layouts, st.integers(1, 3))
def test_elementwise_state_follows_the_parameters(before, after, shares):
    old, new = _places(before), _places(after, shares)
    _fill(old)
    restore(new, collect(old))
    for state in ("residual", "outer.momentum"):
        expected = _parts(old, state)
        for name, part in _parts(new, state).items():
            assert torch.equal(part, expected[name]), name
    for place in new:
        spare = place.bucket.numel - int(sum(parameter.numel() for parameter in place.bucket.parameters))
        assert int((place.memory.state["residual"] == 0).sum()) == spare, "padding is not zero"


@given(layouts)
def test_the_same_layout_gets_everything_back(layout):
    old, new = _places(layout), _places(layout)
    _fill(old)
    restore(new, collect(old))
    assert [int(place.memory.state["count"]) for place in new] == [100 + index for index in range(len(layout))]
    assert [int(place.memory.state["outer.step"]) for place in new] == [200 + index for index in range(len(layout))]


def test_what_belongs_to_a_bucket_goes_where_its_first_parameter_goes():
    old, new = _places([["a", "b"], ["c", "d"], ["e", "f"]]), _places([["b", "c"], ["f"], ["a", "d", "e"]])
    _fill(old)
    restore(new, collect(old))
    assert [int(place.memory.state["count"]) for place in new] == [101, 0, 100]


def test_what_was_collected_does_not_change_with_the_buckets():
    places = _places([list(SHAPES)])
    _fill(places)
    remembered = collect(places)
    places[0].memory.state["residual"].zero_()
    places[0].memory.state["count"].zero_()
    assert remembered["parameters"]["c"]["inner.residual"].tolist() == [990.0, 991.0, 992.0, 993.0, 994.0]
    assert int(remembered["others"][0]["state"]["inner.count"]) == 100


#: What rank 0 makes of its checkpoint, and what it is told.
UNUSABLE: dict[str, tuple[Callable[[dict], dict | None], str]] = {
    "nothing": (lambda _: None, "no algorithm, step, rank, world_size"),
    "rank": (lambda saved: {**saved, "rank": 1}, "no rank1"),
    "own": (lambda saved: {**saved, "rank0": {}}, "no parameters, others, flights"),
    "cut": (lambda saved: {**saved, "others": None}, "a list as others"),
    "other": (lambda saved: {**saved, "others": [1]}, r"a dict as others\[0\]"),
    "flight": (
        lambda saved: {**saved, "rank0": {**saved["rank0"], "flights": [{}]}},
        "no label, names, step",
    ),
    "no tensors": (lambda saved: {**saved, "parameters": {"0.bias": 3}}, r"a dict as parameters\['0.bias'\]"),
    "shape": (
        lambda saved: {**saved, "parameters": {"0.bias": {"residual": torch.ones(3)}}},
        r"residual of 0.bias has another shape",
    ),
    "number": (lambda saved: {**saved, "algorithm": 3}, "state_dict has the wrong type"),
    "step": (lambda saved: {**saved, "step": "x"}, "state_dict has the wrong type"),
    "algorithm": (lambda saved: {**saved, "algorithm": "TopKAlgorithm()"}, "another algorithm"),
    "names": (lambda saved: {**saved, "buckets": [["nobody"]] * len(saved["buckets"])}, "nobody"),
}


@pytest.mark.parametrize("what", UNUSABLE)
@on_ranks(2)
def test_ranks_do_not_wait_for_one_that_cannot_load_its_checkpoint(what):
    change, words = UNUSABLE[what]
    loop = Loop("with_bagua", algorithm=SIGNS)
    loop.train(2)
    saved = loop.wrapped.bagua_state_dict()
    expected = (ConfigurationError, words) if loop.rank == 0 else (CollectiveMismatchError, "cannot be used")
    with pytest.raises(expected[0], match=expected[1]):
        loop.wrapped.bagua_load_state_dict(change(saved) if loop.rank == 0 else saved)
    loop.train(2)


def _remembered(algorithm: Algorithm | str) -> dict:
    loop = Loop("with_bagua", algorithm=algorithm)
    loop.train(2)
    return loop.wrapped.bagua_state_dict()


def _load(algorithm: Algorithm | str, saved: list[dict]) -> int:
    model = mlp()
    wrapped = with_bagua(model, [sgd(model.parameters())], algorithm)
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
        ("diloco", {"sync_every": 6}),
        ("diloco", {"sync_every": 6, "overlap": 2}),
        ("local_sgd", {"sync_every": 5}),
        ("gradient_allreduce", {}),
        ("sign_sgd", {"warmup_steps": 0}),
        ("decentralized", {}),
    ],
    ids=["diloco", "overlapping", "local_sgd", "gradient_allreduce", "sign_sgd", "decentralized"],
)
def test_a_run_that_is_started_again_after_a_death_ends_as_one_that_was_not(algorithm, dies_after, tmp_path):
    """Between exchanges ranks do not wait for a dead one: they train on, and save steps that it does not have."""
    page, steps, size = _loop_of_the_page(), 14, 3

    def attempt(folder: Path, dies: bool) -> tuple[list[torch.Tensor], Any]:
        loop = Loop("with_bagua", algorithm=Algorithm.init(algorithm[0], **algorithm[1]))
        batches = torch.randn(steps, 5, 8, generator=torch.Generator().manual_seed(loop.rank))
        if dies and loop.rank == 1:
            page["train"](folder, loop.wrapped, loop.optimizer, batches[:dies_after], 3)
            raise RankKilled
        page["train"](folder, loop.wrapped, loop.optimizer, batches, 3)
        loop.wrapped.bagua_finish()
        return [one.detach().clone() for one in loop.model.parameters()], sorted(page["own_files"](folder))

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
        assert all(torch.equal(one, other) for one, other in zip(weights, wanted, strict=True))
    assert begun == [dies_after // 3 * 3] * size


@on_ranks(2)
def test_checkpoints_of_different_steps_are_an_error_that_says_what_to_load():
    loop = Loop("with_bagua", algorithm=Algorithm.init("diloco", sync_every=100))
    saved = []
    for _ in range(2):
        loop.train()
        saved.append(loop.wrapped.bagua_state_dict())
    with pytest.raises(CollectiveMismatchError, match="newest step that all ranks have") as caught:
        loop.wrapped.bagua_load_state_dict(saved[loop.rank])
    assert {caught.value.expected, caught.value.seen} == {"saved after step 1", "saved after step 2"}


@pytest.mark.parametrize("algorithm", [SIGNS, "power_sgd", "decentralized", "low_precision_decentralized"], ids=str)
def test_files_that_were_swapped_between_ranks_are_noticed(thread_ranks, algorithm):
    first, second = thread_ranks(2, _remembered, algorithm)
    assert [(saved["rank"], saved["world_size"]) for saved in (first, second)] == [(0, 2), (1, 2)]
    thread_ranks(2, _load, algorithm, [first, second])
    with pytest.raises(ConfigurationError, match=r"rank . of 2 was given the state of rank . of 2") as caught:
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

    algorithm = Algorithm.init("sign_sgd", warmup_steps=0)

    def residuals() -> list[float]:
        loop = Loop("with_bagua", algorithm=algorithm)
        loop.wrapped.bagua_load_state_dict(second)
        places = loop.reducer.scheduler.places
        found = [float(value.abs().sum()) for place in places for value in place.memory.state.values()]
        loop.train(1)
        assert size == 1 or loop.reducer.step == 3
        return found

    _, second = thread_ranks(2, _remembered, algorithm)
    assert any(value.abs().sum() for state in second["rank1"]["parameters"].values() for value in state.values())
    assert not any(sum(found) for found in thread_ranks(size, residuals))
    said = [record.getMessage() for record in caplog.records]
    assert sum("state of rank 1 of 2" in one and "begin anew" in one for one in said) == size
