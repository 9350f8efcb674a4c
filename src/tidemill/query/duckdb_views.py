"""Tables at one time as views of a DuckDB connection, and the names of the tables in a query.

A view is DuckDB's own scan of the Parquet parts, with its columns and filters (`shards.read.read_plan`), and Arrow
tables of the updates that are not merged. If no exact plan exists, the contents are copied into a temporary table of
the connection, by ranges. The data of a view is held until another view takes its name or the connection closes: DuckDB
keeps a reference to the view's Arrow table `live`, and the hold ends with it. (Dropping only the view does not release
it.) DuckDB's own parser finds the names.
"""

from __future__ import annotations

import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.runtime.blocking_portal import SyncContext
from tidemill.objects.factory import local_directory
from tidemill.query.table_read import ReadSelection
from tidemill.query.verified_paths import verified_path
from tidemill.shards.api import DIFF, HASH, TIME
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.stored_types import stored_field
from tidemill.shards.read.read_plan import UNTIL_COLUMN, PlanNotPossibleError, ReadPlan, plan_of_rows, plan_parts

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from tidemill.query.table import Table

GLOB = set("*?[")


def make_view(
    connection: duckdb.DuckDBPyConnection, table: Table, found: SyncContext[ReadSelection], name: str
) -> None:
    """Create the temporary view `name` of the chosen contents. `found` is left when nothing reads it any more.

    Raises InvalidError (DuckDB cannot have such a view), and as reading.
    """
    import duckdb

    _check_names([*table.schema.names, TIME, DIFF, HASH], table.name)
    try:
        _make_view(connection, table, found, name)
    except duckdb.IOException as error:
        raise UnavailableError(
            f"DuckDB cannot read the table: table={table.name} ({error}).", fix="Try again."
        ) from error
    except duckdb.Error as error:
        raise InvalidError(
            f"DuckDB rejects the view: name={name} ({error}).", fix="Use another name, or another connection."
        ) from error


def _make_view(
    connection: duckdb.DuckDBPyConnection, table: Table, found: SyncContext[ReadSelection], name: str
) -> None:
    """Create the view. Its objects have unique names, so an existing view keeps its data until the new one is
    complete."""
    shard, stores, portal = table._shard, table._stores, table._portal
    number = next(_numbers)
    live_name, gone_name, copy_name = (f"tidemill {what} {number} {name}" for what in ("live", "gone", "copy"))
    try:
        try:
            if found.value.at < 0:
                plan = plan_of_rows(contents_schema(shard.schema).empty_table())
            else:
                plan = plan_parts(portal, stores.objects, shard, found.value.batches, found.value.at)
        except PlanNotPossibleError:
            with table._stream_chosen(found, None, None, end=found.exit) as rows:
                _copy_rows(connection, copy_name, rows)
            _create_view(connection, name, f"SELECT * FROM {quote_identifier(copy_name)}")
        else:
            weakref.finalize(plan.live, _release_read, found, table)
            connection.register(live_name, plan.live)
            if plan.gone.num_rows:
                gone = plan.gone.rename_columns([*_superseded_column_names(table.key), UNTIL_COLUMN])
                connection.register(gone_name, gone)
            _create_view(
                connection,
                name,
                _select_sql(plan, table.key, live_name, gone_name, _part_paths(connection, table, plan)),
            )
    except BaseException:
        _drop_view_objects(connection, name, lambda each: each == number)
        raise
    _drop_view_objects(connection, name, lambda each: each < number)


_numbers = itertools.count(1)


def _drop_view_objects(connection: duckdb.DuckDBPyConnection, name: str, which: Callable[[int], bool]) -> None:
    """Drop the objects behind views of this name; `which` selects them by the number of the call that created them."""
    rows = connection.execute("SELECT view_name FROM duckdb_views() WHERE temporary UNION ALL "
                              "SELECT table_name FROM duckdb_tables() WHERE temporary").fetchall()  # fmt: skip
    for (each,) in rows:
        match = _VIEW_OBJECT_NAME.fullmatch(each)
        if match is None or match[3] != name or not which(int(match[2])):
            continue
        if match[1] == "copy":
            connection.execute(f"DROP TABLE IF EXISTS temp.{quote_identifier(each)}")
        else:
            connection.unregister(each)


_VIEW_OBJECT_NAME = re.compile(r"tidemill (live|gone|copy) (\d+) (.*)", re.DOTALL)


def _superseded_column_names(key: tuple[str, ...]) -> list[str]:
    return [f"k{place}" for place in range(len(key))]


def _release_read(found: SyncContext[ReadSelection], table: Table) -> None:
    """Release the hold. The reference to `table` keeps its cluster open until then, even without other references."""
    found.exit()


def _select_sql(plan: ReadPlan, key: tuple[str, ...], live: str, gone: str, paths: list[str]) -> str:
    if not paths:
        return f"SELECT * FROM {quote_identifier(live)}"
    columns = ", ".join(_column_sql(field) for field in plan.live.schema)
    listed = ", ".join(f"'{path}'" for path in (each.replace("'", "''") for each in paths))
    said = f"SELECT {columns} FROM read_parquet([{listed}], hive_partitioning = false) s"
    if plan.gone.num_rows:
        same = [
            _key_equality_sql(f"g.{ours}", f"s.{quote_identifier(column)}", plan.gone.schema.field(place).type)
            for place, (ours, column) in enumerate(zip(_superseded_column_names(key), key, strict=True))
        ]
        said += f" ANTI JOIN {quote_identifier(gone)} g ON ({' AND '.join([*same, f's.{TIME} < g.{UNTIL_COLUMN}'])})"
    return f"{said} UNION ALL SELECT * FROM {quote_identifier(live)}" if plan.live.num_rows else said


