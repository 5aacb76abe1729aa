"""Names of a package that few programs ask for: each is imported when it is asked for (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def late(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What ``package`` has as ``__getattr__`` and ``__dir__``.

    Args:
        package: name of the package.
        places: module of each name; ``module:other`` where it has another name there.

    Example:
        >>> find, names = late("bagua", {"sqrt": "math"})
        >>> find("sqrt")(4.0), "sqrt" in names()
        (2.0, True)
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = places[name].partition(":")
        value = getattr(importlib.import_module(module), there or name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names
