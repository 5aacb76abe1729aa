"""What the network lab is to a prediction: hosts that share cores, token buckets, and calls that pass its links."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from bagua.advise import CallFacts, Cluster, MachineFacts, Others, call_facts, link_facts, machine_facts
from bagua.cli.lab.network import burst_bytes, open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import destroy_process_group, get_default_group
from bagua.link import LinkSettings

_TIMEOUT_S = 120.0


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

    Args:
        hosts: how many.

    Raises:
        LabUnavailableError: there cannot be a lab here.
    """
    others = Others()
    with open_network(hosts) as network:
        found: list[tuple[tuple[CallFacts, ...], float]] = run_ranks(_on_machine, hosts, network=network)
    return replace(machine_facts(*found[0], ranks=hosts), others=others.share())


def probe_link(hosts: int, link: LinkSettings) -> tuple[CallFacts, ...]:
    """Measure what calls take among hosts of the lab, of which each has one rank.

    Args:
        hosts: how many.
        link: link of each host.

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
