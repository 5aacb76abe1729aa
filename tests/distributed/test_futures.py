"""Callbacks of futures may communicate, one after the other, while the main thread is in no call."""

import threading
import time

import pytest
import torch

import bagua.distributed as dist
from bagua.errors import ConcurrentUseError


def communicate_in_callbacks():
    """Two calls; the callback of each reduces again, and both communicate in the order of the calls."""
    threads = []

    def again(done):
        threads.append(threading.current_thread().name)
        tensor = done.value()[0].clone()
        dist.all_reduce(tensor)
        return tensor.item()

    works = [dist.all_reduce(torch.tensor([number]), async_op=True) for number in (1.0, 10.0)]
    futures = [work.get_future().then(again) for work in works]
    totals = [future.wait() for future in futures]
    dist.barrier()
    assert threading.current_thread().name not in threads
    return [*totals, len(set(threads))]


def test_a_callback_may_communicate(ranks):
    assert ranks(3, communicate_in_callbacks) == [[9.0, 90.0, 1]] * 3


def communicate_while_the_main_thread_does(refused):
    """The main thread of rank 0 waits for a message, which rank 1 sends when the callback has been refused."""
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))
        assert refused.wait(60)
        dist.send(torch.ones(1), 0)
        return None
    in_use = dist.group.WORLD.global_communicator.pipeline.in_use

    def again(done):
        while not in_use.locked():
            time.sleep(0.001)
        try:
            with pytest.raises(ConcurrentUseError):
                dist.all_reduce(done.value()[0])
        finally:
            refused.set()

    future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again)
    tensor = torch.zeros(1)
    dist.recv(tensor, 1)
    future.wait()
    return tensor.item()


def test_a_callback_is_refused_inside_another_call(thread_ranks):
    assert thread_ranks(2, communicate_while_the_main_thread_does, threading.Event()) == [1.0, None]
