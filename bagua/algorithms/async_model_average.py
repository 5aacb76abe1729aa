"""Asynchronous model averaging: every rank trains at its own pace; weights are averaged in the background.

One thread for each rank that averages weights beside the training, and how ranks agree on what it does.

The threads go through rounds together. In a round each says in one word where its rank stands (an allgather of one
integer), and all do what follows from all words (``verdict``): nothing, an average (one allreduce), or an end.

1. Only the background thread communicates, and only the training thread touches weights. What they share are two flat
   copies, ``sent`` and ``mean``, and a thread that touches them holds ``lock``. A step never waits for the lock: while
   an average is formed, training goes on without.
2. An average leaves the difference ``mean - snapshot`` in ``sent``, and the training thread adds it to its weights
   before one of its next steps. What was learned since the snapshot stays, and the sum over all ranks of weights and
   differences that are yet to be added stays as it is.
3. Who makes no step is answered for by its background thread: it sends ``mean`` again, which is what the weights of its
   rank are once the difference is added. So rounds wait for the threads of all ranks, and never for a step.
4. All ranks see the same words, so all start the same exchange or none. Flags are read once for each round; who changes
   its mind later is heard in the next round.
5. An end, too, is that of all in the same round. At the end of ``abort()`` all weights are at rest, and each rank takes
   the last mean in place of its weights: bitwise the same.
6. No rank waits for one that is gone. Who leaves says so in a round, which is the last one. Who dies breaks the
   connections, and each of the others finds the error, which names it, in its next call.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

import torch

from bagua import errors
from bagua.algorithms.base import Algorithm, AlgorithmImpl
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.fields import Flight, How, Model
from bagua.algorithms.exchanges.values import Add, Gradients, Mean, Replace, Weights
from bagua.buckets import Bucket
from bagua.checks import check_choice, check_numbers, check_whole
from bagua.comm import Group, ProcessGroup, ReduceOp, Wake, copy_flat, in_background

_log = logging.getLogger("bagua")

#: The bits of a word. ``OPEN``: there are weights to average. ``FRESH``: they are newer than the last average, or at
#: rest. ``IMPATIENT``: fresh for an interval. ``ENDING``: the rank waits for the end; ``SETTLING``: for one without an
#: average. ``LEAVING``: it will not come again.
OPEN, FRESH, IMPATIENT, ENDING, SETTLING, LEAVING = (1 << bit for bit in range(6))
#: Between two rounds: the interval between averages, but not less and not more than this, in seconds.
_LEAST_PACE_S, _MOST_PACE_S = 0.005, 0.1
#: How often who waits for the end looks whether it can come.
_POLL_S = 0.1
#: How long a rank that leaves waits for the round in which it says so, in seconds.
_FAREWELL_S = 1.0

Verdict = Literal["nothing", "average", "last", "settle", "mismatch", "leave"]


def verdict(words: Sequence[int]) -> Verdict:
    """What all ranks do in a round, by the words of all.

    Example:
        >>> verdict([OPEN | FRESH, OPEN]), verdict([OPEN | FRESH] * 2), verdict([OPEN | FRESH | IMPATIENT, OPEN])
        ('nothing', 'average', 'average')
    """
    everyone, anyone = functools.reduce(operator.and_, words), functools.reduce(operator.or_, words)
    if anyone & LEAVING:
        return "leave"
    if everyone & ENDING:
        return "settle" if everyone & SETTLING else "mismatch" if anyone & SETTLING else "last"
    return "average" if everyone & OPEN and (everyone & FRESH or anyone & IMPATIENT) else "nothing"


class Stage(Enum):
    """What ``sent`` and ``mean`` hold."""

    EMPTY = "empty"  #: ``mean``: the last average, which was taken in.
    SNAPSHOT = "snapshot"  #: ``sent``: weights to be averaged.
    DIFFERENCE = "difference"  #: ``sent``: what is to be added to the weights; ``mean``: the last average.
    MEAN = "mean"  #: ``mean``: what is to take the place of the weights.


class Averager:
    """The background thread of one rank, and what it shares with the training thread. It does not know the model.

    Building one is collective.

    Args:
        group: private to the model; the thread has a group of the same ranks for itself.
        interval_s: between two snapshots.

    Attributes:
        lock: guards the stage, and the copies of the weights.
        stage: word for what is in these copies.
        error: why the thread has ended; None while it runs.
        was_left: the thread has ended because a rank left.
    """

    def __init__(self, group: ProcessGroup, interval_s: float) -> None:
        made = group.subgroup(range(group.size), backend=_host_backend(group), label="averaging")
        assert isinstance(made, ProcessGroup)  # This rank is one of all ranks.
        self._group, self._interval_s = made, interval_s
        self._communicator = made.global_communicator
        self._communicator.activity.describe = lambda: "averaging of weights"
        self._communicator.statistics.aside = True
        self._pace_s = min(max(interval_s, _LEAST_PACE_S), _MOST_PACE_S)
        self.lock = threading.Lock()
        self.stage = Stage.EMPTY
        self._sent: list[torch.Tensor] = []
        self._mean: list[torch.Tensor] = []
        self._snapshot_at = self._averaged_at = time.monotonic()
        self._open, self._ending, self._leaving = False, 0, False
        self._words = [0] * made.size
        self._stopped, self._wake = threading.Event(), Wake()
        self.error: BaseException | None = None
        self.was_left = False
        self._thread = threading.Thread(target=in_background()(self._run), name=f"bagua-{made.label}", daemon=True)
        self._thread.start()
        group.when_closing(functools.partial(_leave, weakref.ref(self)))

    # The training thread.

    def check(self, *, training: bool) -> None:
        """Raise if averaging has ended.

        Args:
            training: training may go on if a rank has left.

        Raises:
            PeerLostError: a rank died, or left.
            CommunicatorClosedError: the group was closed, or belongs to the parent of this process.
        """
        if self.error is not None and not (training and self.was_left):
            raise copy.copy(self.error) from self.error  # Its traceback must not keep the frames of the training loop.
        if not training and not self._thread.is_alive():
            raise errors.CommunicatorClosedError("averaging goes on in the process that this one was forked from")

    def safe_point(self, buckets: Sequence[Bucket]) -> None:
        """Take in what has come, and put down a snapshot if that is due; without waiting.

        Args:
            buckets: equal in layout on all ranks.
        """
        if (self.stage in (Stage.DIFFERENCE, Stage.MEAN) or self._is_due()) and self.lock.acquire(blocking=False):
            try:
                self._take(buckets)
                if self._is_due():
                    self._put(buckets)
            finally:
                self.lock.release()

    def stop(self, buckets: Sequence[Bucket], *, average: bool) -> None:
        """Wait until all ranks stop; until then this one's background thread goes on with its weights at rest.

        Args:
            buckets: equal in layout on all ranks.
            average: take the mean of all in place of the weights, as all ranks have to, and wait as long as they live.
                Otherwise ranks are in the same step, and wait until the deadline of the group.

        Raises:
            CollectiveTimeoutError: not all ranks came.
            CollectiveMismatchError: they disagree on ``average``.
            CommunicationError: see ``check``.
        """
        self.check(training=False)
        with self.lock:
            if self._take(buckets) is Stage.MEAN and average:  # Ctrl-C had ended an earlier wait.
                return
            if average:
                self._put(buckets)
        self._stopped.clear()
        self._ending = ENDING if average else ENDING | SETTLING
        self._wake.set()
        try:
            self._wait(None if average else self._group.timeout_s)
        finally:
            self._ending = 0
        with self.lock:
            self._take(buckets)

    def _wait(self, limit_s: float | None) -> None:
        until = None if limit_s is None else time.monotonic() + limit_s
        while not self._stopped.wait(_POLL_S):
            self.check(training=False)
            if until is not None and time.monotonic() > until:
                raise errors.CollectiveTimeoutError(
                    "not all ranks stopped averaging, which must be done together to change a model or its algorithm",
                    rank=self._group.ranks[self._group.rank],
                    peers=[
                        rank for rank, word in zip(self._group.ranks, self._words, strict=True) if not word & ENDING
                    ],
                    timeout_s=limit_s,
                )

    def lay_out_anew(self) -> None:
        """The weights lie elsewhere from now on. Averaging has stopped, or has not begun."""
        with self.lock:
            assert not self._open
            self._sent, self._mean = [], []

    def leave(self) -> None:
        """Leave all others, not waiting for their training. Idempotent, from any thread."""
        self._leaving = True
        self._wake.set()
        self._thread.join(_FAREWELL_S)
        self._group.close()  # Ends what is under way.
        self._thread.join(_FAREWELL_S)

    def _is_due(self) -> bool:
        return self.stage is not Stage.SNAPSHOT and time.monotonic() >= self._averaged_at + self._interval_s

    @torch.no_grad()
    def _take(self, buckets: Sequence[Bucket]) -> Stage:
        """Take in what has come; the stage that was."""
        stage = self.stage
        if stage in (Stage.DIFFERENCE, Stage.MEAN):
            self.stage = Stage.EMPTY  # First: after Ctrl-C half-way, it must not be taken in twice.
        if stage is Stage.DIFFERENCE:
            for bucket, difference in zip(buckets, self._sent, strict=True):
                torch._foreach_add_(list(bucket.parameters), bucket.views(difference.to(bucket.device)))
        elif stage is Stage.MEAN:
            for bucket, mean in zip(buckets, self._mean, strict=True):
                bucket.write_weights(mean)
        return stage

    def _put(self, buckets: Sequence[Bucket]) -> None:
        """Put down a snapshot."""
        if not self._sent:
            self._sent = [torch.zeros(bucket.numel, dtype=bucket.dtype, device="cpu") for bucket in buckets]
            self._mean = [self._communicator.empty(bucket.numel, dtype=bucket.dtype) for bucket in buckets]
        for bucket, sent in zip(buckets, self._sent, strict=True):
            if bucket.device.type == "cpu":
                bucket.read_weights(sent)
            else:
                sent.copy_(bucket.read_weights(torch.zeros_like(sent, device=bucket.device)))
        self.stage, self._open = Stage.SNAPSHOT, True
        self._snapshot_at = time.monotonic()
        self._wake.set()

    # The background thread.

    def _run(self) -> None:
        try:
            while self.error is None:
                self._round()
                if self.error is None:
                    self._wake.wait(self._pace_s)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self.error = error
            culprit, reason = errors.blame(error, self._group.ranks[self._group.rank], "averaging of weights")
            self._group.abort(reason, culprit)

    def _word(self) -> int:
        ending, word = self._ending, LEAVING if self._leaving else 0
        if self._open:
            fresh = self.stage is Stage.SNAPSHOT
            waits = fresh and time.monotonic() >= self._snapshot_at + self._interval_s
            word |= OPEN | (FRESH if fresh or ending else 0) | (IMPATIENT if waits else 0)
        return word | ending

    def _round(self) -> None:
        words = torch.empty(self._group.size, dtype=torch.int64, device="cpu")
        self._communicator.allgather(words, torch.tensor([self._word()], device="cpu"))
        self._words = words.tolist()
        found = verdict(self._words)
        if found in ("average", "last", "settle"):
            with self.lock:
                if found != "settle":
                    self._average(last=found == "last")
                elif self.stage is Stage.SNAPSHOT:
                    self.stage = Stage.EMPTY
                if found != "average":
                    self._open, self._ending = False, 0
                    self._stopped.set()
        elif found == "leave":
            self._end()
        elif found == "mismatch":
            raise errors.CollectiveMismatchError(
                "some ranks call abort(), and others change the model or its algorithm",
                peers=[rank for rank, word in zip(self._group.ranks, self._words, strict=True) if word & SETTLING],
            )

    def _average(self, *, last: bool) -> None:
        stage, self.stage = self.stage, Stage.EMPTY  # If the exchange fails, nothing is taken in.
        for sent, mean in zip(self._sent, self._mean, strict=True):
            if stage is Stage.SNAPSHOT:
                copy_flat(mean, sent)
            elif stage is Stage.DIFFERENCE:
                torch.sub(mean, sent, out=sent)  # What is to be added remains so.
            else:
                copy_flat(sent, mean)
            self._communicator.allreduce(mean, ReduceOp.AVG)
            if not last:
                torch.sub(mean, sent, out=sent)
        self.stage = Stage.MEAN if last else Stage.DIFFERENCE
        self._averaged_at = time.monotonic()
        gauges = self._group.gauges
        gauges["comm/averages"] = gauges.get("comm/averages", 0.0) + 1.0

    def _end(self) -> None:
        """Somebody leaves, and averaging ends for all."""
        left = [rank for rank, word in zip(self._group.ranks, self._words, strict=True) if word & LEAVING]
        own = self._group.ranks[self._group.rank]
        self.was_left = True
        if own in left:
            self.error = errors.CommunicatorClosedError(
                "averaging has ended: the model, or its group, was closed", rank=own
            )
            return
        self.error = errors.PeerLostError(
            f"rank {left[0]} has left, and averaging has ended: its model, or its group, was closed there",
            rank=own,
            peers=left,
            advice="Call model.bagua_algorithm.abort(model) on every rank when it has finished.",
        )
        if self._open:
            _log.warning("rank %d goes on without averages: %s", own, self.error)


def _leave(reference: weakref.ref[Averager]) -> None:
    averager = reference()
    if averager is not None:
        averager.leave()


def _host_backend(group: ProcessGroup) -> str | None:
    """The backend for tensors in host memory; None for that of the group.

    Weights of a GPU travel through host memory. So what happens in the background uses no stream and no NCCL
    communicator, whose kernels could wait for those of the training.
    """
    plain = ":" not in group.backend and "nccl" not in group.backend
    return None if plain and "cpu" in group.global_communicator.device_types else "gloo"


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(Algorithm):
    """Let every rank train at its own pace, and average the weights in the background.

    From time to time each rank ``i`` puts down a copy ``s_i`` of its weights and trains on. The mean of all copies is
    formed in the background, and at one of its next steps each rank takes it in: ``x_i <- x_i + (mean_j s_j - s_i)``.
    What it has learned meanwhile is kept.

    ``model.bagua_algorithm.abort(model)`` ends averaging, with the same weights on all ranks.

    Args:
        peer_selection_mode: ``all``: all ranks take part in each average.
        sync_interval_ms: time between two averages.
        warmup_steps: steps of gradient allreduce before that.

    Raises:
        ConfigurationError: a value that makes no sense.

    Example:
        >>> AsyncModelAverageAlgorithm(sync_interval_ms=100, warmup_steps=10).peer_selection_mode
        'all'

    Paper: Lian et al., Asynchronous decentralized parallel stochastic gradient descent, 2018;
    Stich, Local SGD converges fast and communicates little, 2019.
    """

    peer_selection_mode: str = "all"
    sync_interval_ms: float = 500
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_choice(("all",), peer_selection_mode=self.peer_selection_mode)
        check_numbers(lambda time: time >= 0, "milliseconds >= 0", sync_interval_ms=self.sync_interval_ms)
        check_whole(0, warmup_steps=self.warmup_steps)

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Warm-up, if there is one, and averaging."""
        return ("warm-up", "averaging") if self.warmup_steps else ("averaging",)

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step."""
        return "warm-up" if step < self.warmup_steps else "averaging"

    def exchanges(self, phase: Hashable = "averaging") -> tuple[Exchange, ...]:
        """Gradients in the warm-up, weights between steps after it."""
        if phase == "warm-up":
            return (Exchange(Gradients(), Every(), Mean(), Replace()),)
        return (Exchange(Weights(), Every(), BackgroundMean(), Add(), at="safe"),)


@dataclass(frozen=True)
class BackgroundMean(How):
    """A mean of copies that is formed beside the steps; see ``bagua.algorithms.async_model_average``."""

    lockstep: ClassVar[bool] = False

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Never called: the bound form does it."""
        raise AssertionError("exchanges in the background have no flights")


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl, declaration=AsyncModelAverageAlgorithm):
    """``AsyncModelAverageAlgorithm`` on a group."""

    options: AsyncModelAverageAlgorithm

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self._averager: Averager | None = None
        self._buckets: list[Bucket] = []
        self._paused = False
        #: The step that was begun last.
        self._step = -1

    def abort(self, bagua_module: torch.nn.Module) -> None:
        """End averaging, with the same weights on all ranks. Every rank calls it when it has come to its end.

        It waits until all ranks have called it. Meanwhile this rank's weights take part in averages as they are, so no
        rank that still trains is held up. When all have come, the mean of all takes the place of the weights of each.
        Calling it again does nothing; nor does calling it in the warm-up, in which all weights are equal.

        Args:
            bagua_module: the model that this algorithm trains.

        Raises:
            PeerLostError: a rank died, or has left without calling this.
            ConfigurationError: another algorithm trains this model.
        """
        self._check(bagua_module)
        in_warm_up = self._step + 1 < self.options.warmup_steps
        if self._averager is not None and not self._paused and not in_warm_up:
            self._averager.stop(self._buckets, average=True)
        self._paused = True

    def resume(self, bagua_module: torch.nn.Module) -> None:
        """Average again, after ``abort``. Every rank calls it; averages are formed again when all have trained on.

        Args:
            bagua_module: the model that this algorithm trains.

        Raises:
            PeerLostError: a rank died, or has left.
            ConfigurationError: another algorithm trains this model.
        """
        self._check(bagua_module)
        if self._averager is not None:
            self._averager.check(training=False)
        self._paused = False

    def _check(self, bagua_module: torch.nn.Module) -> None:
        if getattr(bagua_module, "bagua_algorithm", None) is not self:
            raise errors.ConfigurationError(
                "this is not the model that is trained here",
                argument="bagua_module",
                expected="the model that was wrapped: model.bagua_algorithm.abort(model)",
                seen=type(bagua_module).__name__,
            )

    # What the engine tells.

    def attach(self, buckets: Sequence[Bucket], group: ProcessGroup, step: int) -> None:
        """See ``AlgorithmImpl``."""
        if group.size == 1:
            return
        if self._averager is None:
            self._averager = Averager(group, self.options.sync_interval_ms / 1e3)
        self._averager.lay_out_anew()
        self._buckets, self._step = list(buckets), step - 1

    def safe_point(self, step: int) -> None:
        """See ``AlgorithmImpl``."""
        if self._averager is None:
            return
        self._averager.check(training=True)
        if step != self._step and not self._paused and step >= self.options.warmup_steps:
            self._averager.safe_point(self._buckets)
        self._step = step

    def settle(self) -> None:
        """See ``AlgorithmImpl``."""
        if self._averager is not None:
            self._averager.stop(self._buckets, average=False)

    def close(self) -> None:
        """See ``AlgorithmImpl``."""
        if self._averager is not None:
            self._averager.leave()
