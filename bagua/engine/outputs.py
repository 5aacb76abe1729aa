"""Finding the tensors in whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

#: So many objects of unknown classes are looked into, one inside the other. Outputs that
#: keep a reference to their model, or to a trainer, would lead everywhere otherwise.
_DEPTH_OF_UNKNOWN = 3

_LEAVES = (str, bytes, int, float, complex, type, ModuleType, torch.nn.Module)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested sequences, mappings, dataclasses and plain objects with attributes.

    Args:
        value: value that a forward pass returned. Objects that contain themselves are visited once.

    Example:
        >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]
    """
    if isinstance(value, torch.Tensor):  # by far the most common output
        yield value
        return
    pending: list[tuple[Any, int]] = [(value, 0)]
    seen = set()
    while pending:
        item, depth = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None and id(item) not in seen:
            seen.add(id(item))
            parts, deeper = _parts(item)
            if depth + deeper <= _DEPTH_OF_UNKNOWN:
                pending.extend((part, depth + deeper) for part in reversed(parts))


def _parts(item: Any) -> tuple[list[Any], int]:
    """What ``item`` is made of, and 1 if that is a guess."""
    if isinstance(item, _LEAVES) or callable(item):
        return [], 0
    if isinstance(item, Mapping):
        return list(item.values()), 0
    if isinstance(item, list | tuple | set | frozenset):
        return list(item), 0
    if dataclasses.is_dataclass(item):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)], 0
    return list(getattr(item, "__dict__", {}).values()), 1
