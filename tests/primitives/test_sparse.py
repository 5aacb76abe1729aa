"""Few elements between many ranks: bytes that do not grow with their number, and nothing lost that is not known."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.compression import BlockTopK, Metadata, TopK
from bagua.errors import ConfigurationError
from bagua.primitives import ErrorFeedback, SparseReducer
from bagua.testing import ThreadRanks
from tests.harness import coded

NUMEL = 5000


def values(rank: int, call: int = 0) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * call + rank)).double()


def reduce_and_count(reducer: SparseReducer) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The result, what is left, and the bytes that this rank sent."""
    communicator = bagua.comm.get_default_group().global_communicator
    flat = values(communicator.rank)
    memory, remainder = reducer.memory(communicator, flat), torch.empty_like(flat)
    before = communicator.statistics.sent_bytes()
    reducer.reduce(flat, communicator, memory, remainder)
    return flat, remainder, communicator.statistics.sent_bytes() - before


@pytest.mark.parametrize("codec", [TopK(0.01), BlockTopK(512, 8, None)], ids=repr)
@pytest.mark.parametrize("contributors", [False, True])
def test_nine_ranks_send_less_than_eight(codec, contributors):
    reducer = SparseReducer(codec, contributors)
    whole = codec.compressed_bytes(Metadata(NUMEL, torch.float64))
    eight, nine = ThreadRanks(8).run(reduce_and_count, reducer), ThreadRanks(9).run(reduce_and_count, reducer)
    assert {sent for _, _, sent in eight} == {7 * whole}
    rows = codec.compressed_bytes(Metadata(-(-NUMEL // 9), torch.float64))
    assert {sent for _, _, sent in nine} == {2 * 8 * rows}
    assert 2 * 8 * rows < 3 * whole
    for results in (eight, nine):
        assert all(torch.equal(flat, results[0][0]) for flat, _, _ in results)


def test_means_over_senders_by_ranges_are_the_formula():
    """With feedback: what an answer lacks is sent again by the rank that had added up, and counts as its mean then."""
    size, ratio, calls = 9, 0.02, 6

    def reduce_often() -> torch.Tensor:
        communicator = bagua.comm.get_default_group().global_communicator
        reducer = ErrorFeedback(SparseReducer(TopK(ratio), contributors=True))
        flat = values(communicator.rank)
        memory = reducer.memory(communicator, flat)
        for call in range(calls):
            flat = values(communicator.rank, call)
            reducer.reduce(flat, communicator, memory)
            memory.settle(flat)
        return flat

    def simulated(*, feeds_answers_back: bool = True) -> torch.Tensor:
        residuals, length = torch.zeros(size, NUMEL).double(), -(-NUMEL // size)
        answers = torch.empty(0)
        for call in range(calls):
            given = torch.stack([values(rank, call) for rank in range(size)]) + residuals
            sent = torch.stack([torch.cat([coded(TopK(ratio), part) for part in x.split(length)]) for x in given])
            means = size * sent.sum(dim=0) / (sent != 0).sum(dim=0).clamp(min=1)
            answers = torch.cat([coded(TopK(ratio), part) for part in means.split(length)])
            residuals = given - sent
            for rank in range(size if feeds_answers_back else 0):
                mine = slice(rank * length, (rank + 1) * length)
                residuals[rank, mine] += (means - answers)[mine] / size
        return answers

    flats = ThreadRanks(size).run(reduce_often)
    assert all(torch.equal(flat, flats[0]) for flat in flats)
    torch.testing.assert_close(flats[0], simulated())
    assert not torch.allclose(flats[0], simulated(feeds_answers_back=False))


def test_options_out_of_range_are_refused_at_once():
    for options in ({"gather_ranks": 0}, {"contributors": 1}):
        with pytest.raises(ConfigurationError):
            SparseReducer(TopK(0.1), **options)
    with pytest.raises(ConfigurationError):
        SparseReducer(None)
