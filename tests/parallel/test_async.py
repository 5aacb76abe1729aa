"""Asynchronous averaging through the engine, on ranks that are threads: what training gets from it, and how it ends."""

from __future__ import annotations

import copy
import gc
import threading
import time

import pytest
import torch
from torch import nn

import bagua.comm
from bagua import testing
from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithm
from bagua.averaging import AveragingStatus
from bagua.averaging.handoff import Stage
from bagua.comm import solo_group
from bagua.errors import CommunicationError, ConfigurationError, NonFiniteError, PeerLostError
from bagua.parallel import DistributedDataParallel, bagua_init, with_bagua
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)

pytestmark = pytest.mark.threads

OFTEN = AsyncModelAverageAlgorithm(sync_interval_ms=0)
#: A rank that was killed is noticed after this time, in tests.
PEER_TIMEOUT_S = 6.0
#: Between two steps of ranks that train until something happens: it takes them little of the processor.
PACE_S = 0.01


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def build(algorithm=OFTEN, *, seed=0, model=None, **options):
    model = mlp(seed) if model is None else model
    optimizer = plain_sgd(model.parameters())
    return with_bagua(model, [optimizer], algorithm, bucket_bytes=1000, **options), optimizer


def train_until_averaged(model, optimizer, rank, rounds=3, limit=5000):
    """Take steps until so many averages were taken in; returns how many steps that took."""
    algorithm = model.bagua_algorithm
    for step in range(limit):
        train_steps(model, optimizer, rank, [step])
        if algorithm.status().rounds >= rounds:
            return step + 1
        time.sleep(PACE_S)
    raise AssertionError(f"no averages in {limit} steps: {algorithm.status()}")


def _train_and_abort(algorithm):
    rank = bagua.comm.get_rank()
    model, optimizer = build(algorithm, seed=rank)
    train_until_averaged(model, optimizer, rank)
    assert model.bagua_algorithm.abort(model)
    status = model.bagua_algorithm.status()
    assert status.state == "paused"
    return snapshot(model), status


@pytest.mark.parametrize("mode", ["all", "shift_one", "random_pair", "one_peer_exp"])
@pytest.mark.parametrize("size", [2, 3])
def test_after_abort_all_ranks_have_the_same_model(thread_ranks, mode, size):
    results = thread_ranks(size, _train_and_abort, AsyncModelAverageAlgorithm(mode, 0))
    assert_same_on_all_ranks([state for state, _ in results])
    assert all(status.members == tuple(range(size)) and status.failed == 0 for _, status in results)


def test_training_is_that_of_one_rank_with_the_mean_of_all_at_the_end(thread_ranks):
    """Without a round in between: local training, then the mean."""

    def train() -> State:
        rank = bagua.comm.get_rank()
        model, optimizer = build(AsyncModelAverageAlgorithm(sync_interval_ms=1e9))
        train_steps(model, optimizer, rank, range(5))
        model.bagua_algorithm.abort(model)
        return snapshot(model)

    states = thread_ranks(2, train)
    local = []
    for rank in range(2):
        model = mlp()
        train_steps(model, plain_sgd(model.parameters()), rank, range(5))
        local.append(snapshot(model))
    assert_same_on_all_ranks(states)
    assert_close(states[0], {name: (local[0][name] + local[1][name]) / 2 for name in local[0]})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_all_floating_dtypes_are_averaged(thread_ranks, dtype):
    def train() -> torch.Tensor:
        rank = bagua.comm.get_rank()
        layer = torch.nn.Linear(4, 4, dtype=dtype)
        model, _ = build(model=layer)
        with torch.no_grad():
            model.weight.fill_(rank)  # Wrapping made them equal.
        model(torch.zeros(1, 4, dtype=dtype)).sum().backward()
        model.bagua_algorithm.abort(model)
        return model.weight.detach().clone()

    for weight in thread_ranks(3, train):
        assert torch.equal(weight, torch.ones_like(weight))


