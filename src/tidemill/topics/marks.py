"""Marks of topics: one per topic, each process's share being the partitions that it leads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidemill.base.marks import Tracker
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.machine import LedPartition


def report_marks(
    tracker: Tracker, led: Iterable[LedPartition], topics: Mapping[str, TopicRow], writer: L0Writer, now_ms: int
) -> set[str]:
    """Returns the names set. position = sum of high watermarks, target = sum of reserved ends; `held_by` names the
    oldest open upload."""
    committed: dict[str, int] = {}
    reserved: dict[str, int] = {}
    for each in led:
        row = topics.get(each.topic_id)
        if row is None or not each.is_open:
            continue
        high_watermark = each.state.high_watermark
        committed[row.name] = committed.get(row.name, 0) + high_watermark
        reserved[row.name] = reserved.get(row.name, 0) + high_watermark + each.reserved_records
    names = set()
    oldest = writer.oldest_upload()
    for name, position in committed.items():
        behind = reserved[name] > position
        held_by = f"upload:{oldest.key}" if behind and oldest is not None else ""
        reason = "records wait for their upload and commit" if behind else ""
        names.add(f"topic:{name}")
        tracker.set(
            f"topic:{name}",
            position,
            reserved[name],
            now_ms=now_ms,
            held_by=held_by,
            reason=reason,
            unit="records",
            share=True,
        )
    return names
