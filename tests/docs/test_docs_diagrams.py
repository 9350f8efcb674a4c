"""The diagrams of the pages are what their script draws, and the script refuses one that cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "diagrams"))

from draw import Arrow, Box, CollisionError, Picture, svg  # noqa: E402
from pictures import PICTURES  # noqa: E402


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_file_is_what_the_script_draws(picture: Picture) -> None:
    drawn = svg(picture)
    assert (DOCS / "diagrams" / f"{picture.name}.svg").read_text() == drawn, "run: python docs/diagrams/draw.py"
    assert ElementTree.fromstring(drawn).tag.endswith("svg") and "prefers-color-scheme: dark" in drawn


def test_there_are_no_other_files_and_a_page_shows_each() -> None:
    assert {path.stem for path in (DOCS / "diagrams").glob("*.svg")} == {picture.name for picture in PICTURES}
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert not [picture.name for picture in PICTURES if f"diagrams/{picture.name}.svg)" not in pages]


@pytest.mark.parametrize(
    ("boxes", "arrow"),
    [
        ((Box("a", 0, 0, "node", "A title that is far too long"),), None),
        ((Box("a", 0, 0, "node", "A\nfour\nlines\nof\ntext"),), None),
        ((Box("a", 0, 0, "node", "A"), Box("b", 0, 0, "node", "B")), None),
        ((Box("a", 0, 0, "node", "A", columns=2), Box("b", 1, 0, "node", "B")), None),
        (tuple(Box(name, place, 0, "node", name) for place, name in enumerate("abc")), Arrow("a.r", "c.l")),
        ((Box("a", 0, 0, "node", "A"), Box("b", 1, 0, "node", "B")), Arrow("a.r", "b.l", "wider than the gap")),
    ],
    ids=["wide text", "many lines", "same place", "wide box", "arrow through a box", "label over a box"],
)
def test_a_picture_whose_parts_collide_is_refused(boxes: tuple[Box, ...], arrow: Arrow | None) -> None:
    with pytest.raises(CollisionError):
        svg(Picture("colliding", "", boxes, (arrow,) if arrow else ()))
