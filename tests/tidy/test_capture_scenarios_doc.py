"""docs/internals/capture-scenarios.md and the tests with its ids are the same list, and no row is missing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "capture-scenarios.md"
ROWS = {"FT": 18, "SLC": 14, "ER": 4, "C": 15, "ST": 11, "RC": 10, "CV": 4, "H": 14}
"""Number of rows in each group, so that dropping a row by accident fails."""
OPEN: set[str] = set()
"""Rows without a test yet; the page says why."""

ROW = re.compile(r"^\| ((?:FT|SLC|ER|C|ST|RC|CV|H)\d+) \|(.*)\|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[^`]+::[^`]+)`")
ID = r"(?:ft|slc|er|c|st|rc|cv)\d+"
BY_ID = re.compile(rf"test_({ID}(?:_and_{ID})*)_")
"""H is left out here: `test_h1_…` may be a rule of a room of that name. Such a row still needs a test of its name."""


def rows() -> dict[str, str]:
    """Return id → cell that names its proof."""
    found = ROW.findall(PAGE.read_text())
    assert len({i for i, _ in found}) == len(found), "an id stands in two rows"
    assert all(len(cells.split(" | ")) == 3 for _, cells in found)
    return {i: cells.split(" | ")[2].strip() for i, cells in found}


@cache
def defined(path: str) -> set[str]:
    """Return the tests of a file: those that it defines, and those that it imports from tests/support."""
    body = ast.parse((ROOT / path).read_text()).body
    imported = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_is_on_the_page_in_order() -> None:
    assert list(rows()) == [f"{group}{number}" for group, count in ROWS.items() for number in range(1, count + 1)]


def test_every_row_is_shown_by_a_test_of_its_name_or_is_one_of_those_that_are_open() -> None:
    for i, shown in rows().items():
        if i in OPEN:
            assert shown.startswith("open: "), i
            continue
        named = [test.partition("::")[2] for test in NAMED.findall(shown)]
        assert any(re.match(rf"test_(?:[a-z]+\d+_and_)*{i.lower()}_", name) for name in named), i


def test_every_test_on_the_page_exists() -> None:
    for named in NAMED.findall(PAGE.read_text()):
        path, _, name = named.partition("::")
        assert name in defined(path), f"no such test: {named}"


def test_every_test_that_is_named_by_an_id_stands_in_its_row() -> None:
    shown = rows()
    for room in ("capture", "shapes"):
        for path in sorted((ROOT / "tests" / room).glob("test_*.py")):
            node = str(path.relative_to(ROOT))
            for name in defined(node):
                found = BY_ID.match(name)
                for i in found[1].split("_and_") if found else ():
                    assert f"`{node}::{name}`" in shown[i.upper()], f"not in row {i.upper()}: {node}::{name}"


def test_no_test_on_the_page_is_skipped_or_may_fail() -> None:
    """Skips for a missing database or foreign client are made at run time; CI turns them into failures
    (tests/conftest.py)."""
    for named in NAMED.findall(PAGE.read_text()):
        path, _, name = named.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        marks = [node for node in tree.body if isinstance(node, ast.Assign) and _is_pytestmark(node)]
        bodies = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
        said = "\n".join(ast.unparse(part) for part in (*marks, *bodies))
        assert not re.search(r"pytest\.(mark\.)?(skip|xfail|importorskip)", said), named


def _is_pytestmark(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
