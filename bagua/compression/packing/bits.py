"""Small whole numbers side by side in bytes."""

from __future__ import annotations

import torch

#: So many codes of a width as there are in a byte, as one integer, and what keeps each of them apart.
_WORDS = {4: torch.int16, 2: torch.int32}
_APART = {4: 0x0F0F, 2: 0x03030303}


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of ``uint8`` below ``2 ** bits``, 4 or 2 bits each, in rows of bytes; the first code is in the lowest bits.

    Example:
        >>> pack_codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist()
        [[33, 3]]
    """
    short = -codes.shape[1] % (8 // bits)
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    words = codes.view(_WORDS[bits])
    packed = words.clone()
    for place in range(1, 8 // bits):
        packed |= words >> place * (8 - bits)
    return packed.bitwise_and_(0xFF).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows that ``pack_codes`` was given, up to seven zeros longer."""
    words = packed.to(_WORDS[bits])
    spread = words.clone()
    for place in range(1, 8 // bits):
        spread |= words << place * (8 - bits)
    return spread.bitwise_and_(_APART[bits]).view(torch.uint8)


def bits_for(count: int) -> int:
    """Bits that tell ``count`` things apart.

    Example:
        >>> bits_for(4096), bits_for(1), bits_for(5)
        (12, 0, 3)
    """
    return (count - 1).bit_length()


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of ``int64`` below ``2 ** bits`` in rows of bytes, the lowest bit first.

    Example:
        >>> pack_bits(torch.tensor([[5, 1]]), 3).tolist()
        [[13]]
    """
    places = torch.arange(bits, device=numbers.device)
    ones = (numbers.unsqueeze(-1) >> places).bitwise_and_(1).view(len(numbers), -1)
    eights = torch.nn.functional.pad(ones, (0, -ones.shape[1] % 8)).view(len(numbers), -1, 8)
    return (eights << torch.arange(8, device=numbers.device)).sum(dim=-1).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """``count`` numbers of each row that ``pack_bits`` made."""
    ones = (packed.long().unsqueeze(-1) >> torch.arange(8, device=packed.device)).bitwise_and_(1)
    numbers = ones.view(len(packed), -1)[:, : count * bits].reshape(len(packed), count, bits)
    return (numbers << torch.arange(bits, device=packed.device)).sum(dim=-1)
