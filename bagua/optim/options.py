"""Checks of what optimizers are given."""

from __future__ import annotations

import torch

from bagua.errors import ConfigurationError

__all__ = ["check_betas", "check_not_negative", "out_of_range"]


def check_not_negative(**numbers: float | torch.Tensor) -> None:
    """Raise ``ConfigurationError`` for the first of ``numbers`` that is below zero."""
    for name, number in numbers.items():
        if not number >= 0:
            raise out_of_range(name, "a number >= 0", number)


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ``ConfigurationError`` unless these can be factors of running means."""
    if not all(0 <= beta < 1 for beta in betas):
        raise out_of_range("betas", "two numbers in [0, 1)", betas)


def out_of_range(argument: str, expected: str, seen: object) -> ConfigurationError:
    """The error for a number out of its range."""
    return ConfigurationError("the optimizer cannot use this value", argument=argument, expected=expected, seen=seen)
