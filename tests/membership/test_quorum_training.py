"""Islands that are threads and merge by a quorum, each at its own pace."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

from bagua.algorithms import Algorithm, Outer
from bagua.comm import get_rank, inject_fault, solo_group
from bagua.compression import Codec
from bagua.errors import ConfigurationError
from bagua.membership import ElasticSampler
from bagua.optim import DelayedNesterov
from bagua.parallel import with_bagua
from bagua.testing import ThreadRanks
from bagua.testing.ranks import RankDiedError
from tests.membership.training import joined, new_store, run, vanish

pytestmark = pytest.mark.threads

OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
#: So small that training diverges in no order of the merges: what a member loses by that does not count.
RATE = 0.01


def new_model(seat: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False)).double()
    generator = torch.Generator().manual_seed(seat)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def batch(seat: int) -> torch.Tensor:
    return torch.eye(3, dtype=torch.float64)[[seat % 3, (seat + 1) % 3]] * (1 + seat / 4)


def local_step(model, optimizer, seat):
    optimizer.zero_grad()
    model(batch(seat)).square().sum().backward()
    optimizer.step()


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def diloco(**options):
    return Algorithm.init("diloco", **{"sync_every": 2, "quorum": 1, **OUTER, **options})


def wrapped(islands, algorithm):
    model = new_model(islands.seat)
    return with_bagua(model, torch.optim.SGD(model.parameters(), lr=RATE), algorithm, between=islands)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def check_one_model(found):
    """Bit by bit the same weights, the same digest of what is shared, and one history of merges."""
    weights, digests, tapes = zip(*found, strict=True)
    for others in weights[1:]:
        assert all(torch.equal(here, there) for here, there in zip(weights[0], others, strict=True))
    assert len(set(digests)) == 1
    shortest = min(map(len, tapes))
    assert len({tape[len(tape) - shortest :] for tape in tapes}) == 1
    return max(tapes, key=len)


def finished(islands, model):
    model.bagua_finish()
    return weights_of(model), model.bagua_state_digest(), islands.tape()


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": 1, "mix": "add"}, {"fragments": 2, "overlap": 2, "blend": 0.5}],
    ids=["plain", "overlap", "streaming"],
)
def test_a_quorum_of_all_without_grace_is_diloco(options):
    both = {"sync_every": 4, "fragment_order": "bytes", **OUTER, **options}

    def together():
        model = new_model(get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with_bagua(model, optimizer, Algorithm.init("diloco", **both))
        return trained(model, optimizer, get_rank())

    def trained(model, optimizer, seat):
        found = []
        for _ in range(9):
            local_step(model, optimizer, seat)
            found.append(weights_of(model))
        return found

    def island(store):
        with joined(store, 3) as islands:
            model = wrapped(
                islands, Algorithm.init("diloco", quorum=3, grace=0.0, weight="equal", merge="mean", **both)
            )
            return islands.seat, trained(model, *model.bagua_optimizers, islands.seat)

    expected = ThreadRanks(3).run(together)
    for seat, found in run(3, island, new_store()):
        for here, there in zip(found, expected[seat], strict=True):
            torch.testing.assert_close(here, there, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Coarse(Codec):
    """Multiples of 1/32, in a byte each."""

    def _payload_bytes(self, metadata):
        return metadata.numel

    def _encode(self, flat, out):
        out[: flat.numel()] = flat.mul(32).round().to(torch.int8).view(torch.uint8)

    def _decode(self, data, metadata, out, add):
        values = data[: metadata.numel].view(torch.int8) / 32
        out.copy_(out + values if add else values)


class Lossy:
    """What a member loses and owes, in plain torch: the sender of differences, or the owner of results."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.owed = [0.0, 0.0]

    def sent(self, difference: list[torch.Tensor]) -> list[torch.Tensor]:
        exact = [one + self.decay * owed for one, owed in zip(difference, self.owed, strict=True)]
        found = [one.mul(32).round().div(32) for one in exact]
        self.owed = [one - rounded for one, rounded in zip(exact, found, strict=True)]
        return found


