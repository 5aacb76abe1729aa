"""``bagua.watch()``: how much of a step of any torch job waits for the network, and what would wait less."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import pickle
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua.advise.advice import WORTH_IT, asked_for, ranked, rehearse_all, shown
from bagua.advise.facts import MachineFacts, ModelFacts, Rehearsal
from bagua.advise.measure import LEAST_STEPS, StepMeter, own_time
from bagua.advise.network import Cluster
from bagua.advise.prediction import Prediction, predict
from bagua.comm import TorchCalls
from bagua.errors import BaguaError
from bagua.link import LinkSettings, usable_cores
from bagua.torch_private import ddp_seconds

#: Steps that are left out; steps whose gradients are measured; one in so many is sampled by DDP.
_FIRST_STEPS, _METERED_STEPS, _EVERY = 3, 30, 10
#: Below this part of a step, waiting is no matter; so much more than the least is late.
_MATTERS, _LATE = 0.05, 0.05
#: Seconds in which ranks say what they saw, and in which algorithms are rehearsed.
_GATHER_S, _REHEARSE_S = 5.0, 120.0
#: A larger model is not rehearsed beside what the job holds.
_MOST_BYTES = 2**30
_TRIED = ("bytegrad", "power_sgd", "local_sgd")
#: What the bisection of a link's rate goes through, in Mbit/s, and how often it halves that.
_SLOWEST, _FASTEST, _HALVINGS = 1.0, 1e5, 14
_LEAST_DELAY_S = 1e-3
#: What a process does that predicts.
_PREDICT = """\
import pickle, sys, torch
from bagua.advise.verdict import predictions
torch.set_num_threads(1)
print(*predictions(*pickle.load(sys.stdin.buffer)), sep="\\n")
"""


@dataclass(frozen=True)
class RankReport:
    """What one rank saw.

    Attributes:
        host: name of its host.
        steps: how many.
        step_s: seconds of each.
        waiting_s: seconds of each in which it waited for others, or for the network.
        nbytes: bytes of its input to all calls.
        calls: calls that Python made, and exchanges of gradients of DDP.
        way_s: seconds to the store.
    """

    host: str
    steps: int
    step_s: float
    waiting_s: float
    nbytes: int
    calls: int
    way_s: float = 0.0


class TorchWatch:
    """Watches this process until it ends, or until ``end``. See ``watch``."""

    #: The watch of this process.
    now: ClassVar[TorchWatch | None] = None

    def __init__(self) -> None:
        self.calls = TorchCalls()
        #: Passes of each model after which gradients are exchanged.
        self._synced: dict[DistributedDataParallel, int] = {}
        self._steps = 0
        self._exposed: list[float] = []
        #: Time, and seconds in which calls blocked, at the end of the first steps and of the last one.
        self._first = self._last = (0.0, 0.0)
        self._meter: StepMeter | None = None
        find = torch.nn.modules.module.register_module_forward_pre_hook(self._forward)
        self._handles: list[Any] = [find, register_optimizer_step_post_hook(self._stepped)]
        self._verdict: str | None = None

    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        """Before the forward pass of any module, and after the first step of those of DDP that were seen."""
        if isinstance(module, DistributedDataParallel):
            if module not in self._synced:
                self._synced[module] = 0
                ddp_seconds(module, _EVERY)
            self._synced[module] += torch.is_grad_enabled() and module.require_backward_grad_sync

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        self._last = time.perf_counter(), self.calls.blocked_s
        model = next(iter(self._synced), None)
        if self._steps == 1:
            self._handles[0].remove()
            self._handles += [one.register_forward_pre_hook(self._forward) for one in self._synced]
            if model is not None and all(one.device.type == "cpu" for one in model.parameters()):
                clock = lambda: own_time() - self.calls.blocked_s  # noqa: E731
                self._meter = StepMeter(model, optimizer, clock)
        if self._steps <= _FIRST_STEPS:
            self._first = self._last
        if model is not None and self._steps > _FIRST_STEPS and self._steps % _EVERY == 0:
            self._exposed.append(ddp_seconds(model))
        if self._meter is not None and self._meter.steps >= _METERED_STEPS:
            self._meter.end()

    def seen(self) -> RankReport:
        """What this rank saw."""
        steps = max(self._steps - _FIRST_STEPS, 0)
        step_s, blocked_s = ((now - then) / max(steps, 1) for then, now in zip(self._first, self._last, strict=True))
        exposed, synced = [one for one in self._exposed if one >= 0], sum(self._synced.values())
        if exposed:
            blocked_s += statistics.fmean(exposed) * synced / self._steps
        blocked_s = min(blocked_s, step_s)  # DDP samples some steps only, and these may be the slow ones.
        nbytes = self.calls.input_bytes
        for model, passes in self._synced.items():
            nbytes += passes * sum(one.nbytes for one in model.parameters() if one.requires_grad)
        return RankReport(socket.gethostname(), steps, step_s, blocked_s, nbytes, self.calls.calls + synced)

    def end(self) -> str:
        """Stop watching, and say what was seen; empty on all ranks but 0. Ranks wait for none but the store."""
        if self._verdict is None:
            self.calls.end()
            for handle in self._handles:
                handle.remove()
            if self._meter is not None:
                self._meter.end()
            self._verdict = ""
            with contextlib.suppress(RuntimeError):  # The store is gone with its host.
                self._verdict = self._say()
        return self._verdict

    def _say(self) -> str:
        mine = self.seen()
        self.calls.tell(json.dumps(asdict(replace(mine, way_s=self.calls.way_s()))))
        if self.calls.rank:
            return ""
        found = {rank: RankReport(**json.loads(said)) for rank, said in self.calls.told(_GATHER_S).items()}
        facts = self._meter.facts() if self._meter is not None and self._meter.steps >= LEAST_STEPS else None
        return verdict(found or {0: mine}, self.calls.size, facts)


def watch() -> TorchWatch:
    """Watch a job of plain ``torch.distributed``, and say at its end how much of a step waits for the network.

    Call it once on each rank, after ``init_process_group`` and before the model is trained. Nothing is sent before the
    end, and no result changes. At the end of the process, or at Ctrl-C, rank 0 writes at most eight lines.

    Returns:
        The watch: ``end()`` says it earlier.

    Raises:
        NotInitializedError: ``init_process_group`` was not called.

    Example:
        >>> watch()
        Traceback (most recent call last):
            ...
        bagua.errors.NotInitializedError: call init_process_group before bagua.watch()
    """
    if TorchWatch.now is not None:
        logging.getLogger("bagua").warning("bagua.watch() watches this process already")
        return TorchWatch.now
    TorchWatch.now = watching = TorchWatch()
    atexit.register(lambda: sys.stderr.write(watching.end()))
    return watching


def verdict(seen: Mapping[int, RankReport], size: int, facts: ModelFacts | None) -> str:
    """At most eight lines.

    Args:
        seen: the report of each rank that gave it in time.
        size: all ranks.
        facts: the model that was trained, if it was one of DDP on the CPU.
    """
    first = seen[min(seen)]
    if not any(one.calls for one in seen.values()):
        return "bagua watch: no call of torch.distributed was seen; bagua.metrics() has those of bagua's own groups.\n"
    if not first.steps or not first.step_s:
        sent = f"{first.calls} calls, {first.nbytes / 1e6:.2f} MB"
        return f"bagua watch: {sent}; too few steps of an optimizer to say more.\n"
    waits = {rank: one.waiting_s for rank, one in seen.items()}
    share = min(waits.values()) / first.step_s
    told = f"{share:.0%} of a step waits for"
    lines = [f"The network is not the bottleneck: {told} it." if share < _MATTERS else f"{told} the network."]
    sent = f"rank 0 put {first.nbytes / 1e6:.2f} MB into {first.calls} calls"
    lines.append(f"{first.steps} steps of {first.step_s * 1e3:.1f} ms; {sent}.")
    lines += _late(waits, first.step_s)
    if len(seen) < size:
        lines.append(f"Only {len(seen)} of {size} ranks said what they saw.")
    if share >= _MATTERS:
        lines += _expected(facts, _cluster(seen, size), first.step_s, min(waits.values()))
    return "\n".join(["bagua watch: " + lines[0], *lines[1:]]) + "\n"


def _late(waits: Mapping[int, float], step_s: float) -> list[str]:
    """All leave an exchange together, so who waits least came last; only a clear difference counts."""
    ordered = sorted(waits, key=waits.__getitem__)
    if len(ordered) < 2 or waits[ordered[1]] - waits[ordered[0]] < _LATE * step_s:
        return []
    others_s = statistics.fmean(waits[rank] for rank in ordered[1:])
    least_s = waits[ordered[0]]
    return [f"Rank {ordered[0]} is late: the others wait {(others_s - least_s) * 1e3:.1f} ms for it in each step."]


def _cluster(seen: Mapping[int, RankReport], size: int) -> Cluster:
    """Hosts and delay. Ranks of one machine that talk through Gloo are hosts that share it."""
    hosts = len({one.host for one in seen.values()})
    delay_s = max(one.way_s for one in seen.values())
    link = LinkSettings(delay_ms=delay_s * 1e3 if delay_s >= _LEAST_DELAY_S else 0.0)
    if hosts > 1 and size % hosts == 0:
        return Cluster(hosts, size // hosts, link)
    return Cluster(size, 1, link, shared=hosts == 1)


def _expected(facts: ModelFacts | None, cluster: Cluster, step_s: float, waiting_s: float) -> list[str]:
    """What other algorithms would take, computed in another process: one that ends can start no thread."""
    if facts is None:
        return ["Predictions need a model in DistributedDataParallel on the CPU."]
    if 4 * sum(math.prod(one.shape) for one in facts.parameters) > _MOST_BYTES:
        return ["The model is too large to be rehearsed here: ask bagua advise."]
    computing = replace(facts, steps_s=tuple(max(one - waiting_s, one * 0.01) for one in facts.steps_s))
    try:
        answered = subprocess.run(  # noqa: S603 - Python itself
            [sys.executable, "-c", _PREDICT],
            input=pickle.dumps((computing, cluster, step_s)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_REHEARSE_S,
            check=True,
        )
    except (subprocess.SubprocessError, KeyboardInterrupt):
        return ["Predictions could not be made here: ask bagua advise."]
    return answered.stdout.decode().splitlines()


def predictions(facts: ModelFacts, cluster: Cluster, step_s: float) -> list[str]:
    """What algorithms would take on the link on which a step of DDP takes ``step_s``, and how to try the best."""
    try:
        rehearsals, _ = rehearse_all(facts, cluster, _TRIED)
    except BaguaError as error:
        return [f"No prediction: {error}."]
    machine = MachineFacts(cores=usable_cores())

    def on(rate: float, some: Sequence[Rehearsal]) -> list[Prediction]:
        there = replace(cluster, link=replace(cluster.link, send_mbit_s=rate, receive_mbit_s=rate))
        return [predict(one, facts, there, machine) for one in some]

    low, high = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        rate = math.sqrt(low * high)
        low, high = (rate, high) if on(rate, rehearsals[:1])[0].step_s > step_s else (low, rate)
    rate = math.sqrt(low * high)
    found = ranked(on(rate, rehearsals[1:]))
    better = [one for one in found if one.step_s < WORTH_IT * step_s][:2]
    if not better:
        return ["No algorithm that was tried is 5 % faster."]
    texts = [
        f"{shown(one)}: {step_s / one.step_s:.1f}x ({step_s / one.high_s:.1f} to {step_s / one.low_s:.1f})"
        + ("" if one.keeps_equal else ", loss depends on its options and the learning rate")
        for one in better
    ]
    best = next((one for one in better if one.keeps_equal), better[0])
    return [
        f"As fast as a link of {rate:.0f} Mbit/s. Expected there:",
        *texts,
        f"Try: model = bagua.with_bagua(model, [optimizer], {asked_for(best)})",
    ]
