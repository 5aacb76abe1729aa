"""A bucket of an object store, or a folder that all share: objects under names, and the store that is made of them."""

from __future__ import annotations

import importlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote

from torch.distributed import DistNetworkError, Store

from bagua import env
from bagua.checks import install_command
from bagua.comm.store.keys import PolledStore, bottom_of
from bagua.errors import ConfigurationError, StoreLostError

T = TypeVar("T")

#: Forms of addresses of a bucket. Names and paths only: what comes before an "@" or after a "?" could be a secret.
BUCKET = re.compile(r"(?P<scheme>file|s3|gs|az)://(?P<path>[^@?#]+)")
#: Of one request: retries of the client, and the seconds in which they happen.
_RETRIES, _RETRY_S = 3, 10.0
#: Parts of a large object that are under way at once.
_UPLOADS = 4
#: Objects that are deleted in one request.
_MOST_DELETED = 500
#: Seconds between two looks whether an object is there: the first in a folder and in a bucket, growth, and the longest.
_FIRST_IN_FOLDER_S, _FIRST_S, _GROWTH, _LONGEST_S = 0.002, 0.05, 1.5, 2.0
#: A suffix keeps the value of a key apart from the folder of the keys that begin with it.
_CELL = ".cell"
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][a-z]+)*)")
#: What a test may do before and after each request: called with its kind, its object, and "before" or "after".
RequestHook = Callable[[str, str, str], None]


