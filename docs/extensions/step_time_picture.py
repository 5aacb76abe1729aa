"""Draws the step times of `docs/network_lab.md` as `docs/pictures/step_time.svg`; run this file to draw them anew.

The numbers are those of the page's table, which `python -m benchmarks.network` measured. Nothing is measured here.
"""

from __future__ import annotations

import math
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "network_lab.md"
PICTURE = DOCS / "pictures" / "step_time.svg"

#: The contenders that are drawn, as the table calls them, with a colour that tells them apart, also without colours.
LINES = {
    "`power_sgd`, rank 4": ("power_sgd, rank 4", "#0072b2", ""),
    "`sign_sgd`": ("sign_sgd", "#009e73", "7 3"),
    "`bytegrad`": ("bytegrad", "#d55e00", "2 3"),
}
#: Mbit/s of the table's columns after the bytes, without the one that has no limit.
RATES = (100.0, 1000.0, 10000.0)
RATE_NAMES = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s")
RATIOS = (0.03, 0.1, 0.3, 1.0)
#: In pixels: the area of the plot in the picture.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 330, 64, 490, 44, 270


def read_ratios(page: str) -> dict[str, list[float]]:
    """Step time over that of DDP, by contender, at each rate."""
    table, _, _ = page.partition("<!-- end of table -->")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    found = {row[0]: [float(cell) for cell in row[2:5]] for row in rows if row[0] in LINES and len(row) == 6}
    if found.keys() != LINES.keys():
        raise ValueError(f"{PAGE} has no step times of {', '.join(LINES.keys() - found.keys())}")
    return found


def place(rate: float, ratio: float) -> tuple[float, float]:
    """Where a number lies; both axes are logarithmic."""
    across = math.log(rate / RATES[0]) / math.log(RATES[-1] / RATES[0])
    down = math.log(RATIOS[-1] * 1.4 / ratio) / math.log(RATIOS[-1] * 1.4 / (RATIOS[0] * 0.8))
    return LEFT + 20 + across * (RIGHT - LEFT - 40), TOP + down * (BOTTOM - TOP)


def text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    """A label."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{extra}>{words}</text>'


def axes() -> list[str]:
    """The scales, and the line of DDP."""
    parts = []
    for ratio in RATIOS:
        y = place(RATES[0], ratio)[1]
        parts.append(f'<path d="M{LEFT},{y:.1f} H{RIGHT}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{ratio:g}", "end"))
    for rate, name in zip(RATES, RATE_NAMES, strict=True):
        parts.append(text(place(rate, 1)[0], BOTTOM + 20, name))
    level = place(RATES[0], 1)[1]
    parts.append(f'<path d="M{LEFT},{level:.1f} H{RIGHT}" stroke="black" stroke-width="2"/>')
    parts.append(text(RIGHT + 8, level - 8, "torch DDP", "start", ' font-weight="bold"'))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 42, "speed of the link between two hosts"))
    parts.append(text(LEFT - 40, 24, "time of a training step over that of torch DDP; lower is faster", "start"))
    return parts


def curve(contender: str, ratios: list[float]) -> list[str]:
    """One contender: points, and the line through them."""
    _, colour, dashes = LINES[contender]
    points = [place(rate, ratio) for rate, ratio in zip(RATES, ratios, strict=True)]
    path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
    style = f'stroke="{colour}" stroke-width="2.5" fill="none" stroke-dasharray="{dashes}"'
    return [f'<path d="M{path}" {style}/>', *dots]


def legend() -> list[str]:
    """What each line is."""
    parts = []
    for number, (name, colour, dashes) in enumerate(LINES.values()):
        y = TOP + 110 + 24 * number
        parts.append(
            f'<path d="M{RIGHT + 8},{y} h26" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
        )
        parts.append(text(RIGHT + 40, y + 4, name, "start"))
    return parts


def draw(page: str) -> str:
    """The whole picture as SVG, on white, so that it can be read on any page."""
    parts = axes() + legend()
    for contender, ratios in read_ratios(page).items():
        parts += curve(contender, ratios)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="13" role="img">\n<title>Time of a training step against the speed of the '
        f'link</title>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
