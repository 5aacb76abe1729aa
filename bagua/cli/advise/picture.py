"""The picture of ``bagua advise``: step time against the rate of the links."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.advise import DDP, Cluster, MachineFacts, predict
from bagua.link import hosts_in_words

if TYPE_CHECKING:
    from bagua.cli.advise.worker import Found

_RATES_MBIT_S = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)
_MOST_LINES = 8


def draw(found: Found, cluster: Cluster, machine: MachineFacts, path: Path) -> bool:
    """Draw DDP and the algorithms that are the fastest at some rate.

    Args:
        found: results of measuring and rehearsing.
        cluster: hosts and links.
        machine: facts that were measured without a network.
        path: file; its ending says which kind.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        return False
    assert found.facts is not None
    lines: dict[str, list[float]] = {one.name: [] for one in found.rehearsals}
    for rate in _RATES_MBIT_S:
        link = dataclasses.replace(cluster.link, send_mbit_s=rate, receive_mbit_s=rate)
        there = dataclasses.replace(cluster, link=link, calls=())
        for one in found.rehearsals:
            lines[one.name].append(predict(one, found.facts, there, machine).step_s)
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in sorted(lines, key=lambda name: min(s / d for s, d in zip(lines[name], lines[DDP], strict=True)))[
        :_MOST_LINES
    ]:
        axes.plot(_RATES_MBIT_S, lines[name], label=name, marker=".")
    if DDP not in [line.get_label() for line in axes.get_lines()]:
        axes.plot(_RATES_MBIT_S, lines[DDP], label=DDP, color="black")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rate of each host's link, Mbit/s")
    axes.set_ylabel("seconds for a step, predicted")
    axes.set_title(f"{hosts_in_words(cluster.hosts, cluster.ranks_per_host)}, delay {cluster.link.delay_ms:g} ms")
    axes.legend()
    figure.savefig(path)
    return True
