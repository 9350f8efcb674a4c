"""Classes of Spark's Python data sources that not every supported version has.

    Spark 4.2    `latestOffset(start, limit)`, limits, and availableNow in several batches
    Spark 4.1    streaming writes of Arrow batches

Earlier versions call `latestOffset()`. Before the first batch, a planner then does not know where its query is: it
offers everything there is, and continues from the offset that it returned last. Spark itself remembers the start of
each batch, so nothing is skipped or repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark
from pyspark.sql.datasource import DataSourceStreamWriter

from tidemill.spark.session.requirements import check_spark_version

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    if not TYPE_CHECKING:

        class ReadLimit:
            """Limit of a batch."""

        class ReadAllAvailable(ReadLimit):
            """No limit."""

        class ReadMaxRows(ReadLimit):
            def __init__(self, max_rows: int) -> None:
                self.max_rows = max_rows

        class SupportsTriggerAvailableNow:
            """Placeholder without a method: Spark 4.0 and 4.1 ask once for the newest offset, which is the target."""


STREAM_ARROW_WRITER_SINCE = (4, 1)

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:
    if not TYPE_CHECKING:
        DataSourceStreamArrowWriter = DataSourceStreamWriter  # never created: `streamWriter` refuses

__all__ = [
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "check_stream_writes",
]


def check_stream_writes() -> None:
    """Raise InvalidError if this Spark has no streaming writes of Arrow batches."""
    check_spark_version(
        pyspark.__version__,
        STREAM_ARROW_WRITER_SINCE,
        'writeStream.format("tidemill")',
        fix="Use foreachBatch with tidemill.spark.upsert.",
    )
