"""Islands that are threads: who dies, stops or comes at any step, and what the others have then."""

import contextlib
import itertools
import os
import random
import threading
from functools import partial
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from bagua import errors
from bagua.algorithms import Algorithm, Difference, Every, Exchange, Mean, Outer, OuterStep
from bagua.comm import group_of_seats, inject_fault
from bagua.compression import Float16
from bagua.membership import participant
from bagua.parallel import with_bagua
from bagua.primitives import EF21, AllGatherReducer, PowerSGDReducer
from bagua.testing.ranks import RankDiedError
from tests.harness import descend, until
from tests.membership import training
from tests.membership.training import PERIOD, among, check_rows, joined, new_store, run, train, vanish, wrapped

pytestmark = pytest.mark.threads


def test_several_buckets_are_exchanged_one_after_the_other():
    class Mixed(torch.nn.Sequential):
        def forward(self, data):
            return self[1](self[0](data).double())

    def mixed(islands):
        torch.manual_seed(islands.seat)
        model = Mixed(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = Algorithm.init("local_sgd", sync_every=1)
        with_bagua(model, optimizer, algorithm, between=islands, bucket_bytes=20)
        for _ in range(2):
            training.learn(model, torch.full((1, 4), islands.seat + 1.0))
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = among(2, mixed)
    assert all(torch.equal(here, there) for here, there in zip(first, second, strict=True))


@pytest.mark.parametrize("algorithm", ["local_sgd", "diloco, beside training"])
def test_an_island_that_dies_at_any_step_of_an_exchange_costs_the_others_nothing(algorithm):
    """They all have the exchange with it, or all without it; then they go on."""
    seen, steps = set(), (0, 2 * PERIOD, 4 * PERIOD)
    train_to = partial(training.train_to_a_fault, model_of=partial(wrapped, algorithm=algorithm), steps=steps)
    for ends in training.ends_of_each_fault(train_to):
        contributed = check_rows(algorithm, training.survivors(ends))
        assert contributed[-1] == (0, 2)
        seen.add(tuple(contributed[:2]))
    assert len(seen) > 2


def test_who_says_goodbye_is_not_missed_although_half_is_left():
    def island(islands):
        return train(islands, wrapped(islands, "diloco"), PERIOD * (1 if islands.seat else 3))

    assert check_rows("diloco", among(2, island, minimum=None)) == [(0, 1), (0,), (0,)]


@pytest.mark.parametrize("algorithm", training.ALGORITHMS)
def test_a_newcomer_starts_from_the_state_of_the_others_and_contributes(algorithm):
    store = new_store()
    for why in training.check_newcomer(lambda: joined(store, 2), algorithm):
        assert "epoch 2 of seats [0, 1, 2], from exchange 1: seat 2 came" in why


def test_an_island_that_was_left_out_comes_in_again_with_the_same_model():
    """It loses what it learned since its last exchange; the others lose nothing."""
    over, inside, store = threading.Event(), threading.Event(), new_store()

    def island():
        try:
            with joined(store, 3) as islands:
                model = wrapped(islands, "diloco")
                (optimizer,) = model.bagua_optimizers

                def stop(step):
                    if islands.seat == 1 and step == PERIOD + 1:
                        training.fall_silent(islands)
                        assert over.wait(60)
                    elif step == 2 * PERIOD + 1:
                        over.set()
                        until(lambda: islands.rest() or 3 in islands.members().in_epoch)
                        assert inside.wait(60)

                return train(islands, model, 5 * PERIOD, stop)
        except errors.LeftOutError as error:
            assert "seat 1 is not in epoch 2 of seats [0, 2]" in str(error)
        model.bagua_close()
        with joined(store, 3) as islands:
            with_bagua(model, optimizer, training.made("diloco"), between=islands)
            inside.set()
            return train(islands, model, 5 * PERIOD)

    assert check_rows("diloco", run(3, island)) == [(0, 1, 2), (0, 2), *[(0, 2, 3)] * 3]


#: Deaths of first members; as many newcomers come.
MEMBERS, DEATHS = 4, 2


@pytest.mark.parametrize("seed", range(100 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 5))
def test_islands_that_die_and_come_as_drawn_train_as_plain_torch_does(seed, monkeypatch):
    """Who dies, at which step of which exchange, is drawn; a newcomer comes for each. All agree bit by bit.

    With even seeds newcomers receive the state while others train on, and contribute what they have in the rest of the
    period; how much that is depends on the moment.
    """
    early = seed % 2 == 0
    monkeypatch.setattr(participant, "_ROUNDS", participant._ROUNDS if early else 0)
    draw = random.Random(seed)
    died = [threading.Event() for _ in range(DEATHS)]
    doomed = dict(zip(draw.sample(range(MEMBERS), DEATHS), range(DEATHS), strict=True))
    steps = [12 + int(40 * draw.random()) for _ in range(DEATHS)]

    def island(store):
        number = next(roles)
        if number >= MEMBERS:
            assert died[number - MEMBERS].wait(60.0)
        with joined(store, MEMBERS) as islands:
            passed = itertools.count()

            def fault(step):
                if islands.seat in doomed and next(passed) == steps[doomed[islands.seat]]:
                    died[doomed[islands.seat]].set()
                    vanish(islands)

            with inject_fault(fault):
                model, found = wrapped(islands, "diloco"), []
                # The same outer step is the last one of all: all see who contributed to it.
                while not found or not {*range(MEMBERS, MEMBERS + DEATHS)} <= {*found[-1].contributed}:
                    train(islands, model, model.bagua_step + PERIOD - model.bagua_step % PERIOD, found=found)
                return found

    roles = itertools.count()
    ends = run(MEMBERS + DEATHS, island, new_store(), deadline_s=100.0)
    rows = training.survivors(ends)
    assert sum(isinstance(end, RankDiedError) for end in ends) == DEATHS, ends
    assert len(rows) == MEMBERS, ends
    by_step = training.check_equal(rows)
    contributed = [by_step[max(by_step)].contributed] if early else check_rows("diloco", rows)
    assert set(contributed[-1]) == {seat for seat in range(MEMBERS + DEATHS) if seat not in doomed}


def test_who_leaves_in_the_middle_of_an_exchange_learns_it_at_once():
    inside, left = threading.Event(), threading.Event()

    def island(islands):
        model = wrapped(islands, "diloco")
        if islands.seat == 1:
            inside.set()
            assert left.wait(60)
            return
        assert inside.wait(60)

        def leave():
            until(lambda: islands._counterparts.busy)
            islands.leave()
            left.set()

        threading.Thread(target=leave, daemon=True).start()
        with pytest.raises(errors.CommunicatorClosedError, match="has left its islands"):
            train(islands, model, PERIOD)

    assert among(2, island) == [None, None]


def test_signs_of_life_go_on_after_an_error():
    with joined(new_store(), 1) as islands:
        presence, effects = islands._state, itertools.chain([ValueError("half a record")], itertools.repeat(DEFAULT))
        presence.roster.look = Mock(wraps=presence.roster.look, side_effect=effects)
        beat = presence.record.beat
        until(lambda: presence.record.beat > beat + 3)


def test_a_store_that_is_gone_when_members_meet_is_a_typed_error():
    store = training.Unsteady()
    store.on.clear()
    with pytest.raises(errors.TransportUnavailableError, match="nobody is there"):
        group_of_seats(store, [3, 5], 3, "epoch2", backend="gloo", timeout_s=5.0, meet_s=1.0)


def test_a_minority_stops_and_names_whom_it_misses():
    def vanish_at_once(islands, model, step):
        islands._participant._timeout_s = 0.2
        if islands.seat == 1:
            vanish(islands)

    ends = training.train_all(2, periods=1, before=vanish_at_once, minimum=None)
    error = next(end for end in ends if not isinstance(end, RankDiedError))
    assert isinstance(error, errors.TooFewMembersError)
    assert error.peers == (1,)
    assert "seat 0 are not more than half of seats 0, 1" in str(error)


def test_a_run_that_is_over_takes_no_newcomer():
    store = new_store()
    with joined(store, 1) as islands:
        train(islands, wrapped(islands, "diloco"), PERIOD)
    over = pytest.raises(errors.TooFewMembersError, match="the run is over: all members of epoch 1")
    with joined(store, 1) as late, over:
        wrapped(late, "diloco")
    with joined(store, 1, name="another run") as islands:
        assert train(islands, wrapped(islands, "diloco"), PERIOD)[0].contributed == (0,)


def test_another_run_is_refused_with_both_sides_named(monkeypatch):
    store = new_store()
    with contextlib.ExitStack() as first:
        with monkeypatch.context() as there:
            there.setattr("bagua.membership.island.this_process", lambda: "head, process 7")
            first.enter_context(joined(store, 1))
        with pytest.raises(errors.CollectiveMismatchError) as caught, joined(store, 2):
            pass
    assert " than head, process 7, which came first; " in caught.value.problem
    assert "this rank has size=2, others have size=1" in str(caught.value)


def test_another_model_is_refused_with_both_sides_named():
    store = new_store()
    with joined(store, 1) as first, joined(store, 1) as second:
        wrapped(first, "diloco")
        with pytest.raises(errors.CollectiveMismatchError) as caught:
            wrapped(second, Algorithm.init("diloco", sync_every=9))
    assert "sync_every=9" in caught.value.expected
    assert "sync_every=2" in caught.value.seen


def test_islands_train_one_model_which_is_not_switched():
    with joined(new_store(), 1) as islands:
        model = wrapped(islands, "diloco")
        with pytest.raises(errors.ConfigurationError, match="train another model already"):
            wrapped(islands, "diloco")
        with pytest.raises(errors.ConfigurationError, match="this model trains between islands"):
            with_bagua(model, [], "local_sgd")
        assert train(islands, model, PERIOD)[0].contributed == (0,)


def outer_with(reducer, *, hierarchical=False):
    step = OuterStep(Outer(torch.optim.SGD, lr=1.0))
    return Algorithm.of(Exchange(Difference(), Every(4), Mean(reducer, hierarchical), step))


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (Algorithm.init("gradient_allreduce"), "gradients would be exchanged in each step"),
        (Algorithm.init("diloco", start_after=3), "gradients would be exchanged in each step"),
        (Algorithm.init("diloco", sync_every=8, fragments=2, overlap=4), "something always is"),
        (Algorithm.init("diloco", eager=True), "newcomers come in when nothing is on its way"),
        (outer_with(EF21(AllGatherReducer(Float16()))), "a sum over those who took part before: total"),
        (outer_with(EF21(PowerSGDReducer(2)), hierarchical=True), "who took part before: total"),
        (
            Algorithm.init("sparse_loco", start_after=0, error_feedback="weights", hierarchical=False),
            "leaves in the weights of each rank",
        ),
        (Algorithm.init("decentralized"), "only sums and means"),
        (Algorithm.init("async"), "only sums and means"),
    ],
    ids=repr,
)
def test_what_cannot_run_between_islands_is_refused(algorithm, why):
    with joined(new_store(), 1) as islands, pytest.raises(errors.ConfigurationError, match=why):
        wrapped(islands, algorithm)


