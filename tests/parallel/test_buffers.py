"""Means of buffers, and the memory that a wrapped model needs."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, LocalSGDAlgorithm
from bagua.comm.transports.shm.memory import find
from bagua.parallel import allreduce_parameters, with_bagua
from tests.harness import State, assert_same_on_all_ranks, live_bytes, live_tensors, mlp, seeded
from tests.parallel.wrapping import WRAPS, Loop

LOWEST = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """A model with statistics, which have means, beside constants, which are equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4)
        self.register_buffer("causal", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("lowest", torch.full((4, 4), LOWEST).triu(1))
        self.register_buffer("table", torch.linspace(0.1, 0.9, 7).sin())
        self.register_buffer("narrow", torch.linspace(0.1, 0.9, 7).to(torch.bfloat16))
        self.register_buffer("peak", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(inputs)) @ (self.causal.exp() + self.lowest.exp())


def averaged_in_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    wrapped = with_bagua(model, [optimizer], LocalSGDAlgorithm(2, average_buffers=True))
    train_apart(wrapped, optimizer, model)
    return dict(model.named_buffers())


def averaged_at_the_end(model: nn.Module, optimizer: torch.optim.Optimizer, algorithm: str) -> State:
    wrapped = with_bagua(model, [optimizer], Algorithm.init(algorithm))
    train_apart(wrapped, optimizer, model)
    wrapped.bagua_finish()
    return dict(model.named_buffers())


def averaged_for_a_while(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    wrapped = with_bagua(model, [optimizer], Algorithm.init("diloco"))
    train_apart(wrapped, optimizer, model)
    own = {name: one.clone() for name, one in model.named_buffers()}
    with wrapped.bagua_global_average():
        inside = {name: one.clone() for name, one in model.named_buffers()}
    assert all(torch.equal(one, own[name]) or one.isnan().any() for name, one in model.named_buffers())
    return inside


def averaged_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    train_apart(model, optimizer, model)
    allreduce_parameters(model)
    return dict(model.named_buffers())


def train_apart(wrapped: nn.Module, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Two steps, other inputs on each rank; in the second, the peak of the last rank is not a number."""
    rank = bagua.comm.get_rank()
    for step in range(2):
        optimizer.zero_grad()
        wrapped(torch.arange(24.0).view(6, 4) + 10 * rank).mean().backward()
        if step == 1:
            model.peak.fill_(torch.nan if rank == bagua.comm.get_world_size() - 1 else float(rank))
        optimizer.step()


WAYS = {
    "average_buffers": averaged_in_training,
    "finish of diloco": functools.partial(averaged_at_the_end, algorithm="diloco"),
    "finish of decentralized": functools.partial(averaged_at_the_end, algorithm="decentralized"),
    "global_average": averaged_for_a_while,
    "allreduce_parameters": averaged_by_hand,
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_each_buffer_is_averaged_by_itself_and_constants_stay(thread_ranks, way, ranks, caplog):
    def check() -> tuple[State, State]:
        with seeded():
            model = Masked()
        before = {name: one.clone() for name, one in model.named_buffers()}
        found = WAYS[way](model, torch.optim.SGD(model.parameters(), lr=0.1))
        return before, {name: one.clone() for name, one in found.items()}

    with caplog.at_level(logging.WARNING, "bagua"):
        results = thread_ranks(ranks, check)
    for before, after in results:
        for name in ("causal", "lowest", "table", "narrow"):
            assert torch.equal(after[name], before[name]), name
    names = ("norm.running_mean", "norm.running_var")
    assert_same_on_all_ranks([{name: after[name] for name in names} for _, after in results])
    middle = torch.tensor([10.0, 11.0, 12.0, 13.0]) + 5 * (ranks - 1)  # of the batches of all ranks
    assert torch.allclose(results[0][1]["norm.running_mean"], 0.19 * middle, rtol=1e-4)
    assert [after["peak"].item() for _, after in results[:-1]] == [float(rank) for rank in range(ranks - 1)]
    told = [one.getMessage() for one in caplog.records if "is not finite" in one.getMessage()]
    assert len(told) == ranks - 1
    assert all("Buffer peak" in one for one in told)


def spread_of_norms(inside: bool) -> tuple[float, float]:
    """The spectral norm of a layer that is held at 1: by the mean over ranks, and after one forward pass in train()."""
    rank = bagua.comm.get_rank()
    with seeded():
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    wrapped = with_bagua(model, [optimizer], LocalSGDAlgorithm(100))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(60):
        optimizer.zero_grad()
        inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        (wrapped(inputs * (1 + 2 * rank)) - 3 * targets).square().mean().backward()
        optimizer.step()

    def look() -> tuple[float, float]:
        norms = []
        for _ in range(2):
            norms.append(torch.linalg.matrix_norm(model.eval()[0].weight, 2).item())
            with torch.no_grad():
                model.train()(inputs)
        return norms[0], norms[1]

    if inside:
        vectors = [one.clone() for one in model.buffers()]
        with wrapped.bagua_global_average():
            seen = look()
        assert all(map(torch.equal, vectors, model.buffers()))
        return seen
    wrapped.bagua_finish()
    return look()


@pytest.mark.parametrize("inside", [False, True], ids=["finish", "global_average"])
def test_one_forward_pass_finds_the_singular_vectors_of_the_mean(thread_ranks, inside):
    for of_mean, found in thread_ranks(2, spread_of_norms, inside):
        assert abs(found - 1) < min(0.03, abs(of_mean - 1))


def _held_after_training() -> dict[str, int]:
    """What the model, its gradients and its optimizer hold after some steps, by the way it was wrapped."""
    held = {}
    for name in (*WRAPS, "plain"):
        kept = live_tensors()  # What an earlier test has left must not end meanwhile: its bytes would be missing.
        before = live_bytes()
        loop = Loop(name if name in WRAPS else lambda model, _: model)
        loop.train(3)
        held[name] = live_bytes() - before
        del loop, kept
    return held


def test_extra_memory_is_at_most_one_buffer_of_the_gradients_size(process_ranks):
    gradient_bytes = sum(parameter.nbytes for parameter in mlp().parameters())
    alignment_bytes = 64 * 2 * sum(1 for _ in mlp().parameters())
    for held in process_ranks(2, _held_after_training):
        plain = held.pop("plain")
        assert plain == 3 * gradient_bytes, "weights, gradients, momentum; this test can fail"
        assert set(held) == set(WRAPS)
        assert max(held.values()) <= plain + gradient_bytes + alignment_bytes


def _where_gradients_lie() -> tuple[bool, int]:
    """Whether all are in memory that ranks share, and in how many segments of it."""
    wide = nn.Sequential(nn.Linear(8, 8192), nn.ReLU(), nn.Linear(8192, 4))
    loop = Loop("with_bagua", lambda: wide, bucket_bytes=10**7)
    loop.train(3)
    segments = {getattr(find(parameter.grad), "number", None) for parameter in wide.parameters()}
    return None not in segments, len(segments)


def test_fused_gradients_lie_in_one_segment(shm_pool):
    """They are reduced where they lie."""
    assert shm_pool.run(_where_gradients_lie, size=2) == [(True, 1)] * 2
