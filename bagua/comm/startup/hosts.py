"""Which ranks share a host: found out from what each process sees, not assumed."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from bagua import env
from bagua.errors import ConfigurationError


def host_identity() -> str:
    """A text that two processes share exactly when they run on one host.

    The boot id tells kernels apart, the network namespace tells containers apart
    that do not reach each other over loopback. Where the kernel does not tell,
    the launcher's node index and the host name do.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()}/node{env.get_node_rank()}"
    return f"{boot}/net{namespace.st_dev}.{namespace.st_ino}"


def advice_on_interfaces() -> str:
    """What to do where hosts do not reach each other through Gloo."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    return f"Set GLOO_SOCKET_IFNAME to the network interface over which the hosts reach each other. Here are {names}."


def nodes_from_identities(identities: Sequence[str]) -> tuple[int, ...]:
    """Index of the host of each rank; hosts are numbered by their lowest rank.

    Example:
        >>> nodes_from_identities(["b", "a", "b", "c"])
        (0, 1, 0, 2)
    """
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)


def nodes_from_local_size(world_size: int, local_world_size: int) -> tuple[int, ...]:
    """Index of the host of each rank when hosts hold consecutive blocks of ranks.

    Raises:
        ConfigurationError: the blocks do not fit the world.

    Example:
        >>> nodes_from_local_size(4, 2)
        (0, 0, 1, 1)
    """
    if not 1 <= local_world_size <= world_size or world_size % local_world_size:
        raise ConfigurationError(
            "the world does not split into hosts of this size",
            argument="local_world_size",
            expected=f"a divisor of the world size {world_size}",
            seen=local_world_size,
            advice="Leave it out: hosts are found out, also uneven ones.",
        )
    return tuple(rank // local_world_size for rank in range(world_size))
