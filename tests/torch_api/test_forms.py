"""The collectives of ``bagua.torch_api`` in the forms of Bagua 0.9."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from bagua.errors import (
    CommunicatorClosedError,
    ConfigurationError,
    InvalidReduceOpError,
    InvalidTensorError,
    InvalidTypeError,
)
from bagua.testing import ThreadRanks
from bagua.testing.ranks import this_rank

SIZE = 3


def send_and_receive() -> None:
    rank = this_rank.get().rank
    own = torch.arange(2.0) + 10 * rank
    everything = torch.cat([torch.arange(2.0) + 10 * other for other in range(SIZE)])
    bagua.allgather(own, recv := torch.zeros(6))
    assert torch.equal(recv, everything)
    recv = torch.zeros(6)
    recv[2 * rank : 2 * rank + 2] = own
    bagua.allgather_inplace(recv)
    assert torch.equal(recv, everything)
    bagua.gather(own, recv := torch.zeros(6) if rank == 1 else None, 1)
    assert recv is None or torch.equal(recv, everything)
    bagua.scatter(everything if rank == 2 else None, recv := torch.zeros(2), src=2)
    assert torch.equal(recv, own)
    # As the original wants it: a tensor on every rank.
    bagua.gather(own, recv := torch.zeros(6), 1)
    assert torch.equal(recv, everything if rank == 1 else torch.zeros(6))
    bagua.scatter(everything if rank == 2 else torch.zeros(6), recv := torch.zeros(2), src=2)
    assert torch.equal(recv, own)
    bagua.reduce_scatter(everything, recv := torch.zeros(2), bagua.ReduceOp.SUM)
    assert torch.equal(recv, SIZE * own)
    sent = torch.arange(3) + 10 * rank
    bagua.alltoall(sent, received := torch.zeros(3, dtype=torch.int64))
    assert received.tolist() == [10 * other + rank for other in range(SIZE)]
    assert sent.tolist() == [10 * rank, 10 * rank + 1, 10 * rank + 2]
    bagua.alltoall_inplace(sent)
    assert torch.equal(sent, received)
    shares = torch.full((rank + 1,), float(rank)).repeat(SIZE)
    lengths, begin = [1, 2, 3], [0, 1, 3]
    recv = torch.zeros(6)
    bagua.alltoall_v(shares, [rank + 1] * 3, [i * (rank + 1) for i in range(3)], recv, lengths, begin)
    assert recv.tolist() == [0, 1, 1, 2, 2, 2]
    with pytest.raises(ConfigurationError, match="one after the other"):
        bagua.alltoall_v(shares, [rank + 1] * 3, [0, 0, 0], recv, lengths, begin)


def both_forms() -> None:
    rank = this_rank.get().rank
    own = torch.tensor([rank + 1.0])
    for arguments, total in (((), 6.0), ((bagua.ReduceOp.MAX,), 3.0)):
        bagua.allreduce(own, recv := torch.zeros(1), *arguments)
        assert (own.item(), recv.item()) == (rank + 1, total)
        bagua.allreduce(in_place := own.clone(), *arguments)
        assert in_place.item() == total
        bagua.reduce(own, recv := torch.zeros(1), 1, *arguments)
        assert (own.item(), recv.item()) == (rank + 1, total if rank == 1 else 0)
        bagua.reduce(in_place := own.clone(), 1, *arguments)
        assert in_place.item() == (total if rank == 1 else rank + 1)
    bagua.allreduce(send_tensor=own, recv_tensor=(recv := torch.zeros(1)), op=bagua.ReduceOp.MIN)
    assert recv.item() == 1
    bagua.allreduce(own, recv, op=bagua.ReduceOp.MAX)
    assert recv.item() == 3
    bagua.allreduce_inplace(in_place := own.clone(), op=bagua.ReduceOp.MAX)
    assert in_place.item() == 3
    bagua.broadcast(sent := own.clone(), src=2)
    bagua.broadcast_coalesced([also_sent := own.clone()], src=1)
    assert (sent.item(), also_sent.item()) == (3, 2)
    with pytest.raises(InvalidTensorError, match="like what is sent"):
        bagua.allreduce(own, torch.zeros(2))
    for call in (bagua.allreduce, lambda send, recv, **options: bagua.reduce(send, recv, rank, **options)):
        for recv, options, refusal in (
            (torch.zeros(1), {"op": bagua.ReduceOp.PREMUL_SUM}, InvalidReduceOpError),
            (torch.zeros(1), {"timeout": -1}, ConfigurationError),
            (torch.zeros(1), {"tmeout": 1}, TypeError),
            (torch.zeros(1).expand(2), {}, InvalidTensorError),
        ):
            with pytest.raises(refusal):
                call(own.repeat(recv.numel()), recv, **options)
            assert not recv.any()


def in_place() -> None:
    rank = this_rank.get().rank
    own = torch.arange(2.0) + 10 * rank
    everything = torch.cat([torch.arange(2.0) + 10 * other for other in range(SIZE)])
    parts = torch.full((6,), -1.0)
    parts[2:4] = own
    bagua.gather_inplace(held := parts if rank == 1 else own.clone(), 2, 1)
    assert torch.equal(held, everything if rank == 1 else own)
    bagua.scatter_inplace(held := everything.clone() if rank == 2 else torch.zeros(3), 2, 2, async_op=True).wait()
    assert torch.equal(held, everything if rank == 2 else torch.cat([own, torch.zeros(1)]))
    bagua.reduce_scatter_inplace(held := everything.view(3, 2).clone(), bagua.ReduceOp.MAX)
    assert torch.equal(held[0], own)
    assert torch.equal(held[1:], everything.view(3, 2)[1:])
    counts = [abs(rank - other) + 1 for other in range(SIZE)]  # as many there as back
    begins = [sum(counts[:other]) for other in range(SIZE)]
    held = torch.cat([torch.full((count,), 10.0 * rank + other) for other, count in enumerate(counts)])
    bagua.alltoall_v_inplace(held, counts, begins)
    assert torch.equal(held, torch.cat([torch.full((count,), 10.0 * o + rank) for o, count in enumerate(counts)]))
    with pytest.raises(InvalidTensorError, match="contiguous"):
        bagua.gather_inplace(torch.zeros(3, 2).t(), 2, 0)
    with pytest.raises(InvalidTensorError, match="at least 2 elements"):
        bagua.scatter_inplace(torch.zeros(1), 2, (rank + 1) % SIZE)
    with pytest.raises(ConfigurationError, match="one after the other"):
        bagua.alltoall_v_inplace(held, counts, counts)
    assert bagua.get_backend() == "threads"
    for broadcast, sent in ((bagua.broadcast, own), (bagua.broadcast_coalesced, [own])):
        with pytest.raises(ConfigurationError, match="two ranks"):
            broadcast(sent, 1, src=2)
    with pytest.raises(InvalidTypeError, match="bagua_buckets"):
        bagua.get_backend("model")


@pytest.mark.parametrize("function", [send_and_receive, both_forms, in_place])
def test_forms_of_the_original(function) -> None:
    ThreadRanks(SIZE).run(function)


def use_a_closed_group() -> None:
    group, recv = bagua.new_group([0]), torch.zeros(1)
    group.close()
    if group:
        with pytest.raises(CommunicatorClosedError):
            bagua.allreduce(torch.ones(1), recv, comm=group)
    assert not recv.any()


def test_a_refused_call_leaves_what_would_receive() -> None:
    ThreadRanks(2).run(use_a_closed_group)


def among_some() -> list[list[float]]:
    """The forms that work on a copy, among ranks 1 and 3 of four, who are named in each way."""
    odd = bagua.new_group([1, 3])
    forms = [odd, odd.global_communicator]
    if dist.is_initialized():
        forms.append(dist.new_group([1, 3]))
    seen = []
    for form in forms:
        own = torch.tensor([bagua.get_rank() + 1.0])
        bagua.allreduce(own, everywhere := torch.zeros(1), comm=form)
        bagua.reduce(own, at_one := torch.zeros(1), 1, comm=form)
        in_place = own.repeat(2)
        bagua.allgather_inplace(in_place, comm=form)
        bagua.reduce_scatter_inplace(other := own.repeat(2), comm=form)
        bagua.gather_inplace(other, 1, 0, comm=form)
        bagua.scatter_inplace(other, 1, 0, comm=form)
        seen.append([own.item(), everywhere.item(), at_one.item(), *in_place.tolist()])
    return seen


def test_the_group_is_taken_in_each_form(ranks) -> None:
    first, second, third, fourth = ranks(4, among_some)
    assert len({len(seen) for seen in (first, second, third, fourth)}) == 1
    for seen in zip(first, second, third, fourth, strict=True):
        assert seen == ([1, 0, 0, 1, 1], [2, 6, 0, 2, 4], [3, 0, 0, 3, 3], [4, 6, 6, 2, 4])


def test_parts_of_a_tensor_must_be_equal(thread_ranks) -> None:
    def gather_uneven() -> None:
        with pytest.raises(InvalidTensorError, match="argument tensor,"):
            bagua.allgather_inplace(torch.zeros(4))

    thread_ranks(SIZE, gather_uneven)


def pass_what_does_not_fit() -> list[str]:
    """The arguments that errors name, by the function that is called."""
    two, odd, other = torch.zeros(2), torch.zeros(5), 1 - bagua.get_rank()
    counts, begin = [1, 1], [0, 1]
    calls = {
        "allreduce": [lambda: bagua.allreduce(two, odd), lambda: bagua.allreduce("two", two)],
        "reduce": [lambda: bagua.reduce(two.to_sparse(), two, other)],
        "allgather": [lambda: bagua.allgather(two, odd), lambda: bagua.allgather("two", odd)],
        "gather": [lambda: bagua.gather(two, odd, other), lambda: bagua.gather(two, odd, bagua.get_rank())],
        "scatter": [lambda: bagua.scatter(odd, two, bagua.get_rank()), lambda: bagua.scatter(odd, two, 7)],
        "reduce_scatter": [lambda: bagua.reduce_scatter(odd, two)],
        "alltoall": [lambda: bagua.alltoall(odd, odd), lambda: bagua.alltoall(two, odd)],
        "alltoall_v": [
            lambda: bagua.alltoall_v(odd, counts, begin, two, counts, begin),
            lambda: bagua.alltoall_v(two, counts, begin, odd, counts, begin),
        ],
        "alltoall_inplace": [lambda: bagua.alltoall_inplace(odd)],
    }
    named = []
    for name, failing in calls.items():
        for call in failing:
            with pytest.raises(ConfigurationError) as caught:
                call()
            assert f"argument {caught.value.argument}," in str(caught.value)
            named.append(f"{name} {caught.value.argument}")
    return named


def test_errors_name_the_arguments_of_the_caller(thread_ranks) -> None:
    assert thread_ranks(2, pass_what_does_not_fit)[0] == [
        "allreduce recv_tensor",
        "allreduce send_tensor",
        "reduce send_tensor",
        "allgather recv_tensor",
        "allgather send_tensor",
        "gather recv_tensor",
        "gather recv_tensor",
        "scatter send_tensor",
        "scatter src",
        "reduce_scatter send_tensor",
        "alltoall send_tensor",
        "alltoall recv_tensor",
        "alltoall_v send_counts",
        "alltoall_v recv_counts",
        "alltoall_inplace tensor",
    ]
