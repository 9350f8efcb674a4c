"""The tables of docs/internals/faults.md and the tests named by their ids are the same list."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (F\d{3}) \|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"def test_(f\d{3})_", re.MULTILINE)


def rows() -> dict[str, list[str]]:
    text = (ROOT / "docs" / "internals" / "faults.md").read_text()
    found = ROW.findall(text)
    assert not [i for i, n in Counter(i for i, _ in found).items() if n > 1], "an id stands in two rows"
    return {number: [cell.strip() for cell in cells.split(" | ")] for number, cells in found}


def ids_of_tests() -> set[str]:
    return {i.upper() for path in (ROOT / "tests").rglob("*.py") for i in TEST.findall(path.read_text())}


def test_every_fault_has_a_test_and_every_such_test_a_fault() -> None:
    assert set(rows()) == ids_of_tests()


def test_every_row_has_all_five_cells() -> None:
    assert not {number for number, cells in rows().items() if len(cells) != 5 or not all(cells)}
