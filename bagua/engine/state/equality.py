"""Looking, now and then, whether ranks still hold what must be equal: weights, settings of optimizers, shared state."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua.algorithms import Algorithm, Model
from bagua.buckets import Bucket
from bagua.comm import Communicator, ProcessGroup, as_bytes
from bagua.engine.options import EngineOptions
from bagua.engine.state.replicas import broadcast_optimizer_state, broadcast_parameters
from bagua.engine.state.saving import Holder, digest_of, shared_tensors
from bagua.errors import CollectiveMismatchError

__all__ = [
    "Belief",
    "EqualityCheck",
    "digest_of_gradients",
    "quick_digest",
    "warn_of_equal_gradients",
]

_log = logging.getLogger("bagua")

#: Steps from one look to the next where ranks hold equal weights after each step.
DEFAULT_CHECK_EVERY = 100
#: Sums of a digest: what changes several words must cancel out in one of them to be overlooked.
_SUMS = 256
_SETTINGS = "settings of optimizers"


def quick_digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Eight bytes that depend on all bits of ``tensors``; ten times as fast as a cryptographic digest.

    Example:
        >>> quick_digest([torch.zeros(3)]) == quick_digest([torch.zeros(3)]), len(quick_digest([]))
        (True, 8)
    """
    found = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if flat.numel() * flat.itemsize % 8 or flat.data_ptr() % 8:
            flat = torch.cat([flat.view(torch.uint8), flat.new_zeros(8, dtype=torch.uint8)])
            flat = flat[: flat.numel() // 8 * 8]
        words = flat.view(torch.int64)
        whole = words.numel() // _SUMS * _SUMS
        for sums in (words[:whole].view(-1, _SUMS).sum(0), words[whole:]):
            found.update(as_bytes(sums.cpu().view(torch.uint8)))
    return found.digest()[:8]


@dataclass(frozen=True)
class Belief:
    """What a rank holds, of what must be equal on all.

    Args:
        module: that is trained.
        model: its weights by name, and their optimizers.
        buckets: in which the weights lie.
        places: what is remembered.
    """

    module: torch.nn.Module
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
    on purpose, only what the algorithm shares is compared, and whether all of them loaded weights.

    Args:
        algorithm: says what must be equal.
        options: how often to look, and what to do about a difference.
    """

    def __init__(self, algorithm: Algorithm, options: EngineOptions) -> None:
        self._differ = algorithm.ranks_differ
        self._every = _usual(algorithm) if options.check_every is None else options.check_every
        self._repairs = options.on_difference == "repair"
        self._looks = not algorithm.in_background
        self._next = 0 if self._looks else -1
        #: Loads since the last meeting.
        self._loads = self._meetings = 0
        self._loaded_at = -1

    def restart(self, step: int) -> None:
        """All ranks go on with ``step``: look at its end."""
        if self._looks:
            self._next = step

    def note_load(self, step: int, group: ProcessGroup) -> None:
        """Weights were loaded before ``step``."""
        self._loads += 1
        self._loaded_at = step
        if not self._differ:
            with contextlib.suppress(RuntimeError):  # The store may be gone; then so is the training.
                group.store.set(f"loaded{step}/{group.rank}", "1")

    def unmet_loads(self) -> int:
        """A number for ranks to meet by, if there was a load since the question was asked last; else 0.

        It counts the meetings: a rank may have loaded more often than others before one.
        """
        if not self._loads:
            return 0
        self._loads = 0
        self._meetings += 1
        return self._meetings

    def concerns(self, step: int) -> bool:
        """Whether there is something to look at when ``step`` ends: the same on all ranks, or only on this one."""
        return step in (self._next, self._loaded_at)

    def look(self, step: int, belief: Belief, group: ProcessGroup) -> bool:
        """Compare at the end of ``step``. Collective in the steps that all ranks know.

        Returns:
            Whether all ranks have taken what rank 0 holds.

        Raises:
            CollectiveMismatchError: on all ranks, if there is a difference that is not to be repaired.
        """
        if step != self._next:
            self._warn_of_lone_load(step, group)
            return False
        self._next = step + self._every if self._every else -1
        difference = self._difference(belief, group.global_communicator)
        if difference is not None and not self._repairs:
            raise difference
        if difference is not None:
            _take_from_first_rank(belief, group.global_communicator, difference)
        return difference is not None

    def _warn_of_lone_load(self, step: int, group: ProcessGroup) -> None:
        """Who exchanged in this step has said before if weights were loaded there, too."""
        others: list[int] = []
        if not self._differ:
            with contextlib.suppress(RuntimeError):
                keys = {rank: f"loaded{step}/{place}" for place, rank in enumerate(group.ranks)}
                others = [rank for rank, key in keys.items() if not group.store.check([key])]
        if others:
            _log.warning(
                "rank %d loaded weights before step %d, and rank %s did not: load them on every rank, or give all "
                "ranks rank 0's with bagua.torch_api.distributed.broadcast_parameters(model)",
                group.ranks[group.rank],
                step,
                ", ".join(map(str, others)),
            )

    def _difference(self, belief: Belief, communicator: Communicator) -> CollectiveMismatchError | None:
        everyone = _gather(self._quick(belief), communicator)
        if len(set(everyone)) == 1:
            return None
        found = communicator.allgather_object([[self._loads, self._loaded_at], self._lines(belief)])
        communicator.barrier()  # A rank that raises ends the communicator: others may still be receiving.
        self._loads = max(count for (count, _), _ in found)
        return _explain([one[1] for one in found], [one[0] for one in found], communicator)

    def _quick(self, belief: Belief) -> bytes:
        tensors = [tensor for _, tensor in shared_tensors(belief.places)]
        if self._differ:
            return quick_digest(tensors) + self._loads.to_bytes(8, "little")
        settings = "\n".join(map(repr, _settings(belief.model)))
        return quick_digest([*tensors, *belief.flats()]) + hashlib.sha256(settings.encode()).digest()[:8]

    def _lines(self, belief: Belief) -> list[list[str]]:
        """For each thing that must be equal its kind, its name, and its value."""
        shared = [["shared state", name, digest_of(tensor)] for name, tensor in shared_tensors(belief.places)]
        if self._differ:
            return [*shared, ["weights", "the number of times that they were loaded", str(self._loads)]]
        settings = [[_SETTINGS, name, value] for name, value in _settings(belief.model)]
        weights = [["weights", name, digest_of(weight)] for name, weight in belief.model.parameters.items()]
        return [*settings, *weights, *shared]


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
    exchanged = set(map(id, model.parameters.values()))
    for number, optimizer in enumerate(model.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            if exchanged.isdisjoint(map(id, group["params"])):
                continue  # A rank's own, an expert say.
            where = f"optimizer {number} ({type(optimizer).__name__}), parameter group {place}"
            for key in sorted(group):
                if key != "params":
                    yield f"{key} of {where}", repr(_plain(group[key]))


def _plain(value: Any) -> Any:
    """``value`` without what is a rank's own: devices, and the addresses of objects."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _explain(
    lines: Sequence[list[list[str]]], loads: Sequence[list[int]], communicator: Communicator
) -> CollectiveMismatchError | None:
    """The error for the first line in which a rank differs from rank 0; None if there is no such line."""
    ranks = communicator.ranks
    length = max(map(len, lines))
    columns = list(
        zip(*(one + [["state", "the number of tensors", ""]] * (length - len(one)) for one in lines), strict=True)
    )
    differing = next((column for column in columns if any(one != column[0] for one in column)), None)
    if differing is None:
        return None
    others = [rank for rank, line in enumerate(differing) if line != differing[0]]
    (kind, name, here), (_, _, there) = differing[0], differing[others[0]]
    settings = kind == _SETTINGS
    return CollectiveMismatchError(
        f"ranks have different {kind}: {name} on rank {', '.join(str(ranks[one]) for one in others)} "
        f"is not that of rank {ranks[0]}",
        rank=ranks[communicator.rank],
        peers=tuple(ranks[one] for one in others),
        expected=f"{here} on rank {ranks[0]}" if settings else None,
        seen=f"{there} on rank {ranks[others[0]]}" if settings else None,
        advice=_advice(kind, loads, ranks),
    )


