"""What a message costs on a network: rounds that take a delay each, and bytes that go through the links of hosts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bagua.advise.facts import CallFacts, MachineFacts, Message, calls_like
from bagua.checks import check_kind, check_whole
from bagua.link import LinkSettings

#: Bytes of data in one packet, and packets that a connection sends before the first answer.
_PACKET_BYTES, _FIRST_PACKETS = 1448, 10
#: Share of a link's rate that is left when packets have their headers.
_PAYLOAD = 1448 / 1514
#: Bytes of a call that shows what calls take on a link, whatever they carry.
SMALL_CALL_BYTES = 64
#: Calls in which each rank sends a share to each other one, all at once.
_STARS = ("alltoall", "alltoall_v", "reduce_scatter", "gather", "scatter")
#: From this size of a share on, Gloo's allgather is made of messages between pairs, all at once.
_PAIRS_FROM_BYTES = 64 * 1024
#: Gloo cuts a rank's share of an allreduce into two pieces, or more of at most so many bytes, and has two on their way.
_PIECES, _PIECE_BYTES = 2, 2**20
#: More turns of latency and bytes only make a simulation longer: an allreduce of 10,000 ranks would have 20,000.
_MOST_ROUNDS = 64
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
        burst_bytes: bytes that pass a link at any rate after it was idle, as through the token buckets of the lab.
        calls: times of calls among one rank of each host when nothing else went on, where they were measured.

    Raises:
        ConfigurationError: less than one host, or rank.
    """

    hosts: int
    ranks_per_host: int = 1
    link: LinkSettings = field(default_factory=LinkSettings)
    shared: bool = False
    burst_bytes: float = 0.0
    calls: tuple[CallFacts, ...] = ()

    def __post_init__(self) -> None:
        check_whole(1, hosts=self.hosts, ranks_per_host=self.ranks_per_host)
        check_kind(LinkSettings, "as bagua.link.parse_link returns it", link=self.link)

    @property
    def size(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def rate_mbit_s(self) -> float:
        """The slower direction of a link; infinite without a limit."""
        rates = [rate for rate in (self.link.send_mbit_s, self.link.receive_mbit_s) if rate is not None]
        return min(rates, default=math.inf)

    @property
    def bytes_per_s(self) -> float:
        """What a host can send while it receives as much; infinite without a limit."""
        return self.rate_mbit_s * 1e6 / 8 * _PAYLOAD

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
        latency_s: seconds in which nothing happens on this host.
        link_bytes: bytes that go through the link of each host, one way.
        own_bytes: bytes that this rank sends or receives, whichever is more.
        work_s: seconds for which this rank's processor is busy with messages, whatever their size.
        byte_s: least seconds that each of ``own_bytes`` takes.
        byte_work_s: seconds for which this rank's processor is busy with each of them.
        rounds: messages that wait for each other: each takes its part of ``latency_s`` and of the bytes. Of very many,
            several count as one: each is an event of the simulation.
    """

    latency_s: float
    link_bytes: float
    own_bytes: float
    work_s: float = 0.0
    byte_s: float = 0.0
    byte_work_s: float = 0.0
    rounds: int = 1


@dataclass(frozen=True)
class Pattern:
    """How a call is made of messages.

    Attributes:
        messages: messages that a rank sends one after the other.
        delays: ways from host to host that wait for each other. Gloo sends a message when its receiver has asked for
            it, so each of them takes two; counted in the lab, among 2 and 4 hosts with 20 ms between them.
        sent: bytes that the busiest rank sends.
        leaving: the part of them that leaves its host.
    """

    messages: float
    delays: float
    sent: float
    leaving: float = 1.0


def pattern_of(message: Message) -> Pattern:
    """How the messages of a call follow each other."""
    n, size = message.ranks, message.nbytes
    away = (n - n / message.hosts) / (n - 1)  # of the other ranks, those on other hosts
    border = 1.0 if n == message.hosts else message.hosts / n  # of a ring, the ranks that send to another host
    tree = math.ceil(math.log2(n))
    share = (n - 1) / n * size
    pieces = max(_PIECES, math.ceil(size / n / _PIECE_BYTES))
    rounds = math.ceil((n - 1) * pieces / _PIECES)
    star = Pattern(n - 1, 2.0, share, away)
    ring = Pattern(n - 1, 2.0 * (n - 1), share, border)
    patterns = {
        "allreduce": Pattern(2.0 * (n - 1), 4.0 * rounds, 2 * share, border),
        "reduce": Pattern(float(n), 2.0 * n, 2 * share, border),
        "allgather": star if size / n >= _PAIRS_FROM_BYTES else ring,
        **dict.fromkeys(_STARS, star),
        "broadcast": Pattern(tree, 2.0, tree * size),
        "barrier": Pattern(tree, 2.0 * tree, 0.0),
    }
    return patterns.get(message.kind, Pattern(1.0, 2.0, size))  # between two ranks, which may be anywhere


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
    pattern = pattern_of(message)
    own_bytes = pattern.sent
    link_bytes = own_bytes * pattern.leaving * message.ranks / message.hosts
    call = machine.call_of(message.kind)
    work_s, waiting_s, byte_s = call.message_s * call.busy, machine.waiting_s(call), call.byte_s(own_bytes)
    latency_s = pattern.messages * waiting_s + pattern.delays * cluster.delay_s
    seen = calls_like(cluster.calls, message.kind)
    if seen is not None:
        share = min(1.0, machine.cores / (cluster.size if cluster.shared else cluster.ranks_per_host))
        known_s = work_s / share + waiting_s
        latency_s += pattern.delays * _beyond_delay_s(seen, message, cluster, known_s)
        if math.isfinite(cluster.bytes_per_s) and not cluster.delay_s:
            link_bytes *= max(1.0, seen.byte_s(own_bytes) * cluster.bytes_per_s)
    own_rate = 1.0 / byte_s if byte_s else math.inf
    rate = min(cluster.bytes_per_s, own_rate, cluster.connection_bytes_per_s)
    if idle_s > _FORGOTTEN_AFTER_S + 2 * cluster.delay_s:
        latency_s += slow_start_s(own_bytes, rate, cluster.delay_s)
    if seen is None and cluster.connection_bytes_per_s < cluster.bytes_per_s:
        latency_s += own_bytes * (1 / cluster.connection_bytes_per_s - 1 / cluster.bytes_per_s)
    rounds = min(round(pattern.delays / 2), _MOST_ROUNDS)  # a message is asked for before it is sent
    return Cost(latency_s, link_bytes, own_bytes, pattern.messages * work_s, byte_s, byte_s * call.busy_bytes, rounds)


def _beyond_delay_s(seen: CallFacts, message: Message, cluster: Cluster, message_s: float) -> float:
    """How much longer than the delay each way from host to host took, beside the work of messages and the link's rate.

    Without a delay, as in a small call. With one, as in calls of this size: connections do not have all on its way.
    """

    def wait_s(nbytes: float, added_s: float) -> tuple[float, float]:
        pattern = pattern_of(replace(message, nbytes=nbytes))
        on_link_s = pattern.sent * pattern.leaving * message.ranks / message.hosts / cluster.bytes_per_s
        known_s = small.messages * message_s + pattern.delays * cluster.delay_s + on_link_s
        return pattern.sent, max(small.messages * seen.message_s + added_s - known_s, 0.0) / pattern.delays

    small = pattern_of(replace(message, nbytes=float(SMALL_CALL_BYTES)))
    found = [wait_s(float(SMALL_CALL_BYTES), 0.0)]
    if cluster.delay_s:
        found += [wait_s(sent / small.sent * SMALL_CALL_BYTES, added_s) for sent, added_s in seen.points]
    return _between(found, pattern_of(message).sent)


def _between(points: Sequence[tuple[float, float]], place: float) -> float:
    """The value at ``place``, on the line between the points next to it, or that of the first or last one."""
    if place <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return points[-1][1]
