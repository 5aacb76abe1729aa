"""Asynchronous averaging through the engine: what training gets from it, and how it ends, on threads and processes."""

import contextlib
import functools
import gc
import itertools
import math
import os
import random
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

import bagua.comm
from bagua import errors, testing
from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithm
from bagua.algorithms.async_model_average import ENDING, FRESH, IMPATIENT, LEAVING, OPEN, SETTLING, Stage, verdict
from bagua.comm import solo_group
from bagua.comm.transports.threads import FaultHook, RankKilled, Step, inject_fault
from bagua.parallel import DistributedDataParallel, bagua_init, with_bagua
from tests.algorithms.stacked import plain_sgd
from tests.harness import State, assert_same_on_all_ranks, loss_of, mlp, reference, snapshot, train_steps, until
from tests.launching import PATIENCE_S, free_port, launched
from tests.parallel.wrapping import Loop, assert_trained, of_this_rank, on_ranks

OFTEN = AsyncModelAverageAlgorithm(sync_interval_ms=0)
NEVER = AsyncModelAverageAlgorithm(sync_interval_ms=1e9)
#: Between two steps of ranks that train until something happens: it takes them little of the processor.
PACE_S = 0.002


class Averaged(Loop):
    """A model that is averaged in the background."""

    def __init__(self, algorithm=OFTEN, *, wrap="with_bagua", make=mlp, **options) -> None:
        super().__init__(wrap, make, plain_sgd, algorithm=algorithm, **options)

    def abort(self) -> State:
        return abort(self.wrapped)

    def resume(self) -> None:
        self.model.bagua_algorithm.resume(self.model)

    def train_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if condition():
                return
            self.train()
            time.sleep(PACE_S)
        raise AssertionError("it never came")

    def train_until_averaged(self, times: int = 1) -> None:
        enough = averages_of(self.wrapped) + times
        self.train_until(lambda: averages_of(self.wrapped) >= enough)


def averager_of(model):
    return model.bagua_algorithm._averager


def averages_of(model) -> float:
    return averager_of(model)._group.gauges.get("comm/averages", 0.0)


def abort(model) -> State:
    model.bagua_algorithm.abort(model)
    return snapshot(model)


def assert_alike(rows: list[list[State]]) -> None:
    """Ranks have come to the same states."""
    for states in zip(*rows, strict=True):
        assert_same_on_all_ranks(states)


def waits_for_the_end(model, rank: int) -> Callable[[], bool]:
    """Whether ``rank`` has told this one that it waits for the end."""
    return lambda: bool(averager_of(model)._words[rank] & ENDING)


def averaged(*algorithm, **options) -> Averaged:
    """A model that has been averaged once."""
    loop = Averaged(*algorithm, **options)
    loop.train_until_averaged()
    return loop


#: From weights of each rank's own.
averaged_apart = functools.partial(averaged, AsyncModelAverageAlgorithm("all", 1), make=of_this_rank)


