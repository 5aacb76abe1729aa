"""Checks of what users pass, one for each kind of value. Each is called with the arguments under their names.

A value of a wrong type is an ``InvalidTypeError``, one out of its range a ``ConfigurationError``, which
the former also is.
"""

from __future__ import annotations

import difflib
import functools
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from bagua.errors import ConfigurationError, InvalidTypeError

P = ParamSpec("P")
T = TypeVar("T")


def renaming(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let errors about arguments of what a function calls name the arguments of that function.

    Args:
        names: name of each argument here, by its name there.

    Example:
        >>> @renaming(output="recv_tensor")
        ... def receive(recv_tensor):
        ...     raise ConfigurationError("it is too small", argument="output")
        >>> receive(None)
        Traceback (most recent call last):
        bagua.errors.ConfigurationError: it is too small (argument recv_tensor)
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            try:
                return function(*arguments, **keywords)
            except ConfigurationError as error:
                error.argument = names.get(error.argument or "", error.argument)
                raise

        return call

    return decorate


def install_command(extra: str) -> str:
    """The command that installs what the extra ``extra`` of this project needs.

    Example:
        >>> install_command("ray")
        "pip install 'bagua-torch[ray]'"
    """
    return f"pip install 'bagua-torch[{extra}]'"


def check_flags(**flags: object) -> None:
    """Each of ``flags`` must be True or False.

    Raises:
        InvalidTypeError: naming the first one that is not.

    Example:
        >>> check_flags(average=True, hierarchical=False)
        >>> check_flags(average="no")
        Traceback (most recent call last):
        bagua.errors.InvalidTypeError: average has the wrong type (argument average, expected True or False, seen 'no')
    """
    check_kind(bool, "True or False", **flags)


def check_kind(kind: Any, expected: str, **values: object) -> None:
    """Each of ``values`` must be an instance of ``kind``.

    Args:
        kind: a class, or several; ``Callable`` is one of them.
        expected: description of ``kind``, in words.
        values: values that were given, by the names of the arguments.

    Raises:
        InvalidTypeError: naming the first one that is not.
    """
    for argument, value in values.items():
        if not isinstance(value, kind):
            raise wrong_type(argument, expected, value)


def check_whole(minimum: int, /, **numbers: object) -> None:
    """Each of ``numbers`` must be an integer, and at least ``minimum``.

    Raises:
        InvalidTypeError: naming the first one that is no integer.
        ConfigurationError: naming the first one that is too small.

    Example:
        >>> check_whole(0, warmup_steps=0)
    """
    for argument, number in numbers.items():
        expected = f"a whole number >= {minimum}"
        if type(number) is not int:
            raise wrong_type(argument, expected, number)
        if number < minimum:
            raise unusable(argument, expected, number)


def check_numbers(fits: Callable[[float], bool], expected: str, **numbers: object) -> None:
    """Each of ``numbers`` must be a real number for which ``fits`` is true; NaN never is.

    Raises:
        InvalidTypeError: naming the first one that is no number.
        ConfigurationError: naming the first one that does not fit.

    Example:
        >>> check_numbers(lambda ratio: 0 < ratio <= 1, "a number above 0, at most 1", ratio=0.5)
    """
    for argument, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise wrong_type(argument, expected, number)
        value = float(number)
        if math.isnan(value) or not fits(value):
            raise unusable(argument, expected, number)


def check_choice(choices: Sequence[object], **values: object) -> None:
    """Each of ``values`` must be one of ``choices``.

    Raises:
        ConfigurationError: naming the first one that is not, and the choices.

    Example:
        >>> check_choice((8, 2, None), value_bits=8)
    """
    for argument, value in values.items():
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise unusable(argument, " or ".join(map(repr, choices)), value)


def refuse(argument: str, value: object, nothing: object, advice: str, of: str = "torch.distributed") -> None:
    """Raise ``ConfigurationError`` if ``argument``, which torch has, asks for something that does not exist here."""
    if value is not nothing and value != nothing:
        raise ConfigurationError(
            f"this argument of {of} is not supported",
            argument=argument,
            expected=repr(nothing),
            seen=repr(value),
            advice=advice,
        )


def wrong_type(argument: str, expected: str, seen: object) -> InvalidTypeError:
    """The error for a value of a wrong type."""
    text = f"the class {seen.__name__}" if isinstance(seen, type) else reprlib.repr(seen)
    return InvalidTypeError(f"{argument} has the wrong type", argument=argument, expected=expected, seen=text)


def unusable(argument: str, expected: str, seen: object) -> ConfigurationError:
    """The error for a value that is out of its range."""
    text = reprlib.repr(seen)
    return ConfigurationError(
        f"{argument} must be {expected}, not {text}", argument=argument, expected=expected, seen=text
    )


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question that names the one of ``known`` which is spelled most like ``given``; empty if none is.

    Example:
        >>> did_you_mean("ByteGrad", ["bytegrad", "qadam"]), did_you_mean("x", ["bytegrad"])
        ("Did you mean 'bytegrad'?", '')
    """
    by_letters = {name.lower().replace("_", "").replace("-", ""): name for name in known}
    letters = given.lower().replace("_", "").replace("-", "")
    close = difflib.get_close_matches(letters, by_letters, n=1)
    return f"Did you mean {by_letters[close[0]]!r}?" if close else ""
