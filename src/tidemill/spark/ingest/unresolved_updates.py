"""Dead letters of lost commands: an update left columns unchanged, and the previous row is missing."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidemill.spark.decode.dead_letter_rows import DeadLetter, dead_letter_table
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.upsert.toast_fill import LostCommand


def letters_of_lost(feed: TopicFeed, lost: Sequence[LostCommand]) -> pa.Table:
    """Return them as updates of the dead-letter shard, without the record itself: it is at its position in the
    topic."""
    return dead_letter_table(
        [
            DeadLetter(
                feed.topic,
                each.partition,
                each.order,
                each.order,
                each.time_ms,
                f"table={feed.table} the previous row, which has the values of {', '.join(each.columns)}, is missing",
                each.key,
                feed.table,
                each.key.decode("utf-8", "replace"),
            )
            for each in lost
        ]
    )