def test_something_else_than_islands_is_refused():
    with pytest.raises(errors.ConfigurationError, match="argument between"):
        wrapped(type("Fake", (), {"seat": 0, "place": (0, 1)})(), "diloco")


def test_changes_are_told():
    told = []
    with joined(new_store(), 1) as islands:
        islands.on_change(lambda members, why: told.append((members.in_epoch, why)))
        wrapped(islands, "diloco")
        assert told == [((0,), "seat 0 began together")]
        assert islands.members() == ((0,), (0,), ())
    assert "this process left: it left" in islands.why()


def test_a_model_that_could_not_come_in_is_as_it_was():
    model = training.new_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joined(new_store(), 2, timeout_s=0.05) as islands, pytest.raises(errors.TooFewMembersError):
        with_bagua(model, optimizer, "diloco", between=islands)
    assert type(model) is torch.nn.Linear
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_without_the_store_islands_train_on():
    store = training.Unsteady()

    def island(islands):
        rows = train(islands, wrapped(islands, "diloco"), 4 * PERIOD, lambda step: step > PERIOD and store.on.clear())
        until(lambda: "nobody is there" in islands.why())
        return rows

    assert check_rows("diloco", among(2, island, store=store)) == [(0, 1)] * 4


def test_without_the_store_nobody_is_replaced_until_it_is_back():
    store = training.Unsteady()

    def fail(islands, model, step):
        islands._participant._timeout_s = 60.0
        if step == PERIOD + 1 and islands.seat == 1:
            store.on.clear()
            threading.Timer(0.3, store.on.set).start()
            vanish(islands)

    (end,) = [end for end in training.train_all(2, before=fail, store=store) if not isinstance(end, RankDiedError)]
    assert check_rows("diloco", [end]) == [(0, 1), (0,), (0,)]


