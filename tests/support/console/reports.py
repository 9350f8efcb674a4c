"""Reports of clusters: a shop that works, one whose driver was killed, and one with many tables and topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.base.status.histogram import StageHistograms
from tidemill.base.status.status import StageStatus, StatusReport
from tidemill.metastore.rows.captures import CapturedColumn, CaptureTableRow, TableCopy, TableSnapshot
from tidemill.metastore.rows.catalogue import PipelineRow, TopicRow

TABLES = ("warehouse", "district", "customer", "stock", "orders", "order_line", "payment")
SNAPSHOT = TableSnapshot(1, 1, (), 100, 30_000, (30_000,))
COLUMNS = (CapturedColumn("id", "bigint", 0), CapturedColumn("note", "text", -1))
LATENCIES = {"received": [8, 11, 40], "durable": [60, 75, 220], "bound": [80, 110, 260], "planned": [240, 300, 700],
             "decoded": [260, 330, 800], "written": [310, 380, 990], "appended": [380, 470, 1240]}  # fmt: skip


def pipelines() -> list[PipelineRow]:
    tables = {table: f"capture:shop:public.{table}" for table in TABLES}
    tables |= {"clicks": "topic:clicks", "conversion_by_product": "derived"}
    derived = {"conversion_by_product": {"clicks": ("product_id",), "order_line": ("product_id",)}}
    return [PipelineRow("shop", tables, "shop.dead_letters", derived)]


def topics() -> list[TopicRow]:
    return [
        TopicRow("clicks", "t1", 4), TopicRow("shop.public.orders", "t2", 1, "capture"), TopicRow("returns", "t3", 1)
    ]  # fmt: skip


def captured_tables() -> list[CaptureTableRow]:
    rows = [
        CaptureTableRow("shop", f"public.{t}", f"shop.public.{t}", snapshot=SNAPSHOT, columns=COLUMNS) for t in TABLES
    ]
    copy = TableCopy(1, 1, (), 100, 100, "t", 1000, 96, 71, 7_100_000, "", 2)
    rows.append(CaptureTableRow("shop", "public.history", "shop.public.history", columns=COLUMNS, copy=copy))
    why, fix = "The table has no primary key.", "Add one, or exclude it from capture.shop.tables."
    rows.append(CaptureTableRow("shop", "public.audit", state="refused", reason=why, fix=fix))
    rows.append(
        CaptureTableRow("shop", "public.note", "shop.public.note", snapshot=SNAPSHOT, columns=COLUMNS)
    )  # no pipeline maintains it
    return rows


def shop(now_ms: int, *, killed_s: float = 0, waits: bool = False, restarted_s: float = 0) -> list[StatusReport]:
    """Reports of a node and a driver. `killed_s`: the driver has been gone for this long. `waits`: orders lags behind
    an upload. `restarted_s`: seconds since the driver ended; it reports again unless it is killed."""
    latency = StageHistograms()
    for stage, ages in LATENCIES.items():
        latency.add(stage, [now_ms - age for age in ages], now_ms)
    recently = now_ms - 400
    node = [
        StageStatus("node:harbour", 1, 1, since_ms=now_ms - 90_000),
        StageStatus("capture:shop", 900, 910, unit="lsn", since_ms=recently),
        StageStatus("capture:shop/topics", 900, 900, unit="lsn", since_ms=recently, upstream="capture:shop"),
        StageStatus("table:shop/public.history", 7_100_000, 9_600_000, unit="rows", since_ms=recently,
                    reason="118,000 rows/s, 21 s left"),
        StageStatus("topic:clicks", 5_000, 5_200 if waits else 5_000, unit="records", since_ms=now_ms - 7_000,
                    held_by="upload:l0/17" if waits else "", reason="records wait for their upload" if waits else ""),
        StageStatus("binding:topic/clicks", 5_000, 5_000, since_ms=recently, upstream="topic:clicks"),
        StageStatus("shapes:shards", now_ms - 300, now_ms - 300, unit="ms", since_ms=recently),
        StageStatus("shapes:shop", 900, 900, unit="lsn", since_ms=recently),
        StageStatus("objects", 1, 1, since_ms=now_ms - 90_000),
        StageStatus("keeper:shards", 12, 12, unit="steps", since_ms=recently),
    ]  # fmt: skip
    facts: dict[str, Any] = {
        "memory": {"resident": [312_000_000, 2_000_000_000]},
        "latency": {"capture/shop": latency.to_plain()},
        "shapes": {"shapes": 3},
        "capture:shop": {"slot": "tidemill_shop", "slot_wal_status": "reserved", "confirmed_lsn": "0/5A3F1C08",
                         "slot_retained_bytes": 48_000_000, "slot_grows_bytes_per_s": 81_234.5,
                         "slot_headroom_bytes": 976_000_000, "slot_full_in_s": 12_015, "backlog_bytes": 120_000},
    }  # fmt: skip
    then_ms = now_ms - int(killed_s * 1000)
    driver = [StageStatus("pipeline:shop", 1, 1, since_ms=then_ms - 400)]
    for number, table in enumerate((*TABLES, "clicks", "conversion_by_product")):
        lag = 380 + 40 * number
        upstream = {"clicks": "topic:clicks", "conversion_by_product": "shard:clicks"}.get(
            table, f"table:shop/public.{table}"
        )
        late = waits and table == "clicks"
        driver.append(
            StageStatus(f"shard:{table}", then_ms - (7_000 if late else lag), then_ms, unit="ms", upstream=upstream,
                        since_ms=then_ms - (7_000 if late else 300), held_by="topic:clicks" if late else "",
                        reason="waits for records of clicks" if late else "")
        )  # fmt: skip
    facts_of_driver: dict[str, Any] = {"memory": {"resident": [890_000_000, 0]}, "dead_letters": 17, "spark": "4.3.0"}
    reports = [
        StatusReport("node:harbour", now_ms - 300, tuple(node), facts, 4711, "quay"),
        StatusReport("pipeline:shop", then_ms, tuple(driver), facts_of_driver, 4712, "quay"),
    ]
    if restarted_s:
        ended = {"at_ms": now_ms - int(restarted_s * 1000), "count": 2, "reason": "pipeline-shop killed by SIGKILL."}
        reports.append(StatusReport("up:harbour", now_ms, (), {"restarts": {"pipeline:shop": ended}}, 4710, "quay"))
    return reports


def large(now_ms: int, tables: int = 1_000, topics: int = 260) -> list[StatusReport]:
    """Reports of a cluster with many tables and topics, of which every tenth is late."""
    node = [StageStatus(f"topic:t{n:04}", 10, 10, since_ms=now_ms - 500, share=True) for n in range(topics)]
    late_ms = {0: 8_000, 1: 3_000}
    driver = [
        StageStatus("pipeline:big", 1, 1, since_ms=now_ms - 500),
        *(StageStatus(f"shard:table_{n:04}", now_ms - late_ms.get(n % 10, 350), now_ms, unit="ms",
                    since_ms=now_ms - late_ms.get(n % 10, 350), held_by=f"topic:t{n % topics:04}",
                    upstream=f"topic:t{n % topics:04}", reason="waits for its input")
          for n in range(tables)),
    ]  # fmt: skip
    return [
        StatusReport("node:n1", now_ms - 200, tuple(node), {}, 1, "quay"),
        StatusReport("pipeline:big", now_ms - 100, tuple(driver), {}, 2, "quay"),
    ]


def large_rows(tables: int = 1_000, topics: int = 260) -> tuple[list[PipelineRow], list[TopicRow]]:
    of = {f"table_{n:04}": f"topic:t{n % topics:04}" for n in range(tables)}
    return [PipelineRow("big", of)], [TopicRow(f"t{n:04}", f"id{n}", 10) for n in range(topics)]


def by_name(rows: Sequence[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in rows}
