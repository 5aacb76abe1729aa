"""Mixing with neighbours, in full and in low precision, flat and by host."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from bagua.comm import Communicator, ProcessGroup, ReduceOp, Work, divide, followed
from bagua.compression import Codec, Metadata
from bagua.primitives.centralized import on_leaders
from bagua.primitives.reducers import ReducerMemory, State
from bagua.topology import Round, Turn

#: Flat memory like the tensor that is mixed, by name. ``Bucket.buffer`` is one.
Buffers = Callable[[str], torch.Tensor]


def is_global_mean(mixing: Round) -> bool:
    """Whether all ranks end with the mean of all ranks, which an allreduce computes best."""
    edges = mixing.edges
    return edges is not None and len(edges) == 1 and edges[0].is_mean


def neighbour_average(
    tensor: torch.Tensor, mixing: Round, communicator: Communicator, buffers: Buffers, *, async_op: bool = False
) -> Work | None:
    """Replace ``tensor`` by the weighted mean of itself and what its neighbours hold.

    ``x_i <- sum_j W_ij x_j``

    Ranks that all take the common mean do it by allreduce. Everyone else sends the tensor
    to each neighbour, one after the other, in an order in which no ranks wait for each other in a circle.

    Args:
        tensor: one-dimensional and contiguous, floating-point; equal in dtype and size on all ranks.
        mixing: for as many ranks as the communicator has; the same on all of them.
        communicator: communicator of the ranks that mix.
        buffers: scratch memory like ``tensor``.
        async_op: return a ``Work`` where a rank has one neighbour, or all take the mean;
            otherwise the call blocks all the same.

    Returns:
        A ``Work`` if the exchange is still under way, else None.

    Example:
        >>> from bagua.comm import solo_group
        >>> from bagua.topology import Ring
        >>> tensor = torch.ones(3)
        >>> communicator = solo_group().global_communicator
        >>> neighbour_average(tensor, Ring().round(1, 1), communicator, lambda name: torch.empty(3))
        >>> tensor
        tensor([1., 1., 1.])
    """
    if is_global_mean(mixing):
        divide(tensor, mixing.size)
        return communicator.allreduce(tensor, async_op=async_op)
    turns = mixing.turns(communicator.rank)
    own_weight = mixing[communicator.rank].own_weight
    met = turns[0] if len(turns) == 1 else None
    if met is not None and met.source is not None and met.destination is not None:
        received, weight = buffers("received"), met.weight

        def finish() -> None:  # Both ends compute the same two products, so equal weights give equal bits.
            tensor.mul_(own_weight).add_(received, alpha=weight)

        return followed(communicator.sendrecv(received, tensor, met.source, met.destination, async_op=async_op), finish)
    if turns:
        precise = torch.promote_types(tensor.dtype, torch.float32)
        out = buffers("mixed") if tensor.dtype == precise else None
        mixed = torch.mul(tensor.to(precise), own_weight, out=out)
        received = buffers("received")
        for turn in turns:
            _take_turn(turn, received, tensor, communicator)
            if turn.source is not None:
                mixed.add_(received, alpha=turn.weight)
        tensor.copy_(mixed)
    return None


def _take_turn(turn: Turn, received: torch.Tensor, sent: torch.Tensor, communicator: Communicator) -> None:
    if turn.source is None:
        assert turn.destination is not None
        communicator.send(sent, turn.destination)
    elif turn.destination is None:
        communicator.recv(received, turn.source)
    else:
        communicator.sendrecv(received, sent, turn.source, turn.destination)


def hierarchical_neighbour_average(
    tensor: torch.Tensor, between_hosts: Round, group: ProcessGroup, buffers: Buffers
) -> None:
    """Replace ``tensor`` by a weighted mean of the means of hosts.

    ``x_i <- sum_g V_hg mean(x_j, j on g)`` on every rank ``i`` of host ``h``

    Args:
        tensor: one-dimensional and contiguous, floating-point; equal in dtype and size on all ranks.
        between_hosts: ``V``, for as many ranks as there are hosts, already weighted for
            their sizes; see ``bagua.topology.weighted_by_size``.
        group: the ranks, and who leads on each host.
        buffers: scratch memory like ``tensor``.

    Example:
        >>> from bagua.comm import solo_group
        >>> from bagua.topology import Ring
        >>> tensor = torch.ones(3)
        >>> hierarchical_neighbour_average(tensor, Ring().round(1, 1), solo_group(), lambda name: torch.empty(3))
        >>> tensor
        tensor([1., 1., 1.])
    """

    def mix(total: torch.Tensor, leaders: Communicator) -> None:
        divide(total, group.local_size)
        neighbour_average(total, between_hosts, leaders, buffers)

    on_leaders(tensor, group, mix)


class DifferenceExchange:
    """Gossip in low precision: neighbours follow each rank by what it sends of its changes.

    Every rank ``i`` keeps an estimate ``w_i`` of itself, which all its neighbours know,
    and the weighted sum ``v_i`` of its neighbours' estimates: two buffers, whatever the
    number of neighbours. With ``y_i`` the weights after a local step, ``Q`` the codec, and ``W``
    the mixing matrix::

        z_i = y_i - w_i + (W_ii w_i + v_i - w_i)
        w_i <- w_i + Q(z_i);  v_i <- v_i + sum_j W_ij Q(z_j);  x_i = w_i

    The sender applies the decoded difference, as everyone else, so no rank's estimate ever
    differs from its owner's. A difference that is not finite is applied by no rank, and
    the rank that had it keeps its weights.

    The first exchange is in full precision, and starts the estimates from the weights. It is
    repeated if any rank's weights were not finite. State of another mixing, as from a
    checkpoint of more ranks, says nothing about these neighbours, so then, too, estimates
    start anew.

    Calls share the memory that they work in, so they come one after the other.

    Args:
        mixing: symmetric and doubly stochastic, or weighted by the sizes of hosts; the
            same in every round.
        codec: for the differences.

    Example:
        >>> from bagua.comm import solo_group
        >>> from bagua.compression import MinMaxUInt8
        >>> from bagua.topology import Ring
        >>> exchange = DifferenceExchange(Ring().round(1, 1), MinMaxUInt8())
        >>> memory = ReducerMemory(solo_group().global_communicator, 3, torch.float32)
        >>> memory.declare(exchange.state())
        >>> tensor = torch.ones(3)
        >>> exchange.run(tensor, solo_group().global_communicator, memory.state)
        >>> tensor
        tensor([1., 1., 1.])

    Paper: Tang et al., Communication compression for decentralized training, 2018 (DCD-PSGD).
    """

    def __init__(self, mixing: Round, codec: Codec) -> None:
        self._mixing = mixing
        self._codec = codec
        self._mark = zlib.crc32(repr(mixing).encode()) + 1
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    @staticmethod
    def state() -> tuple[State, ...]:
        """The estimates, which the first exchange starts, and ``started``: what tells their mixing from others."""
        return (State("estimate"), State("neighbours"), State("started", _not_started, per="flat"))

    def run(
        self, tensor: torch.Tensor, communicator: Communicator, state: dict[str, torch.Tensor], step: int = 0
    ) -> None:
        """Replace ``tensor`` by the new estimate, and bring ``state`` up to date.

        Args:
            tensor: one-dimensional and contiguous, floating-point; equal in dtype and size on all ranks.
            communicator: communicator of the ranks that mix.
            state: state of this rank and this tensor, as ``state`` declares it. Unchanged if a call fails.
            step: tells this call from others, where the codec rounds at random.
        """
        if int(state["started"]) != self._mark:
            self._start(tensor, communicator, state)
            return
        estimate, neighbours = state["estimate"], state["neighbours"]
        pull = self._mixing[communicator.rank].own_weight - 1.0
        metadata = Metadata.of(estimate)
        nbytes = self._codec.compressed_bytes(metadata)
        difference = self._buffer("difference", communicator, estimate)
        torch.add(neighbours, estimate, alpha=pull - 1.0, out=difference).add_(tensor)
        sent = self._buffer("sent", communicator, estimate, nbytes, torch.uint8)
        self._codec.for_draw(communicator.rank, step).compress(difference, out=sent)
        own = self._codec.decompress(sent, metadata, out=difference)
        received = self._receive(sent, communicator)
        for weight, row in received:
            decoded = self._codec.decompress(row, metadata, out=self._buffer("decoded", communicator, estimate))
            if _is_finite(decoded):
                neighbours.add_(decoded, alpha=weight)
        if not _is_finite(own):
            return
        estimate.add_(own)
        tensor.copy_(estimate)

    def _receive(self, sent: torch.Tensor, communicator: Communicator) -> list[tuple[float, torch.Tensor]]:
        """The neighbours' compressed differences, with their weights."""
        turns = self._mixing.turns(communicator.rank)
        rows = self._buffer("received", communicator, sent, len(turns) * sent.numel()).view(len(turns), sent.numel())
        for turn, row in zip(turns, rows, strict=True):
            _take_turn(turn, row, sent, communicator)
        return [(turn.weight, row) for turn, row in zip(turns, rows, strict=True) if turn.source is not None]

    def _buffer(
        self,
        name: str,
        communicator: Communicator,
        like: torch.Tensor,
        numel: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Memory for one call, which the next call uses again: to map new pages takes longer than to write them."""
        numel, dtype = like.numel() if numel is None else numel, dtype or like.dtype
        found = self._buffers.get((name, dtype, like.device))
        if found is None or found.numel() < numel:
            found = self._buffers[name, dtype, like.device] = communicator.empty(numel, dtype=dtype, device=like.device)
        return found[:numel]

    def _start(self, tensor: torch.Tensor, communicator: Communicator, state: dict[str, torch.Tensor]) -> None:
        """The first exchange: everyone's weights in full precision."""
        precise = tensor.to(state["estimate"].dtype)
        finite = torch.tensor([int(_is_finite(precise))], dtype=torch.int32, device=tensor.device)
        communicator.allreduce(finite, ReduceOp.MIN)
        gathered = torch.zeros_like(state["neighbours"])
        received = torch.empty_like(precise)
        for turn in self._mixing.turns(communicator.rank):
            _take_turn(turn, received, precise, communicator)
            if turn.source is not None:
                gathered.add_(received, alpha=turn.weight)
        if int(finite):
            state["estimate"].copy_(precise)
            state["neighbours"].copy_(gathered)
            state["started"].fill_(self._mark)


def _not_started(_: ReducerMemory) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cpu")


def _is_finite(tensor: torch.Tensor) -> bool:
    """A sum is the cheapest test; the rare sum that overflows is looked at again."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
