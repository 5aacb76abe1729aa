"""Helpers under the names by which users of other frameworks know them."""

from bagua.utilities.distributed import (
    all_gather_ddp_if_available as all_gather_ddp_if_available,
)
from bagua.utilities.distributed import (
    register_ddp_comm_hook as register_ddp_comm_hook,
)
from bagua.utilities.distributed import (
    sync_ddp_if_available as sync_ddp_if_available,
)

__all__: list[str] = []
