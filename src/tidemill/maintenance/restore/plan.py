"""Plan of a restore: what it would bring back, and how old that is. Reads the bucket and writes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tidemill.base.clock import Clock, Rand
from tidemill.metastore.backup.restore_source import BucketRows, RestoreSource
from tidemill.metastore.rows import (
    BINDINGS,
    CAPTURES,
    CHECKPOINTS,
    EXTENTS,
    GROUP_OFFSETS,
    GROUPS,
    PARTITIONS,
    PIPELINES,
    SHARD_BATCHES,
    SHARDS,
    TOPICS,
)
from tidemill.objects.store import ObjectStore


async def plan_restore(objects: ObjectStore, source: RestoreSource, clock: Clock, rand: Rand) -> dict[str, Any]:
    """Return plain values, as printed by `restore --json`. Ages are relative to now. Raises MissingError,
    CorruptError, UnavailableError."""
    now_ms = clock.now_ms()
    rows = await BucketRows.open(objects, source, clock, rand)
    try:
        return {
            "cluster": {
                "uuid": source.cluster.cluster_uuid,
                "restored_from": source.cluster.label,
                "incarnation": source.cluster.incarnation,
                "manifest": source.found.key,
            },
            "domains": _domain_fields(source, now_ms),
            "alive": _sign_of_life_fields(source, now_ms),
            **await _row_summary(rows, now_ms),
        }
    finally:
        await rows.aclose()


def _domain_fields(source: RestoreSource, now_ms: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for domain in source.domains:
        manifest = domain.manifest
        files = [file for level in manifest.levels for file in level] if manifest is not None else []
        found.append(
            {
                "uuid": domain.uuid,
                "manifest": domain.key,
                "seqno": manifest.last_seqno if manifest is not None else 0,
                "epoch": manifest.epoch if manifest is not None else 0,
                "age_ms": max(0, now_ms - manifest.created_ms) if manifest is not None else None,
                "files": len(files),
                "size_bytes": sum(file.size_bytes for file in files),
            }
        )
    return found


def _sign_of_life_fields(source: RestoreSource, now_ms: int) -> dict[str, Any] | None:
    if not source.signs:
        return None
    sign = source.signs[-1]
    age_ms = max(0, now_ms - sign.at_ms)  # for display only: the two clocks may differ
    return {"node": sign.node, "age_ms": age_ms, "watched_for_ms": int(sign.young_s * 1000)}


async def _row_summary(rows: BucketRows, now_ms: int) -> dict[str, Any]:
    topics = await rows.rows(TOPICS)
    records: Counter[str] = Counter()
    size_bytes: Counter[str] = Counter()
    known = {topic.topic_id for topic in topics}
    async for partition in rows.iterate(PARTITIONS):
        if partition.topic_id in known:
            records[partition.topic_id] += partition.next_offset - partition.log_start
            size_bytes[partition.topic_id] += partition.size_bytes
    batches: Counter[str] = Counter()
    async for batch in rows.iterate(SHARD_BATCHES):
        batches[batch.name] += 1
    shards = await rows.rows(SHARDS)
    groups = sorted(
        {*(row.group for row in await rows.rows(GROUPS)), *(row.group for row in await rows.rows(GROUP_OFFSETS))}
    )
    gathered = [row.gathered_ms for row in await rows.rows(CHECKPOINTS)]
    return {
        "topics": [
            {
                "name": topic.name,
                "topic_id": topic.topic_id,
                "partitions": topic.partitions,
                "records": records[topic.topic_id],
                "size_bytes": size_bytes[topic.topic_id],
            }
            for topic in topics
        ],
        "shards": [{"name": s.name, "since": s.since, "upper": s.upper, "batches": batches[s.name]} for s in shards],
        "captures": [row.name for row in await rows.rows(CAPTURES)],
        "pipelines": [row.name for row in await rows.rows(PIPELINES)],
        "groups": groups,
        "checkpoint_age_ms": max(0, now_ms - min(gathered)) if all(gathered) and gathered else None,
        "totals": {
            "topics": len(topics),
            "partitions": sum(topic.partitions for topic in topics),
            "records": sum(records.values()),
            "record_bytes": sum(size_bytes.values()),
            "extents": await _count_rows(rows, EXTENTS.prefix()),
            "shards": len(shards),
            "batches": sum(batches.values()),
            "bindings": await _count_rows(rows, BINDINGS.prefix()),
        },
    }


async def _count_rows(rows: BucketRows, prefix: bytes) -> int:
    return sum([len(keys) async for keys, _ in rows.prefix(prefix)])
