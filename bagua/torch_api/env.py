"""``bagua.torch_api.env``: who this process is. All of it works before ``init_process_group()``, too."""

from bagua.comm import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size

__all__ = ["get_local_rank", "get_local_size", "get_node_rank", "get_rank", "get_world_size"]
