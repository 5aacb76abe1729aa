"""Errors: in a hook, a backward pass, the exchange, on another rank; ranks that are long in coming. Nothing hangs."""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, Every, Exchange, LocalUpdates, Mean, Model, Replace, Weights, registry
from bagua.comm import long_wait
from bagua.comm.long_wait import LongWait
from bagua.engine.schedule.scheduler import Scheduler
from bagua.errors import BaguaError, CollectiveTimeoutError, CommunicationError, CommunicatorClosedError, PeerLostError
from tests.algorithms.test_toys import WarmsUp
from tests.contract.algorithms import optimizer_maker
from tests.harness import State, assert_same_on_all_ranks, in_threads, loss_of, snapshot, until
from tests.parallel import test_decentralized as decentralized
from tests.parallel.wrapping import WRAPS, Loop, Recomputed, Twice, Wrap, on_ranks


class CodecError(Exception):
    """What a user's own code raises in these tests."""


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None:
        assert error not in chain, "the chain leads back to itself"
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


@pytest.fixture
def fails_on_rank_0(monkeypatch):
    """The exchange of step 2 fails there."""
    run = Mean.run

    def fails(self, flight, group):
        if flight.step == 2 and group.rank == 0:
            raise CodecError("no such block")
        return run(self, flight, group)

    monkeypatch.setattr(Mean, "run", fails)


@pytest.mark.parametrize(
    ("wrap", "delay_reduce"), [*((wrap, False) for wrap in WRAPS), ("bagua_init", True), ("with_bagua", True)]
)
@pytest.mark.usefixtures("fails_on_rank_0")
@on_ranks(2)
def test_an_error_in_the_exchange_reaches_the_end_of_backward(wrap, delay_reduce):
    loop = Loop(wrap, **({"delay_reduce": True} if delay_reduce else {}))
    loop.train(2)
    with pytest.raises((CodecError, CommunicationError)) as caught:
        loop.train(4)
    assert any(isinstance(error, CommunicationError if loop.rank else CodecError) for error in _chain(caught.value))
    with pytest.raises(BaguaError):  # And it stays an error, at once.
        loop.train()


@pytest.mark.usefixtures("fails_on_rank_0")
def test_a_bucket_that_is_refused_tells_why_the_one_before_failed(thread_ranks, monkeypatch):
    """The last bucket is exchanged by the thread that computes, here when the exchange of another one has failed."""
    holds = Scheduler._holds_last

    def late(self: Scheduler, ended: bool) -> bool:
        if ended and self.clock.step == 2 and bagua.comm.get_rank() == 1:
            until(lambda: not self._last[0].lane.group.global_communicator.usable)
        return holds(self, ended)

    def train() -> list[type]:
        loop = Loop("with_bagua", bucket_bytes=100, delay_reduce=True)
        with pytest.raises((CodecError, CommunicationError)) as caught:
            loop.train(4)
        return [type(error) for error in _chain(caught.value)]

    monkeypatch.setattr(Scheduler, "_holds_last", late)
    assert thread_ranks(2, train)[1] == [PeerLostError]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.usefixtures("fails_on_rank_0")
@on_ranks(2, assert_same_on_all_ranks)
def test_a_model_whose_exchange_failed_can_be_wrapped_anew(wrap) -> State:
    loop = Loop(wrap)
    with pytest.raises((CodecError, CommunicationError)):
        loop.train(6)
    if wrap == "bagua_init":
        loop.wrapped.switch_to("allreduce")
    else:
        loop.wrapped = WRAPS[wrap](loop.model, loop.optimizer)
    return loop.train(2)


@on_ranks(2)
def test_an_error_in_forward_or_loss_leaves_the_engine_usable():
    loop = Loop()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            loop.wrapped(torch.zeros(2, 3))  # A wrong shape.
        loop.train()


@pytest.mark.parametrize("bucket_bytes", [1, 288, 10**6])  # With 288, a bucket is a layer.
@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_a_parameter_that_arrives_twice_in_one_backward_is_named(steps, bucket_bytes):
    loop = Loop(make=Twice, bucket_bytes=bucket_bytes)
    loop.train(steps)
    loop.model.times = 2
    with pytest.raises(BaguaError, match=r"shared\.(weight|bias)"):
        loop.train()