class Number(nn.Module):
    """A weight that tests change by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()

    def step_by(self, amount: float) -> None:
        """A step of an optimizer that adds ``amount``."""
        self.weight.grad = None
        self().backward()
        with torch.no_grad():
            self.weight.add_(self.weight.grad, alpha=amount)

    @property
    def value(self) -> float:
        return self.weight[0].item()


def number(algorithm=NEVER, fault: FaultHook | None = None) -> Number:
    with inject_fault(fault):
        return with_bagua(Number(), [], algorithm)


def due(model) -> None:
    """A snapshot is put down before the next step; with ``NEVER``, none after it."""
    averager_of(model)._averaged_at = -math.inf


READY, SETTLED = OPEN | FRESH, ENDING | SETTLING
FOLLOWS = {
    "nothing": [(0, READY | IMPATIENT), (OPEN, OPEN), (READY, OPEN), (READY | ENDING, 0), (SETTLED, READY | IMPATIENT)],
    "average": [(READY, READY), (READY | IMPATIENT, OPEN), (READY | ENDING, READY)],
    "last": [(READY | ENDING, READY | ENDING)],
    "settle": [(SETTLED, SETTLED)],
    "mismatch": [(SETTLED, READY | ENDING)],
    "leave": [(SETTLED | LEAVING, SETTLED), (LEAVING, READY)],
}


@pytest.mark.parametrize(("words", "expected"), [(words, one) for one, rows in FOLLOWS.items() for words in rows])
def test_what_follows_from_the_words_of_all(words, expected):
    for order in itertools.permutations((*words, words[-1])):
        assert verdict(order) == expected


def _train_and_count(seed: int) -> tuple[list[float], State, float]:
    """Steps of random sizes at a random pace, and ``abort`` and ``resume``; some points of rounds are delayed."""
    rank = bagua.comm.get_rank()
    drawn, steps = random.Random(100 * seed + rank), []

    def delay(step: Step) -> None:
        if "averaging" in step.label and drawn.random() < 0.1:
            time.sleep(0.004 * drawn.random())

    model = number(AsyncModelAverageAlgorithm(sync_interval_ms=5.0 * (seed % 2)), delay)
    for _ in range(3):
        for _ in range(drawn.randrange(60)):
            steps.append(drawn.random())
            model.step_by(steps[-1])
            time.sleep(drawn.choice([0.0, 0.0, 0.002, 0.02 * (rank == 1)]))  # Rank 1 is much slower.
        abort(model)
        if drawn.random() < 0.5:
            steps.append(1.0)
            model.step_by(1.0)  # On its own.
        model.bagua_algorithm.resume(model)
    return steps, abort(model), averages_of(model)


@pytest.mark.parametrize(("seed", "size"), [(0, 2), (1, 3), (2, 4), (3, 2), (4, 3), (5, 4)])
def test_no_step_of_any_rank_is_lost_or_counted_twice(thread_ranks, seed, size):
    results = thread_ranks(size, _train_and_count, seed)
    assert_same_on_all_ranks([state for _, state, _ in results])
    total = sum(sum(steps) for steps, *_ in results)
    assert torch.allclose(results[0][1]["weight"], torch.full((5,), total / size, dtype=torch.float64), rtol=1e-12)
    assert all(averages > 4 for *_, averages in results), "more than the four at the ends"


#: Events that the ranks of one test share.
trained, begun, interrupted = (pytest.fixture(lambda: threading.Event()) for _ in range(3))  # noqa: PLW0108 - a class is no fixture


@on_ranks(2, assert_same_on_all_ranks)
def test_no_rank_waits_for_one_that_takes_no_step_and_that_one_is_averaged_with(trained) -> State:
    rank, model = bagua.comm.get_rank(), number(OFTEN)
    model.step_by(0.0)
    if rank == 1:
        assert trained.wait(60)  # One of its steps takes as long as those of the other.
    else:
        for _ in range(200):
            model.step_by(1.0)
        enough = averages_of(model) + 3
        while averages_of(model) < enough:
            model.step_by(0.0)
        trained.set()
    assert model.value == (0.0 if rank else pytest.approx(100.0, rel=0.5))
    end = abort(model)
    assert model.value == pytest.approx(100.0, rel=1e-9)
    return end


@on_ranks(2)
def test_an_average_that_takes_long_holds_up_no_step(trained, begun):
    def slow_link(step: Step) -> None:
        if step.rank == 1 and "averaging" in step.label and step.call.kind == "allreduce":
            begun.set()
            assert trained.wait(60)

    model = number(OFTEN, slow_link)
    model.step_by(0.0)
    if bagua.comm.get_rank() == 0:
        assert begun.wait(60)
        for _ in range(50):
            model.step_by(1.0)
        trained.set()
    abort(model)
    assert model.value == 25.0


@on_ranks(2)
def test_a_thread_that_is_late_makes_no_straggler():
    def late(step: Step) -> None:
        if step.rank == 1 and "averaging" in step.label and step.name == "arrive":
            time.sleep(0.01)

    with inject_fault(late):
        loop = Averaged()
    told = averager_of(loop.model)._communicator.statistics
    for expected in (False, True):
        loop.train_until_averaged(3)
        found = bool(told.waits or told.lasts or told.times.waiting_s or told.times.of_collectives_s)
        assert found == expected or loop.rank == 1
        told.aside = False  # As it is for other communicators.
    loop.abort()


@on_ranks(2)
def test_who_waits_in_abort_holds_up_none_that_trains():
    model = number()
    if bagua.comm.get_rank() == 0:
        until(waits_for_the_end(model, 1))
        for made in range(1, 4):
            due(model)
            model.step_by(1.0)
            until(lambda made=made: averages_of(model) == made)
    abort(model)
    assert (averages_of(model), model.value) == (4.0, 1.5)


@pytest.mark.parametrize("first", range(3))
@on_ranks(3, assert_alike)
def test_abort_and_resume_from_any_rank(first) -> list[State]:
    loop, ends = averaged(), []
    for _ in range(3):
        loop.train_until_averaged()
        if loop.rank != first:
            loop.train_until(waits_for_the_end(loop.model, first))
        ends.append(loop.abort())
        loop.abort()  # Twice does no harm.
        loop.train(loop.rank)  # On its own.
        if loop.rank != first:
            time.sleep(0.02)
        loop.resume()
        loop.resume()
    bagua.comm.barrier()  # Who leaves lets no other one resume.
    return ends


@on_ranks(2)
def test_averages_are_formed_again_when_all_have_resumed():
    loop = averaged()
    before = loop.abort()
    made = averages_of(loop.model)
    if loop.rank == 0:
        loop.resume()
        loop.train(20)
        time.sleep(0.05)
        assert averages_of(loop.model) == made
    bagua.comm.barrier()
    if loop.rank == 1:
        assert_same_on_all_ranks([before, snapshot(loop.model)])
        loop.resume()
    loop.train_until_averaged()


@on_ranks(2)
def test_a_training_thread_that_wakes_late_has_one_last_average():
    model = number()
    averager = averager_of(model)
    wait = averager._wait

    def wait_longer(limit_s: float | None) -> None:
        wait(limit_s)
        time.sleep(0.3)  # Rounds go on.

    averager._wait = wait_longer
    model.step_by(2.0 * bagua.comm.get_rank())
    abort(model)
    assert model.value == 1.0
    assert averages_of(model) <= 2.0, "one may come between a rank's snapshot and its word that it ends"


@on_ranks(2)
def test_an_average_that_was_taken_in_half_is_not_taken_in_again():
    layers = nn.Sequential(nn.Linear(1, 300, bias=False), nn.Linear(300, 1, bias=False))
    loop = Averaged(NEVER, make=lambda: layers)
    model, (_, last) = loop.model, loop.model.bagua_algorithm._buckets
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0 * loop.rank)  # Wrapping made them equal.
    due(model)
    model(torch.zeros(1, 1)).sum().backward()
    until(lambda: averager_of(model).stage is Stage.DIFFERENCE)
    with patch.object(last, "views", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        model(torch.zeros(1, 1))
    for _ in range(2):
        model(torch.zeros(1, 1)).sum().backward()
    bagua.comm.barrier()
    assert sorted(one.mean().item() for one in model.parameters()) == [loop.rank, loop.rank + 1.0]


@contextlib.contextmanager
def ctrl_c(model) -> Iterator[None]:
    """The next wait for the end is interrupted when this rank's thread has told the others of it."""
    averager = averager_of(model)

    def interrupt(_: float) -> bool:
        until(waits_for_the_end(model, averager._group.rank))
        raise KeyboardInterrupt

    with patch.object(averager._stopped, "wait", interrupt), pytest.raises(KeyboardInterrupt):
        yield


