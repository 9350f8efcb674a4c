"""`tidemill sql`: DuckDB over shards, all read at one stated time."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.errors import Invalid
from tidemill.cli.context import ConfigOption, JsonOption, Stores, print_json, stores

if TYPE_CHECKING:
    from tidemill.shards.front import Remap, Shard

WAIT_S = 3.0
"""For an idle table to pass the others' time; without its pipeline the query reads at the older time."""


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
        if as_of is None:
            uppers = _together(opened, shards, uppers)
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


def _together(opened: Stores, shards: Sequence[Shard], uppers: list[int]) -> list[int]:
    """Uppers near the newest of them: a shard whose source is idle is asked to say so, and waited for a moment."""
    from tidemill.shards.open import open_remap
    from tidemill.spark.advance import LAG_MS, advance_idle

    def remap(name: str) -> Awaitable[Remap]:
        return open_remap(opened.consensus, opened.clock, opened.rand, name)

    newest, call = max(uppers, default=0), opened.portal.call
    for at, shard in enumerate(shards):
        if newest - uppers[at] > LAG_MS and call(advance_idle(opened.catalogue, remap, shard, uppers[at], newest - 1)):
            uppers[at] = call(shard.wait_upper(newest - 1, WAIT_S))
    return uppers


def _table(columns: list[str], rows: list[Any], title: str) -> Any:
    from rich.table import Table

    view = Table(title=title)
    for column in columns:
        view.add_column(column)
    for row in rows:
        view.add_row(*("NULL" if value is None else str(value) for value in row))
    return view
