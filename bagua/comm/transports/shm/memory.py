"""Memory that processes of one Linux host share: anonymous files, mapped and seen by torch.

The memory is a memfd: it has no name in any file system, nothing of it outlives its last
process, and the size of ``/dev/shm`` does not matter. Its owner writes it; seals keep
everybody else from writing to it and from changing its size.

``mmap.mmap`` of the standard library would keep a duplicate of the descriptor open for as
long as the mapping lives, so the C library is called directly.

A segment is memory of this process that peers map, for reading, when a notice first names
it. It is found by the address of a tensor, so every communicator recognises it. It lives
as long as the tensors in it; then its first word tells the peers to drop their mapping.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from operator import attrgetter

import torch

from bagua.comm.lifetime.forks import family

_PAGE_BYTES = 4096
_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_NORESERVE = 1, 2, 0x10, 0x4000
_MADV_DONTFORK, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 10, 22, 23
_F_ADD_SEALS = 1033
#: From now on it cannot be sealed further, shrunk, grown, or mapped for writing.
_SEALS = 0x1 | 0x2 | 0x4 | 0x10
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _c_library() -> ctypes.CDLL:
    """The calls that Python does not offer; loaded when they are first needed."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = address
    library.mmap.argtypes = [address, size, flags, flags, flags, ctypes.c_long]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, flags]
    library.mprotect.argtypes = [address, size, flags]
    return library


