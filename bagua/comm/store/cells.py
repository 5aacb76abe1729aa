"""Values under names in a store that any process may read: records that are replaced, cells that are written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import Store

from bagua.comm.store.keys import read_all
from bagua.errors import StoreLostError

T = TypeVar("T")


class Cells:
    """Values that JSON can hold, under names.

    Args:
        store: key-value store whose calls do not block for long.
        where: name of the store in messages.

    Attributes:
        where: the same.

    Example:
        >>> from bagua.comm.store.serving import thread_store
        >>> cells = Cells(thread_store())
        >>> cells.claim("epoch/1", {"members": [0]}), cells.claim("epoch/1", {"members": [1]})
        ({'members': [0]}, {'members': [0]})
        >>> cells.post("record/0", {"beat": 1})
        >>> cells.read(["record/0", "record/1"])
        [{'beat': 1}, None]
    """

    def __init__(self, store: Store, where: str = "the store") -> None:
        self._store = store
        self.where = where
        #: What is read is never deleted, so what was there once need not be looked for again.
        self._present: set[str] = set()

    def claim(self, name: str, value: Any) -> Any:
        """What is written under ``name``: ``value``, unless something was there before.

        Raises:
            StoreLostError: the store does not answer. It may be written all the same.
        """
        text = json.dumps(value)
        return json.loads(self._talk(lambda: self._store.compare_set(name, "", text)))

    def post(self, name: str, value: Any) -> None:
        """Replace the value of ``name``.

        Raises:
            StoreLostError: the store does not answer.
        """
        text = json.dumps(value)
        self._talk(lambda: self._store.set(name, text))

    def drop(self, name: str) -> None:
        """Delete a cell that nobody asks for any more.

        Raises:
            StoreLostError: the store does not answer.
        """
        self._talk(lambda: self._store.delete_key(name))

    def read(self, names: Sequence[str]) -> list[Any]:
        """The values of ``names``; None where there is none.

        Raises:
            StoreLostError: the store does not answer.
        """
        return self._talk(lambda: self._read(names))

    def _read(self, names: Sequence[str]) -> list[Any]:
        self._present |= {name for name in names if name not in self._present and self._store.check([name])}
        found = [name for name in names if name in self._present]
        values = dict(zip(found, read_all(self._store, found) if found else [], strict=True))
        return [json.loads(values[name]) if name in values else None for name in names]

    def _talk(self, conversation: Callable[[], T]) -> T:
        try:
            return conversation()
        except (RuntimeError, OSError) as error:
            raise StoreLostError(f"{self.where} does not answer: {str(error).partition(chr(10))[0]}") from error
