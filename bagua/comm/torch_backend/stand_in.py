"""The Gloo group inside each group of backend ``bagua``."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from bagua.comm.operands import as_seconds
from bagua.comm.torch_private import lazy_gloo_options


class CpuStandIn(dist.ProcessGroupGloo):
    """What torch finds registered for CPU tensors, because it asks groups for that.

    It also does what our transports do not: sparse tensors, and messages with a tag. It
    connects when it is first used, so it costs nothing until then.

    Args:
        store: key-value store of its group alone.
        rank: number of this process.
        size: number of ranks.
        timeout: default deadline of the calls of its group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, lazy_gloo_options(timeout))
        self.timeout_s = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Where torch leaves a new timeout for the group."""
        self.timeout_s = as_seconds(timeout)
        super()._set_default_timeout(timeout)