class Reference:
    """What a member has, in plain torch: weights, and copies of the anchor and of its optimizer."""

    def __init__(self, seat: int) -> None:
        self.seat = seat
        self.model = new_model(0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.anchor = [torch.nn.Parameter(one) for one in weights_of(self.model)]
        self.outer = torch.optim.SGD(self.anchor, lr=0.7, momentum=0.9, nesterov=True)
        self.steps = 0

    def step(self) -> None:
        local_step(self.model, self.optimizer, self.seat)
        self.steps += 1

    def difference(self) -> list[torch.Tensor]:
        return [anchor.detach() - one for anchor, one in zip(self.anchor, weights_of(self.model), strict=True)]

    @torch.no_grad()
    def land(self, merged: list[torch.Tensor], *, own: bool) -> None:
        before = [one.detach().clone() for one in self.anchor]
        for anchor, difference in zip(self.anchor, merged, strict=True):
            anchor.grad = difference.clone()
        self.outer.step()
        for one, anchor, old in zip(self.model.parameters(), self.anchor, before, strict=True):
            one.copy_(anchor if own else one + anchor - old)


def merged_by(rule, differences, weights):
    found = []
    for parts in zip(*differences, strict=True):
        total = sum(weights)
        if rule == "mean":
            found.append(sum(weight * part for weight, part in zip(weights, parts, strict=True)) / total)
            continue
        direction = sum(weight * part / (part.norm() or 1) for weight, part in zip(weights, parts, strict=True)) / total
        length = sum(weight * part.norm() for weight, part in zip(weights, parts, strict=True)) / total
        found.append(length * direction / (direction.norm() or 1))
    return found


#: For each seat and each of its periods: how many merges it knows of then, and who waits for one.
SCRIPT = {0: [(0, None), (1, 2), (2, 1)], 1: [(0, None), (2, None)], 2: [(1, None)]}
#: The tape: who contributed to each merge, and who takes merges in without, before its next contribution.
MERGES = [((0, 1), {2: [0]}), ((0, 2), {1: [1]}), ((0, 1), {})]


@pytest.mark.parametrize(("rule", "feedback"), [("rda", None), ("mean", None), ("mean", False), ("rda", 0.5)])
def test_members_take_in_what_a_quorum_has_merged(rule, feedback):
    """Two of three merge; who comes later is part of the next one, with all of its tokens.

    With a codec, differences lose some of their bits on their way to the owner, and results on their way to all.
    """
    here: dict[int, object] = {}
    lossy = {} if feedback is None else {"codec": Coarse(), "error_feedback": feedback}

    def island(store):
        with joined(store, 3) as islands:
            here[islands.seat] = islands
            model = wrapped(islands, diloco(quorum=2, grace=0.0, merge=rule, **lossy))
            (optimizer,) = model.bagua_optimizers
            until(lambda: len(here) == 3)
            for merges, waits in SCRIPT[islands.seat]:
                until(lambda merges=merges: len(islands.tape()) >= merges)
                until(lambda waits=waits: waits is None or not here[waits].merges.is_merged("0.weight"))
                for _ in range(2):
                    islands.count_tokens(10 * (islands.seat + 1))
                    local_step(model, optimizer, islands.seat)
            until(lambda: len(islands.tape()) >= 3)
            mine = weights_of(model), islands.tape()[:3]  # Others may be at their end by now.
            return islands.seat, *mine, finished(islands, model)

    found = sorted(run(3, island, new_store()), key=lambda one: one[0])
    check_one_model([ends for *_, ends in found])
    members = {seat: Reference(seat) for seat in range(3)}
    landed: dict[int, list[list[torch.Tensor]]] = {seat: [] for seat in members}
    senders, owner = {seat: Lossy(float(feedback or 0)) for seat in members}, Lossy(float(feedback or 0))
    expected = []
    for number, (seats, _) in enumerate(MERGES, start=1):
        differences, counts = [], []
        for seat in seats:
            member = members[seat]
            member.step()
            while landed[seat]:
                member.land(landed[seat].pop(0), own=False)
            member.step()
            difference = member.difference()
            differences.append(senders[seat].sent(difference) if lossy else difference)
            counts.append((20.0 * (seat + 1)) ** 2 / 2)
        expected.append((number, 0, seats, tuple(counts)))
        result = merged_by(rule, differences, counts)
        result = owner.sent(result) if lossy else result
        for seat, member in members.items():
            if seat in seats:
                member.land(result, own=True)
            else:
                landed[seat].append(result)
    for seat, weights, tape, _ in found:
        assert [tuple(one) for one in tape] == expected
        torch.testing.assert_close(weights, weights_of(members[seat].model), rtol=0, atol=1e-12)


ASYNCHRONOUS = {"grace": 0.0, "merge": "mean", "outer": Outer(DelayedNesterov, delay=3)}


@pytest.mark.parametrize(
    "options",
    [{}, {**ASYNCHRONOUS, "outer_lr": None, "outer_momentum": None}, {"codec": "int4", "error_feedback": 0.9}],
    ids=["by a quorum", "asynchronous", "in few bits"],
)
def test_each_trains_at_its_own_pace_and_all_end_with_one_model(options):
    steps = {0: 7, 1: 12, 2: 3}

    def island(store):
        with joined(store, 3) as islands:
            model = wrapped(islands, diloco(fragments=2, overlap=1, **options))
            for _ in range(steps[islands.seat]):
                local_step(model, *model.bagua_optimizers, islands.seat)
            return finished(islands, model)

    tape = check_one_model(run(3, island, new_store()))
    for fragment, (seat, made) in itertools.product(range(2), steps.items()):
        assert counted(tape, seat, fragment) == made


def test_what_was_taken_in_is_not_kept():
    """Each merge of others brings memory of its own. The engine kept one for each, to reuse it, and never did."""

    def island(store):
        with joined(store, 2) as islands:
            taken: list[weakref.ref[torch.Tensor]] = []
            others = islands.merges.others

            def watched(*arguments, **options):
                found = others(*arguments, **options)
                taken.extend(map(weakref.ref, found))
                return found

            islands.merges.others = watched
            model = wrapped(islands, diloco())
            merges = 0
            for _ in range(20):
                if islands.seat == 1:  # The other one makes no step until it has learned of a merge.
                    local_step(model, *model.bagua_optimizers, islands.seat)
                    local_step(model, *model.bagua_optimizers, islands.seat)
                else:
                    merges += 1
                    until(lambda merges=merges: len(islands.tape()) >= merges)
                    local_step(model, *model.bagua_optimizers, islands.seat)
            kept = sum(one() is not None for one in taken)
            finished(islands, model)
            return len(taken), kept

    (many, kept), _ = sorted(run(2, island, new_store()), reverse=True)
    assert many > 5
    assert kept == 0


def test_weights_are_not_loaded_while_members_merge():
    """The merge would go on without what this member makes of it, and from then on its anchor would be its own."""
    is_there = threading.Event()

    def island(store):
        with joined(store, 2) as islands:
            model = wrapped(islands, diloco(quorum=2, overlap=1))
            (optimizer,) = model.bagua_optimizers
            model.load_state_dict(new_model(7).state_dict())  # On all of them, before the first step.
            assert islands.seat == 0 or is_there.wait(60)
            local_step(model, optimizer, islands.seat)
            if islands.seat == 0:  # Its difference is on its way, and the other one has none yet.
                kept = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(new_model(8).state_dict())
                for _ in range(2):
                    with pytest.raises(ConfigurationError, match=r"weights were loaded.*bagua_finish"):
                        model(batch(0))
                with pytest.raises(ConfigurationError, match="weights were loaded"):
                    model.bagua_state_dict()
                model.load_state_dict(kept)
                with pytest.raises(ConfigurationError, match=r"never come to one point.*bagua_finish"):
                    model.global_average().__enter__()
                with pytest.raises(ConfigurationError, match="weights were loaded"):
                    model.load_bagua_state_dict(model.bagua_state_dict())
                is_there.set()
            for _ in range(5):
                local_step(model, optimizer, islands.seat)
            ends = [finished(islands, model)]
            model.load_state_dict(new_model(9).state_dict())  # Again on all, when all have ended.
            for _ in range(5):
                local_step(model, optimizer, islands.seat)
            return [*ends, finished(islands, model)]

    for found in zip(*run(2, island, new_store()), strict=True):
        check_one_model(found)


def counted(tape, seat, fragment=0):
    """The steps behind all that a member has contributed: each step counts once."""
    return sum(
        weight
        for one in tape
        if one.fragment == fragment
        for whose, weight in zip(one.seats, one.weights, strict=True)
        if whose == seat
    )


@pytest.mark.parametrize("place", [0, 1, 3, 5, 6])
def test_an_owner_that_dies_in_a_merge_loses_nothing_of_the_others(place):
    """At each step of the second merge; the fragment is then owned by another member."""

    def island(store):
        with joined(store, 3) as islands:
            passed = itertools.count()

            def fault(step):
                merges = step.call.kind in ("recv", "broadcast", "allreduce") and len(islands.tape()) == 1
                if islands.seat == 0 and merges and next(passed) == place:
                    vanish(islands)

            with inject_fault(fault):
                model = wrapped(islands, diloco(quorum=3, grace=0.0))
                for _ in range(8):
                    local_step(model, *model.bagua_optimizers, islands.seat)
                return finished(islands, model)

    ends = run(3, island, new_store())
    assert sum(isinstance(end, RankDiedError) for end in ends) == 1, ends
    tape = check_one_model([end for end in ends if not isinstance(end, BaseException)])
    assert tape[0].seats == (0, 1, 2)
    assert tape[-1].seats == (1, 2)
    assert counted(tape, 1) == counted(tape, 2) == 8


def test_a_newcomer_takes_part_and_counts_nothing_twice():
    came, done = threading.Event(), threading.Event()

    def island(store):
        if came_later := len(seats) == 2 or not first.acquire(blocking=False):
            until(came.is_set)
        with joined(store, 2, minimum=1) as islands:
            seats.append(islands.seat)
            model = wrapped(islands, diloco(fragments=2, overlap=1))
            start = weights_of(model)
            steps = 0
            while steps < 6 or not (came_later or done.is_set()):
                local_step(model, *model.bagua_optimizers, islands.seat)
                steps += 1
                if len(islands.tape()) > 3:
                    came.set()
            if came_later:
                done.set()
            return islands.seat, steps, start, finished(islands, model)

    seats, first = [], threading.Semaphore(2)
    found = sorted(run(3, island, new_store()), key=lambda one: one[0])
    tape = check_one_model([end for *_, end in found])
    assert found[2][1] == 6
    for fragment, (seat, steps, *_) in itertools.product(range(2), found):
        assert counted(tape, seat, fragment) == steps


def test_a_member_that_makes_no_step_does_not_make_others_wait_for_a_newcomer():
    """Another one gives the newcomer the state."""
    rests, goes_on = threading.Event(), threading.Event()

    def island(store):
        late = not first.acquire(blocking=False)
        assert not late or rests.wait(60)
        with joined(store, 2, minimum=1) as islands:
            model = wrapped(islands, diloco(grace=0.0))
            steps = 0
            while not goes_on.is_set():
                local_step(model, *model.bagua_optimizers, islands.seat)
                steps += 1
                if islands.seat == 1 and steps == 2:
                    rests.set()
                    assert goes_on.wait(60)
                if late and any(2 in one.seats for one in islands.tape()):
                    goes_on.set()
            return finished(islands, model)

    first = threading.Semaphore(2)
    tape = check_one_model(run(3, island, new_store()))
    assert {seat for one in tape for seat in one.seats} == {0, 1, 2}


def test_a_newcomer_draws_samples_of_its_own():
    """In one long pass: what all have trained on is what their position says, and nothing twice."""
    came, done = threading.Event(), threading.Event()

    def island(store):
        late = not first.acquire(blocking=False)
        assert not late or came.wait(60)
        with joined(store, 2) as islands:
            sampler = ElasticSampler(range(10**6), islands, shuffle=False)
            model = wrapped(islands, diloco(fragments=2, overlap=1))
            drawn, steps = iter(sampler), 0
            while steps < 6 or not (late or done.is_set()):
                trained.append(next(drawn))
                sampler.record(1)
                local_step(model, *model.bagua_optimizers, islands.seat)
                steps += 1
                if len(islands.tape()) > 3:
                    came.set()
            if late:
                done.set()
            finished(islands, model)
            return sampler.give()

    trained, first = [], threading.Semaphore(2)
    position, *others = run(3, island, new_store())
    assert all(other == position for other in others)
    waiting = {*position["left"], *itertools.chain.from_iterable(position["own"].values())}
    assert sorted(trained) == sorted(set(range(position["first"])) - waiting)


@pytest.mark.parametrize("dies", [False, True])
def test_samples_are_dealt_out_to_members_that_train_at_their_own_pace(dies):
    """Each sample counts once; those of a member that is lost are drawn again, and nobody else trains on any twice."""

    def island(store):
        with joined(store, 3) as islands:
            sampler = ElasticSampler(range(90), islands)
            model = wrapped(islands, diloco(sync_every=4, fragments=2, overlap=1))
            loader = DataLoader(range(90), batch_size=islands.seat + 1, sampler=sampler)
            for step, indices in enumerate(sampler.batches(loader), start=1):
                trained[islands.seat] += indices.tolist()
                local_step(model, *model.bagua_optimizers, islands.seat)
                if dies and islands.seat == 1 and step == 6:
                    vanish(islands)
            finished(islands, model)
            return sampler.give(), sampler.again

    trained = {seat: [] for seat in range(3)}
    ends = [end for end in run(3, island, new_store()) if not isinstance(end, BaseException)]
    assert len(ends) == 3 - dies
    assert len({again for _, again in ends}) == 1
    position, again = ends[0]
    counted = Counter(itertools.chain.from_iterable(trained.values()))
    twice = {sample for sample, count in counted.items() if count > 1}
    assert (again > 0) == dies
    assert len(twice) <= again
    assert twice <= set(trained[1] if dies else [])
    assert all(max(Counter(one).values()) == 1 for one in trained.values())
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).tolist()
    left = {order[number] for number in position["left"]}
    assert {order[number] for number in range(position["first"])} - left <= counted.keys()
    assert not any(position["own"].values())


