"""Types of arguments on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from bagua.link import LinkSettings, parse_link

_Value = TypeVar("_Value")


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
    """A finite number of seconds, zero or more."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number >= 0, got {text}")
    return number
