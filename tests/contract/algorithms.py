"""What every algorithm promises. Subclass ``AlgorithmContract`` to hold one of your own to it.

The suite does not know any algorithm by name: its exchanges say what to expect. It needs
pytest, and two fixtures: ``algorithm``, a declaration, and ``pool``, thread ranks::

    @pytest.fixture
    def algorithm():
        return MyAlgorithm(period=4)


    @pytest.fixture
    def pool():
        return ThreadRanks(4)


    class TestMyAlgorithm(AlgorithmContract):
        pass
"""

import functools
import importlib
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pytest
import torch

import bagua.comm
from bagua import algorithms, compression, primitives
from bagua.algorithms import Algorithm, Exchange, Flight, How
from bagua.comm import ProcessGroup, ReduceOp, Work
from bagua.errors import CollectiveMismatchError, ConfigurationError
from bagua.parallel import BaguaModule, with_bagua
from bagua.testing.ranks import RankPool
from tests import harness
from tests.harness import OptimizerMaker, State, assert_close, assert_same_on_all_ranks, mlp, snapshot, train_steps

__all__ = ["AlgorithmContract", "assert_keeps_promises", "promised_by", "spread"]

#: What can be expected of an algorithm. ``exact``: after every step all ranks hold what one process with all the data
#: would. ``bounded``: they are equal, and near that. ``consensus``: they differ, and come together without gradients.
Promise = Literal["exact", "bounded", "consensus"]

#: Enough for several buckets in the model of the suite, and for one.
BUCKET_BYTES = 1000
ONE_BUCKET_BYTES = 10**9
STEPS = 12

Run = Callable[[How, Flight, ProcessGroup], Work | None]


def build(
    algorithm: Algorithm, *, seed: int = 0, bucket_bytes: int = BUCKET_BYTES, scaler: torch.amp.GradScaler | None = None
) -> tuple[BaguaModule, torch.optim.Optimizer]:
    """The suite's model, ready to be trained with ``algorithm`` on the default group."""
    model = mlp(seed)
    optimizer = optimizer_maker(algorithm)(model.parameters())
    with_bagua(model, [optimizer], algorithm, bucket_bytes=bucket_bytes, grad_scaler=scaler)
    assert isinstance(model, BaguaModule)
    return model, optimizer


def optimizer_maker(algorithm: Algorithm) -> OptimizerMaker:
    """What makes an optimizer of the kind that ``algorithm`` needs."""
    return algorithm.optimizer_class or harness.sgd


def train(algorithm: Algorithm, steps: Iterable[int] = range(STEPS), bucket_bytes: int = BUCKET_BYTES) -> State:
    """The model of this rank after some steps. Ranks start from different weights; rank 0's must win."""
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm, seed=rank, bucket_bytes=bucket_bytes)
    train_steps(model, optimizer, rank, steps)
    return settled(model)


def settled(model: BaguaModule) -> State:
    """The model of this rank once nothing is under way: with a lag, the last exchange goes on after the last step."""
    model.bagua_state_dict()
    return snapshot(model)


def spread(states: Sequence[State]) -> float:
    """How far apart ranks are: the largest distance of a rank from the mean, relative to the mean."""
    flat = torch.stack([torch.cat([value.flatten().double() for value in state.values()]) for state in states])
    mean = flat.mean(dim=0)
    return float((flat - mean).norm(dim=1).max() / mean.norm())


