"""Islands that are threads of this process, what they train, and what must come of it."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import DistNetworkError

from bagua.algorithms import Algorithm
from bagua.comm import get_default_group
from bagua.comm import thread_store as new_store
from bagua.comm.store.keys import PolledStore
from bagua.comm.transports.threads import RankKilled, Step, inject_fault
from bagua.membership import Islands
from bagua.membership.state import Deadlines, Roster
from bagua.parallel import with_bagua
from bagua.testing import Outcome, RankDiedError, ThreadRanks
from tests.harness import descend, in_threads, until

PERIOD = 2
#: Ranks of an island that has several.
RANKS = 2
RATE = 0.05
#: No clock says here who is silent: this machine may be busy. See ``fall_silent``.
QUICK = Deadlines(beat_s=0.01, silence_s=600.0, suspect_s=600.0, meet_s=60.0, poll_s=0.002)
#: Seats and ranks that have fallen silent, for each store.
_silent: weakref.WeakKeyDictionary[object, set[tuple[int, int]]] = weakref.WeakKeyDictionary()

ALGORITHMS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_every": PERIOD, "outer_lr": 0.7, "outer_momentum": 0.9},
    "local_sgd": {"sync_every": PERIOD},
    "slowmo": {"sync_every": PERIOD, "beta": 0.5},
    "diloco, beside training": {"sync_every": PERIOD, "overlap": 1, "outer_lr": 0.7, "outer_momentum": 0.9},
}


class Outer(NamedTuple):
    """What a rank has after an exchange: the number of its step, its weights, and whose they are."""

    step: int
    weights: torch.Tensor
    contributed: tuple[int, ...]


class Unsteady(PolledStore):
    """A store that answers while ``on`` is set."""

    def __init__(self) -> None:
        super().__init__(timeout_s=5.0)
        self.on = threading.Event()
        self.on.set()
        self._kept: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def _values(self) -> dict[str, bytes]:
        if not self.on.is_set():
            raise DistNetworkError("nobody is there")
        return self._kept

    def read(self, keys):
        values = self._values
        return [values.get(key) for key in keys]

    def write(self, key, value):
        self._values[key] = value

    def swap(self, key, expected, desired):
        values = self._values
        with self._lock:
            same = values.get(key, b"") == expected
            if same:
                values[key] = desired
            return same, values.get(key, expected)

    def remove(self, key):
        return self._values.pop(key, None) is not None


@contextlib.contextmanager
def joined(store, size: int, where: str = "the store", **options: Any) -> Iterator[Islands]:
    """One of the islands that meet at ``store``, which errors call ``where``."""
    usual = {"minimum": 1, "name": "a run", "timeout_s": 60.0, "backend": "threads", "deadlines": QUICK}
    with Islands(store, where, size=size, **{**usual, **options}) as islands:
        silent, presence = _silent.setdefault(store, set()), islands._state
        _judge(presence.roster, lambda: {seat for seat, rank in silent if rank == 0 and seat != islands.seat})
        _judge(presence.ranks, lambda: {rank for seat, rank in silent if seat == islands.seat})
        yield islands


def _judge(roster: Roster, silent: Callable[[], set[int]]) -> None:
    """Have those taken for gone who are ``silent``, and nobody else who has not left."""
    gone = roster.gone

    def judged(epoch: int) -> dict[int, str]:
        known = silent() & roster.records.keys()
        return {**dict.fromkeys(known, "it was silent, as the test wants it"), **gone(epoch)}

    roster.gone = judged  # type: ignore[method-assign]


def fall_silent(islands: Islands) -> None:
    """Give no more signs of life, which everybody notices at once."""
    islands._state._ended.set()
    islands._state._thread.join(60)
    _silent[islands._whole_store].add((islands.seat, islands.place[0]))


def filled(model: torch.nn.Module, seed: int, scale: float = 1.0) -> torch.nn.Module:
    """The model with weights of its own for each seed. That of torch belongs to all threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def new_model(seat: int) -> torch.nn.Module:
    return filled(torch.nn.Linear(3, 1, bias=False), seat)


def batch(seat: int, rank: int = 0) -> torch.Tensor:
    """What a rank of the island on this seat learns from, in each step."""
    return torch.eye(3)[[seat % 3, (seat + 1) % 3]] * (1 + seat / 4) + rank / 8


def made(algorithm: str) -> Algorithm:
    """One of ``ALGORITHMS``, or another one by its name."""
    return Algorithm.init(algorithm.partition(",")[0], **ALGORITHMS.get(algorithm, {}))