@on_ranks(2, assert_same_on_all_ranks)
def test_ctrl_c_in_abort_before_the_others_come(interrupted, trained) -> State:
    loop = averaged()
    if loop.rank == 0:
        with ctrl_c(loop.model):
            loop.abort()
        interrupted.set()
        until(waits_for_the_end(loop.model, 1))
        loop.train_until_averaged(3)
        trained.set()
    assert interrupted.wait(60)
    loop.abort()
    assert trained.is_set(), "rank 0 still trained"
    return snapshot(loop.model)


@pytest.mark.parametrize("then", ["abort", "finish"])
@on_ranks(2, assert_same_on_all_ranks)
def test_ctrl_c_in_abort_while_the_others_come(then) -> State:
    loop = averaged()
    if loop.rank == 0:
        until(waits_for_the_end(loop.model, 1))
        with ctrl_c(loop.model):
            loop.abort()
    if loop.rank == 1 or then == "abort":
        loop.abort()
    if then == "finish":
        loop.model.bagua_finish()
    return snapshot(loop.model)


@on_ranks(2, lambda states: assert_trained(states, reference(mlp(), plain_sgd, 2, range(6))))
def test_abort_in_warm_up_and_training_on() -> State:
    loop = Averaged(AsyncModelAverageAlgorithm("all", 1e9, 6))
    loop.train(3)
    if loop.rank == 0:  # It has nothing to wait for.
        loop.abort()
        loop.resume()
    loop.train(3)
    return loop.abort()  # Nobody has made the first step after warm-up.


