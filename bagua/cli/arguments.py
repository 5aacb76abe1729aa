"""Types of arguments on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from bagua.link import LinkSettings, parse_link

_Value = TypeVar("_Value")
_YEAR_S = 365 * 24 * 3600


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """``parse``, whose complaints argparse prints."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def link(text: str) -> LinkSettings:
    """A link, as ``bagua.link.parse_link`` reads it."""
    return argument(parse_link)(text)


def positive(text: str) -> int:
    """A whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def seconds(text: str) -> float:
    """A number of seconds, zero or more, which a call of the system can wait for."""
    number = _float(text)
    if not 0 <= number <= _YEAR_S:
        raise argparse.ArgumentTypeError(f"expected seconds >= 0, at most {_YEAR_S} (a year), got {text}")
    return number


def above_zero(text: str) -> float:
    """A finite number above zero."""
    number = _float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text}")
    return number


def some_seconds(text: str) -> float:
    """A number of seconds above zero, which a call of the system can wait for."""
    number = _float(text)
    if not 0 < number <= _YEAR_S:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, at most {_YEAR_S} (a year), got {text}")
    return number


def _float(text: str) -> float:
    """The number, or NaN, which no range has."""
    try:
        return float(text)
    except ValueError:
        return math.nan
