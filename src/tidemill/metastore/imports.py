"""One-time import of catalogue rows from registers, where earlier versions kept one register per row.

    catalogue/topic/<name>, catalogue/pipeline/<name>, catalogue/capture/<name>     msgpack map of the row

Invariant (imported once): the import is one commit that also writes a marker row and expects its absence. Of several
processes that open the cluster concurrently one imports, and a topic deleted afterwards does not reappear.

The registers are not deleted: an older version can still read them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, CorruptError, FencedError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.metastore.api import DomainRows
from tidemill.metastore.cluster import Cluster, read_cluster, write_cluster
from tidemill.metastore.rows import CAPTURES, PIPELINES, TOPIC_IDS, TOPICS
from tidemill.metastore.rows.catalogue import TopicIdRow, TopicRow
from tidemill.metastore.rows.key_encoding import encode_text
from tidemill.metastore.rows.row_family import Family

PREFIX = "catalogue/"
MARK_KEY = b"\x00" + encode_text("") + b"imported"
RETRY_PAUSE_S = 0.05

_KINDS: dict[str, Family[Any]] = {"topic": TOPICS, "pipeline": PIPELINES, "capture": CAPTURES}
_log = structlog.get_logger()


async def import_registers(consensus: Consensus, rand: Rand, domain: DomainRows) -> Cluster:
    """Import the registers' rows into domain 0 unless that was done; return the cluster, marked as imported."""
    rows = await _read_registers(consensus)
    while rows:
        try:
            await domain.commit([*rows, (MARK_KEY, b"\x01")], expects={MARK_KEY: 0})
            _log.info("catalogue registers imported", rows=len(rows))
            break
        except ConflictError:
            break  # another process imported them: the marker row exists
        except (FencedError, UnknownOutcomeError):
            await asyncio.sleep(RETRY_PAUSE_S)
    while True:
        found = await read_cluster(consensus)
        if found is None:
            raise CorruptError("the cluster register is gone.", fix="Restore the cluster from its bucket.")
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
            raise CorruptError(f"a catalogue register is unreadable: register={name} cause={error}.") from error
        rows.append(family.encode(row))
        if isinstance(row, TopicRow):
            rows.append(TOPIC_IDS.encode(TopicIdRow(row.topic_id, row.name)))
    return rows
