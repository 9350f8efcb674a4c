"""The catalogue: what exists. Check-and-write over rows of the metastore's domain 0 (layouts: rows/).

CA1  A write is a commit that expects the row as it was read. Of two that race one wins; the other looks again.
CA2  A write whose outcome is unknown is decided by reading on: seqnos never come back, so what was expected before
     cannot be true again, and a topic id names one attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Conflict, Fenced, Invalid, Missing, Unknown
from tidemill.metastore.front import VersionedRow
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import CAPTURES, PIPELINES, TOPIC_IDS, TOPICS
from tidemill.metastore.rows.captures import CapturedColumn, CaptureRow, TableSnapshot
from tidemill.metastore.rows.family import Family
from tidemill.metastore.rows.pipelines import PipelineRow
from tidemill.metastore.rows.topics import TopicIdRow, TopicRow

TOPIC_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
TOPIC_NAME_LENGTH = 249

WRITE_BUDGET_S = 20.0
"""A write that meets changes of leadership is tried again for so long."""
PAUSE_S = 0.05

Row = TypeVar("Row", TopicRow, CaptureRow, PipelineRow)
Change = Sequence[tuple[bytes, bytes]]

_FAMILIES: dict[type, Family[Any]] = {TopicRow: TOPICS, CaptureRow: CAPTURES, PipelineRow: PIPELINES}


def check_topic_name(name: str) -> None:
    """Kafka's rule for topic names. Raises Invalid."""
    if not name or len(name) > TOPIC_NAME_LENGTH or name in (".", "..") or not set(name) <= TOPIC_NAME_CHARS:
        raise Invalid(f"bad topic name: topic={name!r}.", fix="Use 1 to 249 of a-z A-Z 0-9 . _ -")


class Catalogue:
    """Reads may raise Unavailable, Closed; writes Unknown besides (only after WRITE_BUDGET_S)."""

    def __init__(self, metastore: Metastore, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rand = rand

    async def get(self, kind: type[Row], name: str, *, fresh: bool = True) -> Row | None:
        """`fresh` False may be up to metastore.STALE_S old, but never older than this process's own writes."""
        found: Row | None = await self._metastore.get(_FAMILIES[kind], name, fresh=fresh)
        return found

    async def list(self, kind: type[Row], *, fresh: bool = True) -> list[Row]:
        """All rows of the kind, by name."""
        found: list[Row] = await self._metastore.rows(_FAMILIES[kind], fresh=fresh)
        return found

    async def topic_by_id(self, topic_id: str, *, fresh: bool = True) -> TopicRow | None:
        found = await self._metastore.get(TOPIC_IDS, topic_id, fresh=fresh)
        row = await self._metastore.get(TOPICS, found.name, fresh=False) if found is not None else None
        # The name may have gone to another topic between the two reads.
        return row if row is not None and row.topic_id == topic_id else None

    async def put(self, row: TopicRow | CaptureRow | PipelineRow) -> None:
        """Create or replace, last writer wins (one owner per row by lease)."""
        family = _FAMILIES[type(row)]
        key, value = family.encode(row)

        def replaced(found: VersionedRow | None) -> Change:
            if found is not None and found.value == value:
                return ()
            return [(key, value), *_by_id(family, key, found, row)]

        await self._write(key, replaced)

    async def create_topic(
        self, name: str, partitions: int, *, kind: str = "stream", config: dict[str, str] | None = None
    ) -> TopicRow:
        """Raises Conflict(current=TopicRow) when the name is taken, Invalid on a bad name or count."""
        check_topic_name(name)
        if not 1 <= partitions <= 10_000:
            raise Invalid(f"bad partition count: topic={name} partitions={partitions}.", fix="Use 1 to 10000.")
        key = TOPICS.key(name)
        attempts: dict[str, TopicRow] = {}

        def created(found: VersionedRow | None) -> Change:
            if found is not None and found.value:
                current = TOPICS.decode(key, found.value)
                if current.topic_id not in attempts:
                    raise Conflict(f"topic exists: topic={name}.", current=current)
                attempts["won"] = current  # an attempt of ours, whose outcome nobody could tell us
                return ()
            row = TopicRow(name, self._rand.uuid(), partitions, kind, self._clock.now_ms(), config or {})
            attempts[row.topic_id] = attempts["won"] = row
            return [TOPICS.encode(row), TOPIC_IDS.encode(TopicIdRow(row.topic_id, name))]

        await self._write(key, created)
        return attempts["won"]

    async def delete(self, kind: type[Row], name: str) -> None:
        """Raises Missing."""
        family: Family[Any] = _FAMILIES[kind]
        key: bytes = family.key(name)
        attempted = False

        def deleted(found: VersionedRow | None) -> Change:
            nonlocal attempted
            if found is None or not found.value:
                if attempted:
                    return ()
                raise Missing(f"no such {family.name}: name={name}.")
            attempted = True
            return [(key, b""), *_by_id(family, key, found, None)]

        await self._write(key, deleted)

    async def _write(self, key: bytes, change: Callable[[VersionedRow | None], Change]) -> None:
        """Read the row, ask `change` what to write (nothing: done), write it if the row is still as read (CA1)."""
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        while True:
            found = await self._metastore.get_row(key)
            rows = change(found)
            if not rows:
                return
            try:
                await self._metastore.commit(rows, expects={key: found.seqno if found is not None else 0})
                return
            except Conflict:
                pass
            except (Fenced, Unknown) as error:
                if self._clock.monotonic_s() > until_s:
                    raise Unknown(
                        f"A row may have been written: key={key!r} cause={error.message!r}.",
                        fix="Look at it again before writing it anew.",
                    ) from error
            await asyncio.sleep(self._rand.uniform(0, PAUSE_S))


def _by_id(family: Family[Any], key: bytes, found: VersionedRow | None, row: Any) -> Change:
    """What a change of a topic's row does to its rows by id."""
    if family is not TOPICS:
        return ()
    old = TOPICS.decode(key, found.value) if found is not None and found.value else None
    rows: dict[bytes, bytes] = {TOPIC_IDS.key(old.topic_id): b""} if old is not None else {}
    if row is not None:
        rows |= [TOPIC_IDS.encode(TopicIdRow(row.topic_id, row.name))]
    return list(rows.items())


__all__ = ["CaptureRow", "CapturedColumn", "Catalogue", "PipelineRow", "TableSnapshot", "TopicRow", "check_topic_name"]
