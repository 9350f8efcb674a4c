"""Inspection of a database for a capture that does not exist yet, for `tidemill init`. Only reads.

The checks are those of `tidemill doctor`. All problems are returned, not only the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.capture.catalog.columns import read_attributes
from tidemill.capture.catalog.foreign_publications import Objection, find_objections
from tidemill.capture.catalog.table_choice import Refusal, choose_tables
from tidemill.capture.catalog.table_discovery import TableInfo, list_tables
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.setup.privileges import find_replaced_identities
from tidemill.capture.setup.publication import Identities
from tidemill.capture.setup.server_checks import find_server_problems
from tidemill.capture.setup.statements import find_missing_statements


class FoundTable(msgspec.Struct, frozen=True):
    """A table that can be captured. `columns`: (name, type in PostgreSQL's form), in the order of the table."""

    schema: str
    table: str
    name: str
    key: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]


class Inspection(msgspec.Struct, frozen=True):
    """Result of an inspection.

    patterns    those of the capture
    tables      tables that can be captured once the statements have run
    refused     by name: why another table that matches cannot be captured
    problems    reasons why the whole server cannot be captured
    statements  SQL for an administrator, in order
    replaced_identities  by table: the identities that the statements replace, to be remembered for `capture drop`
    other_schemas  further schemas with tables that can be captured, if the patterns are the default
    """

    version: int
    patterns: tuple[str, ...]
    tables: tuple[FoundTable, ...]
    refused: dict[str, Refusal]
    problems: tuple[InvalidError | UnavailableError, ...]
    statements: tuple[str, ...]
    replaced_identities: dict[str, Identities]
    other_schemas: tuple[str, ...] = ()


async def inspect_database(name: str, dsn: str, patterns: Sequence[str] = ()) -> Inspection:
    """Inspect the database for a capture of this name. Without patterns: those of `default_patterns`.

    Raises UnavailableError, InvalidError for a DSN that cannot be used, and NoTablesError if nothing matches.
    """
    wire = await PgConnection.connect(dsn, purpose="init")
    try:
        found = await list_tables(wire)
        config = CaptureConfig(name=name, dsn=dsn, tables=tuple(patterns) or default_patterns(found))
        problems = await find_server_problems(wire, config)
        objections = await find_objections(wire, config)
        choice = choose_tables(config.tables, found, wire.server_version, objections=objections)
        statements = await find_missing_statements(wire, config, choice.tables)
        attributes = await read_attributes(wire, [table.oid for table in choice.tables])
        return Inspection(
            wire.server_version,
            config.tables,
            tuple(
                FoundTable(
                    table.schema,
                    table.table,
                    table.name,
                    tuple(attributes[table.oid].key),
                    tuple((column.name, column.type_name) for column in attributes[table.oid].columns),
                )
                for table in choice.tables
                if table.oid in attributes  # otherwise it was dropped in between
            ),
            choice.refused,
            tuple(problem.error for problem in problems),
            (*(problem.statement for problem in problems if problem.statement), *statements),
            await find_replaced_identities(wire, config, choice.tables, statements),
            () if patterns else _other_schemas(found, config.tables, wire.server_version, objections),
        )
    finally:
        await wire.aclose()


def default_patterns(tables: Sequence[TableInfo]) -> tuple[str, ...]:
    """Return `public.*`, or all schemas with tables if schema public has no table. (Managed services add schemas of
    their own.)
    """
    schemas = sorted({table.schema for table in tables})
    return ("public.*",) if "public" in schemas or not schemas else tuple(f"{schema}.*" for schema in schemas)


def _other_schemas(
    found: Sequence[TableInfo], patterns: Sequence[str], version: int, objections: Mapping[int, Objection]
) -> tuple[str, ...]:
    """Return the schemas that the default patterns omit and that have tables that can be captured."""
    others = sorted({f"{table.schema}.*" for table in found} - set(patterns))
    choice = choose_tables(others, found, version, objections=objections) if others else None
    return tuple(sorted({table.schema for table in choice.tables})) if choice is not None else ()
