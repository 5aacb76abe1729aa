"""What each rank of a job last said of itself, where everybody can read it who reaches the store of the job.

The keys do not depend on groups or restarts: the latest job of a store is the one that is seen.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store

from bagua.comm.lifetime.background import beside, within
from bagua.comm.store.keys import job_board, read_present
from bagua.comm.store.serving import connect_store


class Beats:
    """The beats of a job.

    Args:
        store: any store of the job; its server is what counts.
        rank: number of the process that posts; -1 for one that only reads.

    Example:
        >>> from torch.distributed import HashStore
        >>> beats = Beats(HashStore(), rank=0)
        >>> beats.read()
        {}
        >>> beats.post_now({"world_size": 1})
        >>> beats.read()
        {0: {'world_size': 1}}
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._busy = False

    def post(self, beat: dict[str, Any], then: Callable[[], None]) -> None:
        """Post ``beat`` beside what the caller does; drop it if the one before has not arrived. Raises nothing.

        Args:
            beat: anything JSON can hold.
            then: is called when it is there, in the thread that posted it.
        """
        if self._busy:
            return
        self._busy = True
        if not beside(lambda: self._post(beat, then)):
            self._busy = False  # This beat is lost; a thread may be found for the next one.

    def _post(self, beat: dict[str, Any], then: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(Exception):
                self.post_now(beat)
                then()
        finally:
            self._busy = False

    def post_now(self, beat: dict[str, Any]) -> None:
        """Post ``beat`` and wait until it is there.

        Args:
            beat: anything JSON can hold, with ``world_size``.
        """
        self._connection.set(f"bagua/beat/{self._rank}", json.dumps(beat))

    def read(self) -> dict[int, dict[str, Any]]:
        """The last beat of each rank that has posted one."""
        store = self._connection
        first = self._read_some(store, [0])
        if not first:
            return {}
        return {**first, **self._read_some(store, range(1, int(first[0]["world_size"])))}

    def read_within(self, limit_s: float) -> dict[int, dict[str, Any]]:
        """``read`` for somebody who has no thread to lose: a store whose host was stopped never answers.

        Args:
            limit_s: seconds that it may take.

        Raises:
            TimeoutError: it takes longer.
        """
        return within(limit_s, self.read)

    def _read_some(self, store: Store, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        texts = read_present(store, [f"bagua/beat/{rank}" for rank in ranks])
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True) if text is not None}

    @functools.cached_property
    def _connection(self) -> Store:
        """Made when it is needed first."""
        return job_board(self._store)


def connect_beats(host: str, port: int, limit_s: float = 10.0) -> Beats:
    """The beats of a running job, for reading.

    Args:
        host: address of the store, the ``MASTER_ADDR`` of the job.
        port: port of the store, the ``MASTER_PORT`` of the job.
        limit_s: seconds that it may take.

    Raises:
        RuntimeError: who answers is no store, or nothing answers.
        TimeoutError: it takes longer.
    """
    return Beats(connect_store(port, limit_s, host), -1)
