"""Looking, now and then, whether ranks still hold what must be equal: weights, settings of optimizers, shared state.

First weights that a rank loads between two steps: whether others came of it, and whether other ranks loaded some, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bagua.algorithms import Algorithm, Model
from bagua.buckets import Bucket
from bagua.comm import Communicator, ProcessGroup, as_bytes
from bagua.engine.options import EngineOptions
from bagua.engine.state.agreement import gather_objects
from bagua.engine.state.replicas import plain
from bagua.engine.state.saving import Holder, digest_of, shared_tensors
from bagua.errors import CollectiveMismatchError
from bagua.primitives import differ_by_rounding, digest_of_gradients, quick_digest

_log = logging.getLogger("bagua")


class Loads:
    """Counts the steps before which this rank loaded weights.

    An evaluation may swap weights in and out again with two calls of ``load_state_dict``, on one rank alone. Other
    ranks need not know: if the weights are, bit by bit, what they were before the first of several calls, none counts.

    Attributes:
        count: steps before which weights were loaded, since the ranks met last.
        step: the last of these steps; -1 before the first.
        before: digest of the weights before the first call since training went on last; empty if there was none.
    """

    def __init__(self) -> None:
        self.count, self.step = 0, -1
        self._meetings = self._calls = 0
        self.before = b""

    def begin(self, weights: Iterable[torch.Tensor]) -> None:
        """A call of ``load_state_dict`` begins; the model has ``weights`` before it."""
        self.before = self.before or quick_digest(weights)

    def end(self) -> None:
        """It has ended."""
        self._calls += 1

    def differ(self, weights: Callable[[], Iterable[torch.Tensor]]) -> bool:
        """Whether ``weights()`` were loaded since training went on last, and not put back."""
        return self._calls == 1 or (self._calls > 1 and quick_digest(weights()) != self.before)

    def settle(self, step: int, *, loaded: bool) -> None:
        """Training goes on with ``step``.

        Args:
            step: number of the step that comes next.
            loaded: weights were loaded before it, and not put back.
        """
        self._calls, self.before = 0, b""
        if loaded:
            self.count += 1
            self.step = step

    def unmet(self) -> int:
        """A number for ranks to meet by, if weights were loaded since the question was asked last; else 0.

        It counts the meetings: a rank may have loaded more often than others before one.
        """
        if not self.count:
            return 0
        self.count = 0
        self._meetings += 1
        return self._meetings

    def tell(self, group: ProcessGroup) -> None:
        """Have other ranks know of the load before ``step``. Each rank has one key, however often it loads."""
        with contextlib.suppress(RuntimeError):  # The store may be gone; then so is the training.
            group.store.set(_key(group.rank), str(self.step))

    def warn_if_alone(self, step: int, group: ProcessGroup) -> None:
        """Warn if others made ``step``, which has ended, with the weights that they had."""
        others: list[int] = []
        with contextlib.suppress(RuntimeError):
            others = [rank for place, rank in enumerate(group.ranks) if _loaded_at(group, place) < step]
        if others:
            _log.warning(
                "rank %d loaded weights before step %d, and rank %s did not: load them on every rank, or give all "
                "ranks rank 0's with bagua.torch_api.distributed.broadcast_parameters(model)",
                group.ranks[group.rank],
                step,
                ", ".join(map(str, others)),
            )


def _key(place: int) -> str:
    return f"loaded/{place}"


def _loaded_at(group: ProcessGroup, place: int) -> int:
    """The last step before which a rank told of a load; -1 if it never did."""
    return int(group.store.get(_key(place))) if group.store.check([_key(place)]) else -1


#: Steps from one look to the next where ranks hold equal weights after each step.
DEFAULT_CHECK_EVERY = 100
_SETTINGS = "settings of optimizers"
_PURPOSE = "a comparison of what must be equal"


@dataclass(frozen=True)
class Belief:
    """What a rank holds, of what must be equal on all.

    Args:
        model: its weights by name, and their optimizers.
        buckets: buckets in which the weights lie.
        places: places that hold what is remembered.
    """

    model: Model
    buckets: Sequence[Bucket]
    places: Sequence[Holder]

    def flats(self) -> Iterator[torch.Tensor]:
        """The memory of all weights, in as few tensors as possible."""
        for bucket in self.buckets:
            if bucket.weights is not None:
                yield bucket.weights
            else:
                yield from bucket.parameters


class EqualityCheck:
    """Compares the beliefs of all ranks at the end of steps that all of them know.

    Where ranks hold equal weights after each step, weights and settings of optimizers must be equal. Where they differ
    on purpose, only what the algorithm shares is compared, and whether all of them loaded weights. Ranks that only
    round differently are told so once, and train on.

    Args:
        algorithm: says what must be equal.
        options: how often to look.

    Attributes:
        loads: record of weights that were loaded into the model.
        due: step at whose end all look, or the next after it: one may stand for several; infinite for never.
        paused: True while ranks may differ, because some make steps without data.
        at_once: True to look when the backward pass ends, before optimizers step: one of the ranks may skip that.
    """

    def __init__(self, algorithm: Algorithm, options: EngineOptions) -> None:
        self.loads = Loads()
        self.paused = False
        self.at_once = algorithm.ranks_differ
        self._differ = algorithm.ranks_differ
        self._every = _usual(algorithm) if options.check_every is None else options.check_every
        self._looks = not algorithm.in_background
        self.due = 0 if self._looks else math.inf
        self._begins = 0
        self._leaves_gradients = not any("gradients" in one.needs for one in algorithm.every_exchange())
        #: Where gradients are exchanged before buckets would be formed: digests of those that this rank computed.
        self._watches, self._first_gradients = bool(options.buckets), list[str]()
        #: Whether ranks were told that they round differently.
        self._rounds = False

    def restart(self, step: int) -> None:
        """All ranks go on with ``step``: look at its end."""
        if self._looks:
            self._begins = self.due = step

    def postpone(self, step: int) -> None:
        """Ranks may differ at the end of ``step``: look as soon as all have data again."""
        if self.due <= step and self._every:
            self.due = step + 1

    def look_at_gradients(self, step: int, model: Model, group: ProcessGroup) -> None:
        """At the end of the backward pass of ``step``, warn if all ranks computed the same gradients. Collective."""
        if step == 0 and (self._leaves_gradients or self._watches):  # Otherwise they were compared with the buckets.
            own = self._own_gradients(model)
            digests = gather_objects(group.global_communicator, "a look at the first gradients", own)
            warn_of_equal_gradients(digests, group.rank)

    def look(self, step: int, belief: Belief, group: ProcessGroup) -> None:
        """Compare after ``step``. Collective in the steps that all ranks know.

        Raises:
            CollectiveMismatchError: on all ranks, if there is a difference beyond rounding.
        """
        if self.due > step:
            if not self._differ:
                self.loads.warn_if_alone(step, group)
            return
        self.due = self._after(step)
        communicator = group.global_communicator
        difference, by_rounding = self._difference(belief, communicator)
        if difference is not None and not by_rounding:
            raise difference
        if difference is not None:
            self._tell_of_rounding(difference, communicator)

    def _after(self, step: int) -> float:
        """The step after ``step`` to look in: that after the first update shows what optimizers did differently."""
        since = step - self._begins
        if not self._every:
            return math.inf
        if since == 0 and not self._differ:
            return step + 1
        return self._begins + (since // self._every + 1) * self._every

    def watch_gradients(self, take: Callable[[torch.nn.Parameter], None]) -> Callable[[torch.nn.Parameter], None]:
        """``take``, which also notes the gradients of the first step as this rank computed them."""

        def noting(parameter: torch.nn.Parameter) -> None:
            if not self._leaves_gradients:
                self._first_gradients.append(digest_of_gradients([parameter]))
            take(parameter)

        return noting

    def _own_gradients(self, model: Model) -> str:
        if self._leaves_gradients:
            return digest_of_gradients(list(model.parameters.values()))
        noted, self._first_gradients = sorted(self._first_gradients), []
        return "".join(noted)

    def _tell_of_rounding(self, difference: CollectiveMismatchError, communicator: Communicator) -> None:
        if communicator.rank == 0 and not self._rounds:
            _log.warning(
                "%s, but only by rounding, as on other processors or with other numbers of threads. Training goes on",
                difference.problem,
            )
        self._rounds = True

    def _difference(self, belief: Belief, communicator: Communicator) -> tuple[CollectiveMismatchError | None, bool]:
        """The first difference, and whether rounding explains all of them."""
        everyone = _gather(self._quick(belief), communicator)
        if len(set(everyone)) == 1:
            return None, False
        loads = self.loads
        found = gather_objects(communicator, _PURPOSE, [[loads.count, loads.step], self._lines(belief)])
        counts, lines = [one[0] for one in found], [one[1] for one in found]
        error, by_rounding = _explain(lines, counts, communicator), False
        if error is not None and len({count for count, _ in counts}) == 1:
            columns = _differing(lines)
            alike = all(len({(kind, name) for kind, name, _ in column}) == 1 for column in columns)
            names = [(column[0][0], column[0][1]) for column in columns] if alike else []
            if any(kind not in ("weights", "shared state") for kind, _ in names):
                names = []
            held = {(kind, name): tensor for kind, name, tensor in self._tensors(belief)}
            by_rounding = bool(names) and differ_by_rounding([held[name] for name in names], communicator)
        communicator.barrier()  # A rank that raises ends the communicator: others may still be receiving.
        loads.count = max(count for count, _ in counts)
        return error, by_rounding

    def _quick(self, belief: Belief) -> bytes:
        tensors = [tensor for _, tensor in shared_tensors(belief.places)]
        if self._differ:
            return quick_digest(tensors) + self.loads.count.to_bytes(8, "little")
        return quick_digest([*tensors, *belief.flats()]) + _digest_of_settings(belief.model)

    def _lines(self, belief: Belief) -> list[list[str]]:
        """For each thing that must be equal its kind, its name, and its value."""
        digests = [[kind, name, digest_of(tensor)] for kind, name, tensor in self._tensors(belief)]
        if self._differ:
            return [*digests, ["weights", "the number of steps before which they were loaded", str(self.loads.count)]]
        return [*([_SETTINGS, name, value] for name, value in _settings(belief.model)), *digests]

    def _tensors(self, belief: Belief) -> list[tuple[str, str, torch.Tensor]]:
        """Kind, name and value of each tensor that must be equal."""
        weights = () if self._differ else belief.model.parameters.items()
        shared = shared_tensors(belief.places)
        return [*(("weights", *one) for one in weights), *(("shared state", *one) for one in shared)]


def _usual(algorithm: Algorithm) -> int:
    """Steps between looks: after exchanges that bring all ranks together anyway; never where there is none."""
    sent = [one for one in algorithm.every_exchange() if one.how is not None]
    if not algorithm.ranks_differ:
        return DEFAULT_CHECK_EVERY
    if not sent or not all(one.how is not None and one.how.uniform for one in sent):
        return 0
    period = max(one.when.steps for one in sent)
    return -(-DEFAULT_CHECK_EVERY // period) * period


def _gather(own: bytes, communicator: Communicator) -> list[bytes]:
    """What each rank brings: a few bytes, the same number on all."""
    device = communicator.intake.home
    tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    everyone = torch.empty(communicator.size * len(own), dtype=torch.uint8, device=device)
    communicator.allgather(everyone, tensor)
    text = as_bytes(everyone.cpu())
    return [text[start : start + len(own)] for start in range(0, len(text), len(own))]


def _settings(model: Model) -> Iterator[tuple[str, str]]:
    """Names and values of what optimizers were told of parameters that are exchanged."""
    exchanged = {id(parameter): name for name, parameter in model.parameters.items()}
    for number, optimizer in enumerate(model.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            first = next((exchanged[id(one)] for one in group["params"] if id(one) in exchanged), None)
            if first is None:
                continue  # A rank's own, an expert say.
            where = f"optimizer {number} ({type(optimizer).__name__}), parameter group {place} (first: {first})"
            for key in sorted(group, key=lambda one: (one != "lr", one)):
                if key != "params":
                    yield f"{key} of {where}", repr(plain(group[key]))


def _digest_of_settings(model: Model) -> bytes:
    return hashlib.sha256("\n".join(map(repr, _settings(model))).encode()).digest()[:8]


def _differing(lines: Sequence[list[list[str]]]) -> list[tuple[list[str], ...]]:
    """The lines of all ranks, wherever that of a rank is not that of rank 0."""
    length = max(map(len, lines))
    filled = (one + [["state", "the number of tensors", ""]] * (length - len(one)) for one in lines)
    return [column for column in zip(*filled, strict=True) if any(one != column[0] for one in column)]


def _explain(
    lines: Sequence[list[list[str]]], loads: Sequence[list[int]], communicator: Communicator
) -> CollectiveMismatchError | None:
    """The error for the first line in which a rank differs from rank 0; None if there is no such line."""
    ranks = communicator.ranks
    differing = next(iter(_differing(lines)), None)
    if differing is None:
        return None
    others = [rank for rank, line in enumerate(differing) if line != differing[0]]
    settings = any(line[0] == _SETTINGS for line in differing)  # Of which rank 0 may have fewer.
    kind, name = differing[0][:2]
    if settings:
        kind, name = _SETTINGS, _first_setting(lines[0], lines[others[0]])
    here, there = (_value_of(name, lines[one]) for one in (0, others[0]))
    return CollectiveMismatchError(
        f"ranks have different {kind}: {name} on rank {', '.join(str(ranks[one]) for one in others)} "
        f"is not that of rank {ranks[0]}",
        rank=ranks[communicator.rank],
        peers=tuple(ranks[one] for one in others),
        expected=f"{here} on rank {ranks[0]}" if settings else None,
        seen=f"{there} on rank {ranks[others[0]]}" if settings else None,
        advice=_advice(kind, loads, ranks),
    )


def _first_setting(here: list[list[str]], there: list[list[str]]) -> str:
    """Name of the first setting that differs, or that only one rank has."""
    named = (name for kind, name, _ in [*here, *there] if kind == _SETTINGS)
    return next(name for name in named if _value_of(name, here) != _value_of(name, there))


def _value_of(name: str, lines: list[list[str]]) -> str:
    return next((value for _, told, value in lines if told == name), "none")


def _advice(kind: str, loads: Sequence[list[int]], ranks: Sequence[int]) -> str:
    if kind == _SETTINGS:
        return "Give all ranks the same settings, and step schedulers on all ranks alike."
    most = max(count for count, _ in loads)
    loaded = [(ranks[rank], step) for rank, (count, step) in enumerate(loads) if count == most]
    if len(loaded) < len(loads):
        told = ", ".join(f"rank {rank}" for rank, _ in loaded)
        return (
            f"Only {told} loaded weights, before step {loaded[0][1]}. Call load_state_dict on every rank, or before "
            "the model is wrapped, which gives all ranks rank 0's."
        )
    return (
        "Change weights on all ranks alike, by optimizers with the same settings: with_bagua(model, optimizer) "
        "compares those. check_every=0 looks in the first step only."
    )


def warn_of_other_settings(model: Model, communicator: Communicator) -> None:
    """Say so, on rank 0, if optimizers of other ranks were told something else, before all take rank 0's. Collective.

    A scheduler keeps the settings that it began with, so that ranks may come apart again.

    Args:
        model: weights of this rank by name, and their optimizers.
        communicator: communicator of the ranks.
    """
    if len(set(_gather(_digest_of_settings(model), communicator))) == 1:
        return
    lines = gather_objects(communicator, _PURPOSE, [[_SETTINGS, *one] for one in _settings(model)])
    difference = _explain(lines, [], communicator)
    if communicator.rank == 0 and difference is not None:
        _log.warning(
            "%s: %s, %s. All ranks go on with what rank 0 holds; a scheduler made before would change it again. "
            "Make the optimizer with the same settings on every rank.",
            difference.problem,
            difference.expected,
            difference.seen,
        )


def warn_of_equal_gradients(digests: Sequence[str], rank: int) -> None:
    """Say so, on rank 0, if all ranks computed bitwise the same first gradient.

    Args:
        digests: digests of each rank; empty where all gradients are zero.
        rank: this rank.
    """
    if rank == 0 and len(digests) > 1 and digests[0] and len(set(digests)) == 1:
        _log.warning(
            "all %d ranks computed the same gradient in the first step: does each read its own part of the data? "
            "bagua.distributed_loader(loader) sees to that.",
            len(digests),
        )
