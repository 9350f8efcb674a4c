"""`tidemill table list`, `describe` and `history`: read only, and without the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.errors import MissingError
from tidemill.cli.context import ConfigOption, JsonOption, OpenConsensus, open_consensus_only, print_json

if TYPE_CHECKING:
    from tidemill.shards.api import Column, ShardSchema
    from tidemill.shards.state.state import SchemaVersion, ShardState

Name = Annotated[str, typer.Argument(help="Table name.")]
_YEAR_9999_MS = 253_402_300_799_000


def list_all(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the tables: readable times, batches, updates, and stored bytes."""
    from tidemill.shards.registry import read_shards

    with open_consensus_only(config) as opened:
        found = [shard_fields(state) for state in opened.portal.call(read_shards(opened.consensus))]
    if as_json:
        print_json(found)
        return
    for row in found:
        print(
            f"{row['shard']}  since={row['since']}  upper={row['upper']}  batches={row['batches']}"
            f"  updates={row['updates']:,}  bytes={row['bytes']:,}  schema={row['schema_version']}"
        )


def describe(name: Name, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show one table: columns, schema changes, holds on its history, and objects waiting for deletion."""
    with open_consensus_only(config) as opened:
        state = read_shard_state(opened, name)
        now_ms = opened.clock.now_ms()
    holds: list[dict[str, Any]] = [
        {"owner": h.reader, "since": h.since, "ends_in_ms": h.expires_ms - now_ms if h.expires_ms else None}
        for h in state.holds
        if h.is_live(now_ms)
    ]
    row = shard_fields(state) | {
        "columns": {column.name: column.type for column in state.schema.columns},
        "defaults": {c.name: c.default for c in state.schema.columns if c.version > 1},
        "retired": {c.name: c.retired for c in state.schema.columns if c.retired},
        "key": list(state.schema.key),
        "buckets": state.schema.buckets,
        "versions": [_version_fields(state.schema, version) for version in state.versions],
        "holds": holds,
    }
    if as_json:
        print_json(row)
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
    for hold in holds:
        ends = "does not expire" if hold["ends_in_ms"] is None else f"ends in {hold['ends_in_ms']} ms unless renewed"
        print(f"  held from {format_time(hold['since'])} by {hold['owner']} ({ends})")


def history(
    name: Name,
    last: Annotated[int, typer.Option(min=1, help="How many of the newest batches to show.")] = 20,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the newest batches of a table, oldest first: times, updates, writer; and its schema changes.

    A merge replaces many batches with one, so merged batches are shown together.
    """
    with open_consensus_only(config) as opened:
        state = read_shard_state(opened, name)
    rows = sorted(_history_rows(state), key=lambda row: row["upper"])[-last:]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        if "change" in row:
            print(f"{format_time(row['upper'])}  schema {row['version']}: {row['change']}")
            continue
        what = f"updates={row['updates']:,}  bytes={row['bytes']:,}" if row["parts"] else "empty"
        merged = "" if row["summed_to"] < 0 else f"  summed to {format_time(row['summed_to'])}"
        writer = row["writer"] or "unknown"
        print(f"{format_time(row['lower'])} to before {format_time(row['upper'])}  {what}  by {writer}{merged}")


def _history_rows(state: ShardState) -> Iterator[dict[str, Any]]:
    for batch in state.batches:
        yield {
            "lower": batch.lower,
            "upper": batch.upper,
            "updates": sum(part.rows for part in batch.parts),
            "bytes": sum(part.size_bytes for part in batch.parts),
            "parts": len(batch.parts),
            "writer": batch.writer,
            "summed_to": batch.summed_to,
            "schema_version": batch.schema_version,
        }
    for version in state.versions:
        yield _version_fields(state.schema, version)


def _version_fields(schema: ShardSchema, version: SchemaVersion) -> dict[str, Any]:
    """Describe a schema version. `change` shows the current types."""
    columns = {column.name: column for column in schema.columns}
    said = [f"+{columns[n].name} {columns[n].type}" + _default_text(columns[n].default) for n in version.added]
    said += [f"{name} {kind}→{columns[name].type}" for name, kind in version.widened]
    said += [f"-{name} (null from then on)" for name in version.retired]
    return {
        "version": version.version,
        "upper": version.upper,
        "at_ms": version.at_ms,
        "change": ", ".join(said),
        "added": list(version.added),
        "widened": dict(version.widened),
        "retired": list(version.retired),
    }


def _retired_note(column: Column) -> str:
    return f" (null from schema {column.retired} on: its source no longer has it)" if column.retired else ""


def _default_text(text: str | None) -> str:
    return "" if text is None else f" default {text}"


def read_shard_state(opened: OpenConsensus, name: str) -> ShardState:
    """Return the state of a table. Raises MissingError."""
    from tidemill.shards.registry import read_shard

    state = opened.portal.call(read_shard(opened.consensus, name))
    if state is None:
        raise MissingError(f"no such table: table={name}.", fix="See `tidemill table list`.")
    return state


def format_time(time_ms: int) -> str:
    """Return a time in ms and, in parentheses, as a date."""
    if not 0 < time_ms < _YEAR_9999_MS:
        return str(time_ms)
    return f"{time_ms} ({datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S})"


def shard_fields(state: ShardState) -> dict[str, Any]:
    return {
        "shard": state.name,
        "shard_id": state.shard_id,
        "since": state.since,
        "upper": state.upper,
        "batches": len(state.batches),
        "parts": sum(len(batch.parts) for batch in state.batches),
        "updates": state.rows,
        "bytes": state.size_bytes,
        "garbage_bytes": sum(g.size_bytes for g in state.garbage),
        "garbage_objects": sum(len(g.objects) for g in state.garbage),
        "closed": state.closed,
        "schema_version": state.schema.version,
    }
