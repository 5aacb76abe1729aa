"""Where members live, and the faults of places: networks and disks."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bagua.cli.chaos.schedule import Fault
from bagua.cli.lab.network import (
    INTERFACE,
    LabUnavailableError,
    Network,
    call_kernel,
    open_network,
)
from bagua.link import LinkSettings

LOOPBACK = "127.0.0.1"
#: Of Linux: mounts of this process and of what it starts, which no other process sees.
CLONE_NEWNS = 0x00020000
_FILLER = ".filled_by_bagua_chaos"
#: Begins a fault, and says what was done; ends it.
FaultFunctions = tuple[Callable[[Fault, int], str], Callable[[Fault, int], None]]


@dataclass(frozen=True)
class Home:
    """Where one member lives.

    Attributes:
        address: address at which others reach it.
        namespace: path of its network namespace; empty for that of this process.
        variables: variables that it gets.
    """

    address: str = LOOPBACK
    namespace: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def open_places(members: int, link: LinkSettings | None) -> Iterator[tuple[list[Home], Network | None]]:
    """One place for each member, and a last one for the service; the network between them.

    Args:
        members: number of members.
        link: link of each; None for no network of their own.

    Raises:
        LabUnavailableError: there cannot be a network here.
    """
    if link is None:
        yield [Home()] * (members + 1), None
        return
    if link.needs_switch:
        raise LabUnavailableError("links that are cut or slowed have a rate alone; leave delay and loss out of --link")
    with open_network(members + 1, link) as network:
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        yield [Home(host.address, host.namespace, variables) for host in network.hosts], network


def links(network: Network, link: LinkSettings, slow: LinkSettings) -> dict[str, FaultFunctions]:
    """Faults of the network: a link is cut, or is slow."""

    def cut(fault: Fault, member: int) -> str:
        network.cut(member)
        return f"its link is cut for {fault.lasting_s:.1f} s"

    def slow_down(fault: Fault, member: int) -> str:
        network.set_link(member, slow)
        return f"its link is {slow} for {fault.lasting_s:.1f} s"

    return {
        "partition": (cut, lambda _, member: network.mend(member)),
        "slow": (slow_down, lambda _, member: network.set_link(member, link)),
    }


def disks(folders: Sequence[str], size_mb: int) -> dict[str, FaultFunctions]:
    """The fault of a disk: no byte is left on it. Small disks are mounted where only this process and members see them.

    Args:
        folders: folder of each member; may be the same one.
        size_mb: size of each, in 10^6 bytes.

    Raises:
        LabUnavailableError: this user may not mount.
    """
    try:
        call_kernel("unshare", CLONE_NEWNS)
    except OSError as error:
        raise LabUnavailableError(f"full disks need root, to mount a small one ({error.strerror})") from error
    _mount(["--make-rprivate", "/"])
    for folder in dict.fromkeys(folders):
        Path(folder).mkdir(parents=True, exist_ok=True)
        _mount(["-t", "tmpfs", "-o", f"size={size_mb * 1_000_000}", "bagua-chaos", folder])

    def fill(fault: Fault, member: int) -> str:
        with contextlib.suppress(OSError), (Path(folders[member]) / _FILLER).open("ab", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        return f"its disk is full for {fault.lasting_s:.1f} s"

    def empty(_: Fault, member: int) -> None:
        (Path(folders[member]) / _FILLER).unlink(missing_ok=True)

    return {"disk": (fill, empty)}


def _mount(arguments: Sequence[str]) -> None:
    done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise LabUnavailableError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
