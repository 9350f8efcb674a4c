"""Tables, as `table list`, `table describe` and `table history` print them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.shards.api import ShardSchema
    from tidemill.shards.state.state import SchemaVersion, ShardState


def table_row(state: ShardState) -> dict[str, Any]:
    """Return one row of `table list`."""
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


def table_description(state: ShardState, now_ms: int) -> dict[str, Any]:
    """Return `table describe`: the row of `table list` with columns, schema changes and live holds."""
    return table_row(state) | {
        "columns": {column.name: column.type for column in state.schema.columns},
        "defaults": {c.name: c.default for c in state.schema.columns if c.version > 1},
        "retired": {c.name: c.retired for c in state.schema.columns if c.retired},
        "key": list(state.schema.key),
        "buckets": state.schema.buckets,
        "versions": [_version_row(state.schema, version) for version in state.versions],
        "holds": [
            {
                "owner": h.reader,
                "since": _held_since(state, h.since),
                "ends_in_ms": h.expires_ms - now_ms if h.expires_ms else None,
            }
            for h in state.holds
            if h.is_live(now_ms)
        ],
    }


def _held_since(state: ShardState, since: int) -> int | None:
    """Return the time from which a hold keeps history; None for one that keeps only objects."""
    return None if since > state.upper else since


def history_rows(state: ShardState) -> Iterator[dict[str, Any]]:
    """Yield the batches of a table, oldest first, then its schema changes."""
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
        yield _version_row(state.schema, version)


def _version_row(schema: ShardSchema, version: SchemaVersion) -> dict[str, Any]:
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


def _default_text(text: str | None) -> str:
    return "" if text is None else f" default {text}"
