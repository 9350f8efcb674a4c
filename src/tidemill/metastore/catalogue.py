"""The catalogue: what exists. Check-and-write over rows of the metastore's domain 0 (layouts: rows/).

Topics, captures and pipelines have a name row (rows/catalogue), which every change rewrites and no deletion removes:

- Invariant (compare and commit): a write is a commit that expects an unchanged name row. Of two concurrent writes
  one succeeds; the other reads again.
- Invariant (exactly once): a write of unknown outcome is resolved by the name row. It holds the nonce of the newest
  change, and its seqnos never repeat. So a write takes effect once, however often it was tried, and nothing deleted
  reappears.

A captured table's row and a group's configs have no name row: tables come and go indefinitely, while name rows are
never deleted. They are changed by a function from the old row to the new one, which must be idempotent: a write of
unknown outcome is repeated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.metastore.api import VersionedRow
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import (
    CAPTURE_TABLES,
    CAPTURES,
    GROUP_CONFIGS,
    L1_PARTITIONS,
    NAMES,
    PARTITIONS,
    PIPELINES,
    TOPIC_IDS,
    TOPICS,
)
from tidemill.metastore.rows.captures import (
    AcceptedSchemaChange,
    CapturedColumn,
    CaptureRow,
    CaptureTableRow,
    FormerType,
    SideTopicState,
    TableCopy,
    TableSnapshot,
)
from tidemill.metastore.rows.catalogue import NameRow, PipelineRow, TopicIdRow, TopicRow
from tidemill.metastore.rows.groups import GroupConfigRow
from tidemill.metastore.rows.row_family import Family

TOPIC_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
TOPIC_NAME_LENGTH = 249
PARTITIONS_MAX = 10_000
"""Limit for one topic."""

WRITE_BUDGET_S = 20.0
"""Time limit for retries of a write during changes of leadership."""
PAUSE_S = 0.05

Row = TypeVar("Row", TopicRow, CaptureRow, PipelineRow)
Change = Sequence[tuple[bytes, bytes]]

_FAMILIES: dict[type, Family[Any]] = {TopicRow: TOPICS, CaptureRow: CAPTURES, PipelineRow: PIPELINES}


INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata")
"""Kafka's internal topics. Their contents are in the metastore here, and clients treat such topics as internal."""


def check_topic_name(name: str) -> None:
    """Check Kafka's rule for topic names. Raises InvalidError."""
    if not name or len(name) > TOPIC_NAME_LENGTH or name in (".", "..") or not set(name) <= TOPIC_NAME_CHARS:
        raise InvalidError(f"bad topic name: topic={name!r}.", fix="Use 1 to 249 of a-z A-Z 0-9 . _ -")
    if name in INTERNAL_TOPICS:
        raise InvalidError(
            f"the name is reserved for an internal topic of Kafka: topic={name}.", fix="Use another name."
        )


def with_partitions(row: TopicRow, partitions: int) -> TopicRow:
    """Return the topic with more partitions. Raises InvalidError for a captured topic, whose mapping of keys to
    partitions preserves the order of each key, and for a count that is not an increase or exceeds PARTITIONS_MAX."""
    if row.kind == "capture":
        raise InvalidError(
            f"the partitions of a captured table's topic cannot change, they order its keys: topic={row.name}."
        )
    if not row.partitions < partitions <= PARTITIONS_MAX:
        raise InvalidError(
            f"the partitions would not increase: topic={row.name} partitions={partitions} existing={row.partitions}.",
            fix=f"Use a count above {row.partitions}, {PARTITIONS_MAX} at most.",
        )
    return replace(row, partitions=partitions)


