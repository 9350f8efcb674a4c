"""docs/internals/metastore-scenarios.md names tests: each exists, and every scenario has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.consensus.urls import url
from support.metastore import lsm_world
from support.metastore.domain_killed_child import LOG_STEPS
from support.metastore.domain_world import world
from support.metastore.lsm_killed_child import STEPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "metastore-scenarios.md"
TABLES = {
    "LSM": 17,
    "State machine": 13,
    "Replicated database": 11,
    "Bad input": 9,
    "kill -9": 6,
    "Models and simulation": 5,
}
"""Number of rows of each table, so that dropping a scenario by accident fails."""


def rows() -> list[tuple[str, list[str]]]:
    """Return (table, cells) of every row."""
    found, table = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            table = line[3:]
        elif line.startswith("| ") and not line.startswith(("| scenario ", "| while ")):
            found.append((table, [cell.strip() for cell in line.strip("|").split("|")]))
    return found


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def defined(path: Path) -> set[str]:
    """Return the names of tests in a file: functions, Class::method, and assigned test cases."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, FUNCTIONS):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, FUNCTIONS)}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.split("::")[-1].startswith(("test", "Test"))}


@pytest.mark.parametrize(("table", "cells"), rows(), ids=lambda part: part if isinstance(part, str) else part[0])
def test_every_scenario_names_tests_that_exist(table: str, cells: list[str]) -> None:
    assert table and all(cells), f"an empty cell: {cells}"
    named = re.findall(r"`([^`]+)`", cells[-1])
    assert named, f"no test: {cells[0]}"
    for node in named:
        path, _, name = node.partition("::")
        assert (ROOT / path).is_file(), f"no such file: {node}"
        assert name in defined(ROOT / path), f"no such test: {node}"


@cache
def arguments(path: Path) -> dict[str, set[str]]:
    """Return the names of the arguments of each function in a file."""
    functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, FUNCTIONS))
    return {node.name: {argument.arg for argument in node.args.args} for node in functions}


@pytest.mark.parametrize(
    ("table", "fixture", "how_many"),
    [("LSM", "objects", any), ("State machine", "url", any), ("Replicated database", "world", all)],
)
def test_scenarios_run_on_every_backend(table: str, fixture: str, how_many: Callable[[list[bool]], bool]) -> None:
    """`objects`: memory and local; `url`: SQLite and PostgreSQL; `world`: each of those on each of these."""
    for cells in (cells for of, cells in rows() if of == table):
        tests = [node.partition("::") for node in re.findall(r"`([^`]+)`", cells[-1])]
        assert how_many([fixture in arguments(ROOT / path).get(name, ()) for path, _, name in tests]), cells[0]


@pytest.mark.parametrize(
    ("fixture", "wanted"),
    [
        (lsm_world.objects, {"memory", "local"}),
        (url, {"sqlite", "postgres"}),
        (world, {"memory", "local", "sqlite", "postgres"}),
    ],
)
def test_the_fixtures_of_the_scenarios_name_every_backend(fixture: Any, wanted: set[str]) -> None:
    named = set()
    for param in fixture._fixture_function_marker.params:
        for value in getattr(param, "values", [param]):
            named |= {value} if isinstance(value, str) else set(value)
    assert named == wanted


def test_no_scenario_is_missing_or_there_twice() -> None:
    counts = dict.fromkeys(TABLES, 0)
    for table, _ in rows():
        counts[table] += 1
    assert counts == TABLES
    scenarios = [(table, cells[0]) for table, cells in rows()]
    assert len(set(scenarios)) == len(scenarios)


def test_every_step_of_a_death_is_on_the_page() -> None:
    named = {step for table, cells in rows() if table == "kill -9" for step in cells[1].split(", ")}
    assert named - {"drawn"} == {*STEPS, *LOG_STEPS}
