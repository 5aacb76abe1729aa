"""What calls cost among hosts of the network lab: without a limit, and on a link."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from bagua.advise import CallFacts, Cluster, MachineFacts, Message
from bagua.advise.facts import ALIKE
from bagua.advise.measure import (
    CallKey,
    Others,
    UsualCall,
    call_facts,
    facts_of_calls,
    machine_facts,
    usual_calls,
)
from bagua.advise.network import SMALL_CALL_BYTES, Cost, cost_of
from bagua.cli.lab.network import burst_bytes, open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import ProcessGroup, destroy_process_group, get_default_group
from bagua.link import LinkSettings

_TIMEOUT_S = 120.0
#: Bytes of the calls that show what bytes cost. With a delay, it counts from some packets on whether a connection may
#: have them on their way.
_LARGE = (32 * 1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
#: Calls of one kind and size: so many at most and at least, and seconds that they may take; none is made that takes
#: longer, unless it is small.
_MOST_ROUNDS, _LEAST_ROUNDS, _LINK_S, _SMALL_ENOUGH = 40, 3, 1.2, 256 * 1024
#: All of them are made so often: what disturbs the first calls of a process is over when they come again.
_PASSES = 2


def lab_cluster(hosts: int, ranks_per_host: int, link: LinkSettings, calls: tuple[CallFacts, ...] = ()) -> Cluster:
    """Hosts of the lab.

    Args:
        hosts: how many.
        ranks_per_host: on each.
        link: link of each host.
        calls: times of calls between them, as ``probe_link`` returned them.
    """
    rates = [rate for rate in (link.send_mbit_s, link.receive_mbit_s) if rate is not None]
    # The switch that makes delays paces what a host receives, with no bucket.
    burst = burst_bytes(min(rates)) if rates and not link.needs_switch else 0
    return Cluster(hosts, ranks_per_host, link, shared=True, burst_bytes=burst, calls=calls)


def probe_lab(hosts: int) -> MachineFacts:
    """Measure what calls cost among hosts of the lab whose links have no limit, and of which each has one rank.

    Raises:
        LabUnavailableError: there cannot be a lab here.
    """
    others = Others()
    with open_network(hosts) as network:
        found: list[tuple[tuple[CallFacts, ...], float]] = run_ranks(_on_machine, hosts, network=network)
    return replace(machine_facts(*found[0], ranks=hosts), others=others.share())


def probe_link(hosts: int, link: LinkSettings) -> tuple[CallFacts, ...]:
    """Measure what calls take among hosts of the lab, of which each has one rank.

    Raises:
        LabUnavailableError: there cannot be a lab here.
    """
    with open_network(hosts, link) as network:
        if network.shortcoming:
            logging.getLogger("bagua").warning("calls are measured where %s", network.shortcoming)
        found: list[tuple[CallFacts, ...]] = run_ranks(_on_link, hosts, (link,), network=network)
    return found[0]


def _on_machine(rank: Rank) -> tuple[tuple[CallFacts, ...], float]:
    rank.join("gloo", _TIMEOUT_S)
    try:
        return call_facts(get_default_group().global_communicator, time.process_time)
    finally:
        destroy_process_group()


def _on_link(rank: Rank, link: LinkSettings) -> tuple[CallFacts, ...]:
    rank.join("gloo", _TIMEOUT_S)
    try:
        return link_facts(get_default_group(), lab_cluster(rank.world_size, 1, link))
    finally:
        destroy_process_group()


def link_facts(group: ProcessGroup, cluster: Cluster) -> tuple[CallFacts, ...]:
    """Measure calls one after the other, so that they wait for the link alone.

    Those of each kind and size have connections of their own, as in training, which makes few kinds of calls: how much
    a connection has on its way depends on what it carried before.

    Args:
        group: one rank of each host, all of which call this.
        cluster: the hosts.
    """
    found: dict[CallKey, UsualCall] = {}
    wanted = {
        (kind, nbytes): _rounds((kind, nbytes), cost_on(cluster, kind, nbytes), cluster)
        for kind in ALIKE
        for nbytes in (SMALL_CALL_BYTES, *_LARGE)
    }
    for key in [*wanted] * _PASSES:
        if not wanted[key]:
            continue
        made = group.duplicate("probe")
        try:
            usual = usual_calls(made.global_communicator, {key: wanted[key]})[key]
        finally:
            made.close()
        found[key] = min(usual, found.get(key, usual), key=lambda one: one.mean_s)
    return facts_of_calls(found, cluster.hosts, _LARGE, of_cores=False)


def cost_on(cluster: Cluster, kind: str, nbytes: int) -> Cost:
    """What a call would cost on a machine that is not known yet."""
    return cost_of(Message(kind, float(nbytes), cluster.hosts, cluster.hosts), cluster, MachineFacts())


def _rounds(key: CallKey, cost: Cost, cluster: Cluster) -> int:
    """How many calls of one kind and size are made."""
    seconds = cost.latency_s + cost.link_bytes / cluster.bytes_per_s
    if seconds > _LINK_S:
        return _LEAST_ROUNDS if key[1] <= _SMALL_ENOUGH else 0
    return min(max(int(_LINK_S / _PASSES / max(seconds, 1e-6)), _LEAST_ROUNDS), _MOST_ROUNDS)