@pytest.mark.parametrize("fusion", [True, False])
def test_buffers_are_averaged_if_asked_for(thread_ranks, fusion):
    def train(average_buffers: bool) -> tuple[list[float], list[int]]:
        rank = bagua.comm.get_rank()
        algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=1e9, average_buffers=average_buffers)
        model, _ = build(algorithm, model=torch.nn.BatchNorm1d(2), do_flatten=fusion)
        model(torch.full((4, 2), float(rank))).sum().backward()
        model.running_mean = model.running_mean.clone()  # Modules may do that.
        model.bagua_algorithm.abort(model)
        return model.running_mean.tolist(), model.num_batches_tracked.tolist()

    assert thread_ranks(2, train, True) == [([pytest.approx(0.05)] * 2, 1)] * 2
    assert thread_ranks(2, train, False) == [([0.0] * 2, 1), ([pytest.approx(0.1)] * 2, 1)]


# Warm-up.


def test_in_warm_up_training_is_synchronous(thread_ranks):
    def train() -> tuple[State, State, str]:
        rank = bagua.comm.get_rank()
        model = mlp(rank)
        optimizer = sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], AsyncModelAverageAlgorithm("all", 0, 6), bucket_bytes=1000)
        train_steps(wrapped, optimizer, rank, range(6))
        synchronous, state = snapshot(model), wrapped.bagua_algorithm.status().state
        train_until_averaged(wrapped, optimizer, rank)
        wrapped.bagua_algorithm.abort(wrapped)
        return synchronous, snapshot(model), state

    results = thread_ranks(3, train)
    assert_same_on_all_ranks([synchronous for synchronous, *_ in results])
    assert_close(results[0][0], reference(mlp(), sgd, 3, range(6)))
    assert_same_on_all_ranks([state for _, state, _ in results])
    assert {state for *_, state in results} == {"warming up"}


