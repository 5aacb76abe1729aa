"""The forms in which torch's groups take the arguments of a call: tensors or lists of them, with options or without.

Torch itself calls with lists and options; that costs a few comparisons here. All other forms are brought into this one.

The hooks of torch 2.14 around calls are kept and fired in C++. A watched call passes through C++, which fires the hooks
before and after, and comes back here to be made. It leaves Python under the name of the method itself: C++ would
otherwise begin with the method in Python again.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from bagua.comm.torch_private import TORCH_NAME, CppBackend, method_of, set_default_timeout
from bagua.errors import InvalidTypeError

_log = logging.getLogger("bagua")
#: Whether this torch has hooks.
HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")


class Passage(CppBackend):
    """What torch finds registered for CPU tensors where it has hooks: a call that passes through comes back here.

    Args:
        stand_in: gets what comes from elsewhere, and new timeouts.
    """

    supports_abort_hooks = True

    def __init__(self, stand_in: Any) -> None:
        super().__init__(stand_in.rank(), stand_in.size())
        self._stand_in = stand_in
        self._passing = threading.local()
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        #: Whether calls pass: somebody has asked for hooks.
        self.watched = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name under which a recorder of torch files the calls."""
        return TORCH_NAME

    def _set_default_timeout(self, timeout: timedelta) -> None:
        set_default_timeout(self._stand_in, timeout)

    def registerAbortHook(self, number: int, hook: Callable[[], None]) -> None:  # noqa: N802 - torch's name
        """Call ``hook`` when a call fails, or the group is aborted."""
        self._abort_hooks[number] = hook
        self.watched = True

    def unregisterAbortHook(self, number: int) -> None:  # noqa: N802 - torch's name
        """Forget a hook."""
        self._abort_hooks.pop(number, None)

    def fire_abort_hooks(self) -> None:
        """Tell that calls end with an error."""
        for hook in list(self._abort_hooks.values()):
            try:
                hook()
            except Exception:  # noqa: BLE001 - no caller is there to raise it to
                _log.exception("an abort hook failed")

    def make(self, call: Callable[[], Any], passed: Callable[[], object]) -> Any:
        """The work of ``call``, made while ``passed`` goes through C++."""
        outcome: list[Any] = []

        def come_back() -> Any:
            try:
                outcome.append(call())
            except BaseException as error:  # noqa: BLE001 - C++ would raise another one
                outcome.append(error)
                return None
            return outcome[0]

        self._passing.call = come_back
        try:
            passed()  # It raises what a hook raises.
        finally:
            self._passing.call = None
        (work,) = outcome
        if isinstance(work, BaseException):
            self.fire_abort_hooks()
            raise work
        if (pending := getattr(work, "pending", None)) is not None and self._abort_hooks:
            pending.when_completed(functools.partial(self._look, pending))
        return work

    def _look(self, pending: Any) -> None:
        if pending.exception() is not None:
            self.fire_abort_hooks()


def _of_stand_in(name: str) -> property:
    return property(lambda self: getattr(self._stand_in, name))


# C++ asks for these in Python, where it would find its own properties, and ask again without end.
for _name in vars(CppBackend):
    if (_name == "options" or "supports_" in _name) and _name not in vars(Passage):
        setattr(Passage, _name, _of_stand_in(_name))


def _arrival(name: str) -> Callable[..., Any]:
    def arrive(self: Any, *arguments: Any) -> Any:
        call = getattr(self._passing, "call", None)
        if call is None:
            return method_of(self._stand_in, name)(*arguments)
        self._passing.call = None
        return call()

    return arrive


def _lacks_tensors(arguments: list[Any]) -> bool:
    """Whether there are lists for tensors, and no tensor is in one: torch does not let such calls pass."""
    given = [one for one in arguments if isinstance(one, list | torch.Tensor)]
    return bool(given) and all(isinstance(one, list) and not one for one in given)


def hookable(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of a group; through C++ where somebody watches the group."""
    name = method.__name__
    passed = getattr(dist.ProcessGroup, name, None)
    if not HAS_HOOKS or passed is None:
        return method

    def through(self: Any, *arguments: Any) -> Any:
        return passed(self, *arguments)

    through.__code__ = through.__code__.replace(co_name=name)
    setattr(Passage, name, _arrival(name))

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        passage = self.passage
        if passage is None or not passage.watched or _lacks_tensors([*arguments, *keywords.values()]):
            return method(self, *arguments, **keywords)
        made = functools.partial(method, self, *arguments, **keywords)
        return passage.make(made, functools.partial(through, self, *arguments, **keywords))

    return call


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


#: Name and kind of each parameter.
_Form = list[tuple[str, str]]


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
                arguments = _usual(method.__name__, options, parsed, arguments, keywords)
            if not anywhere and (other := self.elsewhere(arguments[told_by])):
                return method_of(other, method.__name__)(*arguments)
            return made(self, *arguments)

        return call

    return decorate


def _parameter(word: str) -> tuple[str, str]:
    name, _, kind = word.partition(":")
    return name, kind or name


def _usual(
    name: str, options: type, forms: list[_Form], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments in the form that the method takes."""
    for form in forms:
        values = _bind(form, options, arguments, keywords)
        if values is not None:
            return _converted(options, forms[0], form, values)
    given = [type(value).__name__ for value in arguments]
    given += [f"{key}={type(value).__name__}" for key, value in keywords.items()]
    raise InvalidTypeError(
        f"{name} does not take these arguments",
        expected=" or ".join(f"({', '.join(parameter for parameter, _ in form)})" for form in forms),
        seen=f"({', '.join(given)})",
        advice=f"See torch.distributed.ProcessGroup.{name}.",
    )


def _bind(form: _Form, options: type, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any] | None:
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


def _converted(options: type, usual: _Form, form: _Form, values: dict[str, Any]) -> tuple[Any, ...]:
    own = values.get("opts") or options()
    converted: list[Any] = []
    for name, kind in form:
        value = values[name]
        if len(converted) < len(usual) - 1:  # The last one are the options.
            _, wanted = usual[len(converted)]
            converted.append(value if wanted in (kind, "sizes") else [value])
        elif kind in _FIELDS and value is not None:
            setattr(own, _FIELDS[kind], value)
    return (*converted, own)
