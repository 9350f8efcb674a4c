"""Draw the diagrams of the documentation: `python docs/diagrams/draw.py` writes one SVG per picture of `pictures.py`.

The output depends on the pictures only, so a test compares the files with it. Each file has colours for light and dark
displays. A picture whose texts, boxes or arrows collide is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from itertools import combinations, pairwise
from pathlib import Path

WIDTH = 720
COLUMNS = 4
BOX_WIDTH = 154
COLUMN_STEP = 184
LEFT = 7
TOP = 14
BOX_HEIGHT = 74
ROW_STEP = 112
MARGIN_BOTTOM = 40
TITLE_PX = 14
NOTE_PX = 12
LINE_PX = 16
KINDS = {"outside": "outside tidemill", "node": "in a node", "driver": "in a pipeline's driver", "stored": "stored"}
"""Kinds of boxes, with the words of the legend."""

STYLE = """
  .paper { fill: #ffffff; }
  text { font-family: Helvetica, Arial, "Liberation Sans", sans-serif; font-size: 12px; fill: #1d2733; }
  .title { font-size: 14px; font-weight: bold; }
  .box { stroke-width: 1.5; }
  .outside { fill: #f3f4f6; stroke: #6b7280; }
  .node { fill: #e3effc; stroke: #2563a8; }
  .driver { fill: #fdebd8; stroke: #b4610f; }
  .stored { fill: #e0f3e6; stroke: #23804a; }
  .arrow { fill: none; stroke: #3f4a57; stroke-width: 1.5; }
  .head { fill: #3f4a57; }
  .label { paint-order: stroke; stroke: #ffffff; stroke-width: 5px; stroke-linejoin: round; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #161b22; }
    text { fill: #e6edf3; }
    .outside { fill: #262c36; stroke: #8b949e; }
    .node { fill: #14304f; stroke: #5aa2ee; }
    .driver { fill: #45290c; stroke: #e0984e; }
    .stored { fill: #12391f; stroke: #4fb872; }
    .arrow { stroke: #aab4c0; }
    .head { fill: #aab4c0; }
    .label { stroke: #161b22; }
  }
"""

NARROW = frozenset("fijlrtI.,:;'|()[]-/ ")
WIDE = frozenset("mwMW@%ABCDEGHKNOPQRSUVXYZ→≤−")

Point = tuple[float, float]


class CollisionError(Exception):
    """Two parts of a picture overlap, or a text is larger than its place."""


@dataclass(frozen=True)
class Box:
    """A step or a thing, at a place of the grid. The first line of `text` is its title."""

    name: str
    column: int
    row: int
    kind: str
    text: str
    columns: int = 1

    @property
    def left(self) -> float:
        return LEFT + self.column * COLUMN_STEP

    @property
    def top(self) -> float:
        return TOP + self.row * ROW_STEP

    @property
    def width(self) -> float:
        return BOX_WIDTH + (self.columns - 1) * COLUMN_STEP

    def anchor(self, side: str, share: float) -> Point:
        """Return a point of a side (`l`, `r`, `t`, `b`), at a share of its length."""
        if side in "lr":
            return (self.left if side == "l" else self.left + self.width), self.top + share * BOX_HEIGHT
        return self.left + share * self.width, (self.top if side == "t" else self.top + BOX_HEIGHT)

    def contains(self, left: float, top: float, right: float, bottom: float) -> bool:
        """Return whether a rectangle overlaps the inside of the box."""
        inside = left < self.left + self.width - 1 and right > self.left + 1
        return inside and top < self.top + BOX_HEIGHT - 1 and bottom > self.top + 1


@dataclass(frozen=True)
class Arrow:
    """A connection from `box.side` or `box.side:share` to another one.

    A path of three parts has its middle part at `via`.
    """

    start: str
    end: str
    label: str = ""
    both: bool = False
    via: float | None = None
    at: float = 0.5
    """Place of the label, as a share of the longest part."""


@dataclass(frozen=True)
class Picture:
    """Boxes and arrows. `says` is the text for readers that do not see the picture."""

    name: str
    says: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    by_name: dict[str, Box] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self.by_name.update({box.name: box for box in self.boxes})

    @property
    def height(self) -> float:
        return TOP + max(box.row for box in self.boxes) * ROW_STEP + BOX_HEIGHT + MARGIN_BOTTOM


def text_width(text: str, size: float) -> float:
    """Return the width of a text in px, estimated from above for Helvetica and fonts of its metrics."""
    return size * sum(0.34 if c in NARROW else 0.8 if c in WIDE else 0.57 for c in text)


def path(picture: Picture, arrow: Arrow) -> list[Point]:
    """Return the corners of an arrow: a line, or horizontal and vertical parts."""
    (start, leaves), (end, enters) = (anchor(picture, place) for place in (arrow.start, arrow.end))
    if arrow.via is None and (start[0] == end[0] or start[1] == end[1]):
        return [start, end]
    if leaves in "lr" and enters in "tb":
        return [start, (end[0], start[1]), end]
    if leaves in "tb" and enters in "lr":
        return [start, (start[0], end[1]), end]
    if leaves in "tb":
        middle = (start[1] + end[1]) / 2 if arrow.via is None else arrow.via
        return [start, (start[0], middle), (end[0], middle), end]
    middle = (start[0] + end[0]) / 2 if arrow.via is None else arrow.via
    return [start, (middle, start[1]), (middle, end[1]), end]


def anchor(picture: Picture, place: str) -> tuple[Point, str]:
    name, _, rest = place.partition(".")
    side, _, share = rest.partition(":")
    return picture.by_name[name].anchor(side, float(share or 0.5)), side


def label_place(corners: list[Point], at: float) -> Point:
    """Return the middle of the label: on the longest part of the arrow, above it if that is horizontal."""
    (x1, y1), (x2, y2) = max(
        pairwise(corners), key=lambda part: abs(part[0][0] - part[1][0]) + abs(part[0][1] - part[1][1])
    )
    x, y = x1 + (x2 - x1) * at, y1 + (y2 - y1) * at
    return (x, y - 6) if y1 == y2 else (x, y + 4)


def check(picture: Picture) -> None:
    """Raise CollisionError where a reader could not tell the parts apart."""
    for box in picture.boxes:
        lines = box.text.split("\n")
        sizes = [TITLE_PX * 1.04] + [NOTE_PX] * (len(lines) - 1)
        wide = [line for line, size in zip(lines, sizes, strict=True) if text_width(line, size) > box.width - 6]
        if wide or len(lines) * LINE_PX > BOX_HEIGHT - 6:
            raise CollisionError(f"{picture.name}: {box.name} is too small for {wide or lines}")
    for one, other in combinations(picture.boxes, 2):
        if one.contains(other.left, other.top, other.left + other.width, other.top + BOX_HEIGHT):
            raise CollisionError(f"{picture.name}: {one.name} and {other.name} overlap")
    labels: list[tuple[str, float, float, float, float]] = []
    for arrow in picture.arrows:
        corners = path(picture, arrow)
        for (x1, y1), (x2, y2) in pairwise(corners):
            for box in picture.boxes:
                if box.contains(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)):
                    raise CollisionError(f"{picture.name}: {arrow.start} to {arrow.end} crosses {box.name}")
        if arrow.label:
            x, y = label_place(corners, arrow.at)
            half = text_width(arrow.label, NOTE_PX) / 2
            labels.append((arrow.label, x - half, y - NOTE_PX, x + half, y + 3))
    for text, *rectangle in labels:
        if rectangle[0] < 0 or rectangle[2] > WIDTH:
            raise CollisionError(f"{picture.name}: the label {text!r} leaves the picture")
        for box in picture.boxes:
            if box.contains(*rectangle):
                raise CollisionError(f"{picture.name}: the label {text!r} covers {box.name}")
    for (text, *a), (other_text, *b) in combinations(labels, 2):
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
            raise CollisionError(f"{picture.name}: the labels {text!r} and {other_text!r} overlap")


def svg(picture: Picture) -> str:
    """Return the picture as SVG. Raises CollisionError."""
    check(picture)
    height = f"{picture.height:g}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(picture.says)}">',
        f"<title>{escape(picture.says)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4.5" orient="auto-start-reverse"'
        ' markerUnits="userSpaceOnUse"><path class="head" d="M0,0 L9,4.5 L0,9 z"/></marker></defs>',
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    for arrow in picture.arrows:
        points = " ".join(f"{x:g},{y:g}" for x, y in path(picture, arrow))
        tail = ' marker-start="url(#head)"' if arrow.both else ""
        out.append(f'<polyline class="arrow" points="{points}"{tail} marker-end="url(#head)"/>')
    out += [line for box in picture.boxes for line in box_lines(box)]
    for arrow in picture.arrows:
        if arrow.label:
            x, y = label_place(path(picture, arrow), arrow.at)
            out.append(f'<text class="label" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(arrow.label)}</text>')
    out += legend(picture)
    return "\n".join([*out, "</svg>", ""])


def box_lines(box: Box) -> list[str]:
    lines = box.text.split("\n")
    radius = 14 if box.kind == "stored" else 4
    out = [
        f'<rect class="box {box.kind}" x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{BOX_HEIGHT}"'
        f' rx="{radius}"/>'
    ]
    first = box.top + BOX_HEIGHT / 2 - (len(lines) - 1) * LINE_PX / 2 + 4.5
    for place, line in enumerate(lines):
        style = ' class="title"' if place == 0 else ""
        x, y = box.left + box.width / 2, first + place * LINE_PX
        out.append(f'<text{style} x="{x:g}" y="{y:g}" text-anchor="middle">{escape(line)}</text>')
    return out


def legend(picture: Picture) -> list[str]:
    out, x, y = [], float(LEFT), picture.height - 14
    for kind, words in KINDS.items():
        if any(box.kind == kind for box in picture.boxes):
            radius = 5 if kind == "stored" else 2
            out.append(f'<rect class="box {kind}" x="{x:g}" y="{y - 11:g}" width="16" height="12" rx="{radius}"/>')
            out.append(f'<text x="{x + 22:g}" y="{y:g}">{words}</text>')
            x += 22 + text_width(words, NOTE_PX) + 18
    return out


def main() -> None:
    """Write every picture next to this file."""
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    from pictures import PICTURES

    for picture in PICTURES:
        (here / f"{picture.name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