def _advice(kind: str, loads: Sequence[list[int]], ranks: Sequence[int]) -> str:
    if kind == _SETTINGS:
        return "Give all ranks the same settings, and step schedulers on all ranks alike."
    most = max(count for count, _ in loads)
    loaded = [(ranks[rank], step) for rank, (count, step) in enumerate(loads) if count == most]
    if len(loaded) < len(loads):
        told = ", ".join(f"rank {rank}" for rank, _ in loaded)
        return (
            f"Only {told} loaded weights, before step {loaded[0][1]}. Call load_state_dict on every rank, or before "
            "the model is wrapped, which gives all ranks rank 0's. on_difference='repair' does that by itself."
        )
    return (
        "Change weights on all ranks alike. on_difference='repair' gives all ranks rank 0's weights instead; "
        "check_every=0 looks in the first step only, for ranks on processors that round differently."
    )


def _take_from_first_rank(belief: Belief, communicator: Communicator, difference: CollectiveMismatchError) -> None:
    """Give all ranks what rank 0 holds, and say on rank 0 why. Collective.

    Args:
        belief: of this rank.
        communicator: of the ranks.
        difference: that was found.
    """
    if communicator.rank == 0:
        _log.warning("%s; all ranks go on with what rank 0 holds", difference.problem)
    broadcast_parameters(belief.module, broadcast_buffers=False, comm=communicator)
    broadcast_optimizer_state(belief.model.optimizers, comm=communicator)
    for _, tensor in shared_tensors(belief.places):
        communicator.broadcast(tensor)


def digest_of_gradients(parameters: Iterable[torch.nn.Parameter]) -> str:
    """A digest of the gradients of ``parameters``; empty if all of them are zero."""
    given = [one.grad for one in parameters if one.grad is not None and one.grad.layout is torch.strided]
    return quick_digest(given).hex() if any(bool(one.any()) for one in given) else ""


def warn_of_equal_gradients(digests: Sequence[str], rank: int) -> None:
    """Say so, on rank 0, if all ranks computed bitwise the same first gradient.

    Args:
        digests: of each rank; empty where all gradients are zero.
        rank: this rank.
    """
    if rank == 0 and len(digests) > 1 and digests[0] and len(set(digests)) == 1:
        _log.warning(
            "all %d ranks computed the same gradient in the first step: does each read its own part of the data? "
            "Use torch.utils.data.distributed.DistributedSampler.",
            len(digests),
        )
