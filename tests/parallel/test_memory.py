"""Memory of a wrapped model: at most one buffer of the gradients' size more than without bagua."""

from __future__ import annotations

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