def _column_sql(field: pa.Field) -> str:
    """Return SQL for a column of a part's file in the table's type: `int16` is stored as int32, also within
    nested values."""
    name = quote_identifier(field.name)
    if stored_field(field).type != field.type:
        return f"s.{name}::{_sql_type(field.type)} AS {name}"
    return f"s.{name}"


def _sql_type(kind: pa.DataType) -> str:
    """Return DuckDB's name of a column's type."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    if pa.types.is_map(kind):
        return f"MAP({_sql_type(kind.key_type)}, {_sql_type(kind.item_type)})"
    if pa.types.is_struct(kind):
        return f"STRUCT({', '.join(f'{quote_identifier(field.name)} {_sql_type(field.type)}' for field in kind)})"
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP WITH TIME ZONE" if kind.tz else "TIMESTAMP"
    return _SQL_TYPES[str(kind)]


_SQL_TYPES = {
    "bool": "BOOLEAN",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "binary": "BLOB",
    "date32[day]": "DATE",
}


def _key_equality_sql(left: str, right: str, of: pa.DataType) -> str:
    """Return SQL for the equality of two key columns, independent of the connection's collation."""
    import pyarrow as pa

    if pa.types.is_string(of):
        left, right = f'{left} COLLATE "C"', f'{right} COLLATE "C"'  # byte by byte; encode() takes five times as long
    return f"{left} IS NOT DISTINCT FROM {right}"


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, select: str) -> None:
    connection.execute(f"CREATE OR REPLACE TEMP VIEW {quote_identifier(name)} AS {select}")


def _copy_rows(connection: duckdb.DuckDBPyConnection, name: str, rows: pa.RecordBatchReader) -> None:
    """Copy rows into a temporary table. DuckDB reads a stream batch by batch, and spills beyond its memory limit."""
    stream = f"{name} stream"
    connection.register(stream, rows)
    try:
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE {quote_identifier(name)} AS SELECT * FROM {quote_identifier(stream)}"
        )
    finally:
        connection.unregister(stream)


def _part_paths(connection: duckdb.DuckDBPyConnection, table: Table, plan: ReadPlan) -> list[str]:
    """Return the paths that DuckDB opens: files if the bucket is a directory, else objects through our file system."""
    if not plan.settled:
        return []
    directory = local_directory(table._stores.urls.objects)
    if directory is not None and not GLOB & set(directory):
        return [verified_path(table._portal, table._stores.objects, directory, part) for part in plan.settled]
    bucket = table._cluster._bucket
    if not connection.filesystem_is_registered(bucket.protocol):
        connection.register_filesystem(bucket)
    return [bucket.path_of(part) for part in plan.settled]


def _check_names(names: list[str], table: str) -> None:
    """Raise InvalidError if two names differ only in case, which DuckDB ignores."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise InvalidError(
                f"DuckDB cannot distinguish two columns: table={table} columns={other},{name}.",
                fix="Read the table as Arrow or Polars.",
            )


def quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def find_table_names(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[set[str], set[str]]:
    """Return (tables, names that are either a table or defined by a WITH of the query).

    `get_table_names` is used only for statements that cannot be serialized: it also binds, and so rejects every JOIN
    with USING. Raises InvalidError if the query does not parse.
    """
    import duckdb

    try:
        ((said,),) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()
        tree = json.loads(said)
        if tree.get("error") and tree.get("error_type") == "parser":
            raise InvalidError(
                f"the query does not parse: {tree.get('error_message')}.", fix="Correct it; DuckDB's dialect applies."
            )
        if tree.get("error"):  # not a SELECT: EXPLAIN, for example
            _check_reads(query)
            return set(connection.get_table_names(query)), set()
    except duckdb.Error as error:
        fix = "Correct it; DuckDB's dialect applies."
        if "single statement" in str(error):
            fix = "Pass one statement; for a PIVOT name the values: PIVOT t ON column IN (…) USING …."
        raise InvalidError(f"the query does not parse: {error}.", fix=fix) from error
    nodes = list(_walk_nodes(tree))
    tables = {node["table_name"] for node in nodes if node.get("type") == "BASE_TABLE"}
    called = {each["key"].lower() for node in nodes for each in node.get("cte_map", {}).get("map", [])}
    either = {name for name in tables if name.lower() in called}
    return tables - either, either


WRITING = ("INSERT", "UPDATE", "DELETE", "MERGE_INTO", "DROP", "ALTER")


def _check_reads(query: str) -> None:
    """Raise InvalidError for a statement that would change a table: the views are of contents at one time."""
    import duckdb

    for statement in duckdb.extract_statements(query):
        kind = statement.type.name
        if kind in WRITING:
            raise InvalidError(
                f"the statement does not read: kind={kind.replace('_INTO', '')}.",
                fix="Tables are written by pipelines and by df.write of Spark; `tidemill table drop NAME` deletes one.",
            )


def _walk_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
