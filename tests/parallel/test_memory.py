"""Memory of a wrapped model: at most one buffer of the size of the gradients more, which ranks share where they can."""

from __future__ import annotations

from torch import nn

from bagua.comm.transports.shm.segments import find
from tests.harness import live_bytes, live_tensors, mlp
from tests.parallel.wrapping import WRAPS, Loop


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
