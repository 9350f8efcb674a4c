"""Migration of committed offsets from an earlier format, one register per group, into rows.

    kafka/group/<group>/offsets    msgpack {topic id: {partition: [offset, leader epoch, metadata]}}

Every node runs it before it serves requests. The last batch of a group writes its head row and expects its absence, so
a group is migrated once even if several nodes start together; then its register is dropped. Nodes of the earlier
version must have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import structlog

from tidemill.base.errors import ConflictError, CorruptError, FencedError, InvalidError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_OFFSETS, GROUPS
from tidemill.metastore.rows.groups import GroupOffsetRow, GroupRow

log = structlog.get_logger()

PREFIX, SUFFIX = "kafka/group/", "/offsets"
PART_ROWS = 5_000
RETRY_PAUSE_S = 0.05

Offsets = dict[str, dict[int, tuple[int, int, str]]]
Rows = list[tuple[bytes, bytes]]


async def migrate_offsets(consensus: Consensus, metastore: Metastore, now_ms: int) -> int:
    """Migrate all groups and return their number.

    Unreadable ones are logged and left unchanged. Raises UnavailableError.
    """
    done = 0
    for key, version in await consensus.scan(PREFIX):
        if not key.endswith(SUFFIX):
            continue
        group = key.removeprefix(PREFIX).removesuffix(SUFFIX)
        try:
            await _migrate_group(metastore, group, version.data, now_ms)
        except (CorruptError, InvalidError) as error:
            log.error("kafka.group_not_carried_over", group=group, error=str(error))
            continue
        try:
            await consensus.drop(key, version.seq)
        except (ConflictError, UnknownOutcomeError):
            continue  # another node was faster, or the next start retries
        done += 1
    return done


async def _migrate_group(metastore: Metastore, group: str, data: bytes, now_ms: int) -> None:
    try:
        offsets = msgspec.msgpack.decode(data, type=Offsets) if data else Offsets()
    except msgspec.DecodeError as error:
        raise CorruptError(f"committed offsets of the group are unreadable: group={group} cause={error}.") from error
    head = GROUPS.key(group)
    rows = dict(_rows(group, offsets, now_ms))
    # Rows that checkpoints copied are older, and may belong to deleted topics.
    old = [key async for keys, _ in metastore.prefix(GROUP_OFFSETS.prefix(group)) for key in keys]
    batch: Rows = [*rows.items(), *((key, b"") for key in old if key not in rows)]
    batch.append(GROUPS.encode(GroupRow(group, since_ms=now_ms)))
    for at in range(0, len(batch), PART_ROWS):
        while True:
            try:
                await metastore.commit(batch[at : at + PART_ROWS], expects={head: 0})
                break
            except ConflictError:
                return
            except (FencedError, UnknownOutcomeError):
                await asyncio.sleep(RETRY_PAUSE_S)


def _rows(group: str, offsets: Offsets, now_ms: int) -> Iterator[tuple[bytes, bytes]]:
    for topic_id, partitions in offsets.items():
        for partition, (offset, leader_epoch, metadata) in partitions.items():
            row = GroupOffsetRow(group, topic_id, partition, offset, leader_epoch, metadata, now_ms)
            yield GROUP_OFFSETS.encode(row)