def train_and_rest(algorithm: Algorithm) -> tuple[State, State]:
    """The model of this rank after training, and after as many more steps in which gradients have no effect."""
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm, seed=rank)
    train_steps(model, optimizer, rank, range(STEPS))
    trained = snapshot(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_steps(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return trained, snapshot(model)


def promised_by(algorithm: Algorithm) -> Promise:
    """What can be expected of ``algorithm``, by what is exchanged."""
    if algorithm.ranks_differ:
        return "consensus"
    every = algorithm.every_exchange()
    exact = all((one.how is None or one.how.contraction == 1.0) and not one.lag for one in every)
    return "exact" if exact else "bounded"


def assert_keeps_promises(promise: Promise, results: list[tuple[State, State]], expected: State) -> None:
    """Raise ``AssertionError`` unless the ``results`` of ``train_and_rest`` on the ranks are where ``promise`` says.

    ``expected`` is the state of one process that trained with the data of all ranks.
    """
    states = [trained for trained, _ in results]
    if promise == "consensus" and len(states) > 1:
        apart, rested = spread(states), spread([state for _, state in results])
        assert apart < 1, f"ranks have drifted apart by {apart:.0%}"
        assert rested < apart / 2 or rested < 1e-6, f"without gradients ranks stay {rested:.2g} apart of {apart:.2g}"
        return
    assert_same_on_all_ranks(states)
    if promise == "exact" or len(states) == 1:
        assert_close(states[0], expected)
        return
    distance = spread([states[0], expected])
    assert 1e-6 < distance < 0.1, f"a lossy exchange gave a relative error of {distance:.2g}"


def exchange_exact_mean(self: How, flight: Flight, group: ProcessGroup) -> None:
    """A mutation: the exact mean over all ranks, where something cheaper was promised."""
    divided = flight.scale != 1.0
    group.global_communicator.allreduce(flight.flat, ReduceOp.SUM if divided else ReduceOp.AVG)


class AlgorithmContract:
    """Tests that any algorithm passes."""

    sizes: tuple[int, ...] = (1, 2, 3, 4)  # numbers of ranks that it is tried on
    promise: Promise | None = None  # to test, where exchanges alone do not tell it; None for the one that they tell

    def test_declarations_and_exchanges_print_as_calls_and_survive_pickle(self, algorithm: Algorithm) -> None:
        names: dict[str, Any] = {"torch": torch}
        for exchange in algorithm.every_exchange():
            assert pickle.loads(pickle.dumps(exchange)) == exchange
            assert eval(repr(exchange), names_in(exchange)) == exchange
            names |= names_in(exchange)
        names |= vars(importlib.import_module(type(algorithm).__module__))
        names[type(algorithm).__name__] = type(algorithm)
        assert eval(repr(algorithm), names) == algorithm
        assert pickle.loads(pickle.dumps(algorithm)) == algorithm

    def test_the_bound_form_keeps_the_options(self, algorithm: Algorithm) -> None:
        bound = algorithm.reify(bagua.comm.solo_group())
        assert bound.options == algorithm
        assert type(bound) is type(algorithm).implementation

    def test_the_schedule_is_a_function_of_the_step(self, algorithm: Algorithm) -> None:
        steps = [3, 1, 2, 7, 1000, 2, 1, 3]
        for exchange in algorithm.every_exchange():
            first = [(exchange.when.due(t), exchange.when.round(t)) for t in steps]
            assert first == [(exchange.when.due(t), exchange.when.round(t)) for t in steps]
            due = [t for t in range(1, 50) if exchange.when.due(t)]
            assert [exchange.when.round(t) for t in due] == list(range(1, len(due) + 1))

    def test_training_gives_what_is_promised(self, algorithm: Algorithm, pool: RankPool) -> None:
        for size in self.sizes:
            results = pool.run(train_and_rest, algorithm, size=size)
            assert_keeps_promises(self.promise_of(algorithm), results, self.expected(algorithm, size))

    @pytest.mark.parametrize("hosts", [[2, 1], [1, 3], [2, 2]], ids=lambda hosts: str(tuple(hosts)))
    def test_host_layouts_work_or_are_refused(self, algorithm: Algorithm, pool: RankPool, hosts: list[int]) -> None:
        results = pool.run(train_or_refuse, algorithm, hosts=hosts)
        if any(isinstance(result, str) for result in results):
            assert len(set(results)) == 1, "one rank trains where another refuses"
            return
        assert_keeps_promises(self.promise_of(algorithm), results, self.expected(algorithm, sum(hosts)))

    def test_every_rank_exchanges_every_bucket_once_per_due_step(
        self, algorithm: Algorithm, pool: RankPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for training in (train, train_with_an_inf):  # Also in the step whose update is skipped.
            with monkeypatch.context() as patched:
                counted = count_exchanges(algorithm, patched)
                pool.run(training, algorithm, size=2)
            assert counted, "nothing was ever exchanged"
            assert set(counted.values()) == {1}, "a bucket was exchanged twice in one step"
            mine, other = ({key[1:] for key in counted if key[0] == rank} for rank in (0, 1))
            assert mine == other, "ranks exchanged different buckets"
            assert {step for step, _ in mine} == self.due_steps(algorithm)

    def test_an_update_that_one_rank_skips_stops_nobody(self, algorithm: Algorithm, pool: RankPool) -> None:
        states = pool.run(train_with_a_skipped_update, algorithm, size=2)
        assert all(value.isfinite().all() for state in states for value in state.values())

    def test_an_inf_on_one_rank_poisons_nothing(self, algorithm: Algorithm, pool: RankPool) -> None:
        states = pool.run(train_with_an_inf, algorithm, size=2)
        assert all(value.isfinite().all() for state in states for value in state.values()), "something kept an Inf"
        if self.promise_of(algorithm) == "exact":
            steps = [step for step in range(STEPS) if step != INF_STEP]
            assert_same_on_all_ranks(states)
            assert_close(states[0], harness.reference(mlp(), optimizer_maker(algorithm), 2, steps))

    def test_training_resumes_bit_exactly_with_the_saved_buckets(self, algorithm: Algorithm, pool: RankPool) -> None:
        """At every step: also where a phase ends."""
        whole = pool.run(train, algorithm, size=2)
        saved = pool.run(train_and_save, algorithm, range(1, STEPS), size=2)
        for step, of_ranks in enumerate(zip(*saved, strict=True), start=1):
            resumed = pool.run(resume, algorithm, list(of_ranks), ONE_BUCKET_BYTES, step, size=2)
            for before, after in zip(whole, resumed, strict=True):
                differing = [name for name, value in before.items() if not torch.equal(value, after[name])]
                assert not differing, f"resumed after {step} steps"

    def test_the_scale_of_the_loss_changes_nothing(self, algorithm: Algorithm, pool: RankPool) -> None:
        """Bit by bit: it is a power of two."""
        plain = pool.run(train, algorithm, size=2)
        for before, after in zip(plain, pool.run(train_with_a_growing_scale, algorithm, size=2), strict=True):
            assert_same_on_all_ranks([before, after])

    def test_switching_away_and_back_is_possible(self, algorithm: Algorithm, pool: RankPool) -> None:
        for state in pool.run(switch_away_and_back, algorithm, size=2):
            assert all(torch.isfinite(value).all() for value in state.values())

    def test_the_suite_notices_that_nothing_is_exchanged(
        self, algorithm: Algorithm, pool: RankPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.assert_noticed(algorithm, pool, monkeypatch, lambda *_: None)

    def test_an_exact_mean_in_place_of_the_exchange_gives_something_else(
        self, algorithm: Algorithm, pool: RankPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        promise = self.promise_of(algorithm)
        if promise == "bounded":
            self.assert_noticed(algorithm, pool, monkeypatch, exchange_exact_mean)
        if promise == "consensus" and not all(how.uniform and how.contraction == 1.0 for how in hows_of(algorithm)):
            own = pool.run(train, algorithm, size=4)
            replace_exchanges(algorithm, monkeypatch, exchange_exact_mean)
            mutated = pool.run(train, algorithm, size=4)
            assert max(map(spread, zip(own, mutated, strict=True))) > 1e-6, "the exchange is an exact mean"

    def assert_noticed(self, algorithm: Algorithm, pool: RankPool, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
        """Fail unless training with ``run`` in place of the algorithm's own exchanges breaks a promise."""
        replace_exchanges(algorithm, monkeypatch, run)
        try:
            results = pool.run(train_and_rest, algorithm, size=2)
        except CollectiveMismatchError:
            return  # The engine has noticed by itself.
        with pytest.raises(AssertionError):
            assert_keeps_promises(self.promise_of(algorithm), results, self.expected(algorithm, 2))

    def promise_of(self, algorithm: Algorithm) -> Promise:
        return self.promise or promised_by(algorithm)

    def due_steps(self, algorithm: Algorithm) -> set[int]:
        """The steps in which something is sent."""
        sent = [exchange for exchange in algorithm.every_exchange() if exchange.how is not None]
        shifts = [(one.when, one.parts.shift(part, one.when.steps)) for one in sent for part in range(one.parts.n)]
        return {step for step in range(STEPS) if any(when.due(step + 1, shift) for when, shift in shifts)}

    def expected(self, algorithm: Algorithm, size: int) -> State:
        """Where one process with the data of all ranks ends."""
        return _reference(optimizer_maker(algorithm), size)


@functools.lru_cache(maxsize=64)  # Most algorithms take any optimizer, and are compared with the same training.
def _reference(make_optimizer: OptimizerMaker, size: int) -> State:
    return harness.reference(mlp(), make_optimizer, size, range(STEPS))


INF_STEP = 4


def hows_of(algorithm: Algorithm) -> list[How]:
    return [exchange.how for exchange in algorithm.every_exchange() if exchange.how is not None]


def replace_exchanges(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    for kind in {type(how) for how in hows_of(algorithm)}:
        monkeypatch.setattr(kind, "run", run)


def names_in(exchange: Exchange) -> dict[str, Any]:
    """What is needed to evaluate the printed form of an exchange."""
    parts = (exchange, exchange.what, exchange.when, exchange.how, exchange.then)
    names = {**vars(compression), **vars(primitives), **{one: getattr(algorithms, one) for one in algorithms.__all__}}
    for part in parts:
        names |= vars(importlib.import_module(type(part).__module__))
    return {**names, **{type(part).__name__: type(part) for part in parts}, "torch": torch}


def train_or_refuse(algorithm: Algorithm) -> tuple[State, State] | str:
    """Train, or the message of the refusal at construction."""
    try:
        build(algorithm)
    except ConfigurationError as error:
        return error.problem
    return train_and_rest(algorithm)


def count_exchanges(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int, str]]:
    """Count what is sent by rank, step and bucket."""
    counted: Counter[tuple[int, int, str]] = Counter()
    guard = threading.Lock()
    own_runs: dict[type[How], Run] = {type(how): type(how).run for how in hows_of(algorithm)}
    for kind, own in own_runs.items():

        def count(self: How, flight: Flight, group: ProcessGroup, run: Run = own) -> Work | None:
            with guard:
                counted[group.rank, flight.step, f"{self!r} of {flight.bucket}"] += 1
            return run(self, flight, group)

        monkeypatch.setattr(kind, "run", count)
    return counted


def train_with_a_skipped_update(algorithm: Algorithm) -> State:
    """Rank 1 leaves out one ``optimizer.step()``; the exchanges go on."""
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm)
    for step in range(STEPS):
        optimizer.zero_grad()
        harness.loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
        if (rank, step) != (1, 3):
            optimizer.step()
    return snapshot(model)


def train_scaled(
    algorithm: Algorithm, scaler: torch.amp.GradScaler, *, seed: int = 0, infinite: tuple[int, int] | None = None
) -> State:
    """Train with a ``GradScaler``; the loss of one rank in one step may be infinite."""
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm, seed=seed, scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = harness.loss_of(model, rank, step)
        scaler.scale(loss * float("inf") if (rank, step) == infinite else loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    return settled(model)


def train_with_an_inf(algorithm: Algorithm) -> State:
    """In one step the loss of rank 1 is infinite."""
    scaler = torch.amp.GradScaler(harness.home().type, init_scale=2.0**10)
    return train_scaled(algorithm, scaler, infinite=(1, INF_STEP))


def train_with_a_growing_scale(algorithm: Algorithm) -> State:
    """The scale doubles after every third step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    return train_scaled(algorithm, scaler, seed=bagua.comm.get_rank())


def train_and_save(algorithm: Algorithm, moments: Iterable[int] = (STEPS // 2,)) -> list[dict[str, Any]]:
    """What a checkpoint of this rank holds after so many steps each."""
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm)
    made, saved = 0, []
    for moment in moments:
        train_steps(model, optimizer, rank, range(made, moment))
        made, remembered = moment, model.bagua_state_dict()
        state = {"model": snapshot(model), "optimizer": optimizer.state_dict(), "algorithm": remembered}
        saved.append(pickle.loads(pickle.dumps(state)))
    return saved


def resume(algorithm: Algorithm, saved: list[dict[str, Any]], bucket_bytes: int, made: int = STEPS // 2) -> State:
    """The rest of the steps, after a new start from the checkpoints of all ranks."""
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm, seed=5, bucket_bytes=bucket_bytes)
    optimizer.load_state_dict(saved[rank]["optimizer"])
    for number in range(made % 2, made % 2 + 3):  # In either order; once more changes nothing.
        if number % 2:
            model.load_state_dict(saved[rank]["model"])
        else:
            model.bagua_load_state_dict(saved[rank]["algorithm"])
    train_steps(model, optimizer, rank, range(made, STEPS))
    return settled(model)


def switch_away_and_back(algorithm: Algorithm) -> State:
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm)
    train_steps(model, optimizer, rank, range(4))
    for number, other in enumerate((Algorithm.init("gradient_allreduce"), algorithm), start=1):
        with_bagua(model, [optimizer], other, bucket_bytes=BUCKET_BYTES)
        train_steps(model, optimizer, rank, range(4 * number, 4 * number + 4))
    return snapshot(model)
