"""Samplers that give all ranks equal work, and a cache for samples that are slow to make. As in Bagua 0.9's contrib."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import Dataset, Sampler

from bagua.checks import check_flags, check_numbers
from bagua.comm import rank_among_all, size_of_all
from bagua.errors import ConfigurationError, InvalidRankError

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
]


class _Sized(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class LoadBalancingDistributedSampler(Sampler[int]):
    """Samples of similar complexity for all ranks at the same time, so that no rank waits for a longer one.

    Samples are sorted by complexity and cut into chunks of one sample for each rank. Shuffling changes the order of
    chunks.

    Args:
        dataset: with ``len`` and indices; each sample is looked at once, at the beginning.
        complexity_fn: makes an integer of a sample, as its length.
        num_replicas: number of ranks; None means all.
        rank: rank of this process; None asks.
        shuffle: give chunks in another order in each epoch; without, samples come by complexity.
        seed: equal on all ranks.
        drop_last: leave out what does not fill a chunk; else the first samples are given again.
        random_level: from 0 to 1: how far complexities are blurred when chunks are formed in each epoch.

    Raises:
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> sampler = LoadBalancingDistributedSampler([[0] * 5, [0], [0] * 4, [0] * 2], len, 2, 0, shuffle=False)
        >>> list(sampler), len(sampler)
        ([1, 2], 2)
    """

    def __init__(
        self,
        dataset: _Sized,
        complexity_fn: Callable[[Any], int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
    ) -> None:
        check_flags(shuffle=shuffle, drop_last=drop_last)
        check_numbers(lambda level: 0 <= level <= 1, "a number from 0 to 1", random_level=random_level)
        self.num_replicas = size_of_all() if num_replicas is None else num_replicas
        self.rank = rank_among_all() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise InvalidRankError(
                "not a rank", argument="rank", expected=f"0 to {self.num_replicas - 1}", seen=self.rank
            )
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._complexities = torch.tensor([complexity_fn(dataset[index]) for index in range(len(dataset))])
        if not self._complexities.numel():
            raise ConfigurationError("there is nothing to sample", argument="dataset", expected="samples", seen="none")
        spread = int(self._complexities.max() - self._complexities.min())
        self._blur = int(spread * random_level + 1)

    def _chunks(self) -> int:
        samples = self._complexities.numel()
        return samples // self.num_replicas if self.drop_last else math.ceil(samples / self.num_replicas)

    def shuffle_chunks(self) -> list[list[int]]:
        """The samples of all ranks in this epoch: one list of indices for each rank."""
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        keys = self._complexities
        if self.shuffle:
            keys = keys + torch.randint(self._blur, keys.shape, generator=random)
        order = torch.argsort(keys, stable=True)
        count = self._chunks()
        places = torch.arange(count * self.num_replicas) % len(order)
        chunks = order[places].view(count, self.num_replicas)
        if self.shuffle:
            chunks = chunks[torch.randperm(count, generator=random)]
        return [[int(index) for index in own] for own in chunks.t()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.shuffle_chunks()[self.rank])

    def __len__(self) -> int:
        return self._chunks()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. Equal on all ranks.

        Args:
            epoch: its number.
        """
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of different sizes, as many on each rank.

    Args:
        sampler: gives the samples of all ranks.
        batch_fn: cuts a list of indices into batches, as by a limit of their complexity.
        drop_last: leave out the last batches of ranks that have more; else ranks that have fewer repeat their first.

    Raises:
        ConfigurationError: the sampler leaves out samples itself; or, when batches are made, a rank has none to repeat,
            which all ranks are told.

    Example:
        >>> sampler = LoadBalancingDistributedSampler(range(6), int, num_replicas=2, rank=1, shuffle=False)
        >>> list(LoadBalancingDistributedBatchSampler(sampler, lambda own: [own[:1], own[1:]]))
        [[1], [3, 5]]
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Sequence[list[int]]],
        drop_last: bool = False,
    ) -> None:
        check_flags(drop_last=drop_last)
        if sampler.drop_last:
            raise ConfigurationError(
                "the sampler leaves out samples already", argument="sampler", expected="drop_last=False", seen="True"
            )
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last

    def generate_batches(self) -> list[list[int]]:
        """The batches of this rank in this epoch."""
        of_ranks = [list(self.batch_fn(indices)) for indices in self.sampler.shuffle_chunks()]
        counts = [len(batches) for batches in of_ranks]
        own = of_ranks[self.sampler.rank]
        if not self.drop_last and min(counts) == 0 < max(counts):
            raise ConfigurationError(
                "a rank has no batch that it could repeat",
                argument="batch_fn",
                expected="at least one batch for each rank, or drop_last=True",
                seen=f"no batch for rank {counts.index(0)}, and {max(counts)} for another one",
            )
        count = min(counts) if self.drop_last else max(counts)
        return [own[number % len(own)] for number in range(count)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.generate_batches())

    def __len__(self) -> int:
        return len(self.generate_batches())

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. Equal on all ranks.

        Args:
            epoch: its number.
        """
        self.sampler.set_epoch(epoch)


class CacheLoader:
    """Remembers what was loaded under a key.

    Args:
        backend: ``memory`` of this process; or ``file``, in a folder that all processes of a host may share, also with
            those of a later run.
        dataset_name: tells apart several caches in one folder.
        folder: for files.

    Raises:
        ConfigurationError: another backend, or files without a folder.

    Example:
        >>> cache = CacheLoader()
        >>> cache.get("a", lambda key: key * 2), cache.get("a", lambda key: "loaded again"), cache.num_keys()
        ('aa', 'aa', 1)
    """

    def __init__(
        self,
        backend: Literal["memory", "file"] = "memory",
        dataset_name: str = "",
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if backend not in {"memory", "file"}:
            raise ConfigurationError(
                "no cache of this kind",
                argument="backend",
                expected="'memory' or 'file'",
                seen=repr(backend),
                advice="In place of Redis, give backend='file' and a folder on a local disk or in /dev/shm.",
            )
        if (backend == "file") != (folder is not None):
            raise ConfigurationError(
                "a folder belongs to files", argument="folder", expected="a folder with backend='file'", seen=folder
            )
        self._values: dict[str, Any] = {}
        self._folder: Path | None = None
        if folder is not None:
            self._folder = Path(folder) / hashlib.sha256(dataset_name.encode()).hexdigest()[:16]
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """What is remembered under ``key``; else ``load_fn(key)``, which is remembered from then on.

        Args:
            key: told from others by its ``str``.
            load_fn: makes the value: for files, of tensors, numbers, strings, and containers of these.

        Raises:
            ConfigurationError: a value that ``load_fn`` made cannot be read again from a file.
        """
        if self._folder is None:
            if str(key) not in self._values:
                self._values[str(key)] = load_fn(key)
            return self._values[str(key)]
        file = self._folder / f"{hashlib.sha256(str(key).encode()).hexdigest()}.pt"
        if file.exists():
            return torch.load(file, weights_only=True)
        value = load_fn(key)
        _write(file, _packed(value))
        return value

    def num_keys(self) -> int:
        """How many values are remembered."""
        return len(self._values) if self._folder is None else len(list(self._folder.glob("*.pt")))


def _packed(value: Any) -> bytes:
    """``value`` as a file holds it. It is read at once, and not first when an epoch has passed."""
    packed = io.BytesIO()
    try:
        torch.save(value, packed)
        torch.load(io.BytesIO(packed.getvalue()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"this value cannot be read again from a file: {error}",
            argument="load_fn",
            expected="tensors, numbers, strings, and containers of these",
            seen=type(value).__name__,
            advice="Make a tensor of it, as with torch.from_numpy, or use backend='memory'.",
        ) from error
    return packed.getvalue()


def _write(file: Path, content: bytes) -> None:
    """Write a whole file, or none: others may be reading."""
    draft = file.with_name(f"{uuid.uuid4().hex}.tmp")  # Not by tempfile: only its owner may read what that makes.
    try:
        draft.write_bytes(content)
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class CachedDataset(Dataset[Any]):
    """A dataset whose samples are made once.

    Args:
        dataset: with ``len`` and indices.
        backend: see ``CacheLoader``.
        dataset_name: see ``CacheLoader``.
        folder: see ``CacheLoader``.

    Attributes:
        cache_loader: loader that remembers the samples.

    Example:
        >>> dataset = CachedDataset([torch.ones(1), torch.zeros(1)])
        >>> [float(sample) for sample in (dataset[0], dataset[0], dataset[1])], dataset.cache_loader.num_keys()
        ([1.0, 1.0, 0.0], 2)
    """

    def __init__(
        self,
        dataset: _Sized,
        backend: Literal["memory", "file"] = "memory",
        dataset_name: str = "",
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, folder=folder)

    def __getitem__(self, index: int) -> Any:
        return self.cache_loader.get(index, self.dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)
