"""Islands on a bucket of which one stops before or after each of its requests, and wakes; and a bucket that is late."""

from __future__ import annotations

import random
import threading
import time

import pytest
from torch.distributed import DistNetworkError

from bagua.comm import Cells
from bagua.errors import LeftOutError, StoreLostError
from bagua.membership import Islands
from bagua.membership.counterparts import Closing
from bagua.membership.epochs import Epoch
from tests.membership.buckets import is_counted, needs_obstore, opened
from tests.membership.training import (
    PERIOD,
    QUICK,
    Outer,
    _judge,
    batch,
    check_rows,
    run_numbered,
    wrapped,
)

pytestmark = [needs_obstore, pytest.mark.threads]
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


def trained(islands, rows, before, algorithm="diloco"):
    """Train, and note what there is after each exchange."""
    model = wrapped(islands, algorithm)
    (optimizer,) = model.bagua_optimizers
    for step in range(model.bagua_step + 1, STEPS + 1):
        before(step)
        optimizer.zero_grad()
        model(batch(islands.seat)).square().sum().backward()
        optimizer.step()
        if step % PERIOD == 0:
            rows.append(Outer(step, model.weight.detach().clone(), islands.members().contributed))


def run_with(silence, open_store, algorithm="diloco"):
    """What each island had after its exchanges, and how it ended; the last one is that which is stopped."""
    rows = [[] for _ in range(SIZE)]
    left = [SIZE - 1]

    def job(number):
        has_it = number == SIZE - 1
        store = open_store()
        store.bucket.hook = silence.hook if has_it else None
        options = {"size": SIZE, "minimum": 1, "name": "a run", "timeout_s": 60.0, "deadlines": QUICK}
        with Islands(store, "the store", **options) as islands:
            _judge(islands._state.roster, lambda: silence.silent - {islands.seat})
            arm = lambda step: silence.arm(islands) if has_it and step == PERIOD + 1 else None  # noqa: E731
            trained(islands, rows[number], arm, algorithm)
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
    def count_of(at):
        silence = Silence(at, moment)
        rows, ends = run_with(silence, lambda: opened(f"file://{tmp_path}/{at}"), algorithm)
        check(rows, ends, algorithm)
        assert ends[-1] is None or (silence.silent and isinstance(ends[-1], LeftOutError)), ends
        return len(silence.silent) if at >= 0 else silence.count

    count = min(count_of(-1), 14)
    assert count > 5
    assert sum(map(count_of, range(count))) > count / 2


def test_a_bucket_that_answers_late_changes_nothing(tmp_path):
    draw = random.Random(0)

    def late(kind, name, moment):
        time.sleep(draw.random() / 100)

    def job(number):
        rows = []
        store = opened(f"file://{tmp_path}/run", hook=late)
        options = {"size": 2, "minimum": 1, "name": "a run", "timeout_s": 60.0, "deadlines": QUICK}
        with Islands(store, "the store", **options) as islands:
            trained(islands, rows, lambda step: None)
        return rows

    assert check_rows("diloco", run_numbered(2, job)) == [(0, 1)] * 3


def test_a_bucket_out_of_reach_for_a_while_delays_an_exchange(tmp_path):
    away = threading.Event()

    def job(number):
        rows = []
        store = opened(f"file://{tmp_path}/run")

        def hook(kind, name, moment):
            if away.is_set() and threading.current_thread() is not back:
                raise DistNetworkError("it cannot be reached")

        store.bucket.hook = hook
        options = {"size": 2, "minimum": 1, "name": "a run", "timeout_s": 60.0, "deadlines": QUICK}
        with Islands(store, "the store", **options) as islands:

            def leave(step):
                if step == PERIOD + 1 and number == 0:
                    away.set()
                    back.start()

            trained(islands, rows, leave)
        return rows

    back = threading.Timer(0.3, away.clear)
    assert check_rows("diloco", run_numbered(2, job)) == [(0, 1)] * 3
