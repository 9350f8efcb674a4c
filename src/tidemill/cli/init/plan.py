"""Names for a new cluster: of its capture, of each table in the pipeline, and of one derived table. Pure."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence

import msgspec

from tidemill.capture.config import NAME_LENGTH
from tidemill.capture.setup.inspection import FoundTable, Inspection

RESERVED = {"spark", "p"}
"""Names with a meaning in the function of a derived table."""
GROUP_NAMES = ("status", "state", "kind", "type", "category", "country", "role")
GROUP_TYPES = ("text", "character varying", "integer", "bigint", "smallint")
_SIMPLE = re.compile(r"[a-z_][a-z0-9_]*")


class PlannedTable(msgspec.Struct, frozen=True):
    """A captured table (`source`, as the capture names it) under its name in the pipeline."""

    name: str
    source: str


class PlannedCount(msgspec.Struct, frozen=True):
    """A derived table: the number of rows of `table` for each value of `column`; "" = of the whole table."""

    name: str
    table: PlannedTable
    column: str


class Plan(msgspec.Struct, frozen=True):
    """Contents of a new cluster's files. `shown`: the table of the page. `other_schemas`: schemas that the patterns
    omit."""

    capture: str
    patterns: tuple[str, ...]
    tables: tuple[PlannedTable, ...]
    count: PlannedCount
    shown: PlannedTable
    other_schemas: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """Name of the variable with the DSN."""
        return f"{self.capture.upper()}_DSN"


def capture_name(database: str) -> str:
    """Return a name for the capture of a database."""
    plain = re.sub(r"[^a-z0-9_]+", "_", database.lower()).strip("_")[:NAME_LENGTH]
    return plain if plain[:1].isalpha() else f"db_{plain}"[:NAME_LENGTH].rstrip("_")


def make_plan(capture: str, found: Inspection) -> Plan:
    """Return the plan for a database with at least one table that can be captured."""
    names = _table_names(found.tables)
    tables = tuple(PlannedTable(name, table.name) for name, table in zip(names, found.tables, strict=True))
    columns = [_group_column(table) for table in found.tables]
    at = min(range(len(tables)), key=lambda n: _rank(columns[n]))
    name = _unused(f"{names[at]}_by_{columns[at]}" if columns[at] else f"{names[at]}_count", set(names))
    count = PlannedCount(name, tables[at], columns[at])
    return Plan(capture, found.patterns, tables, count, tables[at], found.other_schemas)


def _table_names(tables: Sequence[FoundTable]) -> list[str]:
    """Return names that are Python identifiers, each once: that of the table, otherwise with its schema."""
    plain = [_identifier(table.table) for table in tables]
    found: list[str] = []
    for name, table in zip(plain, tables, strict=True):
        wanted = name if plain.count(name) == 1 else _identifier(f"{table.schema}_{table.table}")
        found.append(_unused(wanted, {*found, *(other for other in plain if other != name)}))
    return found


def _identifier(text: str) -> str:
    name = re.sub(r"[^a-z0-9_]+", "_", text.lower()).strip("_") or "table"
    if not name[0].isalpha():
        return f"table_{name}"
    return f"{name}_table" if keyword.iskeyword(name) or name in RESERVED else name


def _unused(name: str, used: set[str]) -> str:
    number = 2
    found = name
    while found in used:
        found, number = f"{name}_{number}", number + 1
    return found


def _group_column(table: FoundTable) -> str:
    """Return the column whose values group the rows best, "" = none: a status, then a reference, then a text."""
    able = [name for name, kind in table.columns if _SIMPLE.fullmatch(name) and kind.partition("(")[0] in GROUP_TYPES]
    able = [name for name in able if (name,) != table.key and name != "count"]
    return min(able, key=_rank, default="")


def _rank(column: str) -> int:
    if column in GROUP_NAMES:
        return GROUP_NAMES.index(column)
    return len(GROUP_NAMES) + (2 if not column else 0 if column.endswith("_id") else 1)
