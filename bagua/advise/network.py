"""What a message costs on a network: rounds that take a delay each, and bytes that go through the links of hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bagua.advise.facts import MachineFacts
from bagua.advise.trace import Message
from bagua.checks import check_kind, check_whole
from bagua.link import LinkSettings

__all__ = ["Cluster", "Cost", "cost_of"]

#: Bytes of data in one packet, and packets that a connection sends before the first answer.
_PACKET_BYTES, _FIRST_PACKETS = 1448, 10
#: Share of a link's rate that is left when packets have their headers.
_PAYLOAD = 1448 / 1514
#: From this size of a share on, Gloo's allgather and alltoall are messages between pairs, all at once.
_PAIRS_FROM_BYTES = 64 * 1024
#: A connection that was idle for so long and a round trip begins like a new one: Linux's least retransmission timeout.
_FORGOTTEN_AFTER_S = 0.2


@dataclass(frozen=True)
class Cluster:
    """Hosts with equal links.

    Args:
        hosts: how many.
        ranks_per_host: on each.
        link: link of each host.
        shared: True if all hosts are one machine, whose cores they share, as in ``bagua lab``.

    Raises:
        ConfigurationError: less than one host, or rank.
    """

    hosts: int
    ranks_per_host: int = 1
    link: LinkSettings = field(default_factory=LinkSettings)
    shared: bool = False

    def __post_init__(self) -> None:
        check_whole(1, hosts=self.hosts, ranks_per_host=self.ranks_per_host)
        check_kind(LinkSettings, "as bagua.link.parse_link returns it", link=self.link)

    @property
    def size(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def bytes_per_s(self) -> float:
        """What a host can send while it receives as much; infinite without a limit."""
        rates = [rate for rate in (self.link.send_mbit_s, self.link.receive_mbit_s) if rate is not None]
        return min(rates) * 1e6 / 8 * _PAYLOAD if rates else math.inf

    @property
    def delay_s(self) -> float:
        """From one host to another."""
        return self.link.delay_ms / 1e3

    @property
    def connection_bytes_per_s(self) -> float:
        """What one connection carries where packets are lost, after Mathis, Semke, Mahdavi and Ott, 1997."""
        if not self.link.loss or not self.delay_s:
            return math.inf
        return _PACKET_BYTES / (2 * self.delay_s) * math.sqrt(1.5 / self.link.loss)


@dataclass(frozen=True)
class Cost:
    """What one message costs.

    Attributes:
        latency_s: seconds in which nothing is limited by bytes.
        link_bytes: bytes that go through the link of each host, one way.
        own_bytes: bytes that this rank sends or receives, whichever is more.
    """

    latency_s: float
    link_bytes: float
    own_bytes: float


@dataclass(frozen=True)
class _Pattern:
    """How a call is made of messages.

    Attributes:
        rounds: messages that wait for each other: Gloo sends one when its receiver has asked for it, and in a ring asks
            for the next one early, so there is one more than messages.
        sent: bytes that the busiest rank sends.
        leaving: the part of them that leaves its host.
    """

    rounds: float
    sent: float
    leaving: float = 1.0


def _pattern(message: Message) -> _Pattern:
    n, size = message.ranks, message.nbytes
    away = (n - n / message.hosts) / (n - 1)  # of the other ranks, those on other hosts
    border = 1.0 if n == message.hosts else message.hosts / n  # of a ring, the ranks that send to another host
    tree = math.ceil(math.log2(n))
    at_once = size / n >= _PAIRS_FROM_BYTES
    swap = _Pattern(2.0 if at_once else float(n), (n - 1) / n * size, away)
    star = _Pattern(2.0, (n - 1) / n * size, away)
    patterns = {
        "allreduce": _Pattern(2.0 * n - 1, 2 * (n - 1) / n * size, border),
        "reduce": _Pattern(float(n), 2 * (n - 1) / n * size, border),
        "allgather": _Pattern(swap.rounds, swap.sent, away if at_once else border),
        "alltoall": swap,
        "alltoall_v": swap,
        "reduce_scatter": swap,
        "gather": star,
        "scatter": star,
        "broadcast": _Pattern(tree + 1.0, tree * size),
        "barrier": _Pattern(tree + 1.0, 0.0),
    }
    return patterns.get(message.kind, _Pattern(2.0, size))  # between two ranks, which may be anywhere


def slow_start_s(nbytes: float, bytes_per_s: float, delay_s: float) -> float:
    """Seconds that a connection loses while it finds out how much it may have on its way.

    Args:
        nbytes: bytes of one message.
        bytes_per_s: rate of the link.
        delay_s: one way.
    """
    round_trip_s = 2 * delay_s
    window = float(_FIRST_PACKETS * _PACKET_BYTES)
    lost_s, left = 0.0, nbytes
    while left > window and window < bytes_per_s * round_trip_s:
        lost_s += round_trip_s - window / bytes_per_s
        left -= window
        window *= 2
    return lost_s


def cost_of(message: Message, cluster: Cluster, machine: MachineFacts, idle_s: float = 0.0) -> Cost:
    """What ``message`` costs on ``cluster``.

    Args:
        message: the message.
        cluster: hosts and links.
        machine: facts that were measured without a network.
        idle_s: seconds for which the connections have sent nothing.
    """
    if message.ranks < 2:
        return Cost(0.0, 0.0, 0.0)
    if message.hosts < 2:
        tree = math.ceil(math.log2(message.ranks))
        return Cost(2 * tree * machine.local_message_s + 3 * message.nbytes * machine.local_byte_s, 0.0, 0.0)
    pattern = _pattern(message)
    own_bytes = pattern.sent
    link_bytes = own_bytes * pattern.leaving * message.ranks / message.hosts
    latency_s = pattern.rounds * (machine.message_s + cluster.delay_s)
    own_rate = 1.0 / machine.byte_s if machine.byte_s else math.inf
    rate = min(cluster.bytes_per_s, own_rate, cluster.connection_bytes_per_s)
    if idle_s > _FORGOTTEN_AFTER_S + 2 * cluster.delay_s:
        latency_s += slow_start_s(own_bytes, rate, cluster.delay_s)
    if cluster.connection_bytes_per_s < cluster.bytes_per_s:
        latency_s += own_bytes * (1 / cluster.connection_bytes_per_s - 1 / cluster.bytes_per_s)
    return Cost(latency_s, link_bytes, own_bytes)