@pytest.mark.parametrize(
    ("merge", "named", "plain"), [("rda", None, {0}), ("rda", "*bias", {0, 2}), ("mean", None, {0, 1, 2})]
)
def test_embeddings_have_the_plain_mean(merge, named, plain):
    """Those of ``nn.Embedding``, and what the user names."""
    merged = {}

    def island(store):
        with joined(store, 2) as islands:
            torch.manual_seed(islands.seat)
            model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 1)).double()
            options = {"quorum": 2, "grace": 0.0, "merge": merge, "embeddings": named, "weight": "equal"}
            algorithm = diloco(sync_every=1, outer="sgd", outer_lr=1.0, outer_momentum=0.0, **options)
            with_bagua(model, torch.optim.SGD(model.parameters(), lr=1.0), algorithm, between=islands)
            start = weights_of(model)
            model(torch.tensor([0, 1, 2])).sum().backward()
            for one in model.parameters():
                one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(islands.seat)).double()
            merged[islands.seat] = [one.grad.clone() for one in model.parameters()]
            model.bagua_optimizers[0].step()
            return [old - one for old, one in zip(start, weights_of(model), strict=True)]

    found = run(2, island, new_store())[0]
    for number, part in enumerate(found):
        rule = "mean" if number in plain else "rda"
        (expected,) = merged_by(rule, [[merged[seat][number]] for seat in (0, 1)], [1.0, 1.0])
        torch.testing.assert_close(part, expected)


