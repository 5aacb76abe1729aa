"""Types of arguments on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from bagua.link import LinkSettings, parse_link

_YEAR_S = 365 * 24 * 3600


def link(text: str) -> LinkSettings:
    """A link, as ``bagua.link.parse_link`` reads it; argparse prints its complaints."""
    try:
        return parse_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def _number(fits: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan  # no range has it
        if not fits(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return number

    return parse


#: Numbers of seconds which a call of the system can wait for, with zero and without it.
seconds = _number(lambda number: 0 <= number <= _YEAR_S, f"seconds >= 0, at most {_YEAR_S} (a year)")
some_seconds = _number(lambda number: 0 < number <= _YEAR_S, f"seconds above 0, at most {_YEAR_S} (a year)")
above_zero = _number(lambda number: 0 < number < math.inf, "a finite number above 0")
