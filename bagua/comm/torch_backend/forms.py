"""The forms in which torch's groups take the arguments of a call: tensors or lists of them, with options or without.

Torch itself calls with lists and options; that costs a few comparisons here. All other forms are brought into this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from bagua.comm.torch_backend.hooks import hookable
from bagua.comm.torch_private import method_of
from bagua.errors import InvalidTypeError

_OPERATIONS = (ReduceOp, ReduceOp.RedOpType)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Tensor) for one in value)


def _is_number(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, Tensor)


#: Whether a value is of a kind. Options are of the class that the call has.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "tensor": lambda value: isinstance(value, Tensor),
    "list": _is_list,
    "lists": lambda value: isinstance(value, list | tuple) and all(_is_list(one) for one in value),
    "op": lambda value: isinstance(value, _OPERATIONS),
    "rank": _is_number,
    "sizes": lambda value: isinstance(value, list | tuple) and all(_is_number(one) for one in value),
    "timeout": lambda value: value is None or isinstance(value, timedelta),
}
#: What may be left out.
_DEFAULTS: dict[str, Any] = {"opts": None, "op": None, "timeout": None}
#: Where options have what other forms say with an argument.
_FIELDS = {"op": "reduceOp", "rank": "rootRank", "timeout": "timeout"}


def takes(options: type, *forms: str, anywhere: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method of a group take its arguments in all forms of torch, and leave the call to who serves its device.

    Args:
        options: class of the last argument.
        forms: parameters of each form, ``name:kind`` or only the kind, as in torch; first that of the method itself,
            whose last one are the options.
        anywhere: True if the method takes tensors of all devices; else the first tensor of a list that is not nested,
            or of a single one, tells who serves it.
    """
    parsed = [[_parameter(word) for word in form.split()] for form in forms]
    lists = [kind for _, kind in parsed[0] if kind != "opts"]
    count = len(lists) + 1
    nested = lists[:1] in (["list"], ["lists"])
    told_by = 1 if lists[:1] == ["lists"] else 0

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        made = hookable(method)

        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            usual = len(arguments) == count and type(arguments[-1]) is options and not keywords
            # Options alone do not tell: torch takes a tensor for a list of its rows.
            if not usual or (nested and type(arguments[0]) is not list):
                arguments = _usual(method.__name__, options, lists, parsed, arguments, keywords)
            if not anywhere and (other := self.elsewhere(arguments[told_by])):
                return method_of(other, method.__name__)(*arguments)
            return made(self, *arguments)

        return call

    return decorate


def _parameter(word: str) -> tuple[str, str]:
    name, _, kind = word.partition(":")
    return name, kind or name


def _usual(
    name: str,
    options: type,
    lists: Sequence[str],
    forms: list[list[tuple[str, str]]],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[Any, ...]:
    """The arguments in the form that the method takes."""
    for form in forms:
        values = _bind(form, options, arguments, keywords)
        if values is not None:
            return _converted(options, lists, form, values)
    given = [type(value).__name__ for value in arguments]
    given += [f"{key}={type(value).__name__}" for key, value in keywords.items()]
    raise InvalidTypeError(
        f"{name} does not take these arguments",
        expected=" or ".join(f"({', '.join(parameter for parameter, _ in form)})" for form in forms),
        seen=f"({', '.join(given)})",
        advice=f"See torch.distributed.ProcessGroup.{name}.",
    )


def _bind(
    form: list[tuple[str, str]], options: type, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any] | None:
    """The value of each parameter of a form; None if the arguments are not in that form."""
    names = [name for name, _ in form]
    values = dict(zip(names, arguments, strict=False))
    if len(arguments) > len(form) or values.keys() & keywords.keys() or keywords.keys() - set(names):
        return None
    values.update(keywords)
    for name, kind in form:
        if name not in values:
            if kind not in _DEFAULTS:
                return None
            values[name] = _DEFAULTS[kind]
        elif kind == "opts":
            if values[name] is not None and not isinstance(values[name], options):
                return None
        elif not _KINDS[kind](values[name]):
            return None
    return values


def _converted(
    options: type, lists: Sequence[str], form: list[tuple[str, str]], values: dict[str, Any]
) -> tuple[Any, ...]:
    own = values.get("opts") or options()
    converted: list[Any] = []
    for name, kind in form:
        value = values[name]
        if len(converted) < len(lists):
            wanted = lists[len(converted)]
            converted.append(value if wanted in (kind, "sizes") else [value])
        elif kind in _FIELDS and value is not None:
            setattr(own, _FIELDS[kind], value)
    return (*converted, own)
