"""Islands that train through a bucket: their weights, requests, what stays behind; one that stops at any request."""

from __future__ import annotations

import random
import re
import threading
import time

import pytest
import torch
from torch.distributed import DistNetworkError

from bagua.algorithms.local.diloco import DiLoCoAlgorithm
from bagua.comm import Cells, Fetch, PhaseDeadline, PieceShelf, ask_now, get_default_group, serve_store_at
from bagua.errors import LeftOutError, StoreLostError, TooFewMembersError
from bagua.membership import Islands, join_islands
from bagua.membership.counterparts import Closing
from bagua.membership.epochs import Epoch
from bagua.membership.state import Deadlines
from bagua.parallel import with_bagua
from tests.harness import until
from tests.membership.servers import is_counted, names, needs_moto, needs_obstore, new_s3, opened, s3_server
from tests.membership.training import (
    PERIOD,
    RANKS,
    _judge,
    check_newcomer,
    check_rows,
    joined,
    run,
    run_islands,
    run_numbered,
    run_with_newcomer,
    train,
    wrapped,
)

pytestmark = needs_obstore
FORMS = {
    "plain": {},
    "codec": {"codec": "int4", "error_feedback": True},
    "fragments": {"fragments": 4},
    "overlap": {"overlap": 2, "codec": "int4", "error_feedback": True},
    "streaming": {"fragments": 4, "overlap": 1, "mix": "add", "codec": "int4", "error_feedback": True},
}


def island(store, size, backend=None, **options):
    """One of the islands that meet in a bucket, or that ``backend`` connects."""
    return joined(store, size, "file:///run", backend=backend, **options)


