"""The engine on shared memory: the same training, and gradients that are reduced where they lie."""

from __future__ import annotations

import os
import signal

import torch

import bagua.comm
from bagua.comm.transports.shm.segments import find
from bagua.errors import PeerLostError
from bagua.testing.ranks import RankDiedError
from tests.parallel.wrapping import WRAPS


def _wide_model() -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, WRAPS["with_bagua"](model, optimizer, bucket_bytes=10_000_000), optimizer


def _step(wrapped: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    wrapped(torch.full((4, 256), bagua.comm.get_rank() + 1.0)).square().mean().backward()
    optimizer.step()


def _where_gradients_lie(steps: int) -> tuple[bool, int]:
    model, wrapped, optimizer = _wide_model()
    for _ in range(steps):
        _step(wrapped, optimizer)
    gradients = [parameter.grad for parameter in model.parameters()]
    segments = {getattr(find(gradient), "number", None) for gradient in gradients if gradient is not None}
    return None not in segments, len(segments)


def test_fused_gradients_lie_in_one_segment(shm_pool) -> None:
    assert shm_pool.run(_where_gradients_lie, 3, size=2) == [(True, 1)] * 2


def _lose_a_rank_while_training() -> BaseException | None:
    _, wrapped, optimizer = _wide_model()
    try:
        for step in range(1000):
            if step == 5 and bagua.comm.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            _step(wrapped, optimizer)
    except PeerLostError as error:
        return error
    return None


def test_a_rank_killed_in_the_middle_of_training(shm_pool) -> None:
    outcomes = shm_pool.outcomes(_lose_a_rank_while_training, size=3)
    assert isinstance(outcomes[1].error, RankDiedError)
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.value, PeerLostError), survivor
        assert survivor.value.peers == (1,)