def test_abort_in_warm_up_and_training_on(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        wrapped = with_bagua(model, [optimizer], AsyncModelAverageAlgorithm("all", 1e9, 6), bucket_bytes=1000)
        train_steps(wrapped, optimizer, rank, range(3))
        assert wrapped.bagua_algorithm.abort(wrapped)
        wrapped.bagua_algorithm.resume(wrapped)
        train_steps(wrapped, optimizer, rank, range(3, 6))
        assert wrapped.bagua_algorithm.abort(wrapped)  # Nobody has made the first step after warm-up.
        return snapshot(model)

    states = thread_ranks(2, train)
    assert_same_on_all_ranks(states)
    assert_close(states[0], reference(mlp(), sgd, 2, range(6)))


def test_abort_between_warm_up_and_averaging(thread_ranks):
    def train() -> tuple[State, State]:
        rank = bagua.comm.get_rank()
        model, optimizer = build(AsyncModelAverageAlgorithm("all", 1e9, 3))
        train_steps(model, optimizer, rank, range(3))
        assert model.bagua_algorithm.abort(model)
        model.bagua_algorithm.resume(model)  # It has the buckets of warm-up until the next step begins.
        train_steps(model, optimizer, rank, range(3, 5))
        alone = snapshot(model)
        assert model.bagua_algorithm.abort(model)
        return alone, snapshot(model)

    (one, ended), (other, ended_too) = thread_ranks(2, train)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert_same_on_all_ranks([ended, ended_too])
    assert_close(ended, {name: (one[name] + other[name]) / 2 for name in one})


def test_a_rank_that_stops_early_in_warm_up_is_named_on_the_others(thread_ranks):
    def train() -> str:
        rank = bagua.comm.get_rank()
        model, optimizer = build(AsyncModelAverageAlgorithm("all", 0, 1000))
        try:
            train_steps(model, optimizer, rank, range(3 if rank == 0 else 6))
        except CommunicationError as error:
            return str(error)
        model.bagua_algorithm.abort(model, timeout=20.0)
        return "stopped"

    first, second = thread_ranks(2, train)
    assert first == "stopped"
    assert "rank 0" in second


# Stopping and starting.


def test_ranks_may_stop_after_different_numbers_of_steps(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        if rank == 2:
            model.bagua_algorithm.abort(model)  # It has no data at all.
            return snapshot(model)
        train_until_averaged(model, optimizer, rank, rounds=2 + 3 * rank)
        model.bagua_algorithm.abort(model)
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(3, train))


def test_abort_and_resume_many_times(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        algorithm = model.bagua_algorithm
        for turn in range(6):
            train_steps(model, optimizer, rank, range((turn * (rank + 1)) % 5))
            assert algorithm.abort(model)
            assert algorithm.abort(model)  # Twice does no harm.
            train_steps(model, optimizer, rank, range(rank))  # On its own.
            algorithm.resume(model)
            algorithm.resume(model)
        assert algorithm.abort(model)
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(3, train))


def test_running_is_a_context(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        with model.bagua_algorithm.running(model):
            train_until_averaged(model, optimizer, rank)
        assert model.bagua_algorithm.status().state == "paused"
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


class OutOfDataError(Exception):
    """What ends the training of one rank."""


def _run_out_of_data(model, optimizer, rank):
    algorithm = model.bagua_algorithm
    with algorithm.running(model):
        train_until_averaged(model, optimizer, rank)
        if rank == 1:
            raise OutOfDataError
        while algorithm._averager._session.member.remaining:
            train_steps(model, optimizer, rank, [0])


def test_an_exception_in_training_is_what_the_user_sees_and_others_go_on(thread_ranks):
    def train() -> str:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        try:
            _run_out_of_data(model, optimizer, rank)
        except OutOfDataError:
            assert not model.bagua_algorithm._averager._session._thread.is_alive()
            return "out of data"
        return "stopped"

    assert thread_ranks(2, train) == ["stopped", "out of data"]


def test_with_a_timeout_abort_leaves_the_others_to_themselves(thread_ranks):
    left = threading.Event()

    def train() -> bool:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank, rounds=1)
        if rank == 0:
            together = model.bagua_algorithm.abort(model, timeout=0.1)
            assert model.bagua_algorithm.abort(model) == together  # The answer stays.
            left.set()
            return together
        while not left.is_set():
            train_steps(model, optimizer, rank, [0])
        train_until_averaged(model, optimizer, rank, rounds=model.bagua_algorithm.status().rounds + 2)
        assert model.bagua_algorithm.status().members == (1, 2)
        return model.bagua_algorithm.abort(model)

    assert thread_ranks(3, train) == [False, True, True]


def test_ctrl_c_in_abort_leaves_and_the_others_go_on(thread_ranks):
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    def train() -> tuple[bool, str]:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        algorithm = model.bagua_algorithm
        train_until_averaged(model, optimizer, rank, rounds=1)
        if rank == 0:
            algorithm._averager._session.wait_for_change = interrupt
            with pytest.raises(KeyboardInterrupt):
                algorithm.abort(model)
            train_steps(model, optimizer, rank, range(3))
            return algorithm.abort(model), algorithm.status().state
        return algorithm.abort(model), algorithm.status().state

    assert thread_ranks(3, train) == [(False, "paused"), (True, "paused"), (True, "paused")]


def test_an_average_that_was_taken_in_half_is_not_taken_in_again(thread_ranks):
    def fail(**_) -> None:
        raise KeyboardInterrupt

    def train() -> float:
        rank = bagua.comm.get_rank()
        model = with_bagua(torch.nn.Linear(4, 4), [], OFTEN, bucket_bytes=1)
        averager = model.bagua_algorithm._averager
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0 * rank)  # Wrapping made them equal.
        model(torch.zeros(1, 4))
        while averager._session.handoff.stage is not Stage.AVERAGE:
            time.sleep(0.001)
        parts = averager._parts
        assert len(parts) == 2
        parts[1].take_average, take = fail, parts[1].take_average
        with pytest.raises(KeyboardInterrupt):
            averager.step(1)
        parts[1].take_average = take
        seen = [part._bucket.parameters[0].flatten()[0].item() for part in parts]
        averager.step(2)
        assert seen == [part._bucket.parameters[0].flatten()[0].item() for part in parts]
        bagua.comm.get_default_group().global_communicator.barrier()
        return seen[0]

    assert thread_ranks(2, train) == [1.0, 1.0]


