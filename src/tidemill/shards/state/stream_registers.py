"""Registers of the streaming queries that write a shard, by the shard's id.

    stream-write/<shard id>/<query id>    QueryProgress: the newest epoch of the query (`spark.write.stream_epoch`)
    stream-write/<shard id>/restored      the shard comes from a restore: registers of earlier queries are lost

A register stays as long as its shard: a query may come back after any time, and only the register knows its last epoch
once 64 other writers have appended. So their number is limited, per shard. A dropped shard's id is never used again:
maintenance removes its registers.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import msgspec

from tidemill.base.errors import ConflictError, UnknownOutcomeError
from tidemill.consensus.api import Consensus

STREAM_REGISTERS = "stream-write/"
RESTORED = "restored"
QUERIES_MAX = 10_000
"""Limit of the queries that have ever written one shard, about 1 MB of consensus."""


class QueryProgress(NamedTuple):
    """Contents of a query's register: the newest epoch that was begun, whether it is done, and the version of the
    shard's state when it was begun."""

    epoch: int
    is_done: bool
    version: int


BEFORE_FIRST_EPOCH = QueryProgress(-1, True, 0)


async def read_progress(consensus: Consensus, key: str) -> tuple[QueryProgress, int] | None:
    """Return what a query's register has, and the sequence number to change it; None if there is no register."""
    found = await consensus.head(key)
    return None if found is None else (msgspec.msgpack.decode(found.data, type=QueryProgress), found.seq)


async def write_progress(consensus: Consensus, key: str, progress: QueryProgress, seq: int, nonce: str) -> None:
    """Replace the register as of `seq`; 0 creates it. Raises ConflictError, UnknownOutcomeError, UnavailableError."""
    await consensus.cas(key, seq, msgspec.msgpack.encode(progress), nonce)


def stream_register(shard_id: str, query_id: str) -> str:
    return f"{STREAM_REGISTERS}{shard_id}/{query_id}"


async def mark_restored(consensus: Consensus, shard_id: str, nonce: str) -> None:
    """Record that the shard comes from a restore. May be repeated. Raises UnavailableError."""
    key = stream_register(shard_id, RESTORED)
    while await consensus.head(key) is None:
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next read decides
            await consensus.cas(key, 0, b"", nonce)


async def is_restored(consensus: Consensus, shard_id: str) -> bool:
    return await consensus.head(stream_register(shard_id, RESTORED)) is not None


async def count_queries(consensus: Consensus, shard_id: str) -> int:
    """Return the number of queries that have written the shard."""
    found = await consensus.scan(stream_register(shard_id, ""))
    return sum(not key.endswith(f"/{RESTORED}") for key, _ in found)
