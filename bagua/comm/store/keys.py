"""Keys of a store: waiting until they are there, and reading several at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from torch.distributed import PrefixStore, Store

from bagua import env

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def wait_for_keys(
    store: Store, keys: Sequence[str], deadline: float, meanwhile: Callable[[], object] | None = None
) -> bool:
    """Poll until all keys are there, or the deadline has passed.

    ``Store.wait`` would hold the only connection of the store, ignore Ctrl-C, and print a warning when its time is up.

    Args:
        store: key-value store.
        keys: names of the keys.
        deadline: value of ``time.monotonic()`` at which to give up.
        meanwhile: called whenever a key is missing; the wait is over if it returns something true.

    Returns:
        Whether the wait was over in time.

    Example:
        >>> from torch.distributed import HashStore
        >>> wait_for_keys(HashStore(), ["missing"], time.monotonic() + 0.01)
        False
    """
    pause_s, longest_s = getattr(bottom_of(store), "pauses_s", (_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        if meanwhile is not None and meanwhile():
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True


def missing_keys(store: Store, keys: Sequence[str]) -> list[int]:
    """The places in ``keys`` of those that are not there.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("first", "")
        >>> missing_keys(store, ["first", "second"])
        [1]
    """
    return [place for place, key in enumerate(keys) if not store.check([key])]


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of ``keys``, which are all there, in one request where the store can do that."""
    # A file, unlike a server, gives one value at a time. Torch forgot the question in its hints.
    at_once = store.has_extended_api()  # type: ignore[attr-defined]
    found: list[bytes] = store.multi_get(list(keys)) if at_once else [store.get(key) for key in keys]
    return found


def read_present(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """The values of ``keys``; None for those that are not there, for which a store would wait.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("first", "one")
        >>> read_present(store, ["first", "second"])
        [b'one', None]
    """
    present = [key for key in keys if store.check([key])]
    found = dict(zip(present, read_all(store, present) if present else [], strict=True))
    return [found.get(key) for key in keys]


def behind_token(store: Store) -> Store:
    """The keys of ``store`` that begin with ``BAGUA_TOKEN``; all of them where it is not set."""
    token = env.token()
    return PrefixStore(token, store) if token else store


def bottom_of(store: Store) -> Store:
    """The store without its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def job_board(store: Store) -> Store:
    """All of the job's keys that begin with ``BAGUA_TOKEN``, over a connection that no call of the job keeps busy.

    Args:
        store: any store of the job; its server is what counts. One that makes no other connection is used itself.
    """
    bottom = bottom_of(store)
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        bottom = bottom.clone()  # type: ignore[attr-defined]  # which torch forgot in its hints
    return behind_token(bottom)
