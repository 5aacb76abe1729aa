"""Loaders that deal, what rank 0 prints, and means of metrics."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

import bagua.comm
from bagua.errors import ConfigurationError, NotInitializedError
from bagua.utilities.training import distributed_loader, print_rank_0


class _Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(4))


def _epochs(shuffle: bool, drop_last: bool, split_batches: bool, first: int) -> tuple[list[object], list[object]]:
    """Three epochs of the dealt loader, and the same with torch's sampler by hand."""
    rank, ranks = bagua.comm.get_rank(), bagua.comm.get_world_size()
    data = torch.arange(23)
    given = DataLoader(data, batch_size=6, shuffle=shuffle, drop_last=drop_last, collate_fn=torch.stack)
    loader = distributed_loader(given, split_batches=split_batches)
    loader.set_epoch(first)
    sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, drop_last=drop_last)
    by_hand = DataLoader(data, batch_size=6 // ranks if split_batches else 6, sampler=sampler, drop_last=drop_last)
    found, expected = [], []
    for epoch in range(first, first + 3):
        found.append([batch.tolist() for batch in loader])
        sampler.set_epoch(epoch)
        expected.append([batch.tolist() for batch in by_hand])
    assert len(loader) == len(by_hand)
    assert loader.collate_fn is torch.stack
    return found, expected


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("drop_last", "split_batches", "first"), [(True, False, 0), (False, True, 5), (False, False, 0)]
)
def test_a_dealt_loader_does_what_the_sampler_does_by_hand(thread_ranks, shuffle, drop_last, split_batches, first):
    outcomes = thread_ranks(2, _epochs, shuffle, drop_last, split_batches, first)
    for found, expected in outcomes:
        assert found == expected
        assert (found[0] != found[1]) == shuffle
    assert outcomes[0][0] != outcomes[1][0]


def _seeded() -> list[object]:
    generator = torch.Generator().manual_seed(7 + bagua.comm.get_rank())
    loader = DataLoader(torch.arange(8), batch_size=4, shuffle=True, generator=generator)
    return [batch.tolist() for batch in distributed_loader(loader)]


def test_the_seed_of_rank_0s_generator_shuffles_on_all_ranks(thread_ranks):
    dealt = [sample for part in thread_ranks(2, _seeded) for batch in part for sample in batch]
    assert sorted(dealt) == list(range(8))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(7)).tolist()
    assert dealt == order[::2] + order[1::2]


_UNDEALT = {
    "a torch.utils.data.DataLoader": lambda: [1, 2],
    "an IterableDataset": lambda: DataLoader(_Stream(), batch_size=2),
    "batches of its own": lambda: DataLoader(torch.arange(4), batch_sampler=[[0, 1], [2, 3]]),
    "WeightedRandomSampler": lambda: DataLoader(torch.arange(4), 2, sampler=WeightedRandomSampler([1.0] * 4, 4)),
    "replacement or num_samples": lambda: DataLoader(
        torch.arange(4), 2, sampler=torch.utils.data.RandomSampler(range(4), replacement=True)
    ),
    "a multiple of 2": lambda: DataLoader(torch.arange(4), 3),
}


def _refusal(words: str) -> str:
    with pytest.raises((ConfigurationError, TypeError)) as refused:
        distributed_loader(_UNDEALT[words](), split_batches=True)
    return str(refused.value)


@pytest.mark.parametrize("words", _UNDEALT)
def test_a_loader_that_cannot_be_dealt_is_refused(thread_ranks, words):
    assert all(words in text for text in thread_ranks(2, _refusal, words))


def test_ranks_must_be_connected():
    with pytest.raises(NotInitializedError):
        distributed_loader(DataLoader(torch.arange(4)))


def _printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_rank_0("rank", bagua.comm.get_rank(), sep="-", end="!\n", flush=True)


def test_rank_0_alone_prints(thread_ranks, capsys):
    thread_ranks(3, _printed, capsys)
    assert capsys.readouterr().out == "rank-0!\n"
