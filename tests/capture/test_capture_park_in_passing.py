"""A row that cannot be written, in the middle of a fragment: the rows before it are still acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from support.capture.fragments import OTHER, T, at, change, fragment
from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change
from tidemill.capture.topics.binder import CommitBoundary
from tidemill.capture.topics.captured_table import MAX_ROW_BYTES, CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import ProduceResult


class AtOnce:
    """A topic log in which everything is durable in the next turn of the loop."""

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}

    def produce_nowait(self, topic_id: str, partition: int, data: bytearray, **_: Any) -> asyncio.Future[ProduceResult]:
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        base = self.ends.get(topic_id, 0)
        self.ends[topic_id] = base + 1
        future.set_result(ProduceResult(base, -1, 0))
        return future


class Notices:
    def flushed(self, consumer: str, position: ChangePosition) -> None:
        raise AssertionError("the binder tells")


async def test_what_was_written_before_a_row_that_parks_its_table_becomes_a_boundary() -> None:
    done: list[CommitBoundary] = []
    tables = [CapturedTable(r.name, TopicRow(r.table, r.table, 1), 1 << 62, oid=r.oid) for r in (T, OTHER)]

    async def parks(table: CapturedTable, lsn: int, error: BaseException) -> None:
        # until the pause is durable; records in flight land
        await asyncio.sleep(0.05)
        writer.pause_table(table.oid, lsn)

    def durable(boundaries: Sequence[CommitBoundary]) -> None:
        done.extend(boundaries)

    topics: Any = AtOnce()
    writer = TopicWriter("topics", tables, topics, Rand(1), durable, parks)
    for table in tables:
        table.writers[0].start_at(0, 0, None)
    # One round is already in flight, so that the next one is sent in the middle of the following fragment.
    await writer.deliver(fragment(1, change(1)), Notices())
    wide = Change(OTHER, "insert", at(2, 2), {"id": "1", "v": "x" * (MAX_ROW_BYTES + 1)})
    await writer.deliver(fragment(2, change(2), wide), Notices())
    await asyncio.sleep(0.05)
    assert [boundary.lsn for boundary in done] == [1, 2]
    await writer.aclose()


def test_the_size_of_a_row_that_is_too_large_includes_its_key() -> None:
    table = CapturedTable("public.item", TopicRow("item", "item", 1), 1, oid=1)
    with pytest.raises(InvalidError, match=f"bytes={MAX_ROW_BYTES + 1} "):
        table.check_size(b"k" * 100, b"v" * (MAX_ROW_BYTES - 99))
