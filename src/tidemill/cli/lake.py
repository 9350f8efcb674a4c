"""`tidemill lake`: tables published for other engines, directly on the stores. No node needs to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.libraries import require
from tidemill.cli.context import ConfigOption, open_consensus_only, open_stores
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column, format_time

if TYPE_CHECKING:
    from tidemill.lake.pointer import LoadedTable, Pointer
    from tidemill.shards.state.state import ShardState

app = typer.Typer(help="List, describe and publish Iceberg tables.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Table name.")]


@app.command("list")
def list_published(config: ConfigOption = None, out: Output = TABLE) -> None:
    """List the tables: the time that is published, its rows, and how far it is behind the table."""
    from tidemill.lake.pointer import list_pointers
    from tidemill.shards.registry import read_shards, table_of_tombstones

    with open_consensus_only(config) as opened:
        shards = opened.portal.call(read_shards(opened.consensus))
        pointers = opened.portal.call(list_pointers(opened.consensus))
    states = [state for state in shards if not table_of_tombstones(state.name)[0]]  # which are not published
    rows = [_listed(state, pointers[state.shard_id][0] if state.shard_id in pointers else None) for state in states]
    out.rows(rows, COLUMNS, empty="no tables")


COLUMNS = (
    Column("table"),
    Column("time", lambda row: _time(row["time_ms"]) or "never published"),
    Column("published", lambda row: _time(row["published_ms"])),
    Column("rows", lambda row: "" if row["rows"] is None else f"{row['rows']:,}", right=True),
    Column("behind", lambda row: "" if row["behind_s"] is None else f"{row['behind_s']:.1f} s", right=True),
)


def _listed(state: ShardState, pointer: Pointer | None) -> dict[str, Any]:
    published = pointer is not None and bool(pointer.metadata)
    newest_ms = max((batch.upper - 1 for batch in state.batches if batch.parts), default=0)
    return {
        "table": state.name,
        "time_ms": pointer.time_ms if pointer and published else None,
        "published_ms": pointer.published_ms if pointer and published else None,
        "rows": pointer.rows if pointer and published else None,
        "behind_s": max(0, newest_ms - pointer.time_ms) / 1000 if pointer and published else None,
    }


@app.command("describe")
def describe(name: Name, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Show the newest publication of a table: its metadata file, and the snapshots that can be read."""
    from tidemill.lake.pointer import load_table

    with open_stores(config) as opened:
        found = opened.portal.call(load_table(opened.consensus, opened.objects, name))
    row = _described(name, found)
    lines = [f"{name}  format {row['format']}  {row['rows']:,} rows at {_time(row['time_ms'])}", f"  {row['location']}"]
    for snapshot in row["snapshots"]:
        tags = ", ".join(snapshot["tags"])
        lines.append(f"  snapshot {snapshot['id']}  {_time(snapshot['time_ms'])}  {snapshot['rows']:,} rows  {tags}")
    out.one(row, "\n".join(lines))


@app.command("publish")
def publish(name: Name, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Publish the newest contents of a table now, and print the location of its metadata file."""
    require("fastavro")
    from tidemill.lake.common_time import common_sources
    from tidemill.lake.pointer import load_table
    from tidemill.lake.publish.stored import LakeStores
    from tidemill.lake.publisher import publish_now
    from tidemill.lake.settings import lake_settings
    from tidemill.metastore.catalogue import PipelineRow

    with open_stores(config) as opened:
        settings = lake_settings(opened.config.lake, opened.config.objects_url)
        sources = common_sources(opened.portal.call(opened.catalogue.list(PipelineRow)))
        stores = LakeStores(opened.consensus, opened.objects, opened.clock, opened.rand, settings)
        opened.portal.call(publish_now(stores, name, sources))
        found = opened.portal.call(load_table(opened.consensus, opened.objects, name))
    row = _described(name, found)
    out.one(row, f"{name}: {row['rows']:,} rows at {_time(row['time_ms'])}\n{row['location']}")


def _described(name: str, found: LoadedTable) -> dict[str, Any]:
    from tidemill.lake.format.metadata import MAIN, decode_metadata

    metadata = decode_metadata(found.metadata, found.location)
    tags: dict[int, list[str]] = {}
    for tag, reference in metadata.refs.items():
        if tag != MAIN:
            tags.setdefault(reference.snapshot_id, []).append(tag)
    return {
        "table": name,
        "location": found.location,
        "format": metadata.format_version,
        "time_ms": found.pointer.time_ms,
        "rows": found.pointer.rows,
        "snapshots": [
            {
                "id": snapshot.snapshot_id,
                "time_ms": int(snapshot.summary["tidemill.time"]),
                "published_ms": snapshot.timestamp_ms,
                "rows": int(snapshot.summary["tidemill.rows"]),
                "tags": sorted(tags.get(snapshot.snapshot_id, [])),
                "lsn": snapshot.summary.get("tidemill.lsn", ""),
            }
            for snapshot in metadata.snapshots
        ],
    }


def _time(ms: int | None) -> str:
    return "" if ms is None else format_time(ms)
