"""Islands of two ranks, all of them threads: each is a job of its own, and the islands train together."""

import threading

import pytest

import bagua.torch_api as bagua
from bagua import errors
from bagua.algorithms import Algorithm
from bagua.comm import get_default_group, get_rank, inject_fault, solo_group
from bagua.compression import Float16
from bagua.membership.counterparts import Receiver
from bagua.membership.island import Island
from bagua.membership.participant import Participant
from bagua.parallel import with_bagua
from bagua.testing import ThreadRanks
from tests.harness import until
from tests.membership import training
from tests.membership.training import PERIOD, among_ranks, check_rows, new_store, run_islands, together, train, wrapped

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("algorithm", training.ALGORITHMS)
def test_islands_of_two_ranks_train_as_one_process_for_each_with_their_batches(algorithm):
    rows = among_ranks(2, lambda islands: train(islands, wrapped(islands, algorithm), 3 * PERIOD))
    assert check_rows(algorithm, [*rows[0], *rows[1]], training.RANKS) == [(0, 1)] * 3


def test_what_a_codec_loses_is_the_same_on_all_ranks():
    algorithm = Algorithm.init("diloco", sync_every=PERIOD, codec=Float16(), error_feedback=True)
    rows = among_ranks(2, lambda islands: train(islands, wrapped(islands, algorithm), 3 * PERIOD))
    assert len(training.check_equal([*rows[0], *rows[1]])) == 3


def test_a_rank_that_dies_in_an_exchange_takes_its_island_out_and_no_other():
    """Wherever the rank dies: the other island has the exchange with it on all of its ranks, or without it."""

    def train_ranks_to_a_fault(fault):
        """It is called at each step of each call of the second exchange, on the second rank of the second island."""
        store = new_store()

        def rank(_):
            armed = []

            def hook(_):
                if armed and (armed[0].seat, get_rank()) == (1, 1):
                    fault(armed[0])

            with inject_fault(hook), together(store, 2) as islands:  # Also for calls inside the island.
                model = wrapped(islands, "local_sgd")
                rows = train(islands, model, PERIOD)
                armed.append(islands)
                rows += train(islands, model, 2 * PERIOD)
                armed.clear()
                return rows + train(islands, model, 4 * PERIOD)

        return [end for rows in run_islands(2, rank) for end in rows]

    seen = set()
    for ends in training.ends_of_each_fault(train_ranks_to_a_fault, skipped=1 / 3, most=12):
        rows = [end for end in ends if isinstance(end, list)]
        assert len(rows) == 2, ends
        assert sum(isinstance(end, errors.PeerLostError) for end in ends) == 1, ends
        crowds = check_rows("local_sgd", rows, training.RANKS)
        assert (crowds[0], crowds[-1]) == ((0, 1), (0,))
        seen.add(tuple(crowds))
    assert len(seen) > 1


def test_a_lost_rank_is_named_also_if_the_others_have_gone_on_by_then(monkeypatch):
    """The goodbye of its island is in the store before the thread that trains knows of it."""
    second = []
    pass_barrier, stop = Participant._pass_barrier, Participant._stop

    def lose_the_second_rank(self):
        if self._state.seat != 1:
            return pass_barrier(self)
        training.fall_silent(second[0])
        until(lambda: self._state.has_left)
        raise errors.PeerLostError("the other island ended the call")

    def stop_late(self, *arguments, **options):
        stop(self, *arguments, **options)
        until(lambda: self._state.seat != 1 or self._cell(2) is not None)

    monkeypatch.setattr(Participant, "_pass_barrier", lose_the_second_rank)
    monkeypatch.setattr(Participant, "_stop", stop_late)

    def rank(islands):
        if (islands.seat, get_rank()) == (1, 1):
            second.append(islands)
        return train(islands, wrapped(islands), PERIOD)

    others, lost = sorted(among_ranks(2, rank), key=lambda rows: not isinstance(rows[0], list))
    assert all(isinstance(row, list) for row in others), others
    assert isinstance(lost[0], errors.PeerLostError), lost
    assert lost[0].problem == "rank 1 of this island is lost: it was silent, as the test wants it"


