"""The hooks of torch 2.14 around calls, which torch keeps and fires in C++.

A watched call passes through C++, which fires the hooks before and after, and comes back here to be made. It leaves
Python under the name of the method itself: C++ would otherwise begin with the method in Python again.
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

from bagua.comm.startup.choice import TORCH_NAME
from bagua.comm.torch_private import CppBackend, method_of, set_default_timeout

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