def test_no_training_thread_waits_for_a_rank_that_takes_no_step(thread_ranks):
    trained = threading.Event()

    def train() -> int:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_steps(model, optimizer, rank, [0])
        if rank == 1:
            assert trained.wait(60)  # One of its steps takes as long as 200 of the other.
        else:
            train_steps(model, optimizer, rank, range(200))
            trained.set()
        assert model.bagua_algorithm.abort(model)
        return model.bagua_algorithm.status().failed

    assert thread_ranks(2, train) == [0, 0]


def test_two_models_do_not_disturb_each_other_nor_the_users_calls(thread_ranks):
    def train() -> tuple[State, State, float]:
        rank = bagua.comm.get_rank()
        (first, one), (second, two) = build(seed=1), build(AsyncModelAverageAlgorithm("shift_one", 0), seed=2)
        total = torch.zeros(1)
        for step in range(30):
            train_steps(first, one, rank, [step])
            train_steps(second, two, rank, [step])
            total += 1
            bagua.comm.allreduce(total)
            total /= 2
        second.bagua_algorithm.abort(second)
        first.bagua_algorithm.abort(first)
        return snapshot(first), snapshot(second), total.item()

    results = thread_ranks(2, train)
    assert_same_on_all_ranks([first for first, *_ in results])
    assert_same_on_all_ranks([second for _, second, _ in results])
    assert [total for *_, total in results] == [30.0, 30.0]


# What training loops do.


