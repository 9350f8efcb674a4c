"""The catalogue: typed rows for what exists. Thin for now: one register per row.

    catalogue/topic/<name>        TopicRow      (msgpack)
    catalogue/pipeline/<name>     PipelineRow
    catalogue/capture/<name>      CaptureRow

The replicated LSM database takes these rows over; callers only see this module.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Conflict, Invalid, Missing, Unknown
from tidemill.consensus.api import Consensus
from tidemill.metastore.rows.captures import CapturedColumn, CaptureRow, TableSnapshot
from tidemill.metastore.rows.pipelines import PipelineRow
from tidemill.metastore.rows.topics import TopicRow

TOPIC_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
TOPIC_NAME_LENGTH = 249


Row = TypeVar("Row", TopicRow, CaptureRow, PipelineRow)
_KINDS: dict[type, str] = {TopicRow: "topic", CaptureRow: "capture", PipelineRow: "pipeline"}


def check_topic_name(name: str) -> None:
    """Kafka's rule for topic names. Raises Invalid."""
    if not name or len(name) > TOPIC_NAME_LENGTH or name in (".", "..") or not set(name) <= TOPIC_NAME_CHARS:
        raise Invalid(f"bad topic name: topic={name!r}.", fix="Use 1 to 249 of a-z A-Z 0-9 . _ -")


class Catalogue:
    def __init__(self, consensus: Consensus, clock: Clock, rand: Rand) -> None:
        self._consensus = consensus
        self._clock = clock
        self._rand = rand

    async def get(self, kind: type[Row], name: str) -> Row | None:
        found = await self._consensus.head(self._key(kind, name))
        if found is None or not found.data:
            return None
        return msgspec.msgpack.decode(found.data, type=kind)

    async def list(self, kind: type[Row]) -> list[Row]:
        rows = await self._consensus.scan(self._key(kind, ""))
        return [msgspec.msgpack.decode(v.data, type=kind) for _, v in rows if v.data]

    async def put(self, row: Row) -> None:
        """Create or replace, last writer wins (one owner per row by lease)."""
        while True:
            found = await self._consensus.head(self._key(type(row), row.name))
            if await self._write(
                self._key(type(row), row.name), found.seq if found else 0, msgspec.msgpack.encode(row)
            ):
                return

    async def create_topic(
        self, name: str, partitions: int, *, kind: str = "stream", config: dict[str, str] | None = None
    ) -> TopicRow:
        """Raises Conflict(current=TopicRow) when the name is taken, Invalid on a bad name or count."""
        check_topic_name(name)
        if not 1 <= partitions <= 10_000:
            raise Invalid(f"bad partition count: topic={name} partitions={partitions}.", fix="Use 1 to 10000.")
        row = TopicRow(name, self._rand.uuid(), partitions, kind, self._clock.now_ms(), config or {})
        while True:
            found = await self._consensus.head(self._key(TopicRow, name))
            if found is not None and found.data:
                current = msgspec.msgpack.decode(found.data, type=TopicRow)
                raise Conflict(f"topic exists: topic={name}.", current=current)
            if await self._write(self._key(TopicRow, name), found.seq if found else 0, msgspec.msgpack.encode(row)):
                return row

    async def delete(self, kind: type[Row], name: str) -> None:
        """Raises Missing. The register stays as an empty version: absence is never permission to write."""
        while True:
            found = await self._consensus.head(self._key(kind, name))
            if found is None or not found.data:
                raise Missing(f"no such {_KINDS[kind]}: name={name}.")
            if await self._write(self._key(kind, name), found.seq, b""):
                return

    async def _write(self, key: str, expected_seq: int, data: bytes) -> bool:
        """One attempt; False = lost the race, look again. An unknown outcome is resolved by nonce."""
        nonce = self._rand.nonce()
        try:
            await self._consensus.cas(key, expected_seq, data, nonce)
        except Conflict:
            return False
        except Unknown:
            found = await self._consensus.head(key)
            return found is not None and found.nonce == nonce
        return True

    @staticmethod
    def _key(kind: type, name: str) -> str:
        return f"catalogue/{_KINDS[kind]}/{name}"


__all__ = ["CaptureRow", "CapturedColumn", "Catalogue", "PipelineRow", "TableSnapshot", "TopicRow", "check_topic_name"]
