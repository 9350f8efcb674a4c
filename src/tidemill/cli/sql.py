"""`tidemill sql`: DuckDB over shards, all read at one stated time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tidemill.base.errors import Invalid
from tidemill.cli.context import ConfigOption, JsonOption, print_json, stores


def sql(
    query: Annotated[str, typer.Argument(help="A query; every table it names is a shard.")],
    as_of: Annotated[int | None, typer.Option(help="Time in ms; default: the newest all tables have.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run SQL over shards at one time; the time is printed with the answer."""
    import duckdb

    connection = duckdb.connect()
    try:
        names = sorted(connection.get_table_names(query))
    except duckdb.Error as error:
        raise Invalid(f"the query does not parse: {error}.", fix="Correct it; DuckDB's dialect applies.") from error
    with stores(config) as opened:
        shards = [opened.shard(name) for name in names]
        uppers = [opened.portal.call(shard.frontiers())[1] for shard in shards]
        time_ms = as_of if as_of is not None else min(uppers, default=1) - 1
        for name, shard, upper in zip(names, shards, uppers, strict=True):
            if time_ms >= upper:
                raise Invalid(f"not readable yet: shard={name} as_of={time_ms} upper={upper}.", fix="Ask below upper.")
            connection.register(name, opened.portal.call(shard.snapshot(time_ms)))
        try:
            result = connection.sql(query)
            columns = list(result.columns)
            rows = result.fetchall()
        except duckdb.Error as error:
            raise Invalid(f"the query failed: {error}.", fix="Correct it.") from error
    if as_json:
        print_json({"as_of_ms": time_ms, "columns": columns, "rows": rows})
        return
    from rich.console import Console

    Console().print(_table(columns, rows, f"as of {time_ms}"))


def _table(columns: list[str], rows: list[Any], title: str) -> Any:
    from rich.table import Table

    view = Table(title=title)
    for column in columns:
        view.add_column(column)
    for row in rows:
        view.add_row(*("NULL" if value is None else str(value) for value in row))
    return view