def test_a_member_whose_weights_are_not_finite_begins_again_from_the_anchor():
    def island(store):
        with joined(store, 2) as islands:
            model = wrapped(islands, diloco(quorum=2, grace=0.0))
            for step in range(4):
                local_step(model, *model.bagua_optimizers, islands.seat)
                if islands.seat == 1 and step == 0:
                    with torch.no_grad():
                        model[0].weight.fill_(float("nan"))
            return finished(islands, model)

    tape = check_one_model(run(2, island, new_store()))
    assert [one.weights for one in tape[:2]] == [(2.0, 0.0), (2.0, 2.0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_lost_has_the_size_of_what_others_receive(dtype):
    """A codec encodes differences of short weights in another dtype than theirs."""

    def island(store):
        with joined(store, 2) as islands:
            model = torch.nn.Linear(8, 4, bias=False).to(dtype)
            algorithm = diloco(quorum=2, grace=0.0, codec=Codec.init("identity"))
            model = with_bagua(model, torch.optim.SGD(model.parameters(), lr=RATE), algorithm, between=islands)
            for step in range(4):
                model(torch.ones(2, 8, dtype=dtype)).sum().backward()
                if islands.seat == 1 and step == 0:
                    with torch.no_grad():
                        model.weight.fill_(float("nan"))
                model.bagua_optimizers[0].step()
            return finished(islands, model)

    tape = check_one_model(run(2, island, new_store()))
    assert [one.weights for one in tape[:2]] == [(2.0, 0.0), (2.0, 2.0)]


@pytest.mark.parametrize("weight", ["tokens", "equal"])
def test_an_end_at_which_nobody_has_learned_more_moves_nothing(weight):
    """Momentum alone makes no outer step."""

    def island(store):
        with joined(store, 2) as islands:
            model = wrapped(islands, diloco(quorum=2, grace=0.0, weight=weight))
            for _ in range(4):
                local_step(model, *model.bagua_optimizers, islands.seat)
            before = weights_of(model)
            model.bagua_finish()
            return all(torch.equal(one, now) for one, now in zip(before, weights_of(model), strict=True))

    assert run(2, island, new_store()) == [True, True]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"quorum": 0}, "quorum"),
        ({"quorum": True}, "quorum"),
        ({"grace": -1.0}, "grace"),
        ({"grace": "soon"}, "grace"),
        ({"weight": "size"}, "weight"),
        ({"merge": "median"}, "merge"),
        ({"quorum": None, "grace": 1.0}, "grace"),
        ({"quorum": None, "merge": "mean"}, "merge"),
        ({"merge": "mean", "embeddings": "*"}, "embeddings"),
        ({"error_feedback": True}, "error_feedback"),
        ({"start_after": 3}, "start_after"),
        ({"average_buffers": True}, "average_buffers"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, argument):
    with pytest.raises(ConfigurationError) as caught:
        diloco(**options)
    assert caught.value.argument == argument


def test_a_quorum_needs_islands_and_enough_of_them():
    with pytest.raises(ConfigurationError, match="a quorum is for islands"):
        with_bagua(new_model(0), [], diloco(), solo_group())
    with (
        joined(new_store(), 1) as islands,
        pytest.raises(ConfigurationError, match="more islands than begin together"),
    ):
        wrapped(islands, diloco(quorum=2))
