"""Checks of what optimizers are given."""

from __future__ import annotations

import torch

from bagua.checks import check_numbers, unusable, wrong_type


def check_not_negative(**numbers: float | torch.Tensor) -> None:
    """Raise ``ConfigurationError`` for the first of ``numbers`` that is below zero, or no number."""
    for name, number in numbers.items():
        value: object = number.item() if isinstance(number, torch.Tensor) and number.numel() == 1 else number
        check_numbers(lambda number: number >= 0, "a number >= 0", **{name: value})


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ``ConfigurationError`` unless these can be factors of running means."""
    expected = "two numbers in [0, 1)"
    pair: object = betas
    if not isinstance(pair, tuple | list) or not all(type(beta) in (int, float) for beta in pair):
        raise wrong_type("betas", expected, betas)
    if len(pair) != 2 or not all(0 <= beta < 1 for beta in pair):
        raise unusable("betas", expected, betas)
