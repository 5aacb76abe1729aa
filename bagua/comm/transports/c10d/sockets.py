"""The sockets of a Gloo group, which must end with the process that made them.

Gloo's sockets are inherited by forked children and by programs that replace the process.
An heir would keep connections open after its parent's death or after an abort, and
peers would notice nothing before their deadline.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

_DESCRIPTORS = "/proc/self/fd"


class OpenSocket(NamedTuple):
    """A socket of this process.

    Attributes:
        descriptor: its number.
        inode: tells it from another one that gets the same number later.
    """

    descriptor: int
    inode: int


def open_sockets() -> frozenset[OpenSocket]:
    """All sockets of this process; none where the system does not list them."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return frozenset()
    found = ((int(name), _inode(int(name))) for name in names)
    return frozenset(OpenSocket(descriptor, inode) for descriptor, inode in found if inode is not None)


def opened_since(before: frozenset[OpenSocket], count: int) -> tuple[OpenSocket, ...]:
    """The sockets opened since ``before``, none inheritable by other programs from now on.

    Args:
        before: result of ``open_sockets`` then.
        count: how many they must be.

    Returns:
        The sockets; none if there are more or fewer, as some are then another thread's.
    """
    opened = tuple(open_sockets() - before)
    if len(opened) != count:
        return ()
    for one in opened:
        with contextlib.suppress(OSError):
            os.set_inheritable(one.descriptor, False)
    return opened


def let_go(sockets: Iterable[OpenSocket]) -> None:
    """In a forked child: give up its share of ``sockets``, which stay open in the parent."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor, inode in sockets:
            if _inode(descriptor) == inode:
                # Not closed: the number stays taken, whatever torch still does with it.
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def _inode(descriptor: int) -> int | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None