def test_weights_stay_while_a_step_goes_on(thread_ranks):
    """Several forwards in a step, ``no_sync``, ``eval`` and ``no_grad`` are no safe points."""

    def train() -> None:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank)
        inputs = torch.ones(1, 8)
        for _ in range(20):
            with model.no_sync():
                model(inputs).square().mean().backward()
            before = snapshot(model)
            time.sleep(0.003)
            with model.no_sync():
                model(inputs).square().mean().backward()
            model.eval()
            model(inputs)
            model.train()
            with torch.no_grad():
                model(inputs)
            loss = model(inputs).square().mean() + model(inputs).square().mean()
            assert_same_on_all_ranks([before, snapshot(model)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.bagua_algorithm.abort(model)

    thread_ranks(2, train)


def test_only_training_forwards_take_an_average_in(thread_ranks):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model, optimizer = build(seed=rank)
        algorithm = model.bagua_algorithm
        train_steps(model, optimizer, rank, [0])
        handoff, until = algorithm._averager._session.handoff, time.monotonic() + 60
        while handoff.stage is not Stage.AVERAGE:
            assert time.monotonic() < until
            time.sleep(0.001)
        before = snapshot(model)
        model.eval()
        model(torch.ones(1, 8))
        model.train()
        with torch.no_grad():
            model(torch.ones(1, 8))
        assert handoff.stage is Stage.AVERAGE
        assert_same_on_all_ranks([before, snapshot(model)])
        model(torch.ones(1, 8))
        assert algorithm.status().age_steps == 0
        algorithm.abort(model)

    thread_ranks(2, train)


def test_a_rank_holds_two_buffers_of_the_models_size_also_after_resume(thread_ranks):
    def train() -> tuple[int, int]:
        model, _ = build(model=torch.nn.Linear(64, 32))
        seen = set()
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
            contributions = model.bagua_algorithm._averager._session.handoff.contributions
            seen |= {
                tensor.data_ptr()
                for contribution in contributions
                for tensor in (contribution.snapshot, contribution.average)
            }
            model.bagua_algorithm.abort(model)
            model.bagua_algorithm.resume(model)
        assert len(seen) == 2 * len(contributions), "another session has other buffers"
        return sum(2 * contribution.nbytes for contribution in contributions), sum(p.nbytes for p in model.parameters())

    for held, model_bytes in thread_ranks(2, train):
        assert 2 * model_bytes <= held <= 2 * model_bytes + 1024  # padding


def test_status_says_what_was_done(thread_ranks):
    def train() -> AveragingStatus:
        rank = bagua.comm.get_rank()
        model, _ = build(AsyncModelAverageAlgorithm(sync_interval_ms=1e9), model=torch.nn.Linear(4, 4, bias=False))
        assert model.bagua_algorithm.status() == AveragingStatus()
        with torch.no_grad():
            model.weight.fill_(rank)
        for _ in range(3):
            model(torch.zeros(1, 4)).sum().backward()
        state = model.bagua_algorithm.status()
        assert (state.state, state.rounds, state.age_steps, state.age_ms) == ("averaging", 0, None, None)
        assert model.bagua_algorithm.abort(model)
        return model.bagua_algorithm.status()

    for status in thread_ranks(2, train):
        assert (status.state, status.rounds, status.members, status.age_steps) == ("paused", 1, (0, 1), 0)
        assert status.distance == pytest.approx(0.5 * 16**0.5)  # 16 weights that are 0.5 from their mean
        assert 16 * 4 <= status.sent_bytes <= 16 * 4 + 256  # padding
        assert status.age_ms > 0
        assert status.round_ms > 0
        assert (status.failed, status.overflowed) == (0, 0)


def test_gradients_are_those_of_the_rank(thread_ranks):
    """In the averaging phase nothing touches gradients, also with a GradScaler and unused parameters."""

    def train() -> None:
        rank = bagua.comm.get_rank()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, optimizer = build(grad_scaler=scaler)
        for step in range(5):
            optimizer.zero_grad()
            twin = copy.deepcopy(model)
            before = snapshot(model)
            loss = loss_of(model, rank, step)
            scaler.scale(loss).backward()
            twin.load_state_dict(model.state_dict())
            loss_of(twin, rank, step).backward()
            for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.allclose(own.grad, 4.0 * expected.grad)
            assert before.keys() == snapshot(model).keys()
            scaler.step(optimizer)
            scaler.update(4.0)
        model[0](torch.ones(1, 8)).sum().backward()
        model(torch.ones(1, 8)).detach_().requires_grad_(True).sum().backward()  # No parameter gets a gradient.
        model.bagua_algorithm.abort(model)

    thread_ranks(2, train)


def test_an_average_between_forward_and_backward_would_be_noticed_by_autograd(thread_ranks):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank)
        stale = loss_of(model, rank, 0)  # Its backward pass comes too late.
        loss_of(model, rank, 1).backward()
        averager = model.bagua_algorithm._averager
        until = time.monotonic() + 60
        rounds = averager.status().age_ms
        while time.monotonic() < until:
            loss_of(model, rank, 2).backward()
            if averager.status().age_ms < rounds:
                break
            rounds = averager.status().age_ms
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
        model.bagua_algorithm.abort(model)

    thread_ranks(2, train)


def test_a_checkpoint_goes_on_in_its_phase(thread_ranks):
    def save() -> tuple[State, dict]:
        rank = bagua.comm.get_rank()
        model, optimizer = build(AsyncModelAverageAlgorithm("all", 1e9, 2))
        train_steps(model, optimizer, rank, range(4))
        return snapshot(model), model.bagua_state_dict()

    def load(saved) -> tuple[State, str]:
        rank = bagua.comm.get_rank()
        model, optimizer = build(AsyncModelAverageAlgorithm("all", 1e9, 2), seed=7)
        model.load_state_dict(saved[rank][0])
        model.load_bagua_state_dict(saved[rank][1])
        loaded = snapshot(model)
        train_steps(model, optimizer, rank, [4])
        state = model.bagua_algorithm.status().state
        model.bagua_algorithm.abort(model)
        assert model._bagua_engine.reducer.step == 5
        return loaded, state

    saved = thread_ranks(2, save)
    for (state, _), (loaded, phase) in zip(saved, thread_ranks(2, load, saved), strict=True):
        assert_same_on_all_ranks([state, loaded])  # Also where they differ between ranks.
        assert phase == "averaging"


def test_switching_and_changing_the_model_stop_averaging_first(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = plain_sgd(model.parameters())
        wrapped, _ = bagua_init(model, optimizer, "async", sync_interval_ms=0, message_size=1000)
        train_steps(wrapped, optimizer, rank, range(10 + rank))
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        train_steps(wrapped, optimizer, rank, range(10))
        for parameter in model[0].parameters():
            parameter.requires_grad_(True)
        train_steps(wrapped, optimizer, rank, range(10))
        wrapped.switch_to("allreduce")
        train_steps(wrapped, optimizer, rank, range(2))
        wrapped.switch_to(OFTEN)
        train_steps(wrapped, optimizer, rank, range(3 + rank))
        wrapped.bagua_algorithm.abort(wrapped)
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


def test_another_wrapper_of_the_same_module_ends_averaging(thread_ranks):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank, rounds=1)
        session = model.bagua_algorithm._averager._session
        other = DistributedDataParallel(model, bucket_bytes=1000)
        assert not session._thread.is_alive()
        train_steps(other, optimizer, rank, range(3))

    thread_ranks(2, train)


# What ends badly.


def _die(model):
    """Both threads of this rank die, first the one that could still say that this rank leaves."""
    session = model.bagua_algorithm._averager._session
    session.member.poll = testing.die
    session.handoff.wake.set()
    assert session.join(PEER_TIMEOUT_S)
    testing.die()


def _train_until_killed(victim: int, on_peer_loss: str) -> tuple[str, tuple[int, ...]]:
    rank = bagua.comm.get_rank()
    algorithm = AsyncModelAverageAlgorithm("all", 0, on_peer_loss=on_peer_loss, peer_timeout_s=PEER_TIMEOUT_S)
    model, optimizer = build(algorithm)
    try:
        train_until_averaged(model, optimizer, rank, rounds=2)
        if rank == victim:
            _die(model)
        while (victim in model.bagua_algorithm.status().members) or on_peer_loss == "raise":
            train_steps(model, optimizer, rank, [0])
            time.sleep(PACE_S)
        model.bagua_algorithm.abort(model)
    except PeerLostError as error:
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        return "PeerLostError", error.peers
    return "went on", model.bagua_algorithm.status().members


@pytest.mark.parametrize(
    ("policy", "expected"), [("raise", ("PeerLostError", (1,))), ("continue", ("went on", (0, 2)))]
)
def test_a_rank_that_dies(thread_pool, policy, expected):
    outcomes = thread_pool.outcomes(_train_until_killed, 1, policy, size=3)
    assert [outcome.value for outcome in outcomes if outcome.rank != 1] == [expected] * 2, outcomes


def _train_in_epochs_until_killed(victim: int) -> tuple[bool, tuple[int, ...]]:
    rank = bagua.comm.get_rank()
    algorithm = AsyncModelAverageAlgorithm("all", 0, on_peer_loss="continue", peer_timeout_s=PEER_TIMEOUT_S)
    model, optimizer = build(algorithm)
    with model.bagua_algorithm.running(model):
        train_until_averaged(model, optimizer, rank, rounds=1)
        if rank == victim:
            _die(model)
    model.bagua_algorithm.resume(model)
    train_until_averaged(model, optimizer, rank)
    together = model.bagua_algorithm.abort(model)
    return together, model.bagua_algorithm.status().members


def test_survivors_resume_without_the_dead(thread_pool):
    outcomes = thread_pool.outcomes(_train_in_epochs_until_killed, 1, size=3)
    assert [outcome.value for outcome in outcomes if outcome.rank != 1] == [(True, (0, 2))] * 2, outcomes


def test_ranks_resume_without_one_that_left_and_ended(thread_ranks):
    def train() -> tuple[int, ...]:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank, rounds=1)
        if rank == 1:
            bagua.comm.destroy_process_group()
            return ()
        assert model.bagua_algorithm.abort(model)
        model.bagua_algorithm.resume(model)
        train_until_averaged(model, optimizer, rank, rounds=1)
        assert model.bagua_algorithm.abort(model)
        return model.bagua_algorithm.status().members

    assert thread_ranks(3, train) == [(0, 2), (), (0, 2)]


