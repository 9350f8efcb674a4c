"""Dead letters of commands that were lost: an update left columns as they were, and the row before is not there."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidemill.spark.decode.dead_letter_rows import Letter, letter_table
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.upsert.toast_fill import Lost


def lost_letters(feed: TopicFeed, lost: Sequence[Lost]) -> pa.Table:
    """As updates of the dead-letter shard. The record itself is not among them: it is at its position in the topic."""
    return letter_table(
        [
            Letter(
                feed.topic,
                each.partition,
                each.order,
                each.order,
                each.time_ms,
                f"table={feed.table} the row before it, which has {', '.join(each.columns)}, is not there",
                each.key,
                feed.table,
                each.key.decode("utf-8", "replace"),
            )
            for each in lost
        ]
    )
