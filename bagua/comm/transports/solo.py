"""The transport of one rank: every collective is a copy or nothing."""

from __future__ import annotations

from bagua.comm.call import Call
from bagua.comm.transports.contract import DONE, Data, Handle, Transport
from bagua.comm.transports.memory.copying import copy_pieces


class SoloTransport(Transport):
    """Serves communicators of size 1 on every device, whatever the backend."""

    name = "solo"
    device_types = frozenset({"cpu", "cuda", "xpu", "mps", "hpu"})
    compares_calls = True
    executor = "caller"

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:  # noqa: ARG002
        """Copy where output and input differ."""
        if source is not target and source is not None and target is not None:
            if target.is_inference():
                copy_pieces([target], [source])
            else:
                target.view(-1).copy_(source.view(-1))
        return DONE

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """There is no other rank to tell."""

    def close(self) -> None:
        """Nothing is held."""
