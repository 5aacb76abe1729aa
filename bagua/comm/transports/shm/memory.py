"""Memory that processes of one Linux host share: anonymous files, mapped and seen by torch.

The memory is a memfd: it has no name in any file system, nothing of it outlives its last
process, and the size of ``/dev/shm`` does not matter. Its owner writes it; seals keep
everybody else from writing to it and from changing its size.

``mmap.mmap`` of the standard library would keep a duplicate of the descriptor open for as
long as the mapping lives, so the C library is called directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import weakref
from collections.abc import Callable

import torch

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
