"""The place of the results of `./dev bench versus` in the documentation, and `publish`, which fills it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from versus_plot import plot
from versus_report import Lanes, caption, compared, sentences, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versus.json"
PICTURE = ROOT / "docs" / "images" / "versus.svg"
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
PLACE = re.compile(r"(<!-- versus -->\n).*?(\n<!-- /versus -->)", re.DOTALL)
"""Place of the results in PAGE."""


def page_text(lanes: Lanes) -> str:
    """Return the part of PAGE that depends on the results."""
    if not lanes:
        return "No run is published yet."
    return f"{sentences(lanes)}\n\n![{caption(compared(lanes)[0])}](../images/{PICTURE.name})\n\n{table(lanes)}"


def published(page: str) -> str:
    """Return the part of a page that depends on the results. Raises ValueError without the place for it."""
    found = PLACE.search(page)
    if found is None:
        raise ValueError("the page has no place for the results")
    return found[0].removeprefix(found[1]).removesuffix(found[2])


def publish(lanes: Lanes) -> None:
    """Write results, picture, and the part of the page that depends on them."""
    text = page_text(lanes)
    page = PAGE.read_text()
    published(page)
    picture = plot(lanes)
    RESULTS.write_text(json.dumps(lanes, indent=1, sort_keys=True) + "\n")
    PICTURE.write_text(picture)
    PAGE.write_text(PLACE.sub(lambda found: found[1] + text + found[2], page))
