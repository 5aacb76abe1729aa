"""Whether ranks hold the same: digests that are cheap enough while training, and what rounding explains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from bagua.comm import Communicator, as_bytes

#: Sums of a digest: what changes several words must cancel out in one of them to be overlooked.
_SUMS = 256
#: The largest difference that is rounding, over the largest element of a tensor: so many units in the last place of its
#: dtype, and never more than this share. Ranks on other processors step from equal gradients with other last bits.
_ROUNDING_UNITS, _ROUNDING_SHARE = 256, 0.03


def quick_digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Eight bytes that show any change of one word of ``tensors``; ten times as fast as a cryptographic digest.

    It is the digest of 256 sums of words for each large tensor. Changes of several words that cancel out in one sum
    are overlooked: exchanging two words that lie a multiple of 2048 bytes apart is such a change, other training is
    not. Small tensors are read as they are, and all at once: a model may have hundreds of them.

    Example:
        >>> quick_digest([torch.zeros(3)]) == quick_digest([torch.zeros(3)]), len(quick_digest([]))
        (True, 8)
    """
    found = hashlib.sha256()
    small: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if flat.numel() * flat.itemsize < 8 * _SUMS:
            small.setdefault(flat.device, []).append(flat.view(torch.uint8))
            continue
        if flat.numel() * flat.itemsize % 8 or flat.data_ptr() % 8:
            flat = torch.cat([flat.view(torch.uint8), flat.new_zeros(8, dtype=torch.uint8)])
            flat = flat[: flat.numel() // 8 * 8]
        words = flat.view(torch.int64)
        whole = words.numel() // _SUMS * _SUMS
        for sums in (words[:whole].view(-1, _SUMS).sum(0), words[whole:]):
            found.update(as_bytes(sums.cpu().view(torch.uint8)))
    for together in small.values():
        found.update(as_bytes(torch.cat(together).cpu()))
    return found.digest()[:8]


def digest_of_gradients(parameters: Iterable[torch.nn.Parameter]) -> str:
    """A digest of the gradients of ``parameters``; empty if all of them are zero."""
    given = [one.grad for one in parameters if one.grad is not None and one.grad.layout is torch.strided]
    return quick_digest(given).hex() if any(bool(one.any()) for one in given) else ""


def differ_by_rounding(tensors: Sequence[torch.Tensor], communicator: Communicator) -> bool:
    """Whether what ranks hold is the same but for rounding. Collective.

    Args:
        tensors: tensors of this rank, equal in shapes and dtypes on all ranks.
        communicator: communicator of the ranks.
    """
    rounds = True
    for own in tensors:
        of_first = own.detach().clone()
        communicator.broadcast(of_first)
        rounds = rounds and _is_rounded(own.detach(), of_first)
    return all(communicator.allgather_object(rounds))


def _is_rounded(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    share = min(_ROUNDING_UNITS * torch.finfo(one.dtype).eps, _ROUNDING_SHARE)
    wide = torch.complex128 if one.is_complex() else torch.float64
    largest = float(other.to(wide).abs().nan_to_num(0.0, 0.0).max()) if other.numel() else 0.0
    return torch.allclose(one.to(wide), other.to(wide), rtol=0.0, atol=share * largest, equal_nan=True)
