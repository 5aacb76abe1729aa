"""Islands that train through a bucket: their weights, requests, what stays behind; one that stops at any request."""

import random
import threading
import time

import pytest
from torch.distributed import DistNetworkError

from bagua.comm import Cells, Fetch, PhaseDeadline, PieceShelf, ask_now, get_default_group
from bagua.errors import LeftOutError, StoreLostError, TooFewMembersError
from bagua.membership import join_islands
from bagua.membership.counterparts import Closing
from bagua.membership.epochs import Epoch
from bagua.membership.state import Deadlines
from tests.harness import until
from tests.membership import training
from tests.membership.servers import is_counted, names, needs_moto, needs_obstore, new_s3, opened, s3_server
from tests.membership.training import PERIOD, check_rows, run, run_numbered, train, wrapped

pytestmark = [needs_obstore, pytest.mark.threads]


def island(folder, size, hook=None, **options):
    """One of the islands that meet in a folder."""
    return training.joined(opened(f"file://{folder}/run", hook=hook), size, "file:///run", backend=None, **options)


@needs_moto
def test_islands_train_through_s3_and_count_their_requests():
    with s3_server() as endpoint:
        objects = new_s3(endpoint)

        def job():
            with join_islands("s3://bucket/run", 2, timeout=60, store=objects) as islands:
                assert islands._state.deadlines.beat_s == 2.0
                rows = train(islands, wrapped(islands, "diloco"), 4)
                return rows, islands.metrics()["comm/requests"]

        ends = run(2, job)
        assert not [end for end in ends if isinstance(end, BaseException)], ends
        assert check_rows("diloco", [rows for rows, _ in ends]) == [(0, 1)] * 2
        assert all(requests > 20 for _, requests in ends)


def test_a_bucket_does_not_grow_with_the_exchanges(tmp_path):
    store = opened(f"file://{tmp_path}/run")

    def job(steps):
        with island(tmp_path, 2, name=f"{steps} steps") as islands:
            train(islands, wrapped(islands, "diloco"), steps)
            until(lambda: islands.members().contributed)
            return len(names(store.bucket, ""))

    few, many = max(run(2, job, 20)), max(run(2, job, 200))
    assert many < few + 100


@pytest.mark.parametrize("algorithm", ["diloco", "slowmo"])
def test_a_newcomer_gets_the_state_from_the_bucket(tmp_path, monkeypatch, algorithm):
    """Nobody listens on a port."""
    monkeypatch.setattr("bagua.comm.pieces.server._Server", None)
    training.check_newcomer(lambda: island(tmp_path, 2), algorithm)
    assert not [name for name in names(opened(f"file://{tmp_path}/run").bucket) if name.startswith("objects/state-")]


def test_a_state_comes_from_several_shelves_and_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("bagua.comm.pieces.server.PIECE_BYTES", 100)
    monkeypatch.setattr("bagua.comm.pieces.fetching.PIECE_BYTES", 100)
    bucket = opened(f"file://{tmp_path}/run").bucket
    contents = {"a": bytearray(range(256)) * 4, "b/../c": bytearray(b"1234567"), "empty": bytearray()}
    shelves = [PieceShelf(bucket, lambda number=number: [number]) for number in range(2)]
    sources = [one.offer(contents, lambda: None) for one in shelves]
    leader, found = Fetch({}, frozenset(), PhaseDeadline(60.0), bucket).run(lambda: sources)
    assert (leader in sources, found) == (True, contents)
    shelves[1].tell_now()
    assert [ask_now(source, 1.0, bucket) for source in sources] == [None, [1]]
    for shelf in shelves:
        shelf.close()
        shelf.close()
    assert not names(bucket)
    failures = Fetch({}, frozenset(), PhaseDeadline(0.05), bucket)
    assert failures.run(lambda: sources) is None
    assert set(failures.failures.values()) == {"it offers that no longer"}


def test_who_finds_a_dead_run_is_told_whose_it_was(tmp_path):
    with island(tmp_path, 1) as islands:
        wrapped(islands, "diloco")
        islands._state._ended.set()
        islands._state._thread.join(60)
    # It waits for 60 s otherwise.
    quick = Deadlines(beat_s=0.02, silence_s=0.5, suspect_s=0.5, meet_s=5.0, poll_s=0.01)
    comes = island(tmp_path, 1, deadlines=quick)
    gone = r"all of its members are gone \(seat 0 was .*, process \d+\)"
    with pytest.raises(TooFewMembersError, match=gone) as caught, comes as islands:
        wrapped(islands, "diloco")
    assert caught.value.timeout_s is None
    assert "bagua islands clean file:///run" in caught.value.advice


def test_who_is_alone_in_a_folder_is_told_which_one_it_is(tmp_path):
    alone = island(tmp_path, 2, timeout_s=0.5)
    with pytest.raises(TooFewMembersError, match="1 of 2 that begin are here") as caught, alone as islands:
        wrapped(islands, "diloco")
    assert "that reach the same file:///run" in str(caught.value)


