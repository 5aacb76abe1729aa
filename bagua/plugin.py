"""The backend ``bagua`` for programs that do not import this package: torch 2.14 finds it by its entry point."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Make the backend name known to torch, which calls this when it meets the name first.

    Imports little and raises nothing; what is wrong with this package is said when a group is asked for.
    """
    # A list: torch would take a string for a list of letters.
    dist.Backend.register_backend("bagua", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(request: Any, options: Any) -> dist.ProcessGroup:
    from bagua.comm import create_requested_group  # noqa: PLC0415 - takes longer than torch may be asked to wait

    return create_requested_group(request, options)
