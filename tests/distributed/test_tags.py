"""Messages with tags: matched by tag in any order, from any rank, and their failures."""

import pytest
import torch

import bagua.comm
import bagua.distributed as dist
from bagua.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicatorClosedError, ConcurrentUseError
from tests.harness import on_ranks


@on_ranks(2, pool="rank_pool")
def test_messages_are_matched_by_their_tags():
    """Rank 0 sends three messages, which rank 1 asks for in another order than that of sending."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (1, 2, 2)]
        assert all(work.wait() and work.is_completed() for work in works)
        dist.isend(torch.tensor([3.0, 3.0]), 1).wait()
    else:
        tensors = torch.zeros(3, 2)
        works = [dist.irecv(tensor, 0, tag=tag) for tensor, tag in zip(tensors, (2, 2, 1), strict=True)]
        dist.recv(tensors[0], 0)  # Of no tag, it overtakes.
        assert tensors[0].tolist() == [3.0, 3.0]
        for work in reversed(works):
            work.wait()
        found = [*tensors.tolist(), works[0].get_future().wait()[0].tolist()]
        assert found == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]
    dist.barrier()


@pytest.mark.parametrize("tag", [{}, {"tag": 7}], ids=str)
@on_ranks(4, pool="rank_pool")
def test_a_message_may_come_from_any_rank(tag):
    """Rank 2 collects what others send, in the order in which it comes; in a group, with global ranks."""
    rank, group = dist.get_rank(), dist.new_group([1, 2, 3])
    if rank in (1, 3):
        dist.send(torch.tensor([rank], dtype=torch.int16), 2, group, **tag)
        dist.send(torch.tensor([10 * rank], dtype=torch.int16), 2, group, **tag)
    if rank == 2:
        tensor = torch.empty(1, dtype=torch.int16)
        found = [(dist.recv(tensor, None, group, **tag), tensor.item()) for _ in range(3)]
        work = dist.irecv(tensor, None, group, **tag)
        work.wait()
        found.append((dist.get_global_rank(group, work._source_rank()), tensor.item()))
        assert sorted(found, key=lambda one: one[0]) == [(1, 1), (1, 10), (3, 3), (3, 30)]
    assert dist.recv(torch.empty(1), None, group, **tag) == -1 if rank == 0 else True
    dist.barrier()


def send_in_pieces():
    strided = torch.arange(3000.0).view(50, 60).t()
    if dist.get_rank() == 0:
        bagua.comm.torch_forms._PIECE_BYTES = 1000
        dist.send(strided, 1, tag=1)
        dist.send(torch.empty(0), 1, tag=1)
    else:
        dist.recv(received := torch.zeros(50, 60).t(), 0, tag=1)
        assert torch.equal(received, strided)
        dist.recv(torch.empty(0), 0, tag=1)
    return count_keys()


def test_large_messages_travel_in_pieces_and_leave_nothing(process_ranks):
    before, after = (process_ranks(2, function)[1] for function in (count_keys, send_in_pieces))
    assert after == before


def count_keys():
    dist.barrier()
    dist.barrier()
    return dist.group.WORLD.global_communicator.store.num_keys()


@pytest.mark.parametrize(
    ("sender", "error", "patience_s", "peers"),
    [(0, CollectiveMismatchError, 20.0, (0,)), (None, CollectiveTimeoutError, 0.05, ())],
    ids=["other", "none"],
)
@on_ranks(2)
def test_a_receive_that_fails_breaks_the_communicator(sender, error, patience_s, peers):
    if dist.get_rank() == sender:
        dist.send(torch.zeros(3), 1, tag=4)
    if dist.get_rank() == 1:
        work = dist.irecv(torch.zeros(2), sender, tag=4)
        with pytest.raises(error, check=lambda error: error.peers == peers):
            work.pending.wait(patience_s)
        with pytest.raises(CommunicatorClosedError):
            dist.irecv(torch.zeros(2), 0, tag=4)
        assert not bagua.comm.get_default_group().global_communicator.usable


def receive_with_a_handler(sender, install):
    """What rank 1 receives; rank 0 sends it when ``install(work, mail)`` or the handler has come to a barrier."""
    if dist.get_rank() == 0:
        dist.barrier()
        return dist.send(torch.ones(2), 1, tag=1)
    work = dist.irecv(tensor := torch.zeros(2), sender, tag=1).pending
    install(work, bagua.comm.torch_forms.mail_of(dist.group.WORLD.global_communicator))
    work.wait()
    return tensor.tolist()


def test_a_handler_may_ask_but_not_wait(thread_ranks):
    """Something that runs in the middle of a wait, as a signal handler does, asks and waits for the same message."""
    said = []

    def install(work, mail):
        look = mail.find

        def find(*arguments):
            if not said:
                said.append(work.is_completed())
                with pytest.raises(ConcurrentUseError):
                    work.wait()
            return look(*arguments)

        mail.find = find
        assert not work.is_completed()
        dist.barrier()

    assert thread_ranks(2, receive_with_a_handler, None, install) == [None, [1.0, 1.0]]
    assert said == [False]


def test_a_handler_may_wait_between_two_looks(thread_ranks):
    def install(work, mail):
        require, nested = mail.require_open, []

        def require_open(kind):
            if not nested:  # The outer wait has found nothing, and is about to sleep.
                nested.append(True)
                dist.barrier()
                work.wait()
            require(kind)

        mail.require_open = require_open

    assert thread_ranks(2, receive_with_a_handler, 0, install) == [None, [1.0, 1.0]]


@pytest.mark.parametrize("left", [{"": b"x"}, {"": b"999999"}, {"": b"1", "/0": b"no object"}, {"": b"0"}])
@on_ranks(2)
def test_what_a_stranger_leaves_in_the_store_is_one_error(left):
    mail = bagua.comm.torch_forms.mail_of(bagua.comm.get_default_group().global_communicator)
    if dist.get_rank() == 0:
        for key, value in sorted(left.items(), reverse=True):
            mail._store.set(f"0/1/5/0{key}", value)
    else:
        with pytest.raises(CollectiveMismatchError, check=lambda error: error.peers == (0,)):
            dist.recv(torch.empty(1), 0, tag=5)
