"""Islands on a bucket of which one dies, or stops, before or after each of its requests; and a bucket that is late."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
from torch.distributed import DistNetworkError

from bagua.comm import Cells
from bagua.comm.transports.threads import RankKilled
from bagua.errors import LeftOutError, StoreLostError
from bagua.membership import Islands
from bagua.membership.closing import Closing
from bagua.membership.epochs import Epoch
from tests.membership.buckets import needs_moto, needs_obstore, new_s3, opened, s3_server
from tests.membership.training import (
    PERIOD,
    QUICK,
    Outer,
    _judge,
    batch,
    check_rows,
    run_numbered,
    until,
    wrapped,
)

pytestmark = [needs_obstore, pytest.mark.threads]
SIZE, STEPS = 3, 3 * PERIOD


def is_of_exchange(name: str) -> bool:
    """Whether an object is a contribution, and no part of a state."""
    return name.startswith("objects/") and not name.startswith("objects/state-")


class Fault:
    """Ends one island, or stops it until the others are at their end, at one of its requests in the second period.

    Args:
        at: number of the request; -1 for none.
        moment: "before" or "after" it.
        wakes: whether it goes on when the others are at their end.
    """

    def __init__(self, at: int, moment: str, *, wakes: bool) -> None:
        self.at, self.moment, self.wakes = at, moment, wakes
        self.others_ended = threading.Event()
        self.silent: set[int] = set()
        self.count = 0
        self._islands: Islands | None = None
        self._thread = 0
        self._dead = False

    def arm(self, islands: Islands) -> None:
        """From now on requests count of the calling thread, and those of its exchanges."""
        self._islands, self._thread = islands, threading.get_ident()

    def is_counted(self, name: str) -> bool:
        """Whether a request belongs to training: contributions are put and got in a thread of their own."""
        thread = threading.current_thread()
        trains = self._thread == thread.ident or thread.name.startswith("bagua-solo")  # beside training
        return self._islands is not None and (trains or is_of_exchange(name))

    def hook(self, kind: str, name: str, moment: str) -> None:
        if self._dead:
            raise DistNetworkError("the process is dead")
        if self.wakes and self.silent:  # Stopped, with all of its threads.
            assert self.others_ended.wait(60)
        if moment != self.moment or not self.is_counted(name):
            return
        self.count += 1
        if self.count - 1 != self.at:
            return
        self.fell_silent(self._islands.seat)
        if self.wakes:
            assert self.others_ended.wait(60)
            return
        self._islands._state._ended.set()  # Not waited for: this thread may hold what its last sign of life needs.
        self._dead = True
        raise RankKilled

    def fell_silent(self, seat: int) -> None:
        """Have the others notice."""
        self.silent.add(seat)

    def hook_of_others(self, kind: str, name: str, moment: str) -> None:
        """Nothing."""


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


def run_with(fault, open_store, algorithm="diloco"):
    """What each island had after its exchanges, and how it ended; that with the fault is the last one."""
    rows = [[] for _ in range(SIZE)]
    left = [SIZE - 1]

    def job(number):
        has_it = number == SIZE - 1
        store = open_store()
        store.bucket.hook = fault.hook if has_it else fault.hook_of_others
        options = {"size": SIZE, "minimum": 1, "name": "a run", "timeout_s": 60.0, "deadlines": QUICK}
        with Islands(store, "the store", **options) as islands:
            _judge(islands._state.roster, lambda: fault.silent - {islands.seat})
            arm = lambda step: fault.arm(islands) if has_it and step == PERIOD + 1 else None  # noqa: E731
            trained(islands, rows[number], arm, algorithm)
        if not has_it:
            left[0] -= 1
            if not left[0]:
                fault.others_ended.set()

    return rows, run_numbered(SIZE, job)


def check(rows, ends, algorithm="diloco"):
    """Survivors made all of their steps; nobody has another result for any exchange, and all are what they say."""
    assert ends[0] is ends[1] is None, ends
    assert [len(row) for row in rows[:-1]] == [STEPS // PERIOD] * (SIZE - 1)
    check_rows(algorithm, [row for row in rows if row])


class DiesAfterItsPut(Fault):
    """Ends one island when it has put its contribution to the second exchange. Others notice when that is closed."""

    def __init__(self) -> None:
        super().__init__(-1, "after", wakes=False)
        self.dead: set[int] = set()
        self._puts = 0

    def hook(self, kind: str, name: str, moment: str) -> None:
        if (kind, moment) == ("put", "after") and self.is_counted(name) and is_of_exchange(name):
            self._puts += 1
            if self._puts == 3:  # Before its contribution it puts what a barrier tells, and what it is for.
                self.at = self.count
        super().hook(kind, name, moment)

    def fell_silent(self, seat: int) -> None:
        self.dead.add(seat)

    def hook_of_others(self, kind: str, name: str, moment: str) -> None:
        if (kind, moment) == ("create", "after") and name.endswith("closed/1/2.cell"):
            until(lambda: self.dead)
            self.silent |= self.dead


def test_a_contribution_of_who_died_after_its_put_counts(tmp_path):
    """No other request of its own is needed: its last act is the put of what the others add."""
    fault = DiesAfterItsPut()
    rows, ends = run_with(fault, lambda: opened(f"file://{tmp_path}/run"))
    check(rows, ends)
    (dead,) = fault.dead
    rest = tuple(seat for seat in range(SIZE) if seat != dead)
    assert [one.contributed for one in rows[0]] == [(0, 1, 2), (0, 1, 2), rest]


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


def requests_of_a_period(open_store, algorithm):
    fault = Fault(-1, "before", wakes=False)
    rows, ends = run_with(fault, open_store, algorithm)
    check(rows, ends, algorithm)
    assert ends == [None] * SIZE
    return fault.count


@pytest.mark.parametrize(
    ("wakes", "moment", "algorithm"),
    [
        *itertools.product([False, True], ["before", "after"], ["diloco"]),
        (False, "after", "diloco, beside training"),
        (True, "before", "diloco, beside training"),
    ],
)
def test_a_fault_at_any_request_leaves_the_others_with_one_result(tmp_path, moment, wakes, algorithm):
    folders = iter(range(1000))

    def new_folder():
        where = f"file://{tmp_path}/{next(folders)}"
        return lambda: opened(where)

    count = min(requests_of_a_period(new_folder(), algorithm), 14)
    assert count > 5
    hits = 0
    for at in range(count):
        fault = Fault(at, moment, wakes=wakes)
        rows, ends = run_with(fault, new_folder(), algorithm)
        check(rows, ends, algorithm)
        hits += bool(fault.silent)
        if wakes and fault.silent:
            assert ends[-1] is None or isinstance(ends[-1], LeftOutError), ends
    assert hits > count / 2


@needs_moto
def test_a_fault_at_a_request_to_s3_leaves_the_others_with_one_result():
    with s3_server() as endpoint:
        for at in (0, 2, 4, 6):
            objects = new_s3(endpoint)
            rows, ends = run_with(
                Fault(at, "after", wakes=False), lambda objects=objects: opened("s3://b/run", objects)
            )
            check(rows, ends)


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
