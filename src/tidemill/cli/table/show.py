"""`tidemill table list`, `describe` and `history`: read only, and without the bucket."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.base.errors import MissingError
from tidemill.cli.context import ConfigOption, OpenConsensus, open_consensus_only
from tidemill.cli.output.data_lines import Row
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column, format_time
from tidemill.console.views.tables import history_rows, table_description, table_row

if TYPE_CHECKING:
    from tidemill.shards.api import Column as TableColumn
    from tidemill.shards.state.state import ShardState

Name = Annotated[str, typer.Argument(help="Table name.")]


def list_all(config: ConfigOption = None, out: Output = TABLE) -> None:
    """List the tables: readable times, batches, updates, and stored bytes."""
    from tidemill.shards.registry import read_shards

    with open_consensus_only(config) as opened:
        found = [table_row(state) for state in opened.portal.call(read_shards(opened.consensus))]
    columns = [
        Column("table", "shard"),
        Column("readable from", lambda row: format_time(row["since"])),
        Column("to before", lambda row: format_time(row["upper"])),
        *(Column(name, partial(_format_count, name), right=True) for name in ("batches", "updates", "bytes")),
        Column("schema", "schema_version"),
    ]
    out.rows(found, columns, empty="no tables")


def describe(name: Name, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Show one table: columns, schema changes, holds on its history, and objects waiting for deletion."""
    with open_consensus_only(config) as opened:
        state = read_shard_state(opened, name)
        now_ms = opened.clock.now_ms()
    row = table_description(state, now_ms)
    if not out.is_text:
        rows = [{"table": name, "column": column, "type": kind} for column, kind in row["columns"].items()]
        out.rows(rows, value=row)
        return
    print(f"{state.name}  id {state.shard_id}")
    print(
        f"  readable from {format_time(state.since)} to before {format_time(state.upper)}"
        + ("  closed" if state.closed else "")
    )
    print("  columns " + ", ".join(f"{c.name} {c.type}{_retired_note(c)}" for c in state.schema.columns))
    print("  key " + (", ".join(state.schema.key) or "the whole row"))
    for version in row["versions"]:
        print(f"  schema {version['version']} from {format_time(version['upper'])}: {version['change']}")
    print(f"  {row['batches']} batches  {row['parts']} parts  {row['updates']:,} updates  {row['bytes']:,} bytes")
    print(f"  waiting for deletion: {row['garbage_bytes']:,} bytes in {row['garbage_objects']} objects")
    for hold in row["holds"]:
        ends = "does not expire" if hold["ends_in_ms"] is None else f"ends in {hold['ends_in_ms']} ms unless renewed"
        held = "objects held" if hold["since"] is None else f"held from {format_time(hold['since'])}"
        print(f"  {held} by {hold['owner']} ({ends})")


def history(
    name: Name,
    last: Annotated[int, typer.Option(min=1, help="How many of the newest batches to show.")] = 20,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Show the newest batches of a table, oldest first: times, updates, writer; and its schema changes.

    A merge replaces many batches with one, so merged batches are shown together.
    """
    with open_consensus_only(config) as opened:
        state = read_shard_state(opened, name)
    rows = sorted(history_rows(state), key=lambda row: row["upper"])[-last:]
    columns = [
        Column("from", lambda row: format_time(row["lower"]) if "lower" in row else ""),
        Column("to before", lambda row: format_time(row["upper"])),
        *(Column(name, partial(_format_count, name), right=True) for name in ("updates", "bytes")),
        Column("writer", lambda row: "" if "change" in row else row["writer"] or "unknown"),
        Column("change", _format_change),
    ]
    out.rows(rows, columns, empty="no batches")


def _format_count(name: str, row: Row) -> str:
    return f"{row[name]:,}" if name in row else ""


def _format_change(row: Row) -> str:
    """Return the schema change of a row of `history`, or that its batch was merged."""
    if "change" in row:
        return f"schema {row['version']}: {row['change']}"
    return f"summed to {format_time(row['summed_to'])}" if row["summed_to"] >= 0 else ""


def _retired_note(column: TableColumn) -> str:
    return f" (null from schema {column.retired} on: its source no longer has it)" if column.retired else ""


def read_shard_state(opened: OpenConsensus, name: str) -> ShardState:
    """Return the state of a table. Raises MissingError."""
    from tidemill.shards.registry import read_shard

    state = opened.portal.call(read_shard(opened.consensus, name))
    if state is None:
        raise MissingError(f"no such table: table={name}.", fix="See `tidemill table list`.")
    return state
