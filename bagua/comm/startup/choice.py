"""Which backend ``backend=None`` means: a function of what all ranks have, so the same on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua import env
from bagua.comm.transports.shm.transport import shm_refusal
from bagua.topology import ranks_by_node

#: The reason for a backend that the user chose.
ASKED_FOR = "it was asked for"
#: Gloo carries CUDA tensors by way of the CPU.
SHARED_GPUS = "a host has more ranks than GPUs, and NCCL connects one rank for each GPU"
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
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "gpus": torch.cuda.device_count() if use_cuda and has_nccl else 0,
        "visible": env.visible_gpus(),
        "may_share_gpus": env.may_share_gpus(),
        "no_shared_memory": str(shm_refusal() or ""),
    }


def sharing_a_gpu(answers: Sequence[dict[str, Any]], nodes: Sequence[int]) -> list[int]:
    """Ranks of one host that are more than the GPUs they see, which NCCL does not connect; none if there are none.

    Example:
        >>> able = {"gpus": 1, "visible": "", "may_share_gpus": False}
        >>> sharing_a_gpu([able] * 3, [0, 1, 1])
        [1, 2]
        >>> sharing_a_gpu([able, {**able, "visible": "1"}], [0, 0])
        []
    """
    seen: dict[tuple[int, str], list[int]] = {}
    for rank, (answer, node) in enumerate(zip(answers, nodes, strict=True)):
        members = seen.setdefault((node, answer["visible"]), [])
        members.append(rank)
        if answer["gpus"] and not answer["may_share_gpus"] and len(members) > answer["gpus"]:
            return members
    return []


def candidates(answers: Sequence[dict[str, Any]], nodes: Sequence[int]) -> list[tuple[str, str]]:
    """Backends to try, the best first, and why each of them; the last one works everywhere.

    Args:
        answers: the ``abilities`` of each rank.
        nodes: index of the host of each rank.

    Example:
        >>> able = {"gpus": 0, "visible": "", "may_share_gpus": False, "no_shared_memory": ""}
        >>> [backend for backend, _ in candidates([able, able], [0, 0])]
        ['shm', 'gloo']
        >>> [backend for backend, _ in candidates([able] * 3, [0, 0, 1])]
        ['hybrid', 'gloo']
        >>> [backend for backend, _ in candidates([able, able], [0, 1])]
        ['gloo']
    """
    if all(answer["gpus"] for answer in answers):
        shared = sharing_a_gpu(answers, nodes)
        return [("gloo", SHARED_GPUS) if shared else ("cpu:gloo,cuda:nccl", "there is CUDA on all ranks")]
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
