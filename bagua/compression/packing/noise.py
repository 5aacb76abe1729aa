"""Random numbers for rounding, equal wherever the seed is."""

from __future__ import annotations

import torch

_BITS = 64
_MASK = 2**_BITS - 1
#: Sixteen random bits are enough: what they miss is a 131072nd part of a step.
_PER_DRAW = 4
_SPAN = 2**16


def mixed_seed(*numbers: int) -> int:
    """One seed made of several numbers, which differs if one of them does.

    Example:
        >>> mixed_seed(0, 1) != mixed_seed(1, 0)
        True

    Source: the finalizer of Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1


def noise_like(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers above 0 and below 1, all equally likely: single precision, in the shape of ``rows``."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    drawn = torch.empty(-(-rows.numel() // _PER_DRAW), dtype=torch.int64, device=rows.device)
    # One draw of 64 bits serves four elements, which takes a third of the time.
    drawn.random_(-(2**63), None, generator=generator)
    noise = drawn.view(torch.int16)[: rows.numel()].float()
    return noise.add_(_SPAN / 2 + 0.5).div_(_SPAN).view(rows.shape)
