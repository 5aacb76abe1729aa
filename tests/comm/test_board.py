"""The notice board: records, decisions that are made once, and a store that goes away."""

from __future__ import annotations

import subprocess
import threading

import pytest
import torch

import bagua.comm
from bagua.comm.store.board import Board
from bagua.comm.store.serving import connect_store, thread_store
from bagua.errors import CommunicatorClosedError, PeerLostError
from tests.interpreters import interpreter


def test_members_read_the_latest_record_of_each_other():
    store = thread_store()
    boards = [Board(store, rank, (4, 5, 6)) for rank in range(3)]
    boards[1].post({"beat": 1})
    assert boards[0].read() == [None, {"beat": 1}, None]
    boards[1].post({"beat": 2})
    boards[0].post({"beat": 7})
    assert boards[2].read() == boards[0].read() == [{"beat": 7}, {"beat": 2}, None]


def test_of_many_proposals_at_a_time_one_is_decided_for_all():
    store = thread_store()
    together, decided = threading.Barrier(4), [[None] * 4 for _ in range(25)]

    def propose(rank):
        board = Board(store, rank, range(4))
        for number, row in enumerate(decided):
            together.wait(10)
            row[rank] = board.decide(f"cell{number}", {"by": rank})

    threads = [threading.Thread(target=propose, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for row in decided:
        assert row[0] is not None
        assert row == row[:1] * 4


def test_a_forgotten_decision_can_be_made_again():
    board = Board(thread_store(), 0, (0,))
    assert board.decided("where") is None
    assert board.decide("where", "here") == "here"
    assert board.decide("where", "there") == board.decided("where") == "here"
    board.forget("where")
    assert board.decided("where") is None
    assert board.decide("where", "there") == "there"


HOST = """
import sys
from bagua.comm.store.serving import serve_store
store, port = serve_store()
print(port, flush=True)
sys.stdin.read()
"""


@pytest.mark.gloo
def test_a_store_whose_host_ends_is_a_lost_peer():
    host = subprocess.Popen([*interpreter(), "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        board = Board(connect_store(int(host.stdout.readline()), 20.0), 0, (3,))
        board.post({})
        assert board.read() == [{}]
    finally:
        host.kill()
        host.wait(20)
        host.stdin.close()
        host.stdout.close()
    with pytest.raises(PeerLostError, match="rank 3 lost the store") as caught:
        for _ in range(100):  # What is written is not answered.
            board.read()
    assert "ended" in caught.value.advice


def _meet_without_rank_1():
    group = bagua.comm.get_default_group()
    if group.rank == 1:
        return None
    communicator = group.connect([0, 2], "without1", timeout_s=20.0)
    tensor = torch.full((3,), group.rank + 1.0)
    communicator.allreduce(tensor)
    group.disconnect(communicator)
    group.disconnect(communicator)
    with pytest.raises(CommunicatorClosedError):
        communicator.allreduce(tensor)
    return tensor.tolist()


@pytest.mark.threads
@pytest.mark.gloo
def test_some_members_connect_without_the_others(ranks):
    assert ranks(3, _meet_without_rank_1) == [[4.0] * 3, None, [4.0] * 3]


@pytest.mark.threads
def test_who_wants_to_know_is_told_before_a_group_closes(thread_ranks):
    def close():
        group = bagua.comm.get_default_group().duplicate()
        told = []
        group.when_closing(lambda: told.append(group.global_communicator.usable))
        group.close()
        group.close()
        return told

    assert thread_ranks(2, close) == [[True], [True]]