@on_ranks(2, assert_same_on_all_ranks)
def test_ranks_may_stop_in_the_last_step_of_warm_up_and_after_it() -> State:
    loop = Averaged(AsyncModelAverageAlgorithm("all", 0, 3))
    loop.train(3)
    assert averages_of(loop.wrapped) == 0
    loop.train(4 * loop.rank)
    return loop.abort()


@on_ranks(2)
def test_weights_stay_while_a_step_goes_on():
    """Several forwards in a step, ``no_sync``, ``eval`` and ``no_grad`` are no safe points."""
    loop = averaged()
    inputs = torch.ones(1, 8)
    for _ in range(20):
        with loop.model.no_sync():
            loop.model(inputs).square().mean().backward()
        before = snapshot(loop.model)
        time.sleep(0.003)
        with loop.model.no_sync():
            loop.model(inputs).square().mean().backward()
        loop.model.eval()(inputs)
        with torch.no_grad():
            loop.model.train()(inputs)
        loss = loop.model(inputs).square().mean() + loop.model(inputs).square().mean()
        assert_same_on_all_ranks([before, snapshot(loop.model)])
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.abort()


@on_ranks(2)
def test_an_average_between_forward_and_backward_would_be_noticed_by_autograd():
    loop = averaged()
    weight = next(loop.model.parameters())
    stale = loss_of(loop.model, loop.rank, 0)  # Its backward pass comes too late.
    before = weight._version

    def an_average_is_taken_in() -> bool:  # No optimizer changes the weights here.
        loss_of(loop.model, loop.rank, 1).backward()
        return weight._version != before

    until(an_average_is_taken_in)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    loop.abort()


@on_ranks(2, assert_alike)
def test_two_models_do_not_disturb_each_other_nor_the_users_calls() -> list[State]:
    loops, total = [Averaged(make=functools.partial(mlp, seed)) for seed in (1, 2)], torch.zeros(1)
    for _ in range(30):
        for loop in loops:
            loop.train()
        total += 1
        bagua.comm.allreduce(total)
        total /= 2
    assert total.item() == 30.0
    return [loops[1].abort(), loops[0].abort()]


