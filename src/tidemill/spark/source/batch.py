"""Batch reads: the contents of one shard at one time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidemill.base.errors import InvalidError, MissingError
from tidemill.shards.api import Column, HistoryLostError, SchemaEvolvedError, ShardSchema
from tidemill.shards.read.hash_ranges import HashRange, cut_ranges, read_range
from tidemill.shards.read.holds import HOLD_ABOVE_BYTES
from tidemill.shards.read.part_reader import fetch_through
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.stores import shared_objects, shared_stores
from tidemill.spark.types import spark_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tidemill.base.runtime.blocking_portal import BlockingPortal
    from tidemill.shards.handle import LogShard

AS_OF_TIMEOUT_S = 60.0
JOB_HOLD_MS = 15 * 60_000
"""Time for which the parts of a batch read are retained for its executors; a longer job fails with lost history."""


def shard_schema(options: SourceOptions) -> ShardSchema:
    portal, stores = shared_stores(options.urls)
    schema: ShardSchema = portal.call(stores.shard(options.shard)).schema
    return schema


class ShardPartition(InputPartition):  # type: ignore[misc]
    """Input of a task, complete apart from the bucket: the parts are named, and small ones are inlined."""

    def __init__(self, objects: str, schema: ShardSchema, chosen: HashRange, as_of: int) -> None:
        self.objects = objects
        self.payload = msgspec.msgpack.encode((schema, chosen, as_of))


class ShardReader(DataSourceReader):  # type: ignore[misc]
    """Reader of a shard. `schema`: the requested columns, all of the shard's or some of them."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        if not options.shard:
            raise InvalidError(
                "no table is named.",
                fix='Set option table=NAME, or .load("NAME"); create a table of a catalogue without a list of columns.',
            )
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition per range of hashes, their number by the shard's size.

        Spark plans a frame, or a view, once, and uses the same partitions for everything derived from it. So no filter
        selects them (it would apply to later queries without the filter), and the newest time is that of the first
        query.
        """
        portal, stores = shared_stores(self._options.urls)
        shard = portal.call(stores.shard(self._options.shard))
        check_columns(self._schema, shard.schema.columns, shard.name)
        as_of = readable_at(portal, shard, self._options.as_of_ms)
        if as_of is None:
            return []
        ranges = cut_ranges(portal.call(shard.batches_until(as_of)))
        if sum(p.size_bytes for r in ranges for batch in r.batches for p in batch.parts) > HOLD_ABOVE_BYTES:
            # Executors read after this process is no longer called, so the hold lasts as long as a job may take. Hold
            # first.
            portal.call(shard.set_hold(shard.reader_name("spark"), as_of, JOB_HOLD_MS))
            ranges = cut_ranges(portal.call(shard.batches_until(as_of)))
        if any(batch.schema_version > shard.schema.version for r in ranges for batch in r.batches):
            raise SchemaEvolvedError(
                f"the table's schema changed during the read: table={shard.name}.", fix="Read again."
            )
        return [ShardPartition(self._options.objects, shard.schema, chosen, as_of) for chosen in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ShardPartition):
            return  # a partition of Spark's, passed if `partitions` returned an empty list: nothing to read
        schema, chosen, as_of = msgspec.msgpack.decode(partition.payload, type=tuple[ShardSchema, HashRange, int])
        portal, objects = shared_objects(partition.objects)
        fetch = fetch_through(portal, objects, whole=True)
        names = self._schema.fieldNames()
        try:
            for rows in read_range(schema, chosen, as_of, fetch):
                wanted = rows.select(names)
                yield from wanted.cast(_with_nullability(self._schema, wanted.schema)).to_batches(max_chunksize=20_000)
        except MissingError as error:
            raise HistoryLostError(
                f"history is lost: the parts that this frame read at its first query are deleted: as_of={as_of}.",
                fix="Load the frame again, or use tidemill.spark.read, whose frames hold their parts. If that fails,"
                " see tidemill doctor --deep.",
            ) from error


def readable_at(portal: BlockingPortal, shard: LogShard, given: int | None) -> int | None:
    """Return the time to read at: the given one, once it is final, or the newest; None if nothing was ever written.

    Raises InvalidError for a time that is not readable.
    """
    since, upper = portal.call(shard.frontiers())
    if given is None and upper == 0:
        return None
    as_of = upper - 1 if given is None else given
    if as_of >= upper:
        upper = portal.call(shard.wait_upper(as_of, AS_OF_TIMEOUT_S))
    if not since <= as_of < upper:
        raise InvalidError(
            f"time is not readable: table={shard.name} as_of={as_of} since={since} upper={upper}.",
            fix="Read at a time from since to upper - 1.",
        )
    return as_of


def check_columns(wanted: StructType, columns: Sequence[Column], name: str) -> None:
    """Raise InvalidError if a schema given by the user, or stored by a catalogue, has a column that the shard has
    not."""
    have = {field.name: field.dataType for field in spark_schema(columns).fields}
    for field in wanted.fields:
        if have.get(field.name) != field.dataType:
            there = have[field.name].simpleString() if field.name in have else "no such column"
            raise InvalidError(
                f"the table's column differs: table={name} column={field.name}"
                f" wanted={field.dataType.simpleString()} there={there}.",
                fix="Remove the schema, or re-create the table in the catalogue.",
            )


def _with_nullability(wanted: StructType, found: pa.Schema) -> pa.Schema:
    """Return `found` with the nullability declared to Spark, which compares the two."""
    for at, field in enumerate(wanted.fields):
        found = found.set(at, found.field(at).with_nullable(field.nullable))
    return found
