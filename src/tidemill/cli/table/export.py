"""`tidemill table export`: the contents of a table at one time as a directory of Parquet files, all or nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.cli.context import ConfigOption, OpenStores, ProgressBars, open_stores
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import format_time
from tidemill.cli.table.show import Name

if TYPE_CHECKING:
    from tidemill.shards.api import ShardSchema
    from tidemill.shards.handle import LogShard
    from tidemill.shards.read.hash_ranges import FetchPart, HashRange

MANIFEST = "_tidemill.json"


def export(
    name: Name,
    to: Annotated[Path, typer.Argument(help="Output directory; it must not exist yet.")],
    as_of: Annotated[
        str, typer.Option(help="Time to export: ms, or as in 2026-11-22T12:00:00Z. Default: the newest.")
    ] = "latest",
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Write a table's contents at one time as Parquet files, in little memory for any size.

    The directory appears when it is complete. An interrupted export leaves TO.partial behind, which the next one
    replaces.
    """
    from tidemill.shards.read.holds import as_of_ms

    at = as_of_ms(as_of)
    if to.exists():
        raise InvalidError(
            f"the output directory exists already: to={to}.", fix="Choose a directory that does not exist yet."
        )
    with open_stores(config) as opened:
        shard = opened.shard(name)
        try:
            facts = opened.portal.call(_export(opened, shard, at, to))
        finally:
            opened.portal.call(shard.aclose())
    said = f"{name} at {format_time(facts['as_of_ms'])}: {facts['rows']:,} rows in {facts['files']} files, {to}"
    out.one(facts, said)


async def _export(opened: OpenStores, shard: LogShard, as_of: int | None, to: Path) -> dict[str, Any]:
    """Hold the time first, then choose the batches: the chosen batches stay for as long as the export takes. Raises
    InvalidError, UnavailableError."""
    _, upper = await shard.frontiers()
    time_ms = upper - 1 if as_of is None else as_of
    if not 0 <= time_ms < upper:
        raise InvalidError(
            f"the table is not readable yet at this time: table={shard.name} as_of={time_ms} upper={upper}.",
            fix="Choose a time below upper.",
        )
    from tidemill.shards.read.hash_ranges import cut_ranges
    from tidemill.shards.read.part_reader import fetch_through

    partial = to.with_name(f"{to.name}.partial")
    async with shard.hold_during("export", time_ms):
        ranges = cut_ranges(await shard.batches_until(time_ms))
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            rows = 0
            fetch = fetch_through(opened.portal, opened.objects, whole=True)
            with ProgressBars() as bars:
                for number, piece in enumerate(_at_least_one_range(ranges)):
                    path = partial / f"part-{number:05}.parquet"
                    # A thread does the work, so that the loop can renew the hold concurrently.
                    rows += await asyncio.to_thread(_write_range, path, shard.schema, piece, time_ms, fetch)
                    bars.update(shard.name, number + 1, len(ranges))
            facts = {"shard": shard.name, "shard_id": shard.shard_id, "as_of_ms": time_ms, "rows": rows,
                     "files": number + 1, "key": list(shard.schema.key),
                     "columns": {c.name: c.type for c in shard.schema.columns}}  # fmt: skip
            (partial / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            _sync_to_disk(partial / MANIFEST)
            _sync_to_disk(partial)
            partial.rename(to)
            _sync_to_disk(to.parent)
        except OSError as error:
            raise UnavailableError(
                f"cannot write the export: to={to} ({error}).", fix="Free disk space, or choose another directory."
            ) from error
    return facts


def _at_least_one_range(ranges: Sequence[HashRange]) -> Sequence[HashRange]:
    """Return one empty range for a table without rows, so that one file without rows shows readers the columns."""
    from tidemill.shards.read.hash_ranges import HASH_MAX, HashRange

    return ranges or [HashRange(0, HASH_MAX, [])]


def _write_range(path: Path, schema: ShardSchema, piece: HashRange, as_of: int, fetch: FetchPart) -> int:
    """Write the rows of one range as one file and sync it to disk. Return the number of rows."""
    import pyarrow.parquet as pq

    from tidemill.shards.parts.schema import contents_schema
    from tidemill.shards.read.hash_ranges import read_range

    rows = 0
    with pq.ParquetWriter(path, contents_schema(schema), compression="zstd") as writer:
        for table in read_range(schema, piece, as_of, fetch):
            writer.write_table(table)
            rows += table.num_rows
    _sync_to_disk(path)
    return rows


def _sync_to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
