"""Which calls of torch the backend ``bagua`` takes itself, and to whom it hands others. Without ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm.group import solo_group
from bagua.comm.torch_backend.group import TorchGroup
from bagua.comm.torch_backend.starter import CallStarter
from bagua.comm.torch_backend.work import BackwardWatch, CallbackThread, TorchWork
from bagua.comm.work import Work, joined
from bagua.errors import InvalidTensorError, PeerLostError


class Recorder:
    """Stands for NCCL, which cannot run here: has the methods that backends have, and notes which is called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in vars(dist.ProcessGroupGloo.__mro__[1]):
            raise AttributeError(name)

        def method(*_: object) -> str:
            self.called.append(name)
            return f"work of {name}"

        return method


def group_alone(**backends: object) -> TorchGroup:
    """A group of one rank, with ``backends`` by device type; torch, which would refuse fakes, does not know of them."""
    return TorchGroup(dist.HashStore(), CallStarter(solo_group(), SimpleNamespace(timeout_s=5.0), backends))


def test_tensors_of_other_devices_go_to_their_backend() -> None:
    recorder = Recorder()
    group = group_alone(meta=recorder)
    far = torch.empty(4, device="meta")
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": ([far],),
        "allreduce_coalesced": ([far, far],),
        "broadcast": ([far],),
        "allgather": ([[far]], [far]),
        "reduce_scatter": ([far], [[far]]),
        "send": ([far], 0),
        "recv": ([far], 0),
        "reduce": ([far],),
        "gather": ([[far]], [far]),
        "scatter": ([far], [[far]]),
        "alltoall": ([far], [far]),
        "recv_anysource": ([far], 0),
    }
    for name, arguments in calls.items():
        assert getattr(group, name)(*arguments) == f"work of {name}"
    assert recorder.called == [*calls]
    # Backends have other names, or none, for these. Torch 2.15 has renamed some.
    recorder.called.clear()
    backend = vars(dist.ProcessGroupGloo.__mro__[1])
    names = [
        name if name in backend else former
        for name, former in (
            ("all_to_all_single", "alltoall_base"),
            ("all_gather_single", "_allgather_base"),
            ("reduce_scatter_single", "_reduce_scatter_base"),
        )
    ]
    assert group.all_to_all_single(far, far, [], []) == f"work of {names[0]}"
    assert group.all_gather_single(far, far) == f"work of {names[1]}"
    assert group.reduce_scatter_single(far, far) == f"work of {names[2]}"
    recorder.called.clear()
    for call, single in (
        (group.all_gather_single_coalesced, names[1]),
        (group.reduce_scatter_single_coalesced, names[2]),
    ):
        assert call([far, far], [far, far]) == "work of _end_coalescing"
        assert recorder.called == ["_start_coalescing", single, single, "_end_coalescing"]
        recorder.called.clear()
    # A CPU tensor of the same group does not.
    near = torch.ones(3)
    assert group.allreduce([near]).wait()
    assert recorder.called == []


def test_lists_of_different_lengths_are_refused() -> None:
    group = group_alone()
    near = torch.ones(3)
    with pytest.raises(InvalidTensorError, match="output tensors"):
        group.all_gather_single_coalesced([near], [near, near])
    with pytest.raises(InvalidTensorError, match="input tensors"):
        group.reduce_scatter_single_coalesced([near, near], [near])


def test_a_device_without_backend_is_a_typed_error() -> None:
    group = group_alone()
    with pytest.raises(InvalidTensorError, match="cpu"):
        group.allreduce([torch.empty(1, device="meta")])


def failing(timeout_s: float | None) -> None:
    raise PeerLostError("rank 1 is gone", peers=(1,))


def test_a_failed_call_is_an_error_to_those_who_hold_its_future() -> None:
    work = TorchWork(Work(failing, lambda: True), [], CallbackThread("test"))
    passed_on = work.get_future().then(lambda done: done.value())
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        passed_on.wait()
    assert not work.is_success()
    with pytest.raises(PeerLostError):
        work.wait()


def test_backward_passes_of_two_threads_raise_their_own_errors() -> None:
    watch, turn = BackwardWatch(), threading.Barrier(2, timeout=60)
    outcomes: dict[int, BaseException | None] = {}

    def lose(rank: int) -> Callable[[float | None], None]:
        def complete(_: float | None) -> None:
            raise PeerLostError(f"rank {rank} is gone", peers=(rank,))

        return complete

    def backward(rank: int) -> None:
        leaf = torch.ones(1, requires_grad=True)

        def hook(_: Tensor) -> None:
            turn.wait()  # Both passes are under way,
            watch.add(Work(lose(rank), lambda: True))
            turn.wait()  # and neither is over before the other has added its call.

        leaf.register_hook(hook)
        try:
            leaf.sum().backward()
            outcomes[rank] = None
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=backward, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, PeerLostError)
        assert outcome.peers == (rank,)
    assert len(outcomes) == 2


def test_a_backward_pass_that_fails_leaves_nothing_to_the_next() -> None:
    watch, leaf = BackwardWatch(), torch.ones(1, requires_grad=True)

    def hook(_: Tensor) -> None:
        watch.add(Work(failing, lambda: True))
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


def test_joined_works_finish_once_when_all_are_complete() -> None:
    finished: list[int] = []
    callbacks: list[Any] = []

    def notify(callback: Any) -> bool:
        callbacks.append(callback)
        return True

    parts = [Work(lambda _: None, lambda: True, notify) for _ in range(2)]
    work = TorchWork(joined(parts, lambda: finished.append(1)), [kept := torch.ones(1)], CallbackThread("test"))
    future = work.get_future()
    callbacks[0]()
    assert not future.done()
    callbacks[1]()
    assert future.wait()[0] is kept
    work.wait()
    assert finished == [1]


def test_gathered_pieces_reach_tensors_of_inference_mode() -> None:
    group = group_alone()
    with torch.inference_mode():
        outputs: list[Tensor] = [torch.zeros(2)]
    assert group.allgather([outputs], [torch.ones(2)]).get_future().wait()
    assert outputs[0].tolist() == [1.0, 1.0]
