"""The directive `topology-pictures`: every registered topology, what it does, how fast, and pictures of its rounds."""

from __future__ import annotations

import inspect
import math

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import bagua.topology as topologies
from bagua.topology import Round, Topology

RANKS = 8
HOSTS = (0, 0, 1, 1, 2, 2, 3, 3)
MOST_ROUNDS = 3
SIZES = (4, 8, 16, 32)
#: In pixels: the circle that ranks lie on, the disc of a rank, and the picture.
RADIUS, DISC, WIDTH = 60.0, 10.0, 160.0


def place(rank: int, size: int, radius: float = RADIUS) -> tuple[float, float]:
    """Where a rank lies: on a circle, rank 0 at the top, clockwise."""
    angle = 2 * math.pi * rank / size - math.pi / 2
    return WIDTH / 2 + radius * math.cos(angle), WIDTH / 2 + radius * math.sin(angle)


def line(source: int, rank: int, weight: float, size: int) -> str:
    """Messages between two ranks, as thick as their weight is large."""
    (x1, y1), (x2, y2) = place(source, size), place(rank, size)
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-width="{0.5 + 4 * weight:.1f}"/>'


def disc(rank: int, size: int) -> str:
    """A rank and its number."""
    x, y = place(rank, size)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{DISC}" style="fill:var(--color-background-primary, white)"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" stroke="none" fill="currentColor">{rank}</text>'
    )


def picture(mixing: Round, title: str) -> str:
    """One round as SVG."""
    size = mixing.size
    lines = [
        line(source, rank, weight, size)
        for rank in range(size)
        for source, weight in mixing[rank].sources
        if source < rank
    ]
    return (
        f'<figure style="display:inline-block;margin:0.5em;text-align:center">'
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" width="{WIDTH:.0f}" '
        f'height="{WIDTH:.0f}" font-size="11" stroke="currentColor" fill="none">'
        f"{''.join(lines)}{''.join(disc(rank, size) for rank in range(size))}</svg>"
        f"<figcaption>{title}</figcaption></figure>"
    )


def pictures(topology: Topology) -> str:
    """The first rounds of a topology, side by side."""
    count = min(topology.period(RANKS, HOSTS) or MOST_ROUNDS, MOST_ROUNDS)
    titles = ["every round"] if topology.static else [f"round {step}" for step in range(1, count + 1)]
    return "".join(picture(topology.round(RANKS, step, HOSTS), title) for step, title in enumerate(titles, start=1))


def rate(topology: Topology, size: int) -> str:
    """How much disagreement a round leaves, or after how many rounds none is left."""
    left = topologies.consensus_rate(topology, size)
    if left > 0:
        return f"{left:.2f}"
    rounds = next(count for count in range(1, 65) if not topologies.consensus_rate(topology, size, rounds=count))
    return f"none after {rounds} round{'s' if rounds > 1 else ''}"


def rates(topology: Topology) -> str:
    """A sentence on how fast ranks come together."""
    found = ", ".join(f"{size} ranks: {rate(topology, size)}" for size in SIZES)
    return f"Disagreement left by a round, on average: {found}."


class TopologyPictures(SphinxDirective):
    """Lists every registered topology. For Markdown pages."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for name in topologies.available():
            topology = topologies.create(name)
            summary = (inspect.getdoc(topology) or "").partition("\n\n")[0].replace("\n", " ")
            found += [
                nodes.rubric("", name),
                *self.parse_text_to_nodes(f"{summary.replace('``', '`')} {rates(topology)}"),
                nodes.raw("", pictures(topology), format="html"),
            ]
        return found


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("topology-pictures", TopologyPictures)
    return {"parallel_read_safe": True}