def _train_through_a_mishap(mishap: str) -> tuple[str, State]:
    """What ends the training when something happens to rank 1 only, and the weights after training on, wrapped anew."""
    loop = Loop()
    loop.train(3)
    if loop.rank != 1:
        handle = None
    elif mishap == "hook":  # In the last bucket: the first one is under way by then.
        handle = loop.model[0].weight.register_hook(Mock(side_effect=CodecError("user's hook")))
    else:
        handle = loop.model[1].register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises((BaguaError, CodecError)) as caught:
        loop.train(7)
    if handle is not None:
        handle.remove()
    loop.wrapped.switch_to("allreduce")
    loop.step = 10
    return type(caught.value).__name__, loop.train(3)


@pytest.mark.parametrize(("mishap", "here"), [("hook", "CodecError"), ("unused", "ConfigurationError")])
def test_what_ends_one_process_ends_the_others_and_all_train_on_wrapped_anew(process_ranks, mishap, here):
    """The error of the others is not that of a timeout."""
    (other, first), (own, second), (another, third) = process_ranks(3, _train_through_a_mishap, mishap, timeout_s=120.0)
    assert own == here
    assert {other, another} <= {"PeerLostError", "CommunicatorClosedError"}
    assert_same_on_all_ranks([first, second, third])


@on_ranks(2)
def test_a_change_that_no_other_rank_makes_is_named_after_the_timeout():
    """The other one makes no step in which it would be seen to wait."""
    loop = Loop("with_bagua", process_group=bagua.comm.new_group([0, 1], timeout=1.0))
    if loop.rank == 0:
        next(loop.model.parameters()).requires_grad_(False)
        why = r"did not come, after .* on this one: .*weight was frozen"
        with pytest.raises(CollectiveTimeoutError, match=why, check=lambda error: error.peers == (1,)):
            loop.loss()
    bagua.comm.barrier()


FAILS_IN = 2


@contextmanager
def failing(place: nn.Module | torch.Tensor, error: type[BaseException] = MemoryError) -> Iterator[None]:
    """A backward pass in this block ends where the gradient of ``place`` is there."""
    fails = Mock(side_effect=error("out of memory, as it were"))
    handle = (place.weight if isinstance(place, nn.Module) else place).register_hook(fails)
    with pytest.raises(error):
        yield
    handle.remove()


def check_all_are_told(
    train: Callable[[int], object],
    backward: Callable[[], object],
    place: Callable[[], nn.Module | torch.Tensor],
    steps: int = FAILS_IN,
    error: type[BaseException] = MemoryError,
) -> None:
    """After some steps, the backward pass of rank 0 fails at ``place``: each rank hears of it in its next steps."""
    why, rank = "a backward pass failed before its end", bagua.comm.get_rank()
    if rank == 0:
        train(steps)
        with failing(place(), error):
            backward()
    else:
        with pytest.raises(PeerLostError, match=f"lost rank 0: it gave up: {why}", check=lambda it: it.peers == (0,)):
            train(steps + 4)
    bagua.comm.barrier()  # They are told before rank 0 goes on.
    for _ in range(2 if rank == 0 else 0):
        with pytest.raises(CommunicatorClosedError, match=f"{why}.*Wrap it anew on all ranks"):
            train(1)


def one_bucket(wrap: Wrap | str = "with_bagua", **options: Any) -> Loop:
    """Nothing is exchanged before the last gradient is there."""
    return Loop(wrap, bucket_bytes=10**9, **options)


def with_algorithm(algorithm: Algorithm) -> Loop:
    return one_bucket(make_optimizer=optimizer_maker(algorithm), algorithm=algorithm)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("step", [0, FAILS_IN])
