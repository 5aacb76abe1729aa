"""Which backend ``backend=None`` means: a function of what all ranks have, so the same on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm.transports.shm.transport import shm_refusal
from bagua.topology import ranks_by_node

#: The reason for a backend that the user chose.
ASKED_FOR = "it was asked for"
#: Under this name ``torch.distributed`` knows our transports.
TORCH_NAME = "bagua"


def unwrapped(backend: str | None) -> str | None:
    """What ``backend`` means to us: torch's name for our transports leaves the choice to us.

    Example:
        >>> unwrapped("bagua"), unwrapped("gloo")
        (None, 'gloo')
    """
    return None if backend == TORCH_NAME else backend


def abilities(use_cuda: bool) -> dict[str, Any]:
    """What this process can do, to be told to all others; anything that JSON can hold."""
    return {
        "cuda": use_cuda and torch.cuda.is_available() and dist.is_nccl_available(),
        "no_shared_memory": str(shm_refusal() or ""),
    }


def candidates(answers: Sequence[dict[str, Any]], nodes: Sequence[int]) -> list[tuple[str, str]]:
    """Backends to try, the best first, and why each of them; the last one works everywhere.

    Args:
        answers: the ``abilities`` of each rank.
        nodes: index of the host of each rank.

    Example:
        >>> able = {"cuda": False, "no_shared_memory": ""}
        >>> [backend for backend, _ in candidates([able, able], [0, 0])]
        ['shm', 'gloo']
        >>> [backend for backend, _ in candidates([able] * 3, [0, 0, 1])]
        ['hybrid', 'gloo']
        >>> [backend for backend, _ in candidates([able, able], [0, 1])]
        ['gloo']
    """
    if all(answer["cuda"] for answer in answers):
        return [("cpu:gloo,cuda:nccl", "there is CUDA on all ranks")]
    if len(answers) == 1:
        return [("gloo", "there is one rank")]
    for rank, answer in enumerate(answers):
        if answer["no_shared_memory"]:
            return [("gloo", f"on rank {rank} {answer['no_shared_memory']}")]
    sizes = [len(members) for members in ranks_by_node(nodes)]
    last = ("gloo", "the ranks could not share memory")
    if len(sizes) == 1:
        return [("shm", "all ranks are on one host"), last]
    if max(sizes) > 1:
        return [("hybrid", f"there are several ranks on some of {len(sizes)} hosts"), last]
    return [("gloo", f"each rank is on a host of its own, {len(sizes)} in all")]
