"""ARCHITECTURE.md is short and matches the tree; the tables of the internal pages are readable at first sight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sim.scenarios import ROOMS as SIMULATED

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tidemill"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
INTERNALS = ROOT / "docs" / "internals"
MAX_BYTES = 12 * 1024
MAX_WORDS = 20
"""Limit of a table cell. The path of a test counts as one word."""

ROOM = re.compile(r"^\| \d \| `(\w+)` \|[^|]+\|([^|]*)\|$", re.MULTILINE)
INVARIANT = re.compile(r"^\| ([a-z][^|`]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def cells(page: Path) -> list[str]:
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [cell.strip() for row in rows for cell in row.strip("|").split(" | ")]


def invariants() -> list[tuple[str, ...]]:
    """Return (name, statement, kept by, proved by) of each row."""
    found: list[tuple[str, ...]] = INVARIANT.findall((INTERNALS / "invariants.md").read_text())
    return [row for row in found if row[0] != "invariant"]


def packages(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if (p / "__init__.py").exists() or p.name == "static"}


def test_architecture_is_at_most_twelve_kilobytes() -> None:
    assert len(ARCHITECTURE.read_bytes()) <= MAX_BYTES


@pytest.mark.parametrize("page", [ARCHITECTURE, *sorted(INTERNALS.glob("*.md"))], ids=lambda page: page.stem)
def test_table_cells_are_short(page: Path) -> None:
    assert not [cell for cell in cells(page) if len(cell.split()) > MAX_WORDS]


def test_architecture_lists_every_room_and_its_packages() -> None:
    listed = {room: set(re.findall(r"`(\w+)`", inside)) for room, inside in ROOM.findall(ARCHITECTURE.read_text())}
    assert listed == {room: packages(SOURCE / room) for room in packages(SOURCE)}


def test_architecture_names_files_that_exist() -> None:
    for name in re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.read_text()):
        found = (SOURCE / name).is_file() if "/" in name else any(SOURCE.rglob(name))
        assert found, f"no such file: {name}"


def test_every_invariant_names_files_that_exist() -> None:
    assert len({name for name, *_ in invariants()}) == len(invariants()) > 60
    for name, _, kept, proved in invariants():
        sources, tests = (re.findall(r"`([\w/]+\.py)`", cell) for cell in (kept, proved))
        rooms = re.findall(r"simulation `(\w+)`", proved)
        assert sources and (tests or rooms), name
        assert all((SOURCE / path).is_file() for path in sources), name
        assert all((ROOT / "tests" / path).is_file() for path in tests), name
        assert set(rooms) <= set(SIMULATED), name
