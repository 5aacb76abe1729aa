"""Works of the backend ``bagua``, as ``torch.distributed`` wants them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from bagua.comm import torch_private
from bagua.comm.torch_backend.futures import CallbackThread, PlainFutures
from bagua.comm.work import Work
from bagua.errors import CommunicationError
from bagua.torch_private import backward_pass, when_backward_ends

_NO_TIMEOUT = timedelta()
#: Looked up once, as works are made in each call; so are their slots filled more quickly than a dictionary.
_begin = torch_private.Work.__init__


class TorchWork(torch_private.Work):
    """A started call. What C++ holds of it can only wait and take the future.

    Args:
        work: the call; None if it is complete.
        outputs: the tensors that receive its result.
        callbacks: makes its future, and runs the callbacks of that.
        is_message: True if it is for one other rank.
    """

    __slots__ = ("_callbacks", "_is_message", "_outputs", "_was_awaited", "pending")

    def __init__(
        self,
        work: Work | None,
        outputs: Sequence[torch.Tensor],
        callbacks: CallbackThread | PlainFutures,
        *,
        is_message: bool = False,
    ) -> None:
        _begin(self)
        self.pending = work
        self._outputs = list(outputs)
        self._callbacks = callbacks
        self._is_message = is_message
        self._was_awaited = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the call is complete.

        Args:
            timeout: zero means the deadline of the call, as in torch.

        Raises:
            CommunicationError: the call failed.
        """
        if self.pending is not None:
            self.pending.wait(timeout or None)
        self._was_awaited = True
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self.pending is None or self.pending.is_completed()

    def is_success(self) -> bool:
        """Whether the call is complete and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, or None; does not wait."""
        return None if self.pending is None else self.pending.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors that receive the result; complete after ``wait``."""
        return self._outputs

    def _source_rank(self) -> int:
        """Rank in the group of the sender of a message that was received from any rank."""
        assert self.pending is not None
        return int(self.pending.result())

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``; the call makes progress without anybody who waits."""
        if self._was_awaited:  # DDP takes the value of it at once, where ranks may join.
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(self._outputs)
            return future
        return self._callbacks.future(self.pending, self._outcome, in_order=not self._is_message)

    def _outcome(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs


class BackwardPass:
    """The calls of one backward pass. Autograd holds the only strong reference, so it dies with the pass."""

    __slots__ = ("__weakref__", "works")

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __call__(self) -> None:
        for work in self.works:
            try:
                work.wait()
            except CommunicationError as error:
                raise error.with_traceback(None) from error.__cause__


class BackwardWatch:
    """Lets the end of a backward pass raise what its calls raised, not torch's account of it.

    DDP waits for futures in C++, which turns each error into a plain ``RuntimeError``. Who
    queues a callback earlier than DDP does may raise first. Threads may run passes side by side.
    """

    def __init__(self) -> None:
        self._passes: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()

    def add(self, work: Work) -> None:
        """Wait for ``work`` at the end of the backward pass that the calling thread runs, if it runs one."""
        task = backward_pass()
        if task < 0:
            return
        current = self._passes.get(task)
        if current is None:
            self._passes[task] = current = BackwardPass()
            when_backward_ends(current)
        current.works.append(work)