class SharedMemory:
    """One mapping. It ends with its last reference, tensors and memory views included.

    Attributes:
        address: address of the first byte.
        nbytes: its length, whole pages.
        writable: True if this process owns it.
    """

    def __init__(self, address: int, nbytes: int, writable: bool, in_children: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.writable = writable
        self._array = (ctypes.c_ubyte * nbytes).from_address(address)
        self._farewells: list[Callable[[], None]] = []
        only_in = None if in_children else os.getpid()
        finalizer = weakref.finalize(self._array, _end, self._farewells, address, nbytes, only_in)
        # At exit tensors may still lie in it; the kernel cleans up after them.
        finalizer.atexit = False

    def tensor(self, dtype: torch.dtype, numel: int, offset: int) -> torch.Tensor:
        """``numel`` elements from byte ``offset``; for the owner."""
        return torch.frombuffer(self._array, dtype=dtype, count=numel, offset=offset)

    def bytes(self) -> torch.Tensor:
        """All of it. Only the owner may write to it; elsewhere a write is a segmentation fault."""
        with torch.inference_mode(False):  # Views of it must be ordinary tensors wherever they are used.
            return torch.frombuffer(self._array, dtype=torch.uint8)

    def view(self) -> memoryview:
        """All of it, byte by byte."""
        view = memoryview(self._array).cast("B")
        return view if self.writable else view.toreadonly()

    def before_its_end(self, function: Callable[[], None]) -> None:
        """Call ``function`` just before the mapping ends, in whatever thread that happens."""
        self._farewells.append(function)


def create_memory(nbytes: int, *, in_children: bool) -> tuple[SharedMemory, int]:
    """New memory of zeros, of which this process is the only writer, always.

    Args:
        nbytes: at least so many; at least one.
        in_children: True if forked children can read it. What they must not see has no
            place in their address space.

    Returns:
        The memory, and its descriptor to pass on and close.

    Raises:
        OSError: there is not so much memory, or it may not be made here.
    """
    nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
    descriptor = os.memfd_create("bagua", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved now: memory that is missing is an error here, and not a SIGBUS later.
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = _map(descriptor, nbytes, True, in_children)
        with contextlib.suppress(OSError):  # Linux before 5.1; then only we promise it.
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor


def map_memory(descriptor: int) -> SharedMemory:
    """The memory of another process, for reading; forked children do not see it.

    Args:
        descriptor: file descriptor of the memory; it may be closed afterwards.
    """
    return _map(descriptor, os.fstat(descriptor).st_size, False, False)


def make_private(address: int, nbytes: int, descriptor: int) -> None:
    """In a forked child: keep what it writes from its parent. What it has not written it sees as its parent does.

    Args:
        address: address of memory that this process has inherited.
        nbytes: its length.
        descriptor: file descriptor of the same memory.
    """
    library = _c_library()
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if library.mmap(address, nbytes, _PROT_READ | _PROT_WRITE, flags, descriptor, 0) != address:
        # Better a child that ends when it writes than a parent with wrong gradients.
        library.mprotect(address, nbytes, _PROT_READ)


def _map(descriptor: int, nbytes: int, writable: bool, in_children: bool) -> SharedMemory:
    library = _c_library()
    protection = _PROT_READ | _PROT_WRITE if writable else _PROT_READ
    address = library.mmap(None, nbytes, protection, _MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    memory = SharedMemory(address, nbytes, writable, in_children)
    if not in_children and library.madvise(address, nbytes, _MADV_DONTFORK):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot keep memory from forked children: {os.strerror(code)}")
    # Page faults one by one cost more than the first copy; older kernels take them one by one.
    library.madvise(address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
    return memory


def _end(farewells: list[Callable[[], None]], address: int, nbytes: int, only_in: int | None) -> None:
    for farewell in farewells:
        farewell()
    # A forked child that does not have this mapping may have something else there.
    if only_in is None or only_in == os.getpid():
        _c_library().munmap(address, nbytes)


#: Data starts here; before it lies the word that says whether the segment is still in use.
HEADER_BYTES = 64
#: What that word says when the last tensor has died; it begins as 0.
GONE = 1


class Segment:
    """Memory of this process that peers may map.

    Attributes:
        number: names the segment in notices; never used again in this process.
        descriptor: file descriptor of the memory, to pass on; open as long as the segment lives.
        address: address of the first byte.
        end: address behind the last byte.
        gone: True once its last tensor has died.
    """

    __slots__ = ("__weakref__", "_in_children", "_process", "address", "descriptor", "end", "gone", "number")

    def __init__(self, number: int, memory: SharedMemory, descriptor: int, in_children: bool) -> None:
        self.number = number
        self.descriptor = descriptor
        # Not the memory: it must be able to end while the registry has the segment.
        self.address = memory.address
        self.end = memory.address + memory.nbytes
        self.gone = False
        self._process = os.getpid()
        self._in_children = in_children
        memory.before_its_end(self._leave)

    def _leave(self) -> None:
        """Tell the peers. Runs wherever the last tensor dies, so it takes no lock."""
        self.gone = True
        if self._process == os.getpid():
            ctypes.c_int64.from_address(self.address).value = GONE
            os.close(self.descriptor)

    def inherit(self) -> None:
        """In a forked child: have the memory for itself, if it is there at all, and close the descriptor.

        Now, since later it may be the number of a file of the child.
        """
        if self.gone:
            return
        if self._in_children:
            make_private(self.address, self.end - self.address, self.descriptor)
        os.close(self.descriptor)


_address = attrgetter("address")


class _Registry:
    """The segments of this process, by address."""

    def __init__(self) -> None:
        #: A signal handler may interrupt ``add``, and call it.
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        #: First addresses and segments in their order; replaced as a whole.
        self._table: tuple[list[int], list[Segment]] = ([], [])
        # Before the transports, which drop tensors: the descriptor of a segment that is gone stays open.
        family.add(self, first=True)

    def disown(self) -> None:
        """In a forked child: have the memory for itself, and know of no segment."""
        for segment in self._table[1]:
            segment.inherit()
        self._lock = threading.RLock()
        self._table = ([], [])

    def add(self, memory: SharedMemory, descriptor: int, in_children: bool) -> Segment:
        segment = Segment(next(self._numbers), memory, descriptor, in_children)
        with self._lock:
            while not segment.gone:
                before = self._table
                living = sorted([*(other for other in before[1] if not other.gone), segment], key=_address)
                after = ([other.address for other in living], living)
                if self._table is before:  # No signal handler has added another one.
                    self._table = after
                    break
        return segment

    def find(self, address: int, nbytes: int) -> Segment | None:
        addresses, segments = self._table
        place = bisect.bisect_right(addresses, address) - 1
        if place < 0:
            return None
        segment = segments[place]
        return segment if address + nbytes <= segment.end and not segment.gone else None


_registry = _Registry()


def allocate(nbytes: int, *, in_children: bool) -> tuple[SharedMemory, Segment]:
    """A new segment with room for ``nbytes`` behind its header.

    Args:
        nbytes: number of bytes of data.
        in_children: True if forked children have it, too: as memory of their own, from their first write to it.

    Raises:
        OSError: there is not so much memory, or there are too many open files.
    """
    memory, descriptor = create_memory(HEADER_BYTES + nbytes, in_children=in_children)
    return memory, _registry.add(memory, descriptor, in_children)


def find(tensor: torch.Tensor) -> Segment | None:
    """The segment in which all of ``tensor``, which is contiguous, lies; None for ordinary memory."""
    return _registry.find(tensor.data_ptr(), tensor.numel() * tensor.element_size())