@on_ranks(2)
def test_gradients_are_those_of_the_rank():
    """With a ``GradScaler``, too: nothing touches them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Averaged(grad_scaler=scaler)
    for _ in range(5):
        loop.optimizer.zero_grad()
        loss = loop.loss()
        expected = torch.autograd.grad(loss, list(loop.model.parameters()), retain_graph=True)
        scaler.scale(loss).backward()
        for parameter, gradient in zip(loop.model.parameters(), expected, strict=True):
            assert torch.allclose(parameter.grad, 4.0 * gradient)
        scaler.step(loop.optimizer)
        scaler.update(4.0)
    loop.abort()


@on_ranks(2)
def test_a_checkpoint_goes_on_in_its_step():
    algorithm = AsyncModelAverageAlgorithm("all", 1e9, 2)
    first, loop, another = Averaged(algorithm), Averaged(algorithm, make=functools.partial(mlp, 7)), Averaged(algorithm)
    weights, state = first.train(4), first.model.bagua_state_dict()
    loop.model.load_state_dict(weights)
    loop.model.bagua_load_state_dict(state)
    assert_same_on_all_ranks([weights, snapshot(loop.model)])  # Also where they differ between ranks.
    loop.step = 4
    assert_same_on_all_ranks([first.train(), loop.train()])
    assert loop.reducer.step == 5
    another.model.bagua_load_state_dict(state)
    another.abort()  # Its warm-up is over.
    assert averages_of(another.model) >= 1  # Another one may come before both ranks say that they end.


@on_ranks(2, assert_same_on_all_ranks)
def test_switching_and_changing_the_model_stop_averaging_first() -> State:
    def wrap(*made, algorithm):
        return bagua_init(*made, Algorithm.init(algorithm, sync_interval_ms=0), message_size=1000)[0]

    loop = Averaged("async", wrap=wrap)
    loop.train(10 + loop.rank)
    for wanted in (False, True):
        for parameter in loop.model[0].parameters():
            parameter.requires_grad_(wanted)
        loop.train_until_averaged()
    thread = averager_of(loop.wrapped)._thread
    loop.reducer.formation.reset(bucket_bytes=500)
    assert not thread.is_alive()
    loop.train_until_averaged()
    loop.switch_to("allreduce")
    loop.train(2)
    loop.switch_to(OFTEN)
    loop.train_until_averaged()
    loop.abort()
    loop.switch_to("allreduce")
    return snapshot(loop.model)


@on_ranks(2)
def test_training_goes_on_after_finish_with_averages():
    rank, model, seen = bagua.comm.get_rank(), number(), []
    for _ in range(2):
        if rank == 0:
            due(model)  # Its snapshot still waits when it finishes.
        model.step_by(2.0 * rank)
        model.bagua_finish()
        seen.append(model.value)
    for _ in range(2):
        due(model)
        model.step_by(0.0)
        until(lambda: averager_of(model).stage is Stage.DIFFERENCE)
    assert seen == [1.0, 2.0]


@on_ranks(2)
def test_one_rank_that_ends_while_another_one_switches():
    loop = averaged()
    with pytest.raises(errors.CollectiveMismatchError, check=lambda error: error.peers == (1,)):
        loop.abort() if loop.rank == 0 else loop.model.bagua_finish()


@on_ranks(2, timeout_s=1.0)
def test_one_rank_alone_changes_its_model():
    loop = averaged()
    if loop.rank == 1:
        with pytest.raises(errors.PeerLostError):  # Rank 0 has given up.
            loop.train_until(lambda: False)
        return
    loop.model[0].weight.requires_grad_(False)
    with pytest.raises(errors.CollectiveTimeoutError, match="not all ranks stopped", check=lambda it: it.peers == (1,)):
        loop.train()


@on_ranks(2)
def test_another_wrapper_of_the_same_module_ends_averaging():
    loop = averaged()
    thread = averager_of(loop.model)._thread
    other = DistributedDataParallel(loop.model, bucket_bytes=1000)
    assert not thread.is_alive()
    train_steps(other, loop.optimizer, loop.rank, range(3))


@pytest.mark.parametrize("leave", [lambda model: model.bagua_close(), lambda _: bagua.comm.destroy_process_group()])
@pytest.mark.parametrize("paused", [False, True])
def test_a_rank_that_leaves_lets_the_others_train_on_and_end(thread_ranks, leave, paused, caplog):
    def train() -> None:
        loop = averaged()
        thread = averager_of(loop.model)._thread
        if paused:
            loop.abort()
        if loop.rank == 1:
            leave(loop.model)
            assert not thread.is_alive()
            return
        loop.train_until(lambda: not thread.is_alive())
        loop.train(5)
        with contextlib.nullcontext() if paused else pytest.raises(errors.PeerLostError, match="rank 1 has left"):
            loop.abort()
        with pytest.raises(errors.PeerLostError, match="rank 1 has left", check=lambda error: error.peers == (1,)):
            loop.resume()

    thread_ranks(3, train)
    warned = [record for record in caplog.records if "goes on without averages" in record.getMessage()]
    assert len(warned) == (0 if paused else 2)


@on_ranks(2)
def test_a_rank_that_leaves_ends_the_abort_of_others():
    loop = averaged()
    if loop.rank == 1:
        until(waits_for_the_end(loop.model, 0))
        loop.model.bagua_close()
        with pytest.raises(errors.CommunicatorClosedError, match="was closed"):
            loop.resume()
        return
    with pytest.raises(errors.PeerLostError, match="rank 1 has left"):
        loop.abort()


def _end_with(victim: int, how: str, kind: str, name: str, times: int) -> tuple[int, ...]:
    """One rank is killed when its rounds come to one step of one kind of call for the ``times``-th time."""
    armed, seen = threading.Event(), itertools.count(1)

    def kill(step: Step) -> None:
        here = armed.is_set() and step.rank == victim and "averaging" in step.label
        if here and (step.call.kind, step.name) == (kind, name) and next(seen) == times:
            raise RankKilled

    model = number(OFTEN, kill)
    algorithm = model.bagua_algorithm
    with torch.no_grad():
        model.weight.fill_(100.0 + bagua.comm.get_rank())
    try:
        while averages_of(model) < 2:
            model.step_by(0.0)
        armed.set()
        if how == "abort":
            abort(model)
            algorithm.resume(model)
        for _ in range(5000):
            model.step_by(0.0)
            time.sleep(PACE_S)
    except errors.PeerLostError as error:
        assert 99.9 < model.value < 102.1, "a part of an average was taken in"
        for call in (lambda: algorithm.resume(model), lambda: model.step_by(0.0)):
            with pytest.raises(errors.PeerLostError):
                call()
        return error.peers
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("how", ["train", "abort"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_at_any_point_of_a_round_is_named_by_the_others(thread_pool, victim, how):
    for point in itertools.product(("allgather", "allreduce"), ("publish", "arrive", "pass"), range(1, 5)):
        outcomes = thread_pool.outcomes(_end_with, victim, how, *point, size=3)
        assert [one.value for one in outcomes if one.rank != victim] == [(victim,)] * 2, (point, outcomes)


@on_ranks(3)
def test_an_error_in_the_thread_of_one_rank_reaches_all_and_is_no_average():
    loop = averaged()
    averager = averager_of(loop.model)
    if loop.rank == 1:
        until(lambda: averager.stage is Stage.DIFFERENCE)
        averager._communicator.allreduce = Mock(side_effect=MemoryError("for the test"))
        until(lambda: not averager._thread.is_alive())
        assert averager.stage is Stage.EMPTY
    with pytest.raises(MemoryError if loop.rank == 1 else errors.PeerLostError, match="for the test"):
        loop.train_until(lambda: False)


@on_ranks(2)
def test_an_error_of_averaging_keeps_no_model_alive():
    loop = averaged()
    if loop.rank == 1:
        bagua.comm.get_default_group().abort("for the test")
        return
    with pytest.raises(errors.CommunicationError):
        loop.train_until(lambda: False)
    averager, gone = averager_of(loop.model), weakref.ref(loop.model)
    del loop
    until(lambda: gc.collect() >= 0 and gone() is None)
    assert averager.error is not None


def test_one_rank_has_nothing_to_do():
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], OFTEN, solo_group())
    train_steps(wrapped, optimizer, 0, range(3))
    abort(wrapped)
    wrapped.bagua_algorithm.resume(wrapped)
    assert_trained([snapshot(model)], reference(mlp(), plain_sgd, 1, range(3)))
    with pytest.raises(errors.ConfigurationError, match="not the model"):
        wrapped.bagua_algorithm.abort(mlp())


@on_ranks(2, assert_same_on_all_ranks, pool="rank_pool")
def test_models_are_equal_after_abort() -> State:
    return averaged_apart().abort()


@on_ranks(2, pool="process_pool")
def test_a_forked_child_does_not_wait_for_the_end():
    """Its parent averages on."""
    loop = averaged_apart()
    child = os.fork()
    if not child:
        signal.alarm(60)
        status = 1
        try:
            loop.abort()
        except errors.CommunicatorClosedError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    loop.train_until_averaged()
    loop.abort()
    assert os.waitstatus_to_exitcode(ended) == 0


def _train_until_killed() -> tuple[int, ...]:
    loop = averaged_apart()
    with pytest.raises(errors.PeerLostError) as caught:
        loop.train_until(lambda: loop.rank == 1 and averages_of(loop.model) >= 2)
        testing.die()
    assert all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())
    with pytest.raises(errors.PeerLostError):
        loop.abort()
    return caught.value.peers


def test_a_killed_process_is_named_by_the_others(process_pool):
    outcomes = process_pool.outcomes(_train_until_killed, size=3)
    assert [outcome.value for outcome in outcomes if outcome.rank != 1] == [(1,)] * 2, outcomes


SCRIPT = """
import sys
import torch
import bagua.torch_api as bagua
from bagua.errors import PeerLostError
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

