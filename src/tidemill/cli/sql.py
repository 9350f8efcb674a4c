"""`tidemill sql`: DuckDB over tables, all read at one stated time."""

from __future__ import annotations

import sys
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from tidemill.base.config.config import load
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.status.logging import configure_logs
from tidemill.cli.context import ConfigOption
from tidemill.cli.output.output import TABLE, Form, Output
from tidemill.cli.output.text_table import Column


def sql(
    query: Annotated[str, typer.Argument(help="SQL query; it names tables of pipelines.")],
    as_of: Annotated[
        str, typer.Option(help="Time to read: ms, or as in 2026-11-22T12:00:00Z. Default: the newest common time.")
    ] = "latest",
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Run a SQL query over tables at one time, which is printed with the result."""
    import duckdb

    configure_logs("warning")
    found = load(config)
    at = -1
    with (
        TemporaryDirectory(prefix="tidemill-sql-") as spill,
        duckdb.connect(config={"temp_directory": spill}) as connection,
    ):
        from tidemill.query.duckdb_views import find_table_names

        tables, either = find_table_names(connection, query)
        if not tables | either:
            columns, rows = _run_query(connection, query)
        else:
            from tidemill.query import connect

            with connect(objects=found.objects_url, consensus=found.consensus_url) as cluster:
                names = tables | (either & set(cluster.tables()) if either else set())
                at = cluster.to_duckdb(connection, sorted(names), as_of=as_of, wait_s=0)
                columns, rows = _run_query(connection, query)
    print_result(columns, rows, at, out)


def print_result(columns: list[str], rows: list[Any], at: int, out: Output) -> None:
    """Print the result and its time, which is -1 if no table was read. Columns of the same name are numbered where
    rows are objects."""
    answer = {"as_of_ms": at if at >= 0 else None, "columns": columns, "rows": rows}
    names = _distinct_names(columns)
    shown = [Column(heading, name) for heading, name in zip(columns, names, strict=True)]
    objects = [dict(zip(names, row, strict=True)) for row in rows]
    out.rows(objects, shown, value=answer, fields=names, null="NULL")
    if at >= 0 and out.form is not Form.JSON:
        print(f"as of {at}", file=sys.stdout if out.is_text else sys.stderr)


def _distinct_names(columns: list[str]) -> list[str]:
    names: list[str] = []
    for column in columns:
        name, number = column, 1
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


_TEXT_RENDERED_TYPES = ("DATE", "TIMESTAMP", "BLOB")
"""Types whose values are shown as DuckDB's own text."""


def _run_query(connection: Any, query: str) -> tuple[list[str], list[Any]]:
    import duckdb

    try:
        connection.execute("SET TimeZone = 'UTC'")  # shards store times in UTC
        result = connection.sql(query)
        if result is None:
            return [], []
        # Converted to Python, DuckDB's infinity is the last moment of 9999, and -infinity the first of the year 1.
        texts = [str(kind).startswith(_TEXT_RENDERED_TYPES) for kind in result.types]
        shown = [f"CAST(#{at} AS VARCHAR)" if text else f"#{at}" for at, text in enumerate(texts, 1)]
        return list(result.columns), (result.project(", ".join(shown)) if any(texts) else result).fetchall()
    except duckdb.IOException as error:
        raise UnavailableError(
            f"the query cannot read its input: {error}.",
            fix="Check that the bucket answers (`tidemill doctor`), or correct the paths in the query.",
        ) from error
    except duckdb.Error as error:
        raise InvalidError(f"the query failed: {error}.", fix="Correct the query.") from error
