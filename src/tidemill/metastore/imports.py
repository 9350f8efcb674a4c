"""Rows of the time when each was a register of its own, taken over once.

    catalogue/topic/<name>, catalogue/pipeline/<name>, catalogue/capture/<name>     msgpack map of the row

I1  The import is one commit that also writes a mark and expects its absence: it happens at most once, whoever
    opens the cluster at the same time, so a topic deleted afterwards does not come back.
I2  The registers stay as they are: an older version still finds them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, CorruptError, FencedError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.metastore.api import Rows
from tidemill.metastore.cluster import Cluster, read_cluster, write_cluster
from tidemill.metastore.rows import CAPTURES, PIPELINES, TOPIC_IDS, TOPICS
from tidemill.metastore.rows.key_encoding import put_text
from tidemill.metastore.rows.row_family import Family
from tidemill.metastore.rows.topics import TopicIdRow, TopicRow

PREFIX = "catalogue/"
MARK_KEY = b"\x00" + put_text("") + b"imported"
RETRY_PAUSE_S = 0.05

_KINDS: dict[str, Family[Any]] = {"topic": TOPICS, "pipeline": PIPELINES, "capture": CAPTURES}
_log = structlog.get_logger()


async def import_registers(consensus: Consensus, rand: Rand, domain: Rows) -> Cluster:
    """Take the registers' rows over into domain 0 if nobody did; returns the cluster, marked as imported."""
    rows = await _read_registers(consensus)
    while rows:
        try:
            await domain.commit([*rows, (MARK_KEY, b"\x01")], expects={MARK_KEY: 0})
            _log.info("catalogue registers imported", rows=len(rows))
            break
        except ConflictError:
            break  # another process was first (I1)
        except (FencedError, UnknownOutcomeError):
            await asyncio.sleep(RETRY_PAUSE_S)
    while True:
        found = await read_cluster(consensus)
        if found is None:
            raise CorruptError("The cluster register is gone.", fix="Restore the cluster from its bucket.")
        cluster, seq = found
        if cluster.imported:
            return cluster
        await write_cluster(consensus, rand, msgspec.structs.replace(cluster, imported=True), seq)


async def _read_registers(consensus: Consensus) -> list[tuple[bytes, bytes]]:
    rows: list[tuple[bytes, bytes]] = []
    for name, found in await consensus.scan(PREFIX):
        family = _KINDS.get(name.removeprefix(PREFIX).partition("/")[0])
        if family is None or not found.data:
            continue
        try:
            row = msgspec.msgpack.decode(found.data, type=family.row)
        except msgspec.DecodeError as error:
            raise CorruptError(f"A catalogue register is unreadable: register={name} cause={error}.") from error
        rows.append(family.encode(row))
        if isinstance(row, TopicRow):
            rows.append(TOPIC_IDS.encode(TopicIdRow(row.topic_id, row.name)))
    return rows