bagua.init_process_group(backend="gloo")
ending = sys.argv[1]
model = torch.nn.Linear(8, 4).with_bagua([], AsyncModelAverageAlgorithm(sync_interval_ms=1))

def train():
    model.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    with torch.no_grad():  # An optimizer would import half of torch at its first step.
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad

while bagua.metrics().get("comm/averages", 0) < 2:
    train()
if ending == "raise":
    raise SystemExit(3)
if ending == "crash":
    raise ValueError("a bug")
try:
    while ending == "go on" and model.bagua_algorithm._averager._thread.is_alive():
        train()
    train()
    if ending == "go on":
        model.bagua_algorithm.abort(model)
except PeerLostError as error:
    print(error.peers[0], flush=True)
"""


def _run(endings: list[str], port: int | None = None) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank."""
    options = {"stderr": subprocess.PIPE, "BAGUA_TIMEOUT_S": "60"}
    with launched(len(endings), "-c", SCRIPT, each=endings, port=port, **options) as ranks:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
        return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ending", ["raise", "crash"])
def test_scripts_that_end_without_abort_are_named_by_those_that_go_on(ending):
    statuses = {"raise": 3, "crash": 1}
    (ended, _, own), (status, output, others) = _run([ending, "go on"])
    assert (ended, status, output) == (statuses[ending], 0, "0\n"), (own, others)
    assert "terminate called" not in own + others
    assert ("goes on without averages" in others) == (ending == "raise"), others


@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_scripts_that_forget_abort_end_well():
    """Also where the first of them hosts the store."""
    for status, output, told in _run(["nothing"] * 3, free_port()):
        assert (status, output) == (0, ""), told
        assert "terminate called" not in told
        assert "Traceback" not in told