@pytest.mark.parametrize("fails_once", [False, True])
def test_a_newcomer_receives_the_state_rank_by_rank(fails_once, monkeypatch):
    """If one of its ranks does not get the state, none takes it, and the island comes in one exchange later."""
    came, seen, store, newcomers = threading.Event(), threading.Event(), new_store(), []
    receive, failures = Receiver.receive, iter([fails_once])

    def receive_or_fail(*arguments):
        receive(*arguments)
        if newcomers and get_rank() == 1 and next(failures, False):
            raise errors.PeerLostError("the state did not arrive", peers=[0])

    monkeypatch.setattr(Receiver, "receive", receive_or_fail)

    def rank(number):
        assert number < 2 or seen.wait(60)
        with together(store, 2) as islands:
            if number == 2:
                newcomers.append(number)
                came.set()

            def pace(step):
                if step == PERIOD + 1 and number < 2:
                    seen.set()
                if step == 2 * PERIOD and number < 2:  # The next exchange has to see it.
                    assert came.wait(60)
                    until(lambda: islands._state.roster.records.get(2, islands._state.record).waiting)

            return train(islands, wrapped(islands), 5 * PERIOD, pace)

    rows = run_islands(3, rank)
    alone = 3 if fails_once else 2
    assert [row[0].step for row in rows[2]] == [(alone + 1) * PERIOD] * 2
    crowds = check_rows("diloco", [row for island in rows for row in island], training.RANKS)
    assert crowds == [(0, 1)] * alone + [(0, 1, 2)] * (5 - alone)


def test_what_ends_the_call_of_the_first_rank_ends_it_on_all():
    store = new_store()

    def rank(_):
        with together(store, 2, timeout_s=0.1) as islands:
            wrapped(islands)

    ((first, second),) = run_islands(1, rank)
    assert type(first) is type(second) is errors.TooFewMembersError
    assert first.problem == second.problem == "1 of 2 that begin are here"
    assert first.advice == second.advice


def test_the_first_rank_does_not_leave_before_all_have_heard_why():
    heard, leaves = threading.Event(), threading.Event()

    def rank():
        island = Island(get_default_group())
        if island.leads:
            meet = island._meet
            island._meet = lambda: (leaves.set(), meet())
            with pytest.raises(errors.StoreLostError), island.leading():
                raise errors.StoreLostError("the store does not answer")
            assert heard.is_set()
            island.abort("it left")
            return
        hear = island._heard
        island._heard = lambda: (hear(), leaves.wait(60), heard.set())[0]
        with pytest.raises(errors.StoreLostError):
            island.follow()

    ThreadRanks(2).run(rank)


def test_an_error_on_one_rank_ends_the_island():
    def rank(islands):
        model = wrapped(islands)
        train(islands, model, PERIOD)
        if get_rank():
            raise ValueError("a broken disk")
        train(islands, model, 2 * PERIOD)

    assert [[type(end) for end in ends] for ends in among_ranks(1, rank)] == [[errors.PeerLostError, ValueError]]


def test_ranks_of_an_island_that_join_differently_are_refused(where):
    def rank(_):
        bagua.join_islands(where, name=f"run of rank {get_rank()}", timeout=20)

    ((first, second),) = run_islands(1, rank)
    assert type(first) is type(second) is errors.CollectiveMismatchError
    assert (first.seen, second.seen) == ("name=run of rank 1", "name=run of rank 0")


def test_ranks_of_an_island_that_deal_out_other_samples_are_refused():
    def job(islands):
        if get_rank() == 0:
            bagua.ElasticSampler(range(8), islands)
        with pytest.raises(errors.CollectiveMismatchError, match="do not deal out the same samples") as raised:
            wrapped(islands)
        return raised.value.peers

    assert among_ranks(1, job) == [[(1,), (0,)]]


def test_a_store_that_one_rank_does_not_reach_is_an_error_on_all(where):
    def rank(_):
        bagua.join_islands("tcp://127.0.0.1:1" if get_rank() else where, timeout=0.5)

    ((first, second),) = run_islands(1, rank)
    assert type(first) is type(second) is errors.StoreLostError
    assert "rank 1 of this island: no store answers at tcp://127.0.0.1:1" in str(first)


def test_an_island_trains_with_the_ranks_that_joined(where):
    def rank(_):
        with bagua.join_islands(where) as islands:
            assert islands.ranks == (0, 1)
            with pytest.raises(errors.ConfigurationError, match="the ranks of this island are those that joined"):
                with_bagua(training.new_model(0), [], "diloco", solo_group(), between=islands)

    assert run_islands(1, rank) == [[None, None]]
    with training.joined(new_store(), 1) as alone:

        def late(_):
            with pytest.raises(errors.ConfigurationError, match=f"a group of rank {get_rank()}"):
                with_bagua(training.new_model(0), [], "diloco", between=alone)

        run_islands(1, late)
