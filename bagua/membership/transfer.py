"""Giving a newcomer the state, in pieces, with a digest of all of it."""

from __future__ import annotations

import hashlib
import logging

import torch

from bagua.comm import Communicator, as_bytes, decode, encode, encode_failure
from bagua.errors import BaguaError, CollectiveMismatchError

__all__ = ["receive_state", "send_state"]

_log = logging.getLogger("bagua")
#: Small enough that a member that is lost in between is noticed soon on a slow link.
_PIECE_BYTES = 4 * 1024 * 1024


def send_state(state: object, communicator: Communicator, newcomer: int) -> None:
    """Send ``state`` to rank ``newcomer`` of the communicator.

    Args:
        state: numbers, strings, tensors, and containers of these.
        communicator: communicator of the epoch.
        newcomer: calls ``receive_state``.

    Raises:
        CommunicationError: it is lost.
    """
    try:
        data = encode(state)
    except BaguaError as error:  # The newcomer has to go; this member trains on.
        _log.warning("islands: newcomers cannot come in, because the state cannot be sent: %s", error.problem)
        data = encode_failure(error.problem)
    communicator.send(torch.tensor([data.numel()]), newcomer)
    for piece in torch.split(data, _PIECE_BYTES):
        communicator.send(piece, newcomer)
    communicator.send(_digest(data), newcomer)


def receive_state(communicator: Communicator, donor: int) -> object:
    """The state that rank ``donor`` of the communicator sends.

    Raises:
        CommunicationError: the donor is lost, or what arrived is not what was sent.
        ConfigurationError: the donor holds something that cannot be sent.
    """
    size = torch.zeros(1, dtype=torch.int64)
    communicator.recv(size, donor)
    data = torch.empty(int(size), dtype=torch.uint8)
    for piece in torch.split(data, _PIECE_BYTES):
        communicator.recv(piece, donor)
    digest = torch.empty(32, dtype=torch.uint8)
    communicator.recv(digest, donor)
    if not torch.equal(digest, _digest(data)):
        raise CollectiveMismatchError(
            "the state that arrived is not the one that was sent",
            call="the transfer of the state to a newcomer",
            peers=(communicator.ranks[donor],),
            expected=as_bytes(digest).hex(),
            seen=as_bytes(_digest(data)).hex(),
        )
    return decode(data)


def _digest(data: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(as_bytes(data)).digest()), dtype=torch.uint8)
