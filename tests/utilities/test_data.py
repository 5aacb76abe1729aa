"""Samplers that give ranks equal work, and caches of samples."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.errors import ConfigurationError, InvalidRankError
from bagua.torch_api.contrib import (
    CachedDataset,
    CacheLoader,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

#: The complexity of a sample is its value.
SAMPLES = [7, 1, 5, 3, 8, 2, 6, 4, 9, 0]


def samplers(size: int, **options: Any) -> list[LoadBalancingDistributedSampler]:
    return [LoadBalancingDistributedSampler(SAMPLES, int, size, rank, **options) for rank in range(size)]


def values(sampler: Any) -> list[int]:
    return [SAMPLES[index] for index in sampler]


def test_samples_come_by_complexity_without_shuffling() -> None:
    assert [values(sampler) for sampler in samplers(2, shuffle=False)] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10, 13])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_get_similar_samples_at_the_same_time(size: int, drop_last: bool) -> None:
    ranks = [values(sampler) for sampler in samplers(size, drop_last=drop_last)]
    assert {len(own) for own in ranks} == {len(samplers(size, drop_last=drop_last)[0])}
    together = [sorted(chunk) for chunk in zip(*ranks, strict=True)]
    whole = [chunk for chunk in together if len(set(chunk)) == size and chunk[-1] - chunk[0] == size - 1]
    assert len(whole) == len(SAMPLES) // size
    seen = [value for own in ranks for value in own]
    assert set(seen) == set(SAMPLES) if not drop_last else len(set(seen)) == len(seen)


def test_epochs_differ_and_ranks_agree() -> None:
    first, second = samplers(2)
    orders = []
    for epoch in range(4):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        orders.append(values(first))
        assert all(one + 1 == other for one, other in zip(values(first), values(second), strict=True))
        assert values(first) == orders[-1]
    assert len(set(map(tuple, orders))) > 1


def test_a_level_blurs_complexities() -> None:
    first, second = samplers(2, random_level=1.0)
    gaps = set()
    for epoch in range(4):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        gaps |= {abs(one - other) for one, other in zip(values(first), values(second), strict=True)}
    assert max(gaps) > 1


def by_limit(indices: list[int]) -> list[list[int]]:
    """Batches whose complexities add up to at most ten."""
    batches: list[list[int]] = [[]]
    for index in indices:
        if sum(SAMPLES[one] for one in batches[-1]) + SAMPLES[index] > 10:
            batches.append([])
        batches[-1].append(index)
    return batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_all_ranks_have_as_many_batches(drop_last: bool) -> None:
    batches = [
        [values(batch) for batch in LoadBalancingDistributedBatchSampler(sampler, by_limit, drop_last)]
        for sampler in samplers(3, shuffle=False)
    ]
    # 0 3 6 9 | 1 4 7 0 | 2 5 8 1
    expected = [[[0, 3, 6], [9]], [[1, 4], [7, 0]], [[2, 5], [8, 1]]]
    assert batches == expected
    assert len(LoadBalancingDistributedBatchSampler(samplers(3)[0], by_limit)) >= 2


def test_ranks_with_fewer_batches_repeat_or_others_leave_out() -> None:
    def one_by_one_on_the_second(indices: list[int]) -> list[list[int]]:
        return [[index] for index in indices] if SAMPLES[indices[0]] == 1 else [indices]

    for drop_last, counts in ((False, 5), (True, 1)):
        own = [
            LoadBalancingDistributedBatchSampler(sampler, one_by_one_on_the_second, drop_last)
            for sampler in samplers(2, shuffle=False)
        ]
        assert [len(list(sampler)) for sampler in own] == [counts, counts]
        assert [values(batch) for batch in own[0]] == [[0, 2, 4, 6, 8]] * counts
        own[0].set_epoch(3)
        assert own[0].sampler.epoch == 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((SAMPLES, int, 2, 2), InvalidRankError, "0 to 1"),
        (([], int, 1, 0), ConfigurationError, "nothing to sample"),
        ((SAMPLES, int, 1, 0, True, 0, False, 2.0), ConfigurationError, "from 0 to 1"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LoadBalancingDistributedSampler(*arguments)


def test_batches_of_a_sampler_that_leaves_out_samples_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="drop_last=False"):
        LoadBalancingDistributedBatchSampler(samplers(2, drop_last=True)[0], by_limit)


class Counted:
    """A dataset that counts how often a sample is made."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.made = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.made += 1
        return {"sample": torch.tensor([index + self.offset]), "names": ("a", index)}


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_samples_are_made_once_and_datasets_do_not_mix(backend: Any, tmp_path: Path) -> None:
    folder = tmp_path if backend == "file" else None
    sources = [Counted(0), Counted(100)]
    cached = [CachedDataset(source, backend, str(source.offset), folder=folder) for source in sources]
    for _ in range(3):
        for source, dataset in zip(sources, cached, strict=True):
            assert [int(dataset[index]["sample"]) for index in range(4)] == [source.offset + i for i in range(4)]
            assert dataset[1]["names"] == ("a", 1)
    assert [source.made for source in sources] == [4, 4]
    assert [dataset.cache_loader.num_keys() for dataset in cached] == [4, 4]
    assert len(cached[0]) == 4
    if folder is not None:
        again = CachedDataset(Counted(0), "file", "0", folder=folder)
        assert int(again[3]["sample"]) == 3
        assert again.dataset.made == 0
        assert sorted(path.suffix for path in folder.rglob("*") if path.is_file()) == [".pt"] * 8


def test_caches_that_do_not_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"'redis'.*backend='file'"):
        CacheLoader("redis")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="folder"):
        CachedDataset(Counted(0), "file")


def test_a_rank_without_batches_is_refused_on_all_ranks() -> None:
    def of_big_ones(indices: list[int]) -> list[list[int]]:
        return [[index] for index in indices if SAMPLES[index] == 9]

    for sampler in samplers(2, shuffle=False):
        with pytest.raises(ConfigurationError, match="no batch for rank 0"):
            list(LoadBalancingDistributedBatchSampler(sampler, of_big_ones))
        assert list(LoadBalancingDistributedBatchSampler(sampler, of_big_ones, drop_last=True)) == []


def test_files_are_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        CacheLoader("file", folder=tmp_path).get("key", len)
    finally:
        os.umask(before)
    (file,) = tmp_path.rglob("*.pt")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_value_that_files_cannot_give_back_is_refused_at_once(tmp_path: Path) -> None:
    cache = CacheLoader("file", folder=tmp_path)
    for value in (Path("a"), {"sample": pytest}, lambda: None):
        with pytest.raises(ConfigurationError, match="load_fn"):
            cache.get("key", lambda _, value=value: value)
    assert cache.num_keys() == 0
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
