"""`tidemill table compact` and `tidemill table evolve`: changes to a table that preserve its contents."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.base.errors import InvalidError
from tidemill.cli.context import ConfigOption, DryRunOption, OpenStores, YesOption, confirm, open_stores, preview
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.table.show import Name, read_shard_state

if TYPE_CHECKING:
    from tidemill.shards.parts.schema_evolution import SchemaChanges

Added = Annotated[list[str] | None, typer.Option("--add", help='A new column: "name type", "name type default 5".')]
Widened = Annotated[list[str] | None, typer.Option("--widen", help='A column and its wider type: "name type".')]


def compact(name: Name, dry_run: DryRunOption = False, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Merge batches now, as maintenance would do later. Contents and readable times do not change; replaced objects are
    deleted later."""
    from tidemill.lake.format.schema import oldest_version
    from tidemill.shards.compaction.compaction import compact_once, next_run
    from tidemill.shards.state.state import batch_sums

    merges = lost = rows_in = rows_out = bytes_in = bytes_out = 0
    with open_stores(config) as opened:
        # Also without lake.enabled: `tidemill lake publish` names this command.
        oldest = partial(oldest_version, version=opened.config.lake.format)
        if dry_run:
            state = read_shard_state(opened, name)
            run = next_run(state, oldest(state.schema))
            updates, size = (sum(batch_sums(batch)[at] for batch in run) for at in (0, 1))
            row = {"shard": name, "batches": len(run), "updates": updates, "bytes": size}
            what = f"merge {len(run)} batches of {name} first: {updates:,} updates, {size:,} bytes"
            preview(out, row, what if run else "nothing to merge")
            return
        shard = opened.shard(name)
        merge = partial(compact_once, shard, opened.objects, opened.rand, oldest_version=oldest)
        while (done := opened.portal.call(merge())) is not None:
            if not done.shown:
                lost += 1  # another process, most likely maintenance, was first
                continue
            merges += 1
            rows_in, rows_out = rows_in + done.rows_in, rows_out + done.rows_out
            bytes_in, bytes_out = bytes_in + done.bytes_in, bytes_out + done.bytes_out
            if out.is_text:
                print(
                    f"merged {done.batches} batches: {done.rows_in:,} → {done.rows_out:,} updates,"
                    f" {done.bytes_in:,} → {done.bytes_out:,} bytes",
                    flush=True,
                )
        opened.portal.call(shard.aclose())
    row = {
        "shard": name, "merges": merges, "lost": lost, "updates": [rows_in, rows_out], "bytes": [bytes_in, bytes_out]
    }  # fmt: skip
    if not (out.is_text and merges):
        out.one(row, "nothing to merge" if not lost else "another process is merging it")


def evolve(
    name: Name,
    add: Added = None,
    widen: Widened = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Add columns and widen types. Every readable time stays the same; older rows hold the default, or null.

    The change cannot be undone. Changes that the table already has are ignored, so a repeat is harmless.
    """
    from tidemill.shards.parts.schema_evolution import SchemaChanges, evolve_schema
    from tidemill.spark.ddl import parse_column

    asked = SchemaChanges(tuple(map(parse_column, add or ())), tuple(map(parse_column, widen or ())))
    if not asked:
        raise InvalidError("no change was given.", fix='Give --add "name type" or --widen "name type".')
    with open_stores(config) as opened:
        shard = opened.shard(name)
        try:
            wanted = evolve_schema(shard.schema, asked)
            if dry_run:
                columns = {column.name: column.type for column in wanted.columns}
                change = f"change {name} permanently: {asked}" if wanted != shard.schema else f"{name} does not change"
                preview(out, {"shard": name, "before": shard.schema.version, "columns": columns}, change)
                return
            if wanted != shard.schema and not yes:
                _confirm_change(opened, name, asked, out)
            schema = opened.portal.call(shard.evolve(asked))
        finally:
            opened.portal.call(shard.aclose())
    columns = {column.name: column.type for column in schema.columns}
    row = {"shard": name, "schema_version": schema.version, "before": shard.schema.version, "columns": columns}
    now = f"{name} has schema {schema.version}: " + ", ".join(f"{n} {kind}" for n, kind in columns.items())
    same = f"{name} already has these columns and types: schema {schema.version}"
    out.one(row, same if schema == shard.schema else now)


def _confirm_change(opened: OpenStores, name: str, asked: SchemaChanges, out: Output) -> None:
    """Ask for confirmation. Raises InvalidError unless the user agrees."""
    from tidemill.maintenance.shards.drop import writing_pipelines

    users = opened.portal.call(writing_pipelines(opened.metastore, name))
    said = f"Written by {', '.join(users)}: the table stops until its file declares the same columns. " if users else ""
    confirm(f"{said}Change table {name} permanently: {asked}?", yes=False, out=out)
