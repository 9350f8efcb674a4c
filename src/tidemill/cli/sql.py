"""`tidemill sql`: DuckDB over tables, all read at one stated time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.config.config import load
from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError, nearest_name
from tidemill.base.runtime.private_directories import is_present
from tidemill.base.status.logging import configure_logs
from tidemill.cli.context import ConfigOption, no_cluster, open_stores
from tidemill.cli.output.output import TABLE, Form, Output
from tidemill.cli.output.text_table import Column

if TYPE_CHECKING:
    from tidemill.query import Cluster


def sql(
    query: Annotated[str, typer.Argument(help="SQL query; it names tables of pipelines.")],
    as_of: Annotated[
        str, typer.Option(help="Time to read: ms, or as in 2026-11-22T12:00:00Z. Default: the newest common time.")
    ] = "latest",
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Run a SQL query over tables at one time, which is printed with the result.

    A table that its pipeline has not computed yet is an error, with what it waits for: exit 4.
    """
    import duckdb

    from tidemill.consensus.factory import sqlite_path_of_url

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

            consensus_file = sqlite_path_of_url(found.consensus_url)
            if consensus_file is not None and not is_present(consensus_file):
                missing = MissingError(f"there is no cluster here: consensus={found.consensus_url}.")
                raise no_cluster(config, found, missing)
            with connect(objects=found.objects_url, consensus=found.consensus_url) as cluster:
                names = sorted(tables | (either & set(cluster.tables()) if either else set()))
                try:
                    at = cluster.to_duckdb(connection, names, as_of=as_of, wait_s=0)
                except (MissingError, UnavailableError) as error:
                    require_written(config, cluster, names)
                    raise _with_meant_names(error, cluster, names) from error
                if at < 0:
                    require_written(config, cluster, names)
                columns, rows = _run_query(connection, query)
    print_result(columns, rows, at, out)


def require_written(config: Path | None, cluster: Cluster, names: Sequence[str]) -> None:
    """Raise UnavailableError if one of the tables was never written."""
    existing = set(cluster.tables())
    for name in names:
        if name not in existing or not cluster.table(name).frontiers().upper:
            _explain_unwritten(config, name, exists=name in existing)


def _with_meant_names(error: TidemillError, cluster: Cluster, names: Sequence[str]) -> TidemillError:
    """Return an error about a missing table with the name that was probably meant, quoted for SQL; others unchanged."""
    existing = cluster.tables()
    for name in names:
        if isinstance(error, MissingError) and name not in existing and (near := nearest_name(name, existing)):
            return MissingError(error.message, fix=f'Did you mean "{near}"? {error.fix}')
    return error


def _explain_unwritten(config: Path | None, name: str, *, exists: bool) -> None:
    """Raise UnavailableError for a table that was never written, with the reason that its stage reports. Return if it
    does not exist, and no pipeline declares it."""
    from tidemill.base.status.freshness import SHARD
    from tidemill.base.status.status import StageState, derive_statuses
    from tidemill.consensus.status.board import StatusBoard
    from tidemill.metastore.catalogue import PipelineRow

    with open_stores(config) as opened:
        reports = opened.portal.call(StatusBoard(opened.consensus, opened.rand).reports())
        pipelines = [row.name for row in opened.portal.call(opened.catalogue.list(PipelineRow)) if name in row.tables]
        found = derive_statuses(reports, opened.clock.now_ms()).get(SHARD + name)
    if not exists and not pipelines and found is None:
        return
    fields = f"table={name}" + (f" pipeline={pipelines[0]}" if pipelines else "")
    if found is None or found.state is StageState.BLIND:
        raise UnavailableError(
            f"the table has not been computed yet, and no process that writes it is running: {fields}.",
            fix="Start its pipeline: tidemill up." if pipelines else "Run the program that writes it.",
        )
    waits = f" blocked_by={found.blocker}" if found.blocker and found.state is not StageState.MOVING else ""
    reason = f" reason={found.mark.reason!r}" if found.mark.reason else ""
    raise UnavailableError(
        f"the table has not been computed yet: {fields} state={found.state}{waits}{reason}.",
        fix=f"Wait until its pipeline has computed it; `tidemill why {name}` shows the progress.",
    )


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


def _shown_type(kind: Any) -> str:
    """Return the type as which values are shown: their own, or DuckDB's text. The elements of a list are shown one by
    one; a struct or a map with such values inside is one text."""
    name = str(kind)
    if kind.id == "list":
        return f"{_shown_type(kind.children[0][1])}[]"
    if kind.id in ("array", "struct", "map"):
        return "VARCHAR" if any(each in name for each in _TEXT_RENDERED_TYPES) else name
    return "VARCHAR" if name.startswith(_TEXT_RENDERED_TYPES) else name


def _run_query(connection: Any, query: str) -> tuple[list[str], list[Any]]:
    import duckdb

    try:
        connection.execute("SET TimeZone = 'UTC'")  # shards store times in UTC
        result = connection.sql(query)
        if result is None:
            return [], []
        # Converted to Python, DuckDB's infinity is the last moment of 9999, and -infinity the first of the year 1.
        kinds = [(str(kind), _shown_type(kind)) for kind in result.types]
        shown = [f"#{at}" if own == kind else f"CAST(#{at} AS {kind})" for at, (own, kind) in enumerate(kinds, 1)]
        changed = any(own != kind for own, kind in kinds)
        return list(result.columns), (result.project(", ".join(shown)) if changed else result).fetchall()
    except duckdb.IOException as error:
        raise UnavailableError(
            f"the query cannot read its input: {error}.",
            fix="Check that the bucket answers (`tidemill doctor`), or correct the paths in the query.",
        ) from error
    except duckdb.Error as error:
        raise InvalidError(f"the query failed: {error}.", fix="Correct the query.") from error