def test_islands_of_several_ranks_train_through_a_bucket(tmp_path):
    def job(number):
        group = get_default_group().duplicate("islands")
        with island(tmp_path, 2, group=group) as islands:
            return train(islands, wrapped(islands, "diloco"), 2 * PERIOD)

    rows = [row for ends in training.run_islands(2, job) for row in ends]
    assert check_rows("diloco", rows, ranks=training.RANKS) == [(0, 1)] * 2


SIZE, STEPS = 3, 3 * PERIOD


def test_an_exchange_has_one_verdict_whoever_asks_for_it(tmp_path):
    cells = [Cells(opened(f"file://{tmp_path}/run")) for _ in range(2)]
    one, other = (Closing(cell, seat) for seat, cell in enumerate(cells))
    epoch = Epoch(3, (0, 1), base=7)
    assert other.close(epoch, 8, counts=True)
    assert one.close(epoch, 8, counts=True)
    assert one.close(epoch, 8, counts=False)
    assert one.close(epoch, 9, counts=True)
    assert not other.close(epoch, 10, counts=False)
    assert not one.close(epoch, 10, counts=True)
    one.tidy()
    other.tidy()
    assert cells[0].read([f"closed/3/{number}" for number in (8, 9, 10)]) == [None, [0, 1], []]


def test_a_cell_that_does_not_show_who_came_first_decides_nothing(tmp_path, monkeypatch):
    store = opened(f"file://{tmp_path}/run")
    closing, epoch = Closing(Cells(store), 0), Epoch(1, (0,))
    assert closing.close(epoch, 1, counts=True)
    monkeypatch.setattr(store.bucket, "get", lambda name: None)
    with pytest.raises(StoreLostError, match="was there a moment ago, and is not"):
        closing.close(epoch, 1, counts=False)


@pytest.mark.parametrize(
    ("moment", "algorithm"), [("before", "diloco"), ("after", "diloco"), ("before", "diloco, beside training")]
)
def test_who_sleeps_at_any_request_leaves_the_others_with_one_result(tmp_path, moment, algorithm):
    """They make all of their steps; nobody has another result for any exchange, and all are what they say."""

    def count_of(at):
        """One stops at this request of the second period, with all of its threads, until others have ended; or never,
        at -1. How many stopped, which is 1 or 0; or how many requests it made."""
        armed, silent, requests, others_ended = {}, set(), [], threading.Event()
        ended = threading.Barrier(SIZE - 1, others_ended.set)
        rows = [[] for _ in range(SIZE)]

        def hook(kind, name, now):
            if silent:
                assert others_ended.wait(60)
            if armed and now == moment and is_counted(name, armed["thread"]):
                requests.append(name)
                if len(requests) - 1 == at:
                    silent.add(armed["seat"])
                    assert others_ended.wait(60)

        def job(number):
            def arm(step):
                if sleeps and step == PERIOD + 1:
                    armed.update(seat=islands.seat, thread=threading.get_ident())

            sleeps = number == SIZE - 1
            with island(tmp_path / str(at), SIZE, hook if sleeps else None) as islands:
                training._judge(islands._state.roster, lambda: silent - {islands.seat})
                train(islands, wrapped(islands, algorithm), STEPS, arm, found=rows[number])
            if not sleeps:
                ended.wait(60)

        ends = run_numbered(SIZE, job)
        assert ends[0] is ends[1] is None, ends
        assert [len(row) for row in rows[:-1]] == [STEPS // PERIOD] * (SIZE - 1)
        check_rows(algorithm, [row for row in rows if row])
        assert ends[-1] is None or (silent and isinstance(ends[-1], LeftOutError)), ends
        return len(silent) if at >= 0 else len(requests)

    count = min(count_of(-1), 14)
    assert count > 5
    assert sum(map(count_of, range(count))) > count / 2


def test_a_bucket_that_answers_late_changes_nothing(tmp_path):
    draw = random.Random(0)

    def job(number):
        with island(tmp_path, 2, lambda *_: time.sleep(draw.random() / 100)) as islands:
            return train(islands, wrapped(islands), STEPS)

    assert check_rows("diloco", run_numbered(2, job)) == [(0, 1)] * 3


def test_a_bucket_out_of_reach_for_a_while_delays_an_exchange(tmp_path):
    away = threading.Event()

    def hook(kind, name, moment):
        if away.is_set() and threading.current_thread() is not back:
            raise DistNetworkError("it cannot be reached")

    def job(number):
        with island(tmp_path, 2, hook) as islands:

            def leave(step):
                if step == PERIOD + 1 and number == 0:
                    away.set()
                    back.start()

            return train(islands, wrapped(islands), STEPS, leave)

    back = threading.Timer(0.3, away.clear)
    assert check_rows("diloco", run_numbered(2, job)) == [(0, 1)] * 3