def test_a_result_that_all_hold_counts_although_the_barrier_failed():
    """The island dies in the barrier, before the others can pass it; they hold the result that it took part in."""

    def island(islands):
        def fault(step):
            first_barrier = step.call.kind == "allgather" and step.call.dtype is torch.int64
            if islands.seat == 1 and first_barrier and step.name == "publish":
                vanish(islands)

        with inject_fault(fault):
            model = wrapped(islands, "diloco")
        return train(islands, model, 2 * PERIOD)

    assert check_rows("diloco", training.survivors(among(3, island))) == [(0, 1, 2), (0, 2)]


def test_who_can_give_no_signs_of_life_has_left(monkeypatch):
    begin, store = threading.Thread.start, new_store()

    def start(thread):
        if thread.name == "bagua-islands":
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as without, pytest.raises(RuntimeError, match="new thread"):
        without.setattr(threading.Thread, "start", start)
        with joined(store, 1):
            pass
    with joined(store, 1) as other:
        assert other._state.roster.left() == {0}


def tensors_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


@pytest.mark.parametrize("algorithm", ["diloco", "local_sgd", "slowmo"])
@pytest.mark.parametrize("several", [False, True], ids=["processes", "of two ranks"])
def test_the_mean_is_that_of_all_members(algorithm, several):
    """Lent by ``bagua_global_average``, which changes nothing; or for good, by ``bagua_finish``."""

    def island(islands, look):
        model = torch.nn.Sequential(training.new_model(islands.seat), torch.nn.BatchNorm1d(1, affine=False)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=training.RATE)
        with_bagua(model, optimizer, training.made(algorithm), between=islands)
        generator = torch.Generator().manual_seed(islands.seat + 2 * islands.place[0])
        data = torch.randn(8, 3, generator=generator, dtype=torch.float64)

        def step():
            descend(optimizer, (model(data) - data.sum(1, keepdim=True)).square().mean())

        lent = []
        for _ in range(3):
            step()
            if look:
                own = tensors_of(model)
                with model.bagua_global_average():
                    lent.append(tensors_of(model))
                assert all(torch.equal(one, own[name]) for name, one in tensors_of(model).items())
        before = tensors_of(model)
        model.bagua_finish()
        ends = [tensors_of(model)]
        step()  # It ends a period: all are equal again.
        ends.append(tensors_of(model))
        return (islands.seat, *islands.place), before, lent, ends

    def all_islands(look):
        job = partial(island, look=look)
        found = [one for ends in training.among_ranks(2, job) for one in ends] if several else among(2, job)
        return [one for _, *one in sorted(found, key=lambda end: end[0])]

    looked, plain = all_islands(look=True), all_islands(look=False)
    for (before, lent, ends), (unlooked, _, plain_ends) in zip(looked, plain, strict=True):
        for name, tensor in before.items():
            mean = torch.stack([one[0][name] for one in looked]).mean(0)
            torch.testing.assert_close(ends[0][name], mean)
            torch.testing.assert_close(lent[-1][name], mean)
            assert several or not torch.allclose(tensor, mean)
            assert torch.equal(unlooked[name], tensor)
            assert torch.equal(plain_ends[1][name], ends[1][name])
        assert torch.equal(ends[1]["0.weight"], looked[0][2][1]["0.weight"])
        assert not torch.allclose(ends[0]["0.weight"], ends[1]["0.weight"])


def test_members_that_are_not_at_one_point_mix_nothing():
    """One comes to the end of its training, while the other takes an outer step."""

    def island(islands):
        model = wrapped(islands, "local_sgd")
        train(islands, model, 1)
        before = model.weight.detach().clone()
        with pytest.raises(errors.CollectiveMismatchError, match="islands exchange different things") as caught:
            model.bagua_finish() if islands.seat == 0 else train(islands, model, 2)
        assert caught.value.peers == (1 - islands.seat,)
        assert islands.seat == 1 or torch.equal(before, model.weight)
        return "refused"

    assert among(2, island) == ["refused", "refused"]