def wrapped(
    islands: Islands, algorithm: str | Algorithm = "diloco", momentum: float = 0.0, **options: Any
) -> torch.nn.Module:
    """The model of this rank; in float64 where an island has several, whose sums are then near those of plain torch."""
    chosen = made(algorithm) if isinstance(algorithm, str) else algorithm
    rank, ranks = islands.place
    model = new_model(islands.seat + 10 * rank).to(torch.float64 if ranks > 1 else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    return with_bagua(model, optimizer, chosen, between=islands, **options)


def learn(model: torch.nn.Module, data: torch.Tensor) -> None:
    """One step, to make squares of what the model answers smaller."""
    descend(*model.bagua_optimizers, model(data).square().sum())


def train(
    islands: Islands, model: torch.nn.Module, steps: int, before: Callable[[int], object] = lambda step: None,
    period: int = PERIOD, found: list[Outer] | None = None,
) -> list[Outer]:  # fmt: skip
    """Train up to step number ``steps``; what there was after each exchange, which is added to ``found``."""
    found = [] if found is None else found
    for step in range(model.bagua_step + 1, steps + 1):
        before(step)
        learn(model, batch(islands.seat, islands.place[0]).to(model.weight.dtype))
        if step % period == 0:
            found.append(Outer(step, model.weight.detach().clone(), islands.members().contributed))
    return found


def vanish(islands: Islands) -> None:
    """End this thread as ``kill -9`` ends a process: no goodbye, no sign of life."""
    fall_silent(islands)
    raise RankKilled


def run(count: int, job: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0) -> list[Any]:
    """What ``job(*arguments)`` returned on each of ``count`` threads; its error where it raised one."""
    return _ends(ThreadRanks(count, backend=None, deadline_s=deadline_s).outcomes(job, *arguments))


def among(count: int, job: Callable[[Islands], Any], *, store: Any = None, **options: Any) -> list[Any]:
    """What ``job(islands)`` returns on each of so many islands that begin together, or how they end."""
    place = store or new_store()

    def island() -> Any:
        with joined(place, count, **options) as islands:
            return job(islands)

    return run(count, island)


def train_all(
    count: int, algorithm: str = "diloco", periods: int = 3,
    before: Callable[[Islands, torch.nn.Module, int], object] = lambda islands, model, step: None, **options: Any,
) -> list[Any]:  # fmt: skip
    """What so many islands that begin together have after their exchanges, or how they end."""

    def job(islands: Islands) -> list[Outer]:
        model = wrapped(islands, algorithm)
        return train(islands, model, periods * PERIOD, lambda step: before(islands, model, step))

    return among(count, job, **options)


def survivors(ends: Sequence[Any]) -> list[Any]:
    """What those returned that were not ended by an error."""
    return [end for end in ends if not isinstance(end, BaseException)]


def run_numbered(count: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Like ``run``, with the number of the thread as the last argument."""
    numbers = itertools.count()
    return run(count, lambda: job(*arguments, next(numbers)))


def _ends(outcomes: Sequence[Outcome]) -> list[Any]:
    """Values, and errors of what is tested. That an assertion did not hold must not be a value that nobody looks at."""
    for outcome in outcomes:
        if isinstance(outcome.error, (AssertionError, pytest.fail.Exception)):
            raise outcome.error
    return [outcome.value if outcome.error is None else outcome.error for outcome in outcomes]


def run_islands(count: int, job: Callable[[int], Any]) -> list[list[Any]]:
    """What ``job(number of the island)`` returned, or raised, on each of the ranks of each island; by island."""
    return in_threads(count, lambda number: _ends(ThreadRanks(RANKS, deadline_s=60.0).outcomes(job, number)))


def together(store, size: int, **options: Any) -> contextlib.AbstractContextManager[Islands]:
    """One of the islands that meet at ``store``, on each of its ranks."""
    return joined(store, size, group=get_default_group().duplicate("islands"), **options)


def among_ranks(count: int, job: Callable[[Islands], Any]) -> list[list[Any]]:
    """The same on each of the ranks of each island, by island."""
    store = new_store()

    def rank(_: int) -> Any:
        with together(store, count) as islands:
            return job(islands)

    return run_islands(count, rank)


def expected(algorithm: str, contributed: Sequence[tuple[int, ...]], ranks: int) -> list[torch.Tensor]:
    """The weights after each outer step, in plain torch: inner steps of each, and one step of the anchor."""
    anchor = new_model(0).weight.detach().to(torch.float64 if ranks > 1 else torch.float32)
    slow = torch.zeros_like(anchor)
    outer = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    found = []
    for seats in contributed:
        ends = [inner_steps(anchor, seat, ranks, PERIOD - ALGORITHMS[algorithm].get("overlap", 0)) for seat in seats]
        difference = torch.stack([anchor - end for end in ends]).mean(0)
        if algorithm.startswith("diloco"):
            outer.grad = difference
            optimizer.step()
            anchor = outer.detach().clone()
        elif algorithm == "slowmo":
            slow = 0.5 * slow + difference / RATE
            anchor = anchor - RATE * slow
        else:
            anchor = torch.stack(ends).mean(0)
        found.append(anchor)
    return found


def inner_steps(anchor: torch.Tensor, seat: int, ranks: int = 1, steps: int = PERIOD) -> torch.Tensor:
    """The weights of an island after so many steps; it is one process here, with the batches of its ranks."""
    weights = anchor.clone()
    data = torch.cat([batch(seat, rank) for rank in range(ranks)]).to(anchor.dtype) / ranks**0.5
    for _ in range(steps):
        weights = weights - RATE * 2 * (data @ weights.T).T @ data
    return weights


Fault = Callable[[Islands], object]


def train_to_a_fault(
    fault: Fault, model_of: Callable[[Islands], torch.nn.Module], steps: tuple[int, int, int], period: int = PERIOD
) -> list[Any]:
    """Train three islands up to the last of ``steps``; between the first and the second of them ``fault(islands)``
    is called on seat 1 at each step of each collective."""

    def island(islands: Islands) -> list[Outer]:
        armed: list[bool] = []

        def hook(step: Step) -> None:
            if armed and islands.seat == 1 and step.call.kind in ("allreduce", "allgather"):
                fault(islands)

        with inject_fault(hook):
            model = model_of(islands)
            rows = train(islands, model, steps[0], period=period)
            armed.append(True)
            rows += train(islands, model, steps[1], period=period)
            armed.clear()
            return rows + train(islands, model, steps[2], period=period)

    return among(3, island)


def ends_of_each_fault(train_to: Callable[[Fault], list[Any]], skipped: float = 0.0, most: int = 1000) -> Iterator[Any]:
    """How all end where one dies at one step after the other at which ``train_to`` calls what it is given.

    Nobody dies at the first steps, of which ``skipped`` is the share; of the others ``most`` are tried, about.
    """
    passed: list[None] = []
    train_to(lambda islands: passed.append(None))
    assert len(passed) > 5
    for place in range(int(skipped * len(passed)), len(passed), max(1, len(passed) // most)):
        count = itertools.count()
        ends = train_to(lambda islands, place=place, count=count: next(count) == place and vanish(islands))
        assert sum(isinstance(end, RankDiedError) for end in ends) == 1, ends
        yield ends


def check_newcomer(island: Callable[[], contextlib.AbstractContextManager[Islands]], algorithm: str) -> Sequence[str]:
    """Two train for five periods; a third one comes in the middle of the second. Why, as all say in the end.

    It had the state before it came in, and trains on from where the others are.
    """
    came, seen, inside = threading.Event(), threading.Event(), threading.Event()

    def job(number: int) -> tuple[list[Outer], str]:
        late = number == 2
        assert not late or seen.wait(60)
        with island() as islands:
            if late:
                came.set()
            model = wrapped(islands, algorithm)
            if late:
                inside.set()

            def let_in(step: int) -> None:
                if step == PERIOD + 1 and not late:
                    seen.set()
                    assert came.wait(60)
                    until(lambda: islands.rest() or 2 in islands.members().in_epoch)
                    assert inside.wait(60)

            return train(islands, model, 5 * PERIOD, let_in), islands.why()

    rows, reasons = zip(*run_numbered(3, job), strict=True)
    assert [row[0].step for row in rows] == [PERIOD, PERIOD, 2 * PERIOD]
    assert check_rows(algorithm, rows) == [(0, 1), *[(0, 1, 2)] * 4]
    return reasons


def check_equal(rows: Sequence[Sequence[Outer]]) -> dict[int, Outer]:
    """All agree bit by bit; what there is after each exchange."""
    by_step: dict[int, Outer] = {}
    for row in rows:
        for one in row:
            other = by_step.setdefault(one.step, one)
            assert torch.equal(one.weights, other.weights), (one, other)
            assert one.contributed == other.contributed
    return by_step


def check_rows(algorithm: str, rows: Sequence[Sequence[Outer]], ranks: int = 1) -> list[tuple[int, ...]]:
    """All agree bit by bit, and their weights are those of plain torch; who contributed to each outer step."""
    by_step = check_equal(rows)
    contributed = [by_step[step].contributed for step in sorted(by_step)]
    assert sorted(by_step) == [PERIOD * (number + 1) for number in range(len(by_step))]
    near = {"rtol": 1e-12, "atol": 1e-12} if ranks > 1 else {}
    for step, weights in zip(sorted(by_step), expected(algorithm, contributed, ranks), strict=True):
        torch.testing.assert_close(by_step[step].weights, weights, **near)
    return contributed
