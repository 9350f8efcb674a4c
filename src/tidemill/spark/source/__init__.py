"""`format("tidemill")`: the Python data source. Spark finds it through the package `pyspark_tidemill`.

    batch      option table=NAME (or .load("NAME")); as_of = ms, ISO 8601 text (UTC when it names no zone) or latest
    streaming  option source=topic/NAME (with schema, key) or capture/NAME (with table=schema.table)
               rows=true  (default) one row per record: columns, _time, _order, _partition, _live
               rows=false one row per partition and batch: its offsets, for operators that fetch the records themselves;
               source=NAME,NAME reads any number of sources
               start=MS, max_rows, pace_ms; mode, columnNameOfCorruptRecord (`corrupt`)
               or table=NAME with changes=true: columns, _time, _diff; start=MS, max_rows
    write      option table=NAME (or .save("NAME")), mode append or overwrite; key, delete, mergeSchema, `beside`
               writeStream: the same options; each epoch is one append
    shard      earlier name of `table` in a batch read, a stream of changes and a write
    all        which cluster: see `spark.settings`

An option that is unknown, or has no effect on the operation, is rejected. Spark pickles instances of these classes by
reference and calls them in separate processes: planners and executors. State is in `stores.shared_stores` of each
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import structlog
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from tidemill.base.errors import InvalidError
from tidemill.spark.session.python_worker import check_session_python
from tidemill.spark.source.batch import ShardReader, shard_schema
from tidemill.spark.source.changes import META, ChangesReader
from tidemill.spark.source.options import (
    BATCH,
    CHANGES,
    STREAM,
    STREAM_WRITE,
    WRITE,
    SourceOptions,
    is_create_table,
    keep_options,
    table_options,
)
from tidemill.spark.source.progress_stream import DESCRIPTOR_COLUMNS, ProgressReader
from tidemill.spark.source.spark_versions import check_stream_writes
from tidemill.spark.source.stream import RowReader, stream_columns
from tidemill.spark.source.write import EpochWriter, FrameWriter
from tidemill.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

log = structlog.get_logger()

__all__ = ["DESCRIPTOR_COLUMNS", "TidemillSource", "register"]


def register(spark: SparkSession, objects: str = "", consensus: str = "") -> None:
    """Register the URLs of a cluster with the session, so that its reads need not name one.

    Raises InvalidError if the Python that Spark runs does not have tidemill.
    """
    check_session_python(spark)
    given = {key: value for key, value in (("objects", objects), ("consensus", consensus)) if value}

    class Configured(TidemillSource):  # pickled by value for workers, together with its URLs
        registered = given

    try:
        spark.dataSource.register(Configured)
    except Exception as error:  # py4j's exception in a classic session, PySpark's under Connect
        if "[DATA_SOURCE_ALREADY_EXISTS]" not in str(error):
            raise
        # Spark 4.0 has found the package itself, and lets no session replace that.
        if given:
            Configured.name = classmethod(lambda _: REGISTERED_FORMAT)  # type: ignore[assignment]
            spark.dataSource.register(Configured)
            _formats[spark] = REGISTERED_FORMAT
            log.info(f'format("tidemill") ignores the registered URLs in Spark {spark.version}; name them as options')
    _registered[spark] = given


REGISTERED_FORMAT = "tidemill_registered"
_registered: WeakKeyDictionary[SparkSession, dict[str, str]] = WeakKeyDictionary()
_formats: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()


def source_format(spark: SparkSession) -> str:
    """Return the name of the data source that has the URLs given to `register`."""
    return _formats.get(spark, TidemillSource.name())


def registered_urls(spark: SparkSession) -> dict[str, str]:
    """Return the URLs that `register` gave this session."""
    return _registered.get(spark, {})


class TidemillSource(DataSource):  # type: ignore[misc]
    registered: dict[str, str] = {}

    def _read_options(self, schema: StructType | None = None) -> SourceOptions:
        return SourceOptions({**(table_options(schema) if schema is not None else {}), **self.options}, self.registered)

    @classmethod
    def name(cls) -> str:
        return "tidemill"

    def schema(self) -> StructType:
        options = self._read_options()
        if options.shard:
            more = META if options.flag("changes", False) else ()
            found = spark_schema((*shard_schema(options).columns, *more))
            return keep_options(found, options) if is_create_table(self.options) else found
        return spark_schema(stream_columns(options) if options.flag("rows", True) else DESCRIPTOR_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._read_options(schema)
        options.check_applicable(BATCH, "a batch read")
        return ShardReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        # Without the options stored in a schema: they may be those of the table that the rows were read from.
        options = self._read_options()
        options.check_applicable(WRITE, "a write")
        return FrameWriter(options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        options = self._read_options()
        options.check_applicable(STREAM_WRITE, "a streaming write")
        check_stream_writes()
        return EpochWriter(options, schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._read_options(schema)
        if options.shard:
            options.check_applicable(CHANGES, "a stream of changes")
            if not options.flag("changes", False):
                raise InvalidError(
                    "a stream of a table requires changes.",
                    fix="Set option changes=true, or read a captured table: set source to capture/<name>.",
                )
            return ChangesReader(options, schema)
        options.check_applicable(STREAM, "a stream")
        return RowReader(options) if options.flag("rows", True) else ProgressReader(options)