class ObjectBucket:
    """Objects under names. Each request ends within seconds, and no message repeats what the server says.

    Answers of servers, and the errors of clients, may hold keys and signatures.

    Args:
        objects: store of obstore.
        where: address in messages.

    Attributes:
        first_pause_s: seconds until an object that was missing is looked for again.
        is_folder: True for a folder of a file system, whose requests take no time to speak of.
        requests: number of requests, without retries and parts, which the client makes.
        hook: function to call before and after each request; None for none.
        leftovers: names that a communicator, which is closed, has left; the next one deletes them.
    """

    def __init__(self, objects: Any, where: str) -> None:
        self._obstore = _obstore()
        self._objects = objects
        self.where = where
        #: A folder writes an object at once; to a server large ones go in parts, few at a time, each within its limit.
        self.is_folder = where.startswith("file:")
        self.first_pause_s = _FIRST_IN_FOLDER_S if self.is_folder else _FIRST_S
        self._parts: dict[str, Any] = {"use_multipart": False} if self.is_folder else {"max_concurrency": _UPLOADS}
        self.requests = 0
        self.hook: RequestHook | None = None
        self.leftovers: list[str] = []
        self._counting = threading.Lock()

    def pauses(self) -> Iterator[float]:
        """Seconds between two looks for an object, which grow."""
        pause_s = self.first_pause_s
        while True:
            yield pause_s
            pause_s = min(pause_s * _GROWTH, _LONGEST_S)

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Write an object, in the place of one that is there."""
        self._ask("put", name, lambda: self._obstore.put(self._objects, name, content, **self._parts))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; whether there was none. It may be this process's own, sent twice."""
        return self._ask("create", name, lambda: self._create(name, content))

    def _create(self, name: str, content: bytes) -> bool:
        try:
            self._obstore.put(self._objects, name, content, mode="create")
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def replace(self, name: str, expected: bytes, content: bytes) -> bool:
        """Write an object if its content is ``expected``; whether it was. Folders cannot do that."""

        def swap() -> bool:
            found = self._obstore.get(self._objects, name)
            if bytes(found.bytes()) != expected:
                return False
            try:
                self._obstore.put(self._objects, name, content, mode={"e_tag": found.meta["e_tag"]})
            except self._obstore.exceptions.PreconditionError:
                return False
            return True

        return self._ask("replace", name, swap)

    def get(self, name: str) -> bytes | None:
        """The content of a small object; None where there is none."""
        return self._found("get", name, lambda: bytes(self._obstore.get(self._objects, name).bytes()))

    def get_part(self, name: str, start: int, length: int) -> memoryview | None:
        """A part of an object, in bytes; None where there is no such object."""
        return self._found(
            "get", name, lambda: memoryview(self._obstore.get_range(self._objects, name, start=start, length=length))
        )

    def _found(self, kind: str, name: str, request: Callable[[], T]) -> T | None:
        try:
            return self._ask(kind, name, request)
        except FileNotFoundError:
            return None

    def list(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """Size in bytes, and ETag, of each object whose name begins with ``prefix`` and a slash."""

        def pages() -> dict[str, tuple[int, str]]:
            found = self._obstore.list(self._objects, prefix=prefix or None)
            return {one["path"]: (one["size"], str(one["e_tag"])) for page in found for one in page}

        return self._ask("list", prefix, pages)

    def delete(self, names: Collection[str]) -> None:
        """Delete objects, of which some may be gone."""
        every = list(names)
        for start in range(0, len(every), _MOST_DELETED):
            batch = every[start : start + _MOST_DELETED]
            try:
                self._ask("delete", batch[0], lambda batch=batch: self._obstore.delete(self._objects, batch))  # type: ignore[misc]
            except FileNotFoundError:  # Folders say so, of the first.
                for name in batch:
                    self._found("delete", name, lambda name=name: self._obstore.delete(self._objects, name))  # type: ignore[misc]

    def _ask(self, kind: str, name: str, request: Callable[[], T]) -> T:
        with self._counting:
            self.requests += 1
        if self.hook is not None:
            self.hook(kind, name, "before")
        try:
            found = request()
        except FileNotFoundError:
            if kind in ("put", "create"):
                raise self.trouble("there is no such bucket") from None
            raise
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise self.trouble(_words_of(error)) from None  # Its text and its cause may hold secrets.
        if self.hook is not None:
            self.hook(kind, name, "after")
        return found

    def trouble(self, words: str) -> DistNetworkError:
        """The error of a request."""
        return DistNetworkError(f"{self.where}: {words}")


def _words_of(error: Exception) -> str:
    """What may be said of an error of obstore, or of the system."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    status = _STATUS.search(str(error))
    kind = type(error).__name__.removesuffix("Error")
    plain = {"PermissionDenied": "permission is denied", "Unauthenticated": "the credentials are not accepted"}
    words = plain.get(kind, "the request failed" if kind == "Generic" else f"the request failed ({kind})")
    return f"{words}, with status {status[1]}" if status is not None else words


class BucketStore(PolledStore):
    """The keys of a store as objects of a bucket. A value that is swapped in the place of another one needs a server.

    Args:
        bucket: bucket that holds the objects.
        timeout_s: how long ``get`` and ``wait`` wait for a key, in seconds.
    """

    def __init__(self, bucket: ObjectBucket, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.bucket = bucket
        #: Who waits for a key asks less and less often: each look is a request.
        self.pauses_s = (bucket.first_pause_s, _LONGEST_S)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.bucket.get(cell_name(key)) for key in keys]

    def write(self, key: str, value: bytes) -> None:
        self.bucket.put(cell_name(key), value)

    def swap(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
        """See ``PolledStore``. A request that was sent twice finds what it wrote: it says that it found it."""
        name = cell_name(key)
        written = self.bucket.replace(name, expected, desired) if expected else self.bucket.create(name, desired)
        found = desired if written else self.bucket.get(name)
        if found is None and not expected:
            raise self.bucket.trouble("an object was there a moment ago, and is not")
        return written, expected if found is None else found

    def remove(self, key: str) -> bool:
        there = self.bucket.get(cell_name(key)) is not None
        self.bucket.delete([cell_name(key)])
        return there


def cell_name(key: str) -> str:
    """Name of the object that holds the value of ``key``.

    Example:
        >>> cell_name("islands/a run/epoch/1")
        'islands/a=20run/epoch/1.cell'
    """
    return quoted("/".join(filter(None, [env.token(), key]))) + _CELL


def quoted(path: str) -> str:
    """Any words as a part of the name of an object."""
    return quote(path).replace(".", "%2E").replace("%", "=")


def bucket_of(store: Store) -> ObjectBucket | None:
    """The bucket that keeps ``store``; None for a store of another kind."""
    bottom = bottom_of(store)
    return bottom.bucket if isinstance(bottom, BucketStore) else None


def open_bucket(where: str, timeout_s: float, objects: Any = None) -> BucketStore:
    """The store in the bucket at ``where``, once it was seen that it can be written to, and that a claim holds.

    Args:
        where: ``file:///path``, ``s3://bucket/path``, ``gs://bucket/path`` or ``az://container/path``.
        timeout_s: how long to try, and later to wait for keys, in seconds.
        objects: store of obstore; None to make one from ``where`` and the usual variables of the environment.

    Raises:
        ConfigurationError: obstore is not installed, or it or the bucket cannot do what is needed.
        StoreLostError: the bucket cannot be read and written.
    """
    bucket = ObjectBucket(_client_of(where) if objects is None else objects, where)
    started = time.monotonic()
    for pause_s in bucket.pauses():
        try:
            _probe(bucket)
            return BucketStore(bucket, timeout_s)
        except DistNetworkError as error:
            elapsed_s = time.monotonic() - started
            if elapsed_s + pause_s >= min(timeout_s, _RETRY_S):
                raise StoreLostError(
                    str(error),
                    elapsed_s=elapsed_s,
                    timeout_s=timeout_s,
                    advice="Check its name, the region or endpoint, and that the credentials of this process may read, "
                    "write, list and delete there.",
                ) from None
            time.sleep(pause_s)
    raise AssertionError


def _probe(bucket: ObjectBucket) -> None:
    """Claim one name twice.

    Raises:
        ConfigurationError: both succeed, or the store has no claims.
        DistNetworkError: it does not answer, or refuses.
    """
    name = f"probe/{uuid.uuid4().hex}"
    try:
        first, second = bucket.create(name, b"1"), bucket.create(name, b"2")
    except NotImplementedError:
        first = second = True
    if second:
        raise ConfigurationError(
            f"{bucket.where} has no conditional put, without which two islands could both win",
            argument="where",
            expected="an object store that refuses to create an object twice",
            seen="the second one was taken" if first else "the first one was refused",
            advice="AWS S3, Cloudflare R2, Google Cloud Storage, Azure and MinIO have it; see the settings of yours.",
        )
    bucket.delete([name])


def _client_of(where: str) -> Any:
    """The client of obstore for an address."""
    _obstore()
    made: Any = importlib.import_module("obstore.store")
    options: dict[str, Any] = {"retry_config": {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}}
    if where.startswith("file:"):
        options = {"mkdir": True}
    try:
        return made.from_url(where, **options)
    except Exception as error:  # noqa: BLE001 - whatever it is, its text may repeat the environment, and is dropped
        raise ConfigurationError(
            "the client of the object store cannot be made",
            argument="where",
            expected="an address, and credentials in the usual variables of the environment",
            seen=f"{where}, {type(error).__name__}",
        ) from None


def _obstore() -> Any:
    try:
        importlib.import_module("obstore.exceptions")
        return importlib.import_module("obstore")
    except ImportError as error:
        raise ConfigurationError(
            "a bucket needs the package obstore",
            argument="where",
            expected="a store of another kind, or the package",
            seen="neither",
            advice=f"Install it with: {install_command('bucket')}",
        ) from error
