"""Finding the tensors in whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested sequences, mappings, dataclasses and plain objects with attributes.

    Args:
        value: what a forward returned. Objects that contain themselves are visited once.

    Example:
        >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]
    """
    if isinstance(value, torch.Tensor):  # by far the most common output
        yield value
        return
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None and id(item) not in seen:
            seen.add(id(item))
            pending.extend(reversed(_parts(item)))


def _parts(item: Any) -> list[Any]:
    if isinstance(item, str | bytes | int | float | complex | type | torch.nn.Module):
        return []
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if dataclasses.is_dataclass(item):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return list(getattr(item, "__dict__", {}).values())
