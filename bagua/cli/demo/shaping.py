"""The demo's slow link: shaped by the kernel where that may be, else paced inside the processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bagua.cli.demo.link import PACED, register_paced
from bagua.cli.lab.network import LabUnavailableError, Network, open_network
from bagua.cli.launch import Rank
from bagua.comm import backend_refusal
from bagua.link import LinkSettings

#: What sends everything through the network device, where the kernel shapes it.
_THROUGH_DEVICE = "gloo"


@dataclass(frozen=True)
class SlowLink:
    """The link of each process of a comparison.

    Args:
        mbit_per_s: its rate, each way, in 10^6 bits per second.
        backend: name of the backend that the processes communicate through.
        network: hosts whose links the kernel shapes, one for each process; None where processes pace themselves.
        reason: why the kernel does not shape the link; empty where it does.
    """

    mbit_per_s: float
    backend: str
    network: Network | None = None
    reason: str = ""

    def join(self, rank: Rank, timeout_s: float) -> None:
        """Initialize bagua's process group with the other processes, over this link."""
        if self.network is not None:
            rank.join(self.backend, timeout_s)
            return
        register_paced(self.mbit_per_s, self.backend)
        rank.join(PACED, timeout_s)

    @property
    def made_by(self) -> str:
        """Who makes it slow, in a few words."""
        return "paced inside the processes" if self.network is None else "shaped by the kernel"

    def __str__(self) -> str:
        return f"links of {self.mbit_per_s:g} Mbit/s, {self.made_by}"


@contextmanager
def open_slow_link(ranks: int, mbit_per_s: float, backend: str | None, paced: bool = False) -> Iterator[SlowLink]:
    """Make the links, and take them down at the end of the block.

    Args:
        ranks: how many processes will use them.
        mbit_per_s: rate of each, in 10^6 bits per second.
        backend: backend that the user asked for; None for the best there is.
        paced: True if the processes pace themselves also where the kernel could shape.
    """
    with ExitStack() as stack:
        if paced:
            reason = "as --paced asks for"
        elif backend not in (None, _THROUGH_DEVICE):
            reason = f"because {backend} does not send through the network device"
        else:
            try:
                network = stack.enter_context(open_network(ranks, LinkSettings(mbit_per_s, mbit_per_s)))
            except LabUnavailableError as error:
                reason = f"because {error}"
            else:
                yield SlowLink(mbit_per_s, _THROUGH_DEVICE, network)
                return
        best_here = "shm" if backend_refusal("shm") is None else "gloo"
        yield SlowLink(mbit_per_s, backend or best_here, None, reason)
