"""What is put on a user's module, and what the module is without it: that is what is copied and pickled.

The module keeps its class: a class made at run time hid names of the user.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

#: The switch of PyTorch's DDP: whether the backward pass of the next forward pass is a step.
SWITCH = "require_backward_grad_sync"


class Wrapping:
    """What is put on a module: hooks, and names in its ``__dict__``. One for each module.

    Args:
        module: a module of any class, which stays what it is.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._reference = weakref.ref(module)
        self._handles: list[RemovableHandle] = []
        self._names = {"__deepcopy__", "__reduce_ex__", SWITCH}
        module.__dict__.update({"__deepcopy__": self._deepcopy, "__reduce_ex__": self._reduce})

    @property
    def module(self) -> torch.nn.Module:
        """The module; what is on it knows it by a weak reference, so that it can be dropped."""
        module = self._reference()
        assert module is not None, "it is asked through the module"
        return module

    @classmethod
    def to(cls, module: torch.nn.Module) -> Wrapping:
        """What is on ``module``; from now on its copies are plain."""
        known = getattr(module.__dict__.get("__reduce_ex__"), "__self__", None)
        return known if isinstance(known, cls) else cls(module)

    def add(self, handles: Iterable[RemovableHandle] = (), names: Mapping[str, Any] = {}) -> None:
        """Note hooks that were registered, and put ``names`` on the module."""
        present = (one for one in self._handles if one.id in (one.hooks_dict_ref() or ()))
        self._handles = [*present, *handles]
        self._names.update(names)
        self.module.__dict__.update(names)

    def twin(self) -> torch.nn.Module:
        """A plain module with the same contents: not a copy, it shares everything but what is put on."""
        hooks: dict[int, set[int]] = {}
        for handle in self._handles:
            hooks.setdefault(id(handle.hooks_dict_ref()), set()).add(handle.id)
        twin: torch.nn.Module = object.__new__(type(self.module))
        for name, value in self.module.__dict__.items():
            if name not in self._names:
                gone = hooks.get(id(value))
                twin.__dict__[name] = value if gone is None else _without(value, gone)
        return twin

    def _deepcopy(self, memo: dict[int, Any]) -> torch.nn.Module:
        if hasattr(type(self.module), "__deepcopy__"):  # It would copy the engine, too.
            return copy.deepcopy(self.twin(), memo)
        # Python notes what it makes before it copies what that refers to, which may be this module again.
        own = self.module.__dict__.pop("__deepcopy__", self._deepcopy)
        try:
            return copy.deepcopy(self.module, memo)
        finally:
            self.module.__dict__["__deepcopy__"] = own

    def _reduce(self, protocol: Any) -> Any:
        return self.twin().__reduce_ex__(protocol)


def _without(hooks: Mapping[int, Any], gone: set[int]) -> Any:
    kind: Any = type(hooks)
    return kind((key, hook) for key, hook in hooks.items() if key not in gone)