def test_not_finite_weights_stay_where_they_are(thread_ranks):
    def train() -> int:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank, rounds=1)
        if rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] = float("nan")
        with pytest.raises(NonFiniteError) as caught:
            for _ in range(10_000):
                train_steps(model, optimizer, rank, [0])
                time.sleep(0.001)
        finite = all(torch.isfinite(parameter).all() for parameter in model.parameters())
        assert finite == (rank == 0)
        with pytest.raises(NonFiniteError):  # It stays an error ...
            train_steps(model, optimizer, rank, [0])
        model.bagua_algorithm.abort(model)  # ... until it is accepted.
        if rank == 0:
            train_steps(model, optimizer, rank, [0])
        return caught.value.rank

    assert thread_ranks(2, train) == [1, 1]


def test_a_model_that_is_dropped_leaves_no_thread(thread_ranks):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank, rounds=1)
        thread = model.bagua_algorithm._averager._session._thread
        del model, optimizer
        for _ in range(200):
            gc.collect()  # Does nothing while another thread collects.
            thread.join(0.1)
            if not thread.is_alive():
                return
        raise AssertionError("the thread goes on without its model")

    thread_ranks(2, train)


def test_destroying_the_group_ends_the_thread(thread_ranks):
    def train() -> None:
        rank = bagua.comm.get_rank()
        model, optimizer = build()
        train_until_averaged(model, optimizer, rank, rounds=1)
        thread = model.bagua_algorithm._averager._session._thread
        bagua.comm.destroy_process_group()
        assert not thread.is_alive()

    thread_ranks(2, train)


