"""Parts of Spark tasks are never older than the shard's last sweep, even if the clock of their machine is behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from support.spark.upsert_world import SCHEMA, commands
from tidemill.base.clock import SystemClock
from tidemill.shards.api import written_ms
from tidemill.shards.registry import open_shard
from tidemill.spark.ingest.fetch_decode import to_ipc
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.step_planner import Step
from tidemill.spark.ingest.steps.distributed_step import DistributedStep
from tidemill.spark.ingest.steps.shuffle import RangeResult, StepPlan, resolve_range
from tidemill.spark.ingest.table_writer import TableWriter

HOUR_MS = 3_600_000


def test_a_step_after_a_sweep_by_a_clock_that_is_ahead_is_appended(harbour: Any, tmp_path: Path) -> None:
    """Otherwise each step was rejected until real time caught up, and each attempt left orphans."""
    s, call = harbour.stores, harbour.portal.call
    shard = call(open_shard(s.consensus, s.objects, s.clock, s.rand, "t", SCHEMA))
    ahead_ms = SystemClock().now_ms() + HOUR_MS
    call(shard.advance_sweep(ahead_ms))
    table = TableWriter(harbour.portal, s, harbour.shard("t"), tmp_path / "mirror")
    call(table.shard.frontiers())
    table.feed = TopicFeed("t", "id", 1, False, SCHEMA)
    [plan] = [DistributedStep(None, s)._plan(table, Step(0, 10), 0, 1)]
    plans = msgspec.msgpack.encode([plan])
    assert msgspec.msgpack.decode(plans, type=list[StepPlan]) == [plan]
    rows = to_ipc(commands([(k, k, 1, k) for k in range(50_000)]).rows)
    [answer] = resolve_range(plans, 0, [(0, (rows, b""))])
    part = msgspec.msgpack.decode(answer, type=RangeResult).part
    assert part is not None and part.object_key
    assert call(table.shard.compare_and_append(0, 10, (part,), "")) == 10
    assert written_ms(part.object_key) == ahead_ms
