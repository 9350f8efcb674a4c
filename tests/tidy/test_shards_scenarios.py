"""docs/internals/shards-scenarios.md and the tests named by its ids are the same list, and no id is missing."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from sim.scenarios import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "shards-scenarios.md"
COUNTS = {"41": 12, "43": 6, "44": 5, "45": 6}
"""Number of rows of each section, so that dropping a scenario by accident fails."""

ROW = re.compile(r"^\| (M4\d{3}) \|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"^(?:async )?def (test_((?:m4\d{3}_)+)\w+)", re.MULTILINE)
NAMED = re.compile(r"`(tests/[^`]+)`")


def rows() -> list[tuple[str, list[str]]]:
    """Return (id, [scenario, alone, through Spark]) of every row."""
    return [(i, [cell.strip() for cell in cells.split(" | ")]) for i, cells in ROW.findall(PAGE.read_text())]


def ids_of_tests() -> dict[str, set[str]]:
    found = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name, ids in TEST.findall(path.read_text()):
            for i in ids.strip("_").split("_"):
                found[i.upper()].add(f"{path.relative_to(ROOT)}::{name}")
    return found


def test_every_row_is_on_the_page_once() -> None:
    wanted = [f"M{section}{row:02}" for section, count in COUNTS.items() for row in range(1, count + 1)]
    assert [i for i, _ in rows()] == wanted


def test_every_row_names_its_tests_and_every_such_test_its_row() -> None:
    assert {i: set(NAMED.findall(" ".join(cells))) for i, cells in rows()} == ids_of_tests()


def test_every_planted_fault_of_the_room_is_on_the_page() -> None:
    simulated = PAGE.read_text().partition("## Simulation")[2]
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", simulated, re.MULTILINE))
    assert named == {name for name, (room, _) in FAULTS.items() if room == "shards"}


def test_every_row_is_held_alone_and_through_spark_or_says_why_there_is_no_spark_in_it() -> None:
    for i, (_, alone, spark) in rows():
        assert NAMED.findall(alone), i
        through = {node.partition("::")[0] for node in NAMED.findall(spark)}
        assert through or spark.startswith("no JVM in it"), i
        assert all("pytest.mark.spark" in (ROOT / path).read_text() for path in through), i