# The declaration.


def test_one_rank_has_nothing_to_do():
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    wrapped = with_bagua(model, [optimizer], OFTEN, solo_group())
    with wrapped.bagua_algorithm.running(wrapped):
        train_steps(wrapped, optimizer, 0, range(3))
    assert wrapped.bagua_algorithm.status().state == "idle"
    assert_close(snapshot(model), reference(mlp(), plain_sgd, 1, range(3)))


def test_only_the_model_that_is_trained_can_be_stopped():
    model, _ = build_alone()
    with pytest.raises(ConfigurationError, match="not the model"):
        model.bagua_algorithm.abort(mlp())


def build_alone():
    model = mlp()
    return with_bagua(model, [plain_sgd(model.parameters())], OFTEN, solo_group()), None


@pytest.mark.parametrize(
    "options",
    [
        {"peer_selection_mode": "nobody"},
        {"sync_interval_ms": -1},
        {"sync_interval_ms": float("nan")},
        {"warmup_steps": 1.5},
        {"on_peer_loss": "ignore"},
        {"peer_timeout_s": 0},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigurationError):
        Algorithm.init("async", **options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_only_passes_that_bring_gradients_are_steps(thread_ranks, reentrant):
    """Rank 0 also looks at the gradient of its inputs, as a penalty or a map of saliency does."""

    def train() -> int:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = sgd(model.parameters())
        body = nn.Sequential(Checkpointed(model)) if reentrant else model
        wrapped = with_bagua(body, [optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=0))
        for step in range(5):
            optimizer.zero_grad()
            inputs = batch(rank, step)[0].requires_grad_()
            output = wrapped(inputs).sum()
            if rank == 0 and not reentrant:
                torch.autograd.grad(output, inputs, retain_graph=True)
            output.backward()
            optimizer.step()
        wrapped.bagua_algorithm.abort(wrapped)
        return wrapped._bagua_engine.reducer.step

    assert thread_ranks(2, train) == [5, 5]


class Checkpointed(nn.Module):
    """Runs a module again in the backward pass, in a pass of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=True)
