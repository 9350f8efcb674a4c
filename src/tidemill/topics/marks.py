"""Marks of topics: one per topic, each process's share being the partitions that it leads.

A process that leads more topics than OWN_MARKS has one mark for all that are at their target, `topics`; those that
stand below theirs keep their own, the ones with most behind first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from tidemill.base.marks import Tracker
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.machine import LedPartition
from tidemill.topics.supervision import TOGETHER

OWN_MARKS = 200
"""About 30 kB of a process's report."""


def report_marks(
    tracker: Tracker,
    led: Iterable[LedPartition],
    topics: Mapping[str, TopicRow],
    writer: L0Writer,
    now_ms: int,
    failing: Container[str] = (),
) -> set[str]:
    """Returns the names set. position = sum of high watermarks, target = sum of reserved ends; `held_by` names the
    oldest open upload. The marks of `failing` topics stay as they are: progress of others of their partitions is no
    sign that they work."""
    committed: dict[str, int] = {}
    reserved: dict[str, int] = {}
    for each in led:
        row = topics.get(each.topic_id)
        if row is None or not each.is_open:
            continue
        name = f"topic:{row.name}"
        high_watermark = each.state.high_watermark
        committed[name] = committed.get(name, 0) + high_watermark
        reserved[name] = reserved.get(name, 0) + high_watermark + each.reserved_records
    if len(committed) > OWN_MARKS:
        behind = {name for name, position in committed.items() if reserved[name] > position}
        own = set(sorted(behind, key=lambda name: (committed[name] - reserved[name], name))[:OWN_MARKS])
        rest = [name for name in committed if name not in own]
        committed = {name: committed[name] for name in own} | {TOGETHER: sum(committed[name] for name in rest)}
        reserved[TOGETHER] = sum(reserved[name] for name in rest)
    oldest = writer.oldest_upload()
    for name, position in committed.items():
        if name in failing:
            continue
        behind_now = reserved[name] > position
        held_by = f"upload:{oldest.key}" if behind_now and oldest is not None else ""
        reason = "records wait for their upload and commit" if behind_now else ""
        tracker.set(
            name,
            position,
            reserved[name],
            now_ms=now_ms,
            held_by=held_by,
            reason=reason,
            unit="records",
            share=True,
        )
    return set(committed)