def model_of(seat):
    """A model of several parameters that no two islands begin with."""
    sizes = [(3, 8), (8, 8), (8, 8), (8, 1)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    generator = torch.Generator().manual_seed(seat)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def weights_after(islands, options, outer_steps=5, period=8):
    """All weights after so many outer steps, and the seat."""
    model = model_of(islands.seat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = with_bagua(model, optimizer, DiLoCoAlgorithm(period, **options), between=islands)
    generator = torch.Generator().manual_seed(100 + islands.seat)
    for _ in range(outer_steps * period + 1):
        data = torch.randn(4, 3, generator=generator)
        optimizer.zero_grad()
        (model(data) - data.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    assert all(one.isfinite().all() for one in model.parameters())
    return islands.seat, torch.cat([one.detach().reshape(-1) for one in model.parameters()])


@pytest.mark.gloo
@pytest.mark.parametrize(("size", "form"), [(2, "plain"), (2, "streaming"), (3, "streaming"), (5, "streaming")])
def test_a_schedule_gives_the_same_bits_over_file_and_over_tcp(tmp_path, size, form):
    def over(where):
        def job():
            with join_islands(where, size, timeout=60) as islands:
                return weights_after(islands, FORMS[form])

        ends = run(size, job)
        assert not [end for end in ends if isinstance(end, BaseException)], ends
        return dict(ends)

    served, where = serve_store_at("127.0.0.1", 0)
    ours, theirs = over(f"file://{tmp_path}/run"), over(where)
    del served
    assert all(torch.equal(ours[seat], theirs[seat]) for seat in ours)


@pytest.mark.threads
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


@pytest.mark.threads
def test_a_bucket_does_not_grow_with_the_exchanges(tmp_path):
    store = opened(f"file://{tmp_path}/run")

    def job(steps):
        with island(opened(f"file://{tmp_path}/run"), 2, name=f"{steps} steps") as islands:
            train(islands, wrapped(islands, "diloco"), steps)
            until(lambda: islands.members().contributed)
            return len(names(store.bucket, ""))

    few, many = max(run(2, job, 20)), max(run(2, job, 200))
    assert many < few + 100


@pytest.mark.threads
@pytest.mark.parametrize("algorithm", ["diloco", "slowmo"])
def test_a_newcomer_gets_the_state_from_the_bucket(tmp_path, monkeypatch, algorithm):
    """Nobody listens on a port."""
    monkeypatch.setattr("bagua.comm.pieces.server._Server", None)
    found = run_with_newcomer(lambda: island(opened(f"file://{tmp_path}/run"), 2), algorithm)
    check_newcomer(algorithm, [rows for rows, _ in found])
    left = names(opened(f"file://{tmp_path}/run").bucket)
    assert not [name for name in left if name.startswith("objects/state-")]


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


@pytest.mark.threads
def test_who_finds_a_dead_run_is_told_whose_it_was(tmp_path):
    quick = Deadlines(beat_s=0.02, silence_s=0.5, suspect_s=0.5, meet_s=5.0, poll_s=0.01)

    def dies():
        with island(opened(f"file://{tmp_path}/run"), 1) as islands:
            wrapped(islands, "diloco")
            islands._state._ended.set()
            islands._state._thread.join(60)

    def comes():
        with island(opened(f"file://{tmp_path}/run"), 1, deadlines=quick) as islands:  # It waits for 60 s otherwise.
            wrapped(islands, "diloco")

    assert run(1, dies) == [None]
    (error,) = run(1, comes)
    assert isinstance(error, TooFewMembersError), error
    assert re.search(r"all of its members are gone \(seat 0 was .*, process \d+\)", str(error))
    assert error.timeout_s is None
    assert "bagua islands clean file:///run" in error.advice


@pytest.mark.threads
def test_who_is_alone_in_a_folder_is_told_which_one_it_is(tmp_path):
    def alone():
        with island(opened(f"file://{tmp_path}/run"), 2, timeout_s=0.5) as islands:
            wrapped(islands, "diloco")

    (error,) = run(1, alone)
    assert isinstance(error, TooFewMembersError)
    assert "1 of 2 that begin are here" in str(error)
    assert "that reach the same file:///run" in str(error)


@pytest.mark.threads
def test_islands_of_several_ranks_train_through_a_bucket(tmp_path):
    def job(number):
        group = get_default_group().duplicate("islands")
        with island(opened(f"file://{tmp_path}/run"), 2, group=group) as islands:
            return train(islands, wrapped(islands, "diloco"), 2 * PERIOD)

    rows = [row for ends in run_islands(2, job) for row in ends]
    assert check_rows("diloco", rows, ranks=RANKS) == [(0, 1)] * 2


SIZE, STEPS = 3, 3 * PERIOD


class Silence:
    """Stops one island, with all of its threads, at one of its requests in the second period, until others have ended.

    Args:
        at: number of the request; -1 for none.
        moment: "before" or "after" it.
    """

    def __init__(self, at: int, moment: str) -> None:
        self.at, self.moment = at, moment
        self.others_ended = threading.Event()
        self.silent: set[int] = set()
        self.count = 0
        self._islands: Islands | None = None
        self._thread = 0

    def arm(self, islands: Islands) -> None:
        """From now on requests count of the calling thread, and those of its exchanges."""
        self._islands, self._thread = islands, threading.get_ident()

    def hook(self, kind: str, name: str, moment: str) -> None:
        if self.silent:
            assert self.others_ended.wait(60)
        if self._islands is None or moment != self.moment or not is_counted(name, self._thread):
            return
        self.count += 1
        if self.count - 1 == self.at:
            self.silent.add(self._islands.seat)
            assert self.others_ended.wait(60)


def run_with(silence, open_store, algorithm="diloco"):
    """What each island had after its exchanges, and how it ended; the last one is that which is stopped."""
    rows = [[] for _ in range(SIZE)]
    left = [SIZE - 1]

    def job(number):
        has_it = number == SIZE - 1
        store = open_store()
        store.bucket.hook = silence.hook if has_it else None
        with island(store, SIZE) as islands:
            _judge(islands._state.roster, lambda: silence.silent - {islands.seat})
            arm = lambda step: silence.arm(islands) if has_it and step == PERIOD + 1 else None  # noqa: E731
            train(islands, wrapped(islands, algorithm), STEPS, arm, found=rows[number])
        if not has_it:
            left[0] -= 1
            if not left[0]:
                silence.others_ended.set()

    return rows, run_numbered(SIZE, job)


def check(rows, ends, algorithm):
    """Survivors made all of their steps; nobody has another result for any exchange, and all are what they say."""
    assert ends[0] is ends[1] is None, ends
    assert [len(row) for row in rows[:-1]] == [STEPS // PERIOD] * (SIZE - 1)
    check_rows(algorithm, [row for row in rows if row])


@pytest.mark.threads
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


@pytest.mark.threads
def test_a_cell_that_does_not_show_who_came_first_decides_nothing(tmp_path, monkeypatch):
    store = opened(f"file://{tmp_path}/run")
    closing, epoch = Closing(Cells(store), 0), Epoch(1, (0,))
    assert closing.close(epoch, 1, counts=True)
    monkeypatch.setattr(store.bucket, "get", lambda name: None)
    with pytest.raises(StoreLostError, match="was there a moment ago, and is not"):
        closing.close(epoch, 1, counts=False)


@pytest.mark.threads
@pytest.mark.parametrize(
    ("moment", "algorithm"), [("before", "diloco"), ("after", "diloco"), ("before", "diloco, beside training")]
)
def test_who_sleeps_at_any_request_leaves_the_others_with_one_result(tmp_path, moment, algorithm):
    def count_of(at):
        silence = Silence(at, moment)
        rows, ends = run_with(silence, lambda: opened(f"file://{tmp_path}/{at}"), algorithm)
        check(rows, ends, algorithm)
        assert ends[-1] is None or (silence.silent and isinstance(ends[-1], LeftOutError)), ends
        return len(silence.silent) if at >= 0 else silence.count

    count = min(count_of(-1), 14)
    assert count > 5
    assert sum(map(count_of, range(count))) > count / 2


@pytest.mark.threads
def test_a_bucket_that_answers_late_changes_nothing(tmp_path):
    draw = random.Random(0)

    def late(kind, name, moment):
        time.sleep(draw.random() / 100)

    def job(number):
        with island(opened(f"file://{tmp_path}/run", hook=late), 2) as islands:
            return train(islands, wrapped(islands), STEPS)

    assert check_rows("diloco", run_numbered(2, job)) == [(0, 1)] * 3


@pytest.mark.threads
def test_a_bucket_out_of_reach_for_a_while_delays_an_exchange(tmp_path):
    away = threading.Event()

    def job(number):
        store = opened(f"file://{tmp_path}/run")

        def hook(kind, name, moment):
            if away.is_set() and threading.current_thread() is not back:
                raise DistNetworkError("it cannot be reached")

        store.bucket.hook = hook
        with island(store, 2) as islands:

            def leave(step):
                if step == PERIOD + 1 and number == 0:
                    away.set()
                    back.start()

            return train(islands, wrapped(islands), STEPS, leave)

    back = threading.Timer(0.3, away.clear)
    assert check_rows("diloco", run_numbered(2, job)) == [(0, 1)] * 3
