"""docs/internals/topics-scenarios.md names tests: each exists, and every scenario has one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from sim.scenarios import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "topics-scenarios.md"
TABLES = {
    "Producer queue": 9,
    "Frontend": 3,
    "Idempotence": 14,
    "Partition state machine": 11,
    "Reconciler": 15,
    "L0 collection": 12,
    "Failures": 28,
}
"""Number of rows of each table, so that dropping a scenario by accident fails."""


def rows() -> list[tuple[str, str, list[str]]]:
    """Return (table, scenario, tests) of every row."""
    found, table = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            table = line[3:]
        elif line.startswith("| ") and table in TABLES and not line.startswith("| scenario "):
            scenario, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append((table, scenario, re.findall(r"`([^`]+)`", tests)))
    return found


@cache
def defined(path: str) -> set[str]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, functions)}


def test_every_scenario_names_tests_that_exist() -> None:
    for _, scenario, tests in rows():
        assert tests, f"no test: {scenario}"
        for named in tests:
            path, _, name = named.partition("::")
            assert name.startswith("test_") and name in defined(path), f"no such test: {named}"


def test_no_scenario_is_missing_or_there_twice() -> None:
    assert Counter(table for table, _, _ in rows()) == TABLES
    assert len({(table, scenario) for table, scenario, _ in rows()}) == sum(TABLES.values())
    failures = [scenario.partition(" ")[0] for table, scenario, _ in rows() if table == "Failures"]
    assert failures == [f"F{number}" for number in range(1, 29)]


def test_every_planted_fault_of_the_rooms_is_on_the_page() -> None:
    assert set(re.findall(r"planted: `([a-z0-9-]+)`", PAGE.read_text())) <= FAULTS.keys()
    simulated = PAGE.read_text().partition("## Simulation")[2]
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", simulated, re.MULTILINE))
    assert named == {name for name, (room, _) in FAULTS.items() if room in ("topics", "groups", "transactions")}
