"""A rank that waits for long says for whom, and in which step and bucket; and so do errors."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import bagua.comm
from bagua.comm import long_wait
from bagua.comm.long_wait import LongWait
from bagua.errors import CollectiveTimeoutError, PeerLostError
from tests.harness import loss_of
from tests.parallel.wrapping import Loop


def test_warnings_come_at_growing_intervals():
    now = 0.0
    wait, times = LongWait(lambda: now), []
    for second in range(500):
        now = float(second)
        if wait.is_over():
            times.append(second)
    assert times == [30, 60, 120, 240, 480]


class Heard(logging.Handler):
    """Keeps messages, and wakes who waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if "has waited" in self.messages[-1]:
            self.told.set()


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(long_wait, "FIRST_WARNING_S", 0.02)
    handler = Heard()
    logging.getLogger("bagua").addHandler(handler)
    yield handler
    logging.getLogger("bagua").removeHandler(handler)


def test_who_waits_in_a_step_says_for_whom_where_and_where_the_other_is(thread_ranks, heard):
    def train() -> None:
        loop = Loop("with_bagua", bucket_bytes=600)
        for step in range(3):
            if (loop.rank, step) == (1, 2):
                heard.messages.clear()
                heard.told.clear()
                assert heard.told.wait(60)
            loop.train()

    thread_ranks(2, train)
    told = next(message for message in heard.messages if "has waited" in message)
    assert told.startswith("rank 0 has waited 0 s for rank 1 in step 2, bucket 0 (")
    assert "4.bias" in told
    assert "; rank 1 was last in #" in told


def test_who_waits_for_others_to_start_names_them(heard):
    store = bagua.comm.thread_store()

    def start(rank: int) -> None:
        if rank == 1:
            assert heard.told.wait(60)
        bagua.comm.init_process_group(backend="threads", store=store, rank=rank, world_size=2)
        bagua.comm.destroy_process_group()

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert any(message.startswith("rank 0 has waited 0 s for rank 1 to come to") for message in heard.messages)


def _wait_on_a_process() -> list[str]:
    """What rank 0 says while rank 1 has yet to come."""
    long_wait.FIRST_WARNING_S = 0.2
    handler = Heard()
    logging.getLogger("bagua").addHandler(handler)
    communicator = bagua.comm.get_default_group().global_communicator
    try:
        communicator.allreduce(torch.ones(2))
        if communicator.rank == 1:
            communicator.store.wait(["told"])
        else:
            threading.Thread(target=_pass_on, args=(handler, communicator.store.clone()), daemon=True).start()
        communicator.allreduce(torch.ones(3))
    finally:
        logging.getLogger("bagua").removeHandler(handler)
        long_wait.FIRST_WARNING_S = 30.0
    return handler.messages


def _pass_on(handler: Heard, store: torch.distributed.Store) -> None:
    handler.told.wait(30)
    store.set("told", "1")


def test_processes_say_it_too(ranks, rank_pool):
    (message, *_), _ = ranks(2, _wait_on_a_process)
    assert message.startswith("rank 0 has waited 0 s for rank 1 in ")
    if rank_pool.backend in ("shm", "threads"):
        assert "(3 x float32, sum), on world; rank 1 was last in #" in message
        assert "(2 x float32, sum)" in message


def test_errors_name_step_bucket_and_parameters_before_calls(thread_ranks):
    def train() -> tuple[str, str]:
        loop = Loop("with_bagua", bucket_bytes=10**6)
        loop.train(3)
        if loop.rank == 1:
            bagua.comm.destroy_process_group()
            return "", ""
        with pytest.raises((PeerLostError, CollectiveTimeoutError)) as caught:
            loss_of(loop.wrapped, loop.rank, 3).backward()
        return caught.value.activity, str(caught.value)

    activity, text = thread_ranks(2, train)[0]
    assert activity == "step 3, bucket 0 (4.bias to 0.weight)"
    assert f"(in {activity}, in #" in text