@pytest.mark.parametrize("place", ["first gradient", "last gradient", "output"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@on_ranks(3)
def test_the_engine_stops_on_all_ranks(wrap, step, place, error):
    loop, outputs = one_bucket(wrap), []

    def fails_at() -> nn.Module | torch.Tensor:
        outputs.append(loop.wrapped(torch.ones(1, 8)))
        return {"first gradient": loop.model[4], "last gradient": loop.model[0], "output": outputs[0]}[place]

    check_all_are_told(loop.train, lambda: outputs[0].sum().backward(), fails_at, step, error)


TOGETHER = {name: registry.get(name)() for name in registry if not issubclass(registry.get(name), LocalUpdates)}
OWN_PACE = TOGETHER.pop("async")
TOGETHER |= {"warm-up of async": registry.get("async")(warmup_steps=10), "between": registry.get("local_sgd")(5)}


@pytest.mark.parametrize("name", TOGETHER)
@on_ranks(2)
def test_with_every_algorithm_whose_ranks_step_together(name):
    loop = with_algorithm(TOGETHER[name])
    check_all_are_told(loop.train, loop.backward, lambda: loop.model[0])


@on_ranks(2)
def test_where_ranks_step_at_their_own_pace_nobody_needs_to_know():
    loop = with_algorithm(OWN_PACE)
    loop.train(FAILS_IN)
    if loop.rank == 0:
        with failing(loop.model[0]):
            loop.backward()
    loop.train(2)
    loop.model.bagua_algorithm.abort(loop.model)


@pytest.mark.parametrize("topology", ["complete", "ring", "one-peer-exp"])
@on_ranks(4)
def test_with_neighbours(topology):
    rank, model = bagua.comm.get_rank(), decentralized.wrap(topology=topology)
    check_all_are_told(
        lambda steps: decentralized.train(model, range(steps)),
        lambda: loss_of(model, rank, FAILS_IN).backward(),
        lambda: model.module[0],
    )


@on_ranks(2)
def test_the_second_backward_pass_of_one_graph():
    """Each of them is a step."""
    loop = one_bucket()
    loss = loop.loss()
    loss.backward(retain_graph=True)
    check_all_are_told(lambda steps: steps and loop.train(steps), loss.backward, lambda: loop.model[0], 0)


@on_ranks(2)
def test_inside_a_reentrant_checkpoint():
    loop = one_bucket(make=Recomputed)
    check_all_are_told(loop.train, loop.backward, lambda: loop.model.inner[2], 1)


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2, assert_same_on_all_ranks)
def test_one_that_only_accumulates_may_fail(wrap) -> State:
    """Nobody waits for it. What it left in the gradients is the user's, as without bagua."""
    loop = one_bucket(wrap)
    loop.train(2)
    if loop.rank == 0:
        with loop.wrapped.no_sync(), failing(loop.model[0]):
            loop.backward()
    return loop.train(2)


@on_ranks(1)
def test_without_other_ranks_the_next_step_goes_on():
    model, plain = decentralized.wrap(), decentralized.wrap()
    decentralized.train(model, range(2))
    with failing(model.module[0]):
        loss_of(model, 0, 2).backward()
    model.zero_grad()
    decentralized.train(model, range(2, 4))
    assert_same_on_all_ranks([snapshot(model), decentralized.train(plain, range(4))[-1]])


@pytest.mark.parametrize("ends", ["bagua_finish", "with_bagua"])
@on_ranks(2)
def test_who_is_interrupted_while_results_come_in_does_not_go_on_without_them(ends):
    loop = with_algorithm(Algorithm.init("diloco", sync_every=2, overlap=1))
    loop.train(3)
    under_way = [flight for course in loop.reducer.scheduler.courses for flight in course.flights]
    assert under_way
    for flight in under_way:
        flight.wait = Mock(side_effect=KeyboardInterrupt)
    bagua.comm.barrier()  # Who gives up ends the calls of others, too.
    with pytest.raises(KeyboardInterrupt):
        loop.wrapped.bagua_finish() if ends == "bagua_finish" else loop.wrapped.with_bagua(loop.optimizer)
    with pytest.raises(CommunicatorClosedError, match="no longer be synchronized: KeyboardInterrupt"):
        loop.wrapped.bagua_finish()


@dataclass(frozen=True)
class _Slower(Algorithm):
    """The mean of all weights in each step, and after two steps in every second one: in the same buckets."""

    @property
    def phases(self) -> tuple[Hashable, ...]:
        return 1, 2

    def phase(self, step: int, model: Model) -> Hashable:
        return 1 if step < FAILS_IN else 2

    def exchanges(self, phase: Hashable = 1) -> tuple[Exchange, ...]:
        return (Exchange(Weights(), Every(int(str(phase))), Mean(), Replace()),)


@pytest.mark.parametrize("algorithm", [WarmsUp(FAILS_IN), _Slower()])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@on_ranks(2)
def test_a_phase_that_is_not_left_to_its_end_ends_training_on_all_ranks(algorithm, error):
    """The others are in the next phase already: nothing that this rank did later would fit."""
    loop = with_algorithm(algorithm)
    loop.train(FAILS_IN)
    if loop.rank == 0:
        with pytest.raises(PeerLostError, match="rank 1", check=lambda error: error.peers == (1,)):
            loop.train(2 * FAILS_IN)
        return
    loop.reducer.scheduler.flush = Mock(side_effect=error("in the middle"))
    with pytest.raises(error):
        loop.train()
    with pytest.raises(CommunicatorClosedError, match="in the middle"):
        loop.train()


def test_warnings_come_at_growing_intervals():
    now = 0.0
    wait, times = LongWait(lambda: now), []
    for second in range(500):
        now = float(second)
        if wait.is_over():
            times.append(second)
    assert times == [30, 60, 120, 240, 480]


class Heard(logging.Handler):
    """Keeps messages, and wakes who waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if "has waited" in self.messages[-1]:
            self.told.set()


@contextmanager
def listening(first_warning_s: float) -> Iterator[Heard]:
    """Who waits says so after that time. Ranks that are threads may listen at the same time."""
    handler = Heard()
    logging.getLogger("bagua").addHandler(handler)
    long_wait.FIRST_WARNING_S = first_warning_s
    try:
        yield handler
    finally:
        logging.getLogger("bagua").removeHandler(handler)
        long_wait.FIRST_WARNING_S = 30.0


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening(0.02) as handler:
        yield handler


@on_ranks(2)
def test_who_waits_in_a_step_says_for_whom_where_and_where_the_other_is(heard):
    loop = Loop("with_bagua", bucket_bytes=600)
    for step in range(3):
        if (loop.rank, step) == (1, 2):
            heard.messages.clear()
            heard.told.clear()
            assert heard.told.wait(60)
        loop.train()
    told = next(message for message in heard.messages if "has waited" in message)
    assert told.startswith("rank 0 has waited 0 s for rank 1 in step 2, bucket 0 (")
    assert "4.bias" in told
    assert "; rank 1 was last in #" in told


def test_who_waits_for_others_to_start_names_them(heard):
    store = bagua.comm.thread_store()

    def start(rank: int) -> None:
        if rank == 1:
            assert heard.told.wait(60)
        bagua.comm.init_process_group(backend="threads", store=store, rank=rank, world_size=2)
        bagua.comm.destroy_process_group()

    in_threads(2, start)
    assert any(message.startswith("rank 0 has waited 0 s for rank 1 to come to") for message in heard.messages)


def _wait_on_a_process() -> list[str]:
    """What rank 0 says while rank 1 has yet to come."""
    communicator = bagua.comm.get_default_group().global_communicator
    with listening(0.2) as handler:
        communicator.allreduce(torch.ones(2))
        if communicator.rank == 1:
            communicator.store.wait(["told"])
        else:
            threading.Thread(target=_pass_on, args=(handler, communicator.store.clone()), daemon=True).start()
        communicator.allreduce(torch.ones(3))
    return handler.messages


def _pass_on(handler: Heard, store: torch.distributed.Store) -> None:
    handler.told.wait(30)
    store.set("told", "1")


def test_processes_say_it_too(ranks, rank_pool):
    (message, *_), _ = ranks(2, _wait_on_a_process)
    assert message.startswith("rank 0 has waited 0 s for rank 1 in ")
    assert "(3 x float32, sum), on world" in message
    if rank_pool.backend in ("shm", "threads"):
        assert ", on world; rank 1 was last in #" in message
        assert "(2 x float32, sum)" in message


@on_ranks(2)
def test_errors_name_step_bucket_and_parameters_before_calls():
    loop = Loop("with_bagua", bucket_bytes=10**6)
    loop.train(3)
    if loop.rank == 1:
        bagua.comm.destroy_process_group()
        return
    with pytest.raises((PeerLostError, CollectiveTimeoutError)) as caught:
        loop.backward()
    assert caught.value.activity == "step 3, bucket 0 (4.bias to 0.weight)"
    assert f"(in {caught.value.activity}, in #" in str(caught.value)