class Catalogue:
    """Typed reads and writes of the catalogue.

    Reads may raise UnavailableError, ClosedError; writes also UnknownOutcomeError.
    """

    def __init__(self, metastore: Metastore, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rand = rand

    @property
    def metastore(self) -> Metastore:
        """The metastore that stores the rows."""
        return self._metastore

    async def get(self, kind: type[Row], name: str, *, fresh: bool = True) -> Row | None:
        """Return a row. Unless `fresh`, it may be up to metastore.STALE_S old, but never older than this process's own
        writes."""
        found: Row | None = await self._metastore.get(_FAMILIES[kind], name, fresh=fresh)
        return found

    async def list(self, kind: type[Row], *, fresh: bool = True) -> list[Row]:
        """Return all rows of the kind, by name. The identical list while none was written; callers must not modify
        it."""
        found: list[Row] = await self._metastore.rows(_FAMILIES[kind], fresh=fresh)
        return found

    async def put(self, row: TopicRow | CaptureRow | PipelineRow) -> None:
        """Create or replace; the last writer wins (a lease gives each row one owner). An equal row is not written."""
        family = _FAMILIES[type(row)]
        key, value = family.encode(row)

        def replaced(found: bytes, _: str) -> Change:
            return [(key, value), *_topic_id_changes(family, key, found, row)] if found != value else ()

        await self._write_named(family, row.name, replaced)

    async def change_capture(self, name: str, change: Callable[[CaptureRow | None], CaptureRow]) -> CaptureRow:
        """Write what `change` returns for the capture's row (None if there is no row); return the stored row.

        `change` is called again after a concurrent write. Raises what it raises, and UnknownOutcomeError.
        """
        attempts: dict[str, CaptureRow] = {}

        def changed(found: bytes, attempt: str) -> Change:
            old: CaptureRow | None = CAPTURES.decode(CAPTURES.key(name), found) if found else None
            row = attempts[attempt] = change(old)
            return [CAPTURES.encode(row)] if row != old else ()

        return attempts[await self._write_named(CAPTURES, name, changed)]

    async def tables(self, capture: str, *, fresh: bool = True) -> Sequence[CaptureTableRow]:
        """Return the tables of a capture, by name."""
        return [table for table in await self.all_tables(fresh=fresh) if table.capture == capture]

    async def all_tables(self, *, fresh: bool = True) -> Sequence[CaptureTableRow]:
        """Return the tables of all captures, by capture and name. The identical list while none of them was written."""
        found: list[CaptureTableRow] = await self._metastore.rows(CAPTURE_TABLES, fresh=fresh)
        return found

    async def table(self, capture: str, table: str, *, fresh: bool = True) -> CaptureTableRow | None:
        return await self._metastore.get(CAPTURE_TABLES, capture, table, fresh=fresh)

    async def change_table(
        self, capture: str, table: str, change: Callable[[CaptureTableRow | None], CaptureTableRow | None]
    ) -> CaptureTableRow | None:
        """Write what `change` returns for the row; None deletes it. Return the stored row.

        Raises what `change` raises, InvalidError for a row too large for the metastore, UnknownOutcomeError after
        WRITE_BUDGET_S.
        """
        changed: CaptureTableRow | None = await self._change_row(
            CAPTURE_TABLES, CAPTURE_TABLES.key(capture, table), change
        )
        return changed

    async def group_configs(self, *, fresh: bool = True) -> Sequence[GroupConfigRow]:
        """Return the configs of all groups that have some. The identical list while none of them was written."""
        found: list[GroupConfigRow] = await self._metastore.rows(GROUP_CONFIGS, fresh=fresh)
        return found

    async def change_group_config(
        self, group: str, change: Callable[[dict[str, str]], dict[str, str]]
    ) -> dict[str, str]:
        """Write what `change` returns for the group's configs ({} without configs), as `change_table` does."""

        def changed(old: GroupConfigRow | None) -> GroupConfigRow | None:
            config = change(old.config if old is not None else {})
            return GroupConfigRow(group, config) if config else None

        row: GroupConfigRow | None = await self._change_row(GROUP_CONFIGS, GROUP_CONFIGS.key(group), changed)
        return row.config if row is not None else {}

    async def _change_row(self, family: Family[Any], key: bytes, change: Callable[[Any], Any]) -> Any:
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        while True:
            error: TidemillError
            try:
                found = await self._metastore.get_row(key)
                old = family.decode(key, found.value) if found is not None and found.value else None
                wanted = change(old)
                value = family.encode(wanted)[1] if wanted is not None else b""
                if value == (found.value if found is not None else b""):
                    return wanted
                await self._metastore.commit([(key, value)], expects={key: found.seqno if found is not None else 0})
                return wanted
            except (ConflictError, FencedError, UnavailableError, UnknownOutcomeError) as failed:
                error = failed
            await self._pause_before_retry(until_s, key, error)

    async def create_topic(
        self, name: str, partitions: int, *, kind: str = "stream", config: dict[str, str] | None = None
    ) -> TopicRow:
        """Create a topic. Raises ConflictError(current=TopicRow) if it exists, InvalidError for a bad name or count."""
        check_topic_name(name)
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidError(
                f"bad partition count: topic={name} partitions={partitions}.", fix=f"Use 1 to {PARTITIONS_MAX}."
            )
        attempts: dict[str, TopicRow] = {}

        def created(found: bytes, attempt: str) -> Change:
            if found:
                raise ConflictError(f"topic exists: topic={name}.", current=TOPICS.decode(TOPICS.key(name), found))
            row = TopicRow(name, self._rand.uuid(), partitions, kind, self._clock.now_ms(), config or {})
            attempts[attempt] = row
            return [TOPICS.encode(row), TOPIC_IDS.encode(TopicIdRow(row.topic_id, name))]

        return attempts[await self._write_named(TOPICS, name, created)]

    async def change_topic(self, name: str, change: Callable[[TopicRow], TopicRow]) -> TopicRow:
        """Write what `change` returns for the topic's row, which must keep name, id and kind; return the stored row.

        `change` is called again after a concurrent write. Raises what it raises, and MissingError if there is no such
        topic.
        """
        attempts: dict[str, TopicRow] = {}

        def changed(found: bytes, attempt: str) -> Change:
            if not found:
                raise MissingError(f"no such topic: topic={name}.")
            old: TopicRow = TOPICS.decode(TOPICS.key(name), found)
            row = attempts[attempt] = change(old)
            return [TOPICS.encode(row)] if row != old else ()

        return attempts[await self._write_named(TOPICS, name, changed)]

    async def grow_topic(self, name: str, partitions: int) -> TopicRow:
        """Increase the partitions of a topic. Raises what `with_partitions` raises, and MissingError."""
        return await self.change_topic(name, lambda row: with_partitions(row, partitions))

    async def partition_bytes(self, topic_id: str) -> dict[int, int]:
        """Return the bytes of each partition of a topic as of its newest checkpoint. Partitions without records may be
        missing."""
        found = Counter({row.partition: row.size_bytes for row in await self._metastore.rows(PARTITIONS, topic_id)})
        found += Counter({r.partition: r.size_bytes for r in await self._metastore.rows(L1_PARTITIONS, topic_id)})
        return dict(found)

    async def delete_topic(self, row: TopicRow) -> None:
        """Delete this topic. Raises MissingError if it is gone, also if a later topic has its name."""

        def deleted(found: bytes, _: str) -> Change:
            if not found or TOPICS.decode(TOPICS.key(row.name), found).topic_id != row.topic_id:
                raise MissingError(f"no such topic: topic={row.name} id={row.topic_id}.")
            return [(TOPICS.key(row.name), b""), (TOPIC_IDS.key(row.topic_id), b"")]

        await self._write_named(TOPICS, row.name, deleted)

    async def delete(self, kind: type[Row], name: str) -> None:
        """Delete the row of this name, even if another process has just created it. Raises MissingError."""
        family: Family[Any] = _FAMILIES[kind]
        key: bytes = family.key(name)

        def deleted(found: bytes, _: str) -> Change:
            if not found:
                raise MissingError(f"no such {family.name}: name={name}.")
            return [(key, b""), *_topic_id_changes(family, key, found, None)]

        await self._write_named(family, name, deleted)

    async def _write_named(self, family: Family[Any], name: str, change: Callable[[bytes, str], Change]) -> str:
        """Write the rows that `change(value or b"", nonce)` returns, unless the name changed since; return the nonce
        that won.

        `change` raises to reject; no rows mean success without a write. Raises UnknownOutcomeError if it cannot be
        determined whether an attempt was committed, or not within WRITE_BUDGET_S.
        """
        key, name_key = family.key(name), NAMES.key(family.name, name)
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        open_attempts: dict[str, int] = {}
        """nonce → seqno of the name row that the attempt expected, for attempts of unknown outcome"""
        while True:
            nonce = self._rand.nonce()
            try:
                # The name is read last. A row changes only together with its name row, so if the name row still is as
                # an open attempt expected it, the row read before it is from before that attempt too.
                found, named = await self._metastore.get_rows([key, name_key])
            except UnavailableError as error:
                if not open_attempts:
                    raise
                await self._pause_before_retry(until_s, name_key, error)
                continue
            seqno = named.seqno if named is not None else 0
            if open_attempts and seqno not in open_attempts.values():
                return _resolve_attempt(named, name_key, open_attempts)
            rows = change(found.value if found is not None else b"", nonce)
            if not rows:
                return nonce
            named_by_us = NAMES.encode(NameRow(family.name, name, nonce))
            expects = {name_key: seqno, key: found.seqno if found is not None else 0}
            try:
                await self._metastore.commit([*rows, named_by_us], expects=expects)
                return nonce
            except (ConflictError, FencedError, UnavailableError) as error:
                # This attempt had no effect, but an earlier one may have had. Then UnavailableError would be wrong.
                if isinstance(error, UnavailableError) and not open_attempts:
                    raise
                await self._pause_before_retry(until_s, name_key, error)
            except UnknownOutcomeError as error:
                open_attempts[nonce] = seqno
                await self._pause_before_retry(until_s, name_key, error)

    async def _pause_before_retry(self, until_s: float, name_key: bytes, error: TidemillError) -> None:
        """Wait before the next attempt. Raises UnknownOutcomeError when the time budget is used up."""
        if not isinstance(error, ConflictError) and self._clock.monotonic_s() > until_s:
            raise UnknownOutcomeError(
                f"a row may have been written: name={name_key!r} cause={error.message!r}.",
                fix="Check it before writing it again.",
            ) from error
        await asyncio.sleep(self._rand.uniform(0, PAUSE_S))


def _resolve_attempt(named: VersionedRow | None, name_key: bytes, open_attempts: Collection[str]) -> str:
    """Return the nonce of the attempt that the changed name row holds. Raises if a later change by another process
    hides it."""
    attempt = NAMES.decode(name_key, named.value).attempt if named is not None else ""
    if attempt not in open_attempts:
        raise UnknownOutcomeError(
            f"a later change hides whether a row was written: name={name_key!r}.",
            fix="Check it before writing it again.",
        )
    return attempt


def _topic_id_changes(family: Family[Any], key: bytes, found: bytes, row: Any) -> Change:
    """Return the changes of a topic's id rows that a change of its row requires."""
    if family is not TOPICS:
        return ()
    old = TOPICS.decode(key, found) if found else None
    rows: dict[bytes, bytes] = {TOPIC_IDS.key(old.topic_id): b""} if old is not None else {}
    if row is not None:
        rows |= [TOPIC_IDS.encode(TopicIdRow(row.topic_id, row.name))]
    return list(rows.items())


__all__ = [
    "PARTITIONS_MAX",
    "AcceptedSchemaChange",
    "CaptureRow",
    "CaptureTableRow",
    "CapturedColumn",
    "Catalogue",
    "FormerType",
    "PipelineRow",
    "SideTopicState",
    "TableCopy",
    "TableSnapshot",
    "TopicRow",
    "check_topic_name",
    "with_partitions",
]
