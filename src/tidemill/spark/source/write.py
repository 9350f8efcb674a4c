"""Writes: append the rows of a DataFrame, or of an epoch of a streaming query, to a shard. Tasks stage rows, the driver
commits them (`spark.write`). `tidemill.spark.upsert` is such a write, with deletions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError, TidemillError
from tidemill.shards.api import staged_key
from tidemill.spark.session.python_worker import translate_missing_source
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.spark_versions import DataSourceStreamArrowWriter
from tidemill.spark.stores import shared_objects, shared_stores
from tidemill.spark.types import columns_of
from tidemill.spark.write.commit import WriteCommit, open_existing, pipeline_sources
from tidemill.spark.write.schema_match import WriteFrame, plan_frame
from tidemill.spark.write.staging import Staged, stage_rows
from tidemill.spark.write.stream_epoch import StreamEpoch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

log = structlog.get_logger()


DELETE_COLUMN = "_tidemill_delete"
QUERY_ID_PROPERTY = "sql.streaming.queryId"
"""Property of the tasks of a streaming query: the id that its checkpoint stores."""


class StagedMessage(WriterCommitMessage):  # type: ignore[misc]
    """Rows that one task staged. `query_id`: of the streaming query, or ""."""

    def __init__(self, staged: Sequence[Staged], query_id: str = "") -> None:
        self.payload = msgspec.msgpack.encode(staged)
        self.query_id = query_id

    @property
    def staged(self) -> list[Staged]:
        return msgspec.msgpack.decode(self.payload, type=list[Staged])


class FrameWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """Writer that is created on the driver, where it rejects invalid writes before anything runs, and pickled to
    tasks."""

    def __init__(self, options: SourceOptions, schema: StructType, overwrite: bool) -> None:
        if not options.shard:
            raise InvalidError(
                "no table is named.",
                fix='Set option table=NAME, or .save("NAME"). Spark passes no options of a catalogue\'s table to'
                " a write: use INSERT INTO t WITH (table = 'NAME') …, or a TEMPORARY VIEW.",
            )
        key = tuple(name.strip() for name in options.text("key").split(",")) if options.text("key") else ()
        grows = options.flag("mergeschema", False)
        frame = WriteFrame(options.shard, columns_of(schema), key, options.text("delete"), overwrite, grows)
        frame = msgspec.structs.replace(frame, beside=options.text("beside"))
        portal, stores = shared_stores(options.urls)
        pipeline_sources(portal, stores, frame)
        shard = open_existing(portal, stores, frame.shard)
        self._frame = msgspec.msgpack.encode(plan_frame(frame, shard.schema if shard is not None else None))
        if shard is not None:
            portal.call(shard.aclose())
        self._options = options
        self._objects = options.objects
        self._job = str(stores.rand.nonce())

    @property
    def frame(self) -> WriteFrame:
        return msgspec.msgpack.decode(self._frame, type=WriteFrame)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        """Stage rows in a task. Objects of a repeated task, or of a failed job, are deleted by age."""
        portal, objects = shared_objects(self._objects)
        clock, rand = SystemClock(), Rand()

        def put(data: bytes) -> str:
            key = staged_key(self._job, clock.now_ms(), rand.nonce())
            portal.call(objects.put(key, data))
            return key

        return StagedMessage(list(stage_rows(self.frame, iterator, put)))

    def commit(self, messages: list[WriterCommitMessage | None], epoch: StreamEpoch | None = None) -> None:
        portal, stores = shared_stores(self._options.urls)
        WriteCommit(portal, stores, self.frame, epoch or self._job).run(_staged_of(messages))
        self._delete_staged(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged objects. After a commit that raised, parts stay: they may be published; staged objects
        never are."""
        self._delete_staged(messages)

    def _delete_staged(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged objects early; the rest is deleted by age."""
        portal, objects = shared_objects(self._objects)
        try:
            for one in _staged_of(messages):
                if one.object_key:
                    portal.call(objects.delete(one.object_key))
        except TidemillError as error:
            log.info("staged rows are left to the maintenance job", job=self._job, cause=str(error))


class EpochWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """Writer of a streaming query. Each epoch is one append, which a repeated epoch finds (`write.stream_epoch`)."""

    def __init__(self, options: SourceOptions, schema: StructType, overwrite: bool) -> None:
        self._writer = FrameWriter(options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        context = TaskContext.get()
        found = self._writer.write(iterator)
        found.query_id = (context.getLocalProperty(QUERY_ID_PROPERTY) or "") if context is not None else ""
        return found

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Append the epoch's rows. Raises InvalidError if the tasks do not know their query."""
        known = {message.query_id for message in messages if isinstance(message, StagedMessage)}
        if not known:
            return  # the epoch has no partitions
        if len(known) > 1 or "" in known:
            raise InvalidError(
                f"the tasks do not name their streaming query: property={QUERY_ID_PROPERTY}.",
                fix="Use foreachBatch with tidemill.spark.upsert.",
            )
        self._writer.commit(messages, StreamEpoch(known.pop(), batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.abort(messages)


def _staged_of(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    return [one for message in messages if isinstance(message, StagedMessage) for one in message.staged]


def upsert(
    df: DataFrame,
    table: str,
    *,
    key: str | Sequence[str] = (),
    delete_when: Column | str | None = None,
    merge_schema: bool = False,
    config: str = "",
    objects: str = "",
    consensus: str = "",
) -> None:
    """Upsert the rows of `df` into `table`, all at one time; each key must occur once.

    `key`: its key columns ("a, b"), needed to create the table. `delete_when`: a condition, as a Column or in SQL; rows
    for which it is true delete their key. `merge_schema`: new columns and wider types become part of the table.
    `config`, `objects`, `consensus`: the cluster, chosen as by `read`. Raises Spark's exceptions, whose text is that of
    the error, and InvalidError if the session's Python has no tidemill.
    """
    options = {"config": config, "objects": objects, "consensus": consensus}
    options["key"] = key if isinstance(key, str) else ",".join(key)
    options["mergeSchema"] = "true" if merge_schema else ""
    if delete_when is not None:
        from pyspark.sql.functions import expr

        df = df.withColumn(DELETE_COLUMN, expr(delete_when) if isinstance(delete_when, str) else delete_when)
        options["delete"] = DELETE_COLUMN
    given = {name: value for name, value in options.items() if value}
    from tidemill.spark.source import source_format

    with translate_missing_source():
        df.write.format(source_format(df.sparkSession)).mode("append").options(**given).save(table)
