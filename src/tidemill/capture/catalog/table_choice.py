"""Choose the tables that the patterns of a capture name. Pure.

    refused    named, and cannot be captured in its present form: no primary key; unlogged or foreign; before PostgreSQL
               18 with a generated column in its primary key, since the stream lacks that column, and rows would share a
               key; on PostgreSQL 18 with a virtual generated column, since REPLICA IDENTITY FULL would make all its
               UPDATEs and DELETEs fail;
               if identities are used unchanged, with one that does not include the primary key of an old row
    left       skipped: the same kinds if only a pattern matches them, and no operator named this very table. Such a
               table is listed with its reason, and nothing is stuck because of it

Nothing is altered before this is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from tidemill.base.errors import MissingError
from tidemill.capture.catalog.foreign_publications import Objections
from tidemill.capture.catalog.table_discovery import GENERATED_PUBLISHED, TableInfo
from tidemill.capture.naming import to_readable


class Refusal(msgspec.Struct, frozen=True):
    """Reason why a table is not captured. `state`: refused or left (CaptureTableRow). `held_by`: the blocker, if it is
    not the operator. `again`: for a table that was captured, a copy resolves it once the reason is gone.
    """

    state: str
    reason: str
    fix: str
    held_by: str = ""
    again: bool = False


class TableChoice(msgspec.Struct, frozen=True):
    """Result of a capture's patterns: tables in name order, and those that cannot be captured by name."""

    tables: tuple[TableInfo, ...]
    refused: dict[str, Refusal]


class NoTablesError(MissingError):
    """The capture matches no table at present; a table may be created at any moment."""


def choose_tables(
    patterns: Sequence[str],
    tables: Sequence[TableInfo],
    version: int,
    *,
    whole: bool = True,
    objections: Objections | None = None,
) -> TableChoice:
    """Return the tables that match the patterns. `whole`: each is set to REPLICA IDENTITY FULL; otherwise it is
    captured with its present identity. `objections`: those of publications. Raises NoTablesError if the patterns match
    no table at all.
    """
    chosen: dict[str, TableInfo] = {}
    refused: dict[str, Refusal] = {}
    excluded = [p[1:] for p in patterns if p.startswith("!")]
    for pattern in (p for p in patterns if not p.startswith("!")):
        exact = [t for t in tables if _is_named_by(t, pattern)]
        hits = exact or [t for t in tables if _matches_pattern(t, pattern)]
        if not hits and not _is_pattern(pattern):
            refused[_add_default_schema(pattern)] = Refusal(
                "refused", f"no such table: table={pattern}.", "Create it, or correct `tables` of this capture."
            )
        for table in hits:
            if any(_matches_pattern(table, e) for e in excluded):
                continue
            why = find_refusal(table, version, named=bool(exact), whole=whole)
            objection = objections.get(table.oid) if objections is not None else None
            if why is None and objection is not None and objection.refuses:
                why = Refusal("refused", objection.reason, objection.fix, again=True)
            if why is None:
                chosen[table.name] = table
            elif refused.get(table.name, why).state != "refused" or table.name not in refused:
                refused[table.name] = why
    if not chosen and all(r.reason.startswith("no such table") for r in refused.values()):
        raise NoTablesError(
            f"the capture's patterns match no table: table={','.join(patterns)}.",
            fix="Create it, or correct `tables` of this capture.",
        )
    return TableChoice(tuple(chosen[name] for name in sorted(chosen)), refused)


def find_refusal(table: TableInfo, version: int, *, named: bool = True, whole: bool = True) -> Refusal | None:
    """Return why a table cannot be captured in its present form, None = it can. Pure, and called before anything is
    altered.
    """
    state = "refused" if named else "left"
    if table.kind == "f":
        return Refusal(
            state, f"a foreign table has no WAL here: table={table.name}.", "Capture it in its own database."
        )
    if table.odd:
        return Refusal(
            state,
            f"a name is not UTF-8: table={table.name} name={table.odd}.",
            "Rename it, or leave the table out.",
        )
    if table.persistence == "u":
        return Refusal(
            state, f"an unlogged table has no WAL: table={table.name}.", f"ALTER TABLE {table.name} SET LOGGED."
        )
    if table.odd_partition:
        return Refusal(
            state,
            f"a partition is foreign, unlogged or temporary and has no WAL: table={table.name}"
            f" partition={table.odd_partition}.",
            f'Detach it, or exclude the table with "!{table.name}".',
        )
    if not table.has_key:
        return Refusal(
            state,
            f"a captured table needs a primary key: table={table.name}.",
            f'Add a primary key to {table.name}, or exclude it with "!{table.name}".',
        )
    if version < GENERATED_PUBLISHED and table.generated_key:
        return Refusal(
            state,
            "a column of the primary key is generated, and the stream does not carry generated columns before"
            f" PostgreSQL 18: table={table.name} column={table.generated_key}.",
            "Run ALTER TABLE … ALTER COLUMN … DROP EXPRESSION, and let the application write the column; or upgrade to"
            f' PostgreSQL 18; or exclude the table with "!{table.name}".',
        )
    if version >= GENERATED_PUBLISHED and "v" in table.generated:
        return Refusal(
            state,
            "a virtual generated column is in no stream, and capturing the table would make UPDATE and DELETE"
            f" fail: table={table.name}.",
            f'Make the column STORED, or exclude the table with "!{table.name}".',
        )
    if not whole and table.lacking:
        return Refusal(
            state,
            "its replica identity does not include the primary key of a changed or deleted row:"
            f" table={table.name} identity={table.identity!r}.",
            f"Run {to_readable(table.lacking)};",
        )
    return None


def _add_default_schema(pattern: str) -> str:
    return pattern if "." in pattern else f"public.{pattern}"


def _is_pattern(text: str) -> bool:
    return any(c in text for c in "*?[")


def _accepted_names(table: TableInfo) -> tuple[str, ...]:
    """Return the names by which an operator may refer to the table: ours, plain text, and without its schema if that is
    public.
    """
    plain = f"{table.schema}.{table.table}"
    return (table.name, plain, *((table.table,) if table.schema == "public" else ()))


def _is_named_by(table: TableInfo, pattern: str) -> bool:
    return pattern in _accepted_names(table)


def _matches_pattern(table: TableInfo, pattern: str) -> bool:
    full = _add_default_schema(pattern)
    return any(fnmatchcase(name, full) for name in _accepted_names(table)[:2])
