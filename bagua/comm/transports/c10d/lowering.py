"""From a described call to the calls that a ``torch.distributed`` backend has.

What a backend lacks is supplied from what it has. Copies of dtypes that it does not
know travel as bytes; int16 is reduced as int32 and complex numbers as pairs of reals
where that means the same; every other reduction gathers the operands and folds them
in rank order, so that all ranks get the same bits.

Every method returns the started works and what is left to do once they are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm.call import KINDS, POINT_TO_POINT, Call
from bagua.comm.reduction import OPERATIONS, divide, fold
from bagua.comm.torch_private import end_coalescing, method_of, source_rank, start_coalescing
from bagua.errors import CollectiveMismatchError


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension with stride 1; a single element may claim any other stride.

    Args:
        tensor: contiguous.
    """
    flat = tensor.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of uint8."""
    return flattened(tensor).view(torch.uint8)


Finish = Callable[[], object]
#: Works of the backend, and what completes the call after them.
Started = tuple[tuple[Any, ...], Finish | None]

#: Of users' messages.
MESSAGE_TAG = 0
#: Of messages that a collective is made of; 1 is that of the poison.
_EXCHANGE_TAG = 2


def as_timedelta(seconds: float) -> timedelta:
    """``seconds`` for torch, which counts milliseconds and takes 0 for "no limit"."""
    return timedelta(seconds=max(seconds, 0.001))


@dataclass(frozen=True)
class Abilities:
    """What a backend does by itself.

    Attributes:
        copies: dtypes that it moves.
        reductions: pairs of reduction and dtype that it reduces, with equal bits on all ranks.
        reduce_scatters: it has a reduce-scatter of its own, for the same pairs, that can be polled.
        grouped_messages: several messages must be started as one group (NCCL).
        any_source: it can receive from whichever rank sends first.
        device_type: type of the device on which barriers run.
        messages_from_bytes: from this size of a share on, alltoall and allgather are better made of messages; None
            where never.
        pairs_to_bytes: up to this size two ranks are faster if each sends the other its operand, and both add.
    """

    copies: frozenset[torch.dtype]
    reductions: frozenset[tuple[str, torch.dtype]]
    reduce_scatters: bool = False
    grouped_messages: bool = False
    any_source: bool = False
    device_type: str = "cpu"
    messages_from_bytes: int | None = None
    pairs_to_bytes: int = 0


class Lowering:
    """Starts described calls on one backend.

    Args:
        group: the backend object of torch.
        rank: this rank.
        size: number of ranks.
        abilities: operations and dtypes that the backend serves by itself.
    """

    def __init__(self, group: Any, rank: int, size: int, abilities: Abilities) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._abilities = abilities
        self._copies = abilities.copies
        self._reductions, self._pairs_to_bytes = abilities.reductions, abilities.pairs_to_bytes
        # Setting up an options object costs as much as the rest of a call; they are only read.
        self._options: dict[tuple[str, str, int, float], Any] = {}
        #: Those of allreduce once more: one look-up says that the backend can do it, and how.
        self._allreduces: dict[tuple[str, torch.dtype, float], Any] = {}
        self._all_gather = method_of(group, "all_gather_single")
        self._reduce_scatter = method_of(group, "reduce_scatter_single")
        self._all_to_all = method_of(group, "all_to_all_single")

    def start(self, call: Call, source: torch.Tensor | None, target: torch.Tensor | None, timeout_s: float) -> Started:
        """Start ``call``; see ``bagua.comm.transports.contract`` for what the tensors are."""
        started: Started = _STARTERS[call[0]](self, call, source, target, timeout_s)
        return started

    def takes_messages(self, call: Call) -> bool:
        """Whether ``call`` is started as messages between pairs; equal on all ranks."""
        kind = call[0]
        if kind in POINT_TO_POINT:
            return True
        least = self._abilities.messages_from_bytes
        return least is not None and kind in _EXCHANGES and call.nbytes >= least

    # Reductions.

    def allreduce(self, call: Call, _: torch.Tensor | None, target: torch.Tensor, timeout_s: float) -> Started:
        """Reduce in place on every rank."""
        options = self._allreduces.get((call[3], target.dtype, timeout_s))
        if options is None and (call.reduction, target.dtype) in self._reductions:
            options = self._prepared("allreduce", dist.AllreduceOptions, timeout_s, call.reduction)
            self._allreduces[call.reduction, target.dtype, timeout_s] = options
        if options is None:
            return self._allreduce_otherwise(call, target, timeout_s)
        # Of one or two elements the backend takes as few turns.
        if self._size == 2 and call[3] in _SUMS and target.numel() > 2 and target.nbytes <= self._pairs_to_bytes:
            return self._sum_of_two(call, target, timeout_s)
        return (self._group.allreduce([target], options),), None

    def _sum_of_two(self, call: Call, target: torch.Tensor, timeout_s: float) -> Started:
        options = self._prepared("alltoall", dist.AllToAllOptions, timeout_s)
        mine = flattened(target)
        # One more element, a one, shows that the other rank sends as many: Gloo takes fewer without a word.
        sent = torch.cat((mine, mine.new_ones(1)))
        received = torch.zeros_like(sent)
        counts = [0, len(sent)] if self._rank == 0 else [len(sent), 0]

        def add() -> None:
            if received[-1] != 1:
                raise CollectiveMismatchError(
                    "ranks disagree on what they are doing",
                    expected=f"{call} on both ranks",
                    seen="fewer elements on the other rank",
                    advice="All ranks must make the same calls, in the same order, with the same dtype and size.",
                )
            theirs = received[:-1]
            fold([mine, theirs] if self._rank == 0 else [theirs, mine], call.reduction, mine)

        return (self._all_to_all(received, sent, counts, counts, options),), add

    def _allreduce_otherwise(self, call: Call, target: torch.Tensor, timeout_s: float) -> Started:
        reduction, dtype = call.reduction, target.dtype
        if reduction == "avg" and ("sum", dtype) in self._reductions:
            works, _ = self.allreduce(call._replace(reduction="sum"), None, target, timeout_s)
            return works, lambda: divide(target, self._size)
        if dtype.is_complex and reduction in ("sum", "avg"):
            return self.allreduce(call, None, torch.view_as_real(target), timeout_s)
        if dtype is torch.int16 and (reduction, torch.int32) in self._reductions:
            wide = target.to(torch.int32)
            works, add = self.allreduce(call, None, wide, timeout_s)
            return works, lambda: (add and add(), target.copy_(wide))
        parts = target.new_empty((self._size, target.numel()))
        works, _ = self._allgather(target, parts, timeout_s)
        flat = flattened(target)
        return works, lambda: fold(list(parts.unbind()), reduction, flat)

    def reduce(self, call: Call, _: torch.Tensor | None, target: torch.Tensor, timeout_s: float) -> Started:
        """Reduce into the root's tensor; backends spoil the tensors of the others, hence a copy."""
        at_root = call.root == self._rank
        reduction = "sum" if call.reduction == "avg" else call.reduction
        if (reduction, target.dtype) not in self._reductions:
            return self._reduce_otherwise(call, target, timeout_s)
        scratch = target if at_root else target.clone()
        options = self._prepared("reduce", dist.ReduceOptions, timeout_s, reduction, call.root)
        works = (self._group.reduce([scratch], options),)
        if at_root and call.reduction == "avg":
            return works, lambda: divide(target, self._size)
        return works, None

    def _reduce_otherwise(self, call: Call, target: torch.Tensor, timeout_s: float) -> Started:
        flat = flattened(target)
        at_root = call.root == self._rank
        parts = target.new_empty((self._size, target.numel())) if at_root else None
        works, _ = self.gather(call, flat, parts, timeout_s)
        if parts is None:
            return works, None
        return works, lambda: fold(list(parts.unbind()), call.reduction, flat)

    def reduce_scatter(self, call: Call, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Started:
        """Reduce, and keep this rank's share."""
        reduction = call.reduction
        flat, shares = flattened(target), flattened(source)
        if self._abilities.reduce_scatters:
            if (reduction, flat.dtype) in self._reductions:
                options = self._prepared("reduce_scatter", dist.ReduceScatterOptions, timeout_s, reduction)
                return (self._reduce_scatter(flat, shares, options),), None
            if flat.dtype.is_complex and reduction in ("sum", "avg"):
                reals, real_shares = torch.view_as_real(flat), torch.view_as_real(shares)
                return self.reduce_scatter(call, real_shares, reals, timeout_s)
        parts = shares.new_empty((self._size, flat.numel()))
        works, _ = self._alltoall(shares, parts, timeout_s)
        return works, lambda: fold(list(parts.unbind()), reduction, flat)

    # Copies.

    def broadcast(self, call: Call, _: torch.Tensor | None, target: torch.Tensor, timeout_s: float) -> Started:
        """Copy the root's tensor to all others."""
        options = self._options.get(("broadcast", "", call.root, timeout_s))
        if options is None:
            options = self._prepared("broadcast", dist.BroadcastOptions, timeout_s, root=call.root)
        tensor = target if target.dtype in self._copies else as_bytes(target)
        return (self._group.broadcast([tensor], options),), None

    def allgather(self, call: Call, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Started:
        """Gather everyone's share everywhere."""
        if self.takes_messages(call):
            return self._exchange([self._movable(source)] * self._size, self._rows(target))
        return self._allgather(source, target, timeout_s)

    def _allgather(self, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Started:
        options = self._prepared("allgather", dist.distributed_c10d.AllgatherOptions, timeout_s)
        return (self._all_gather(self._movable(target), self._movable(source), options),), None

    def gather(self, call: Call, source: torch.Tensor, target: torch.Tensor | None, timeout_s: float) -> Started:
        """Gather everyone's share on the root."""
        options = self._prepared("gather", dist.GatherOptions, timeout_s, root=call.root)
        share = self._movable(source)
        rows = [] if target is None else [self._rows(target)]
        return (self._group.gather(rows, [share], options),), None

    def scatter(self, call: Call, source: torch.Tensor | None, target: torch.Tensor, timeout_s: float) -> Started:
        """Give everyone a share of the root's tensor."""
        options = self._prepared("scatter", dist.ScatterOptions, timeout_s, root=call.root)
        rows = [] if source is None else [self._rows(source)]
        return (self._group.scatter([self._movable(target)], rows, options),), None

    def alltoall(self, call: Call, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Started:
        """Exchange equal shares."""
        if self.takes_messages(call):
            return self._exchange(self._rows(source), self._rows(target))
        return self._alltoall(source, target, timeout_s)

    def _alltoall(self, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Started:
        options = self._prepared("alltoall", dist.AllToAllOptions, timeout_s)
        work = self._all_to_all(self._movable(target), self._movable(source), [], [], options)
        return (work,), None

    def alltoall_v(self, call: Call, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Started:
        """Exchange shares of different sizes."""
        options = self._prepared("alltoall", dist.AllToAllOptions, timeout_s)
        unit = 1 if source.dtype in self._copies else source.element_size()
        receive = [count * unit for count in call.recv_counts]
        send = [count * unit for count in call.send_counts]
        work = self._all_to_all(self._movable(target), self._movable(source), receive, send, options)
        return (work,), None

    # Messages.

    def send(self, call: Call, source: torch.Tensor, _: object, __: float) -> Started:
        """Send to ``call.root``."""
        return (self._group.send([self._movable(source)], call.root, MESSAGE_TAG),), None

    def recv(self, call: Call, source: torch.Tensor | None, target: torch.Tensor, __: float) -> Started:
        """Receive from ``call.root``; if that is no rank, from any, whose rank ``source`` takes."""
        if call.root < 0:
            if source is None or not self._abilities.any_source:
                raise NotImplementedError("it receives from a rank that is named only")
            # Gloo insists on room for something; an empty message leaves it alone.
            room = self._movable(target) if target.numel() else target.new_empty(1, dtype=torch.uint8)
            sender, work = source, self._group.recv_anysource([room], MESSAGE_TAG)
            return (work,), lambda: sender.fill_(source_rank(work))
        return (self._group.recv([self._movable(target)], call.root, MESSAGE_TAG),), None

    def sendrecv(self, call: Call, source: torch.Tensor, target: torch.Tensor, _: float) -> Started:
        """Send to ``call.root`` and receive from ``call.source`` at the same time."""
        if call.root == self._rank:
            flattened(target).copy_(flattened(source))
            return (), None
        outgoing, incoming = self._movable(source), self._movable(target)
        if self._abilities.grouped_messages:
            start_coalescing(self._group)
            self._group.send([outgoing], call.root, MESSAGE_TAG)
            self._group.recv([incoming], call.source, MESSAGE_TAG)
            return (end_coalescing(self._group),), None
        receiving = self._group.recv([incoming], call.source, MESSAGE_TAG)
        return (self._group.send([outgoing], call.root, MESSAGE_TAG), receiving), None

    def _exchange(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> Started:
        """Send every rank its share, all at once.

        Gloo sends a message once its receiver has asked for it, on the connection that the receiver's own message goes
        through. Asking for everything first lets both directions of a link be used at a time, which takes half as
        long; Gloo's own alltoall and allgather send first.
        """
        others = [(self._rank + step) % self._size for step in range(1, self._size)]
        receiving = [self._group.recv([incoming[other]], other, _EXCHANGE_TAG) for other in reversed(others)]
        sending = [self._group.send([outgoing[other]], other, _EXCHANGE_TAG) for other in others]
        incoming[self._rank].copy_(outgoing[self._rank])
        return (*sending, *receiving), None

    def barrier(self, _: Call, __: object, ___: object, timeout_s: float) -> Started:
        """Wait for everyone."""
        options = self._prepared("barrier", dist.BarrierOptions, timeout_s)
        if self._abilities.device_type != "cpu":
            # Left to itself NCCL takes the device with the number of the rank.
            options.device = torch.device(self._abilities.device_type, torch.accelerator.current_device_index())
        return (self._group.barrier(options),), None

    # What they have in common.

    def _movable(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, flat, in a dtype that the backend moves."""
        return flattened(tensor) if tensor.dtype in self._copies else as_bytes(tensor)

    def _rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(self._movable(tensor).view(self._size, -1).unbind())

    def _prepared(self, kind: str, options_class: Any, timeout_s: float, reduction: str = "", root: int = -1) -> Any:
        key = (kind, reduction, root, timeout_s)
        options = self._options.get(key)
        if options is None:
            options = options_class()
            options.timeout = as_timedelta(timeout_s)
            if reduction:
                options.reduceOp = OPERATIONS[reduction]
            if root >= 0:
                options.rootRank = root
            if len(self._options) > 1000:  # Somebody passes another timeout every time.
                self._options.clear()
                self._allreduces.clear()
            self._options[key] = options
        return options


#: What ``Abilities.pairs_to_bytes`` and ``messages_from_bytes`` are about.
_SUMS = ("sum", "avg")
_EXCHANGES = frozenset({"allgather", "alltoall"})

#: Not bound methods: a cycle would keep torch's object alive until the next garbage collection.
_STARTERS: dict[str, Callable[..., Started]] = {kind: getattr(Lowering, kind) for kind in KINDS}
