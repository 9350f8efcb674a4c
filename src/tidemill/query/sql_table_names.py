"""Names of the tables in a query, found by DuckDB's own parser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError

if TYPE_CHECKING:
    import duckdb


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


def _walk_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
