"""The directive `timeline TITLE`: who computes and who sends, drawn to no scale.

Each line of its content is a lane: `name: label begin end, label begin end, ...`. A label ends before its last two
numbers. The colour follows the first word of the label; `wait` is drawn hollow.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

#: In pixels: the names of lanes, the whole picture, one lane, and a bar in it.
LEFT, WIDTH, LANE, BAR = 92.0, 700.0, 34.0, 24.0
#: Fills that carry dark text on a light page and on a dark one.
FILLS = {
    "forward": "#9ecae1",
    "forward+backward": "#6baed6",
    "backward": "#6baed6",
    "optimizer": "#fdd0a2",
    "step": "#6baed6",
    "wait": "none",
}
SENT = "#a1d99b"


@dataclass(frozen=True)
class Bar:
    """Something that takes time, from `begin` to `end`."""

    label: str
    begin: float
    end: float

    @property
    def fill(self) -> str:
        return FILLS.get(self.label.split()[0], SENT)


def read_lane(line: str) -> tuple[str, list[Bar]]:
    """One line of the content: the name of a lane, and its bars."""
    name, found, text = line.partition(":")
    if not found:
        raise ValueError(f"a lane is 'name: label begin end, ...', got {line!r}")
    bars = []
    for part in text.split(","):
        *label, begin, end = part.split()
        bars.append(Bar(" ".join(label), float(begin), float(end)))
    if any(bar.begin >= bar.end or not bar.label for bar in bars):
        raise ValueError(f"a bar has a label and begins before it ends, got {line!r}")
    return name.strip(), bars


def draw_bar(bar: Bar, top: float, scale: float) -> str:
    """A rectangle with its label in the middle."""
    x, width = LEFT + bar.begin * scale, (bar.end - bar.begin) * scale
    hollow = bar.fill == "none"
    dashes = ' stroke-dasharray="3 3"' if hollow else ""
    colour = "currentColor" if hollow else "black"
    return (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" rx="3" fill="{bar.fill}"{dashes}/>'
        f'<text x="{x + width / 2:.1f}" y="{top + BAR / 2 + 4:.1f}" text-anchor="middle" stroke="none" '
        f'fill="{colour}">{html.escape(bar.label)}</text>'
    )


def draw(title: str, lines: list[str]) -> str:
    """The whole picture as SVG, with the axis of time below."""
    lanes = [read_lane(line) for line in lines]
    scale = (WIDTH - LEFT - 12) / max(bar.end for _, bars in lanes for bar in bars)
    bottom = LANE * len(lanes) + 6
    parts = []
    for number, (name, bars) in enumerate(lanes):
        top = LANE * number + (LANE - BAR) / 2
        parts.append(f'<text x="0" y="{top + BAR / 2 + 4:.1f}" stroke="none" fill="currentColor">{name}</text>')
        parts += [draw_bar(bar, top, scale) for bar in bars]
    return (
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(title)}" '
        f'viewBox="0 0 {WIDTH:.0f} {bottom + 18:.0f}" style="width:100%;height:auto" font-size="11" '
        f'stroke="currentColor" fill="none">{"".join(parts)}'
        f'<path d="M{LEFT},{bottom} H{WIDTH - 6} m-5,-3 l5,3 l-5,3"/>'
        f'<text x="{WIDTH - 6}" y="{bottom + 14}" text-anchor="end" stroke="none" fill="currentColor">time</text>'
        f"</svg><figcaption>{html.escape(title)}</figcaption></figure>"
    )


class Timeline(SphinxDirective):
    """Draws one timeline."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            picture = draw(self.arguments[0], [line for line in self.content if line.strip()])
        except ValueError as error:
            raise self.error(f"timeline: {error}") from error
        return [nodes.raw("", picture, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("timeline", Timeline)
    return {"parallel_read_safe": True}
