"""Which calls of torch the backend ``bagua`` takes itself, and to whom it hands others. Without ranks."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from bagua.comm.group import solo_group
from bagua.comm.torch_backend.group import TorchGroup
from bagua.comm.torch_backend.starter import CallStarter, Connected
from bagua.comm.torch_backend.work import BackwardWatch, CallbackThread, TorchWork, in_callback
from bagua.comm.work import Work, joined
from bagua.errors import CommunicatorClosedError, InvalidTensorError, PeerLostError
from tests.harness import in_threads

#: The methods of backends. A mock with these stands for NCCL, which cannot run here.
BACKEND = [*vars(dist.ProcessGroupGloo.__mro__[1])]


def called(backend: Mock) -> list[str]:
    """The methods that were called since this was last asked."""
    names = [name for name, _, _ in backend.method_calls]
    backend.reset_mock()
    return names


def group_alone(**backends: object) -> TorchGroup:
    """A group of one rank, with ``backends`` by device type; torch, which would refuse fakes, does not know of them."""
    return TorchGroup(CallStarter(Connected(dist.HashStore(), solo_group(), SimpleNamespace(timeout_s=5.0), backends)))


def test_tensors_of_other_devices_go_to_their_backend() -> None:
    backend = Mock(spec=BACKEND)
    group, far = group_alone(meta=backend), torch.empty(4, device="meta")
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": ([far],), "allreduce_coalesced": ([far, far],), "broadcast": ([far],), "reduce": ([far],),
        "allgather": ([[far]], [far]), "gather": ([[far]], [far]), "scatter": ([far], [[far]]),
        "reduce_scatter": ([far], [[far]]), "alltoall": ([far], [far]),
        "send": ([far], 0), "recv": ([far], 0), "recv_anysource": ([far], 0),
    }  # fmt: skip
    for name, arguments in calls.items():
        assert getattr(group, name)(*arguments) is getattr(backend, name).return_value
    assert called(backend) == [*calls]
    # Backends have other names, or none, for these. Torch 2.15 has renamed some.
    names = {}
    for name, former, more in (
        ("all_to_all_single", "alltoall_base", ([], [])),
        ("all_gather_single", "_allgather_base", ()),
        ("reduce_scatter_single", "_reduce_scatter_base", ()),
    ):
        names[name] = name if name in BACKEND else former
        assert getattr(group, name)(far, far, *more) is getattr(backend, names[name]).return_value
    assert called(backend) == [*names.values()]
    for name in ("all_gather_single", "reduce_scatter_single"):
        assert getattr(group, f"{name}_coalesced")([far] * 2, [far] * 2) is backend._end_coalescing.return_value
        assert called(backend) == ["_start_coalescing", *[names[name]] * 2, "_end_coalescing"]
    # A CPU tensor of the same group does not.
    assert group.allreduce([torch.ones(3)]).wait()
    assert called(backend) == []


def test_a_barrier_of_devices_is_among_the_members_there_are_now() -> None:
    before, now, cpu = (Mock(spec=BACKEND, timeout_s=5.0, _set_default_timeout=lambda _: None) for _ in range(3))
    group = TorchGroup(CallStarter(Connected(dist.HashStore(), solo_group(), cpu, {"cuda": before})))
    options = dist.BarrierOptions()
    options.device_ids = [0]
    assert group.barrier(options) is before.barrier.return_value
    group._starter.renew(Connected(dist.HashStore(), solo_group(), cpu, {"cuda": now}))
    assert group.barrier(options) is now.barrier.return_value
    assert called(before) == called(now) == ["barrier"]


def test_lists_of_different_lengths_and_devices_without_backend_are_refused() -> None:
    group, near = group_alone(), torch.ones(3)
    with pytest.raises(InvalidTensorError, match="output tensors"):
        group.all_gather_single_coalesced([near], [near, near])
    with pytest.raises(InvalidTensorError, match="input tensors"):
        group.reduce_scatter_single_coalesced([near, near], [near])
    with pytest.raises(InvalidTensorError, match="cpu"):
        group.allreduce([torch.empty(1, device="meta")])


def lost(rank: int = 1) -> Work:
    return Work(Mock(side_effect=PeerLostError(f"rank {rank} is gone", peers=(rank,))), lambda: True)


def test_a_failed_call_is_an_error_to_those_who_hold_its_future() -> None:
    work = TorchWork(lost(), [], CallbackThread("test"))
    passed_on = work.get_future().then(lambda done: done.value())
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        passed_on.wait()
    assert not work.is_success()
    with pytest.raises(PeerLostError):
        work.wait()


def test_backward_passes_of_two_threads_raise_their_own_errors() -> None:
    watch, turn = BackwardWatch(), threading.Barrier(2, timeout=60)

    def backward(rank: int) -> None:
        leaf = torch.ones(1, requires_grad=True)

        def hook(_: torch.Tensor) -> None:
            turn.wait()  # Both passes are under way,
            watch.add(lost(rank))
            turn.wait()  # and neither is over before the other has added its call.

        leaf.register_hook(hook)
        with pytest.raises(PeerLostError, check=lambda error: error.peers == (rank,)):
            leaf.sum().backward()

    in_threads(2, backward)


def test_a_backward_pass_that_fails_leaves_nothing_to_the_next() -> None:
    watch, leaf = BackwardWatch(), torch.ones(1, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        watch.add(lost())
        raise ZeroDivisionError

    handle = leaf.register_hook(hook)
    with pytest.raises(ZeroDivisionError):
        leaf.sum().backward()
    handle.remove()
    assert not watch._passes
    leaf.sum().backward()


def test_a_timeout_of_zero_means_the_deadline_of_the_call() -> None:
    seen: list[float | None] = []
    for timeout in (timedelta(), timedelta(seconds=2)):
        TorchWork(Work(seen.append, lambda: False), [], CallbackThread("test")).wait(timeout)
    assert seen == [None, 2.0]


def test_gathered_pieces_reach_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        outputs: list[torch.Tensor] = [torch.zeros(2)]
    assert group_alone().allgather([outputs], [torch.ones(2)]).get_future().wait()
    assert outputs[0].tolist() == [1.0, 1.0]


class Call:
    """A call that is complete when the test says so, and that tells, or makes those who want to know wait."""

    def __init__(self, tells: bool = True) -> None:
        self._over = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self.work = Work(lambda _: self._over.wait(10), self._over.is_set, self._notify if tells else None)

    def _notify(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return True

    def end(self) -> None:
        self._over.set()
        for callback in self._callbacks:
            callback()


@pytest.fixture
def thread() -> Iterator[CallbackThread]:
    thread = CallbackThread("test")
    yield thread
    thread.stop()


def future_of(thread: CallbackThread, call: Call, value: Any = None) -> Any:
    def outcome() -> Any:
        call.work.wait()
        return value

    return thread.future(call.work, outcome)


@pytest.mark.parametrize("tells", [{0, 1, 2, 3, 4}, set(), {0, 3}, {1, 2}])
@pytest.mark.parametrize("completed", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_callbacks_run_in_the_order_of_the_calls(thread: CallbackThread, tells: set[int], completed: list[int]) -> None:
    calls, order = [Call(number in tells) for number in range(5)], []
    futures = [future_of(thread, call, number) for number, call in enumerate(calls)]
    last = [future.then(lambda done: order.append(done.value())) for future in futures]
    for number in completed:
        calls[number].end()
    torch.futures.wait_all(last)
    assert order == list(range(5))


def test_no_callback_runs_in_the_thread_that_adds_it(thread: CallbackThread) -> None:
    call = Call()
    future = future_of(thread, call)
    call.end()
    future.wait()
    assert not in_callback()
    assert future.then(lambda _: in_callback()).wait() is True
    assert future.then(lambda _: threading.get_ident()).then(lambda done: done.value()).wait() != threading.get_ident()


def test_what_a_callback_starts_comes_before_the_next_callback(thread: CallbackThread) -> None:
    first, second, order = Call(), Call(), []

    def start(_: Any) -> None:
        inner = Call()
        future_of(thread, inner).then(lambda _: order.append("inner"))
        second.end()
        inner.end()
        order.append("first")

    futures = [future_of(thread, first).then(start), future_of(thread, second).then(lambda _: order.append("second"))]
    first.end()
    torch.futures.wait_all(futures)
    assert order == ["first", "inner", "second"]


def test_messages_do_not_wait_for_their_turn(thread: CallbackThread) -> None:
    first, second = Call(), Call()
    still, over = (thread.future(call.work, lambda: None, in_order=False) for call in (first, second))
    second.end()
    assert over.then(lambda _: 5).wait() == 5
    assert not still.done()
    first.end()
    still.wait()


@pytest.mark.parametrize("later_first", [False, True])
def test_a_callback_may_wait_for_callbacks_of_later_calls(thread: CallbackThread, later_first: bool) -> None:
    first, second = Call(), Call()
    waits: list[Any] = []
    result = future_of(thread, first).then(lambda _: waits[0].wait() + 1)
    waits.append(future_of(thread, second, 1).then(lambda done: done.value() + 1))
    for call in (second, first) if later_first else (first, second):
        call.end()
    assert result.wait() == 3


def test_a_callback_that_fails_is_an_error_of_its_future_only(thread: CallbackThread) -> None:
    call = Call()
    future = future_of(thread, call, 5)
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: sys.exit())
    failed, exits = future.then(lambda _: 1 / 0), future.then(lambda _: sys.exit())
    well = future.then(lambda done: done.value())
    call.end()
    assert well.wait() == 5
    for future in (failed, failed.then(lambda done: done.value())):
        with pytest.raises(ZeroDivisionError):
            future.wait()
    with pytest.raises(RuntimeError, match="SystemExit"):
        exits.wait()


def test_the_end_completes_what_is_left() -> None:
    thread, ready, call = CallbackThread("test"), Call(), Call()
    started, future = future_of(thread, ready), future_of(thread, call, 7)
    ready.end()
    started.wait()
    thread.stop()
    assert thread._thread is not None
    assert not thread._thread.is_alive()
    call.end()  # after the end: completed by whoever ends the call
    assert future.wait() == 7
    assert future.then(lambda done: done.value()).wait() == 7


def test_a_callback_that_waits_learns_of_the_end() -> None:
    thread, first, never = CallbackThread("test"), Call(), Call()
    entered, unanswered = threading.Event(), []

    def wait(_: Any) -> Any:
        entered.set()
        return unanswered[0].wait()

    result = future_of(thread, first).then(wait)
    unanswered.append(future_of(thread, never))
    first.end()
    assert entered.wait(60)
    thread.stop()
    with pytest.raises(CommunicatorClosedError, match="closed while a callback waited"):
        result.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_the_call_is_its_parents(thread: CallbackThread) -> None:
    call = Call()
    future = future_of(thread, call)
    child = os.fork()
    if child == 0:
        try:
            future.wait()
        except CommunicatorClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_joined_works_tell_and_finish_once_when_all_are_complete_if_all_can(thread: CallbackThread) -> None:
    calls = [Call(), Call(tells=False)]
    assert not joined([call.work for call in calls], None).notify(lambda: None)
    finished: list[int] = []
    calls = [Call(), Call()]
    work = TorchWork(joined([call.work for call in calls], lambda: finished.append(1)), [kept := torch.ones(1)], thread)
    future = work.get_future()
    calls[0].end()
    assert not future.done()
    calls[1].end()
    assert future.wait()[0] is kept
    work.wait()
    assert finished == [1]
