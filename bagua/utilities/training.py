"""What a training script that runs on several ranks needs besides its model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from bagua.checks import check_kind
from bagua.comm import get_default_group
from bagua.errors import ConfigurationError
from bagua.utilities.rank_zero import rank_zero_only

__all__ = ["DistributedLoader", "distributed_loader", "print_rank_0"]

#: Attributes of a loader that are arguments of its constructor, except those that say which samples make a batch.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


@rank_zero_only
def print_rank_0(*values: object, sep: str = " ", end: str = "\n", flush: bool = False) -> None:
    """``print`` on rank 0; the other ranks print nothing. Before ranks are connected, the launcher's rank counts.

    Args:
        values: objects to print.
        sep: text between two values.
        end: text after the last value.
        flush: True to send the text on at once.

    Example:
        >>> print_rank_0("epoch", 3)
        epoch 3
    """
    sys.stdout.write(sep.join(map(str, values)) + end)
    if flush:
        sys.stdout.flush()


class DistributedLoader(DataLoader[Any]):
    """A loader of this rank's part of the data; ``distributed_loader`` makes it. Each pass is the next epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass over the loader be that of ``epoch``, when training resumes for example."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # all that torch promises
        assert isinstance(self.sampler, DistributedSampler)
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return super().__iter__()


def distributed_loader(loader: DataLoader[Any], *, split_batches: bool = False) -> DistributedLoader:
    """``loader`` for this rank: it deals the samples among all ranks, and shuffles anew in each epoch. All call it.

    The seed is that of rank 0's ``generator``, else 0. Shuffled loaders stay shuffled, with torch's
    ``DistributedSampler``. All ranks get the same number of batches: the sampler repeats a few samples at the end, or
    leaves some out where ``loader`` has ``drop_last=True``.

    Args:
        loader: ordinary loader with a ``batch_size``, shuffled or not.
        split_batches: False if ``batch_size`` is that of each rank, True if it is that of all ranks together.

    Raises:
        NotInitializedError: ranks are not connected yet.
        ConfigurationError: the loader has a sampler of its own, a batch sampler, or a dataset without length, or
            ``batch_size`` cannot be split evenly.

    Example:
        >>> import bagua
        >>> bagua.init_process_group()
        >>> loader = DataLoader(torch.arange(6), batch_size=2)
        >>> [batch.tolist() for batch in distributed_loader(loader)]
        [[0, 1], [2, 3], [4, 5]]
        >>> bagua.destroy_process_group()
    """
    group = get_default_group()
    batch_size = _batch_size_of(loader)
    if split_batches and batch_size % group.size:
        raise ConfigurationError(
            "the batch cannot be split among the ranks",
            argument="batch_size",
            expected=f"a multiple of {group.size}, the number of ranks",
            seen=str(batch_size),
        )
    shuffle = isinstance(loader.sampler, RandomSampler)
    # Ranks with seeds of their own would deal some samples twice, and others not at all.
    own_seed = 0 if loader.generator is None else loader.generator.initial_seed()
    seed = group.global_communicator.broadcast_object(own_seed, 0)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, group.size, group.rank, shuffle=shuffle, seed=seed, drop_last=loader.drop_last
    )
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    each = batch_size // group.size if split_batches else batch_size
    return DistributedLoader(loader.dataset, batch_size=each, sampler=sampler, **kept)


def _batch_size_of(loader: DataLoader[Any]) -> int:
    check_kind(DataLoader, "a torch.utils.data.DataLoader", loader=loader)
    if isinstance(loader.dataset, IterableDataset):
        seen = "an IterableDataset"
    elif loader.batch_size is None or type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        seen = "a loader with batches of its own"
    elif type(loader.sampler) not in (RandomSampler, SequentialSampler):
        seen = f"the sampler {type(loader.sampler).__name__}"
    elif isinstance(loader.sampler, RandomSampler) and (loader.sampler.replacement or loader.sampler._num_samples):  # noqa: SLF001
        seen = "a RandomSampler with replacement or num_samples"
    else:
        return loader.batch_size
    raise ConfigurationError(
        "this loader's samples cannot be dealt among ranks",
        argument="loader",
        expected="a loader with batch_size and shuffle",
        seen=seen,
        advice="Give each rank its own part with a sampler or a dataset of yours that knows the rank.",
    )
