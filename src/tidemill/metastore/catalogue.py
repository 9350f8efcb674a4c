"""The catalogue: what exists. Check-and-write over rows of the metastore's domain 0 (layouts: rows/).

CA1  A write is a commit that expects the name's row (rows/names) as it was read. Of two that race one wins; the
     other looks again.
CA2  A write whose outcome is unknown is decided by the name's row: it holds the nonce of the newest change, and its
     seqno never comes back. A write counts once, however often it was tried, and nothing deleted comes back.
CA3  The row of a captured table, and of a group's configs, has no name row: tables come and go for ever, name rows
     stay. It is changed by a function of what it is, which must give the same when it is applied twice: a write of
     unknown outcome is made again.
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
    Accepted,
    CapturedColumn,
    CaptureRow,
    CaptureTableRow,
    FormerType,
    SetAside,
    TableCopy,
    TableSnapshot,
    of_old,
)
from tidemill.metastore.rows.group_configs import GroupConfigRow
from tidemill.metastore.rows.name_index import NameRow
from tidemill.metastore.rows.pipelines import PipelineRow
from tidemill.metastore.rows.row_family import Family
from tidemill.metastore.rows.topics import TopicIdRow, TopicRow

TOPIC_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
TOPIC_NAME_LENGTH = 249
PARTITIONS_MAX = 10_000
"""Of one topic."""

WRITE_BUDGET_S = 20.0
"""A write that meets changes of leadership is tried again for so long."""
PAUSE_S = 0.05

Row = TypeVar("Row", TopicRow, CaptureRow, PipelineRow)
Change = Sequence[tuple[bytes, bytes]]

_FAMILIES: dict[type, Family[Any]] = {TopicRow: TOPICS, CaptureRow: CAPTURES, PipelineRow: PIPELINES}


INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata")
"""Kafka's internal topics. Their contents lie in the metastore here, and clients take such topics for internal."""


def check_topic_name(name: str) -> None:
    """Kafka's rule for topic names. Raises InvalidError."""
    if not name or len(name) > TOPIC_NAME_LENGTH or name in (".", "..") or not set(name) <= TOPIC_NAME_CHARS:
        raise InvalidError(f"bad topic name: topic={name!r}.", fix="Use 1 to 249 of a-z A-Z 0-9 . _ -")
    if name in INTERNAL_TOPICS:
        raise InvalidError(
            f"the name is reserved for an internal topic of Kafka: topic={name}.", fix="Use another name."
        )


def grown(row: TopicRow, partitions: int) -> TopicRow:
    """The topic with more partitions. Raises InvalidError for a captured one, whose writer's rule of keys to partitions
    is what orders a key, and for a count that is no increase or above PARTITIONS_MAX."""
    if row.kind == "capture":
        raise InvalidError(f"a captured table's topic keeps its partitions, which order its keys: topic={row.name}.")
    if not row.partitions < partitions <= PARTITIONS_MAX:
        raise InvalidError(
            f"the partitions would not increase: topic={row.name} partitions={partitions} existing={row.partitions}.",
            fix=f"Use a count above {row.partitions}, {PARTITIONS_MAX} at most.",
        )
    return replace(row, partitions=partitions)


class Catalogue:
    """Reads may raise UnavailableError, Closed; writes Unknown besides."""

    def __init__(self, metastore: Metastore, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rand = rand
        self._tables: tuple[list[CaptureRow], list[CaptureTableRow], list[CaptureTableRow]] | None = None

    @property
    def metastore(self) -> Metastore:
        """Where the rows are."""
        return self._metastore

    async def get(self, kind: type[Row], name: str, *, fresh: bool = True) -> Row | None:
        """`fresh` False may be up to metastore.STALE_S old, but never older than this process's own writes."""
        found: Row | None = await self._metastore.get(_FAMILIES[kind], name, fresh=fresh)
        return found

    async def list(self, kind: type[Row], *, fresh: bool = True) -> list[Row]:
        """All rows of the kind, by name. The very same list while none of them was written; nobody may change it."""
        found: list[Row] = await self._metastore.rows(_FAMILIES[kind], fresh=fresh)
        return found

    async def put(self, row: TopicRow | CaptureRow | PipelineRow) -> None:
        """Create or replace, last writer wins (one owner per row by lease). An equal row is left alone."""
        family = _FAMILIES[type(row)]
        key, value = family.encode(row)

        def replaced(found: bytes, _: str) -> Change:
            return [(key, value), *_by_id(family, key, found, row)] if found != value else ()

        await self._write(family, row.name, replaced)

    async def change_capture(self, name: str, change: Callable[[CaptureRow | None], CaptureRow]) -> CaptureRow:
        """Write what `change` makes of the capture's row, None where there is none; returns what is there now.

        `change` is called again where another writer was faster. Raises what it raises, and UnknownOutcomeError.
        """
        attempts: dict[str, CaptureRow] = {}

        def changed(found: bytes, attempt: str) -> Change:
            old: CaptureRow | None = CAPTURES.decode(CAPTURES.key(name), found) if found else None
            row = attempts[attempt] = change(old)
            return [CAPTURES.encode(row)] if row != old else ()

        return attempts[await self._write(CAPTURES, name, changed)]

    async def tables(self, capture: str, *, fresh: bool = True) -> Sequence[CaptureTableRow]:
        """The tables of a capture, by name; those that an older version kept in the capture's row included."""
        return [table for table in await self.all_tables(fresh=fresh) if table.capture == capture]

    async def all_tables(self, *, fresh: bool = True) -> Sequence[CaptureTableRow]:
        """The tables of all captures, by capture and name. The very same list while none of them was written."""
        captures = await self.list(CaptureRow, fresh=fresh)
        tables: list[CaptureTableRow] = await self._metastore.rows(CAPTURE_TABLES, fresh=False)
        if self._tables is None or self._tables[0] is not captures or self._tables[1] is not tables:
            found = {(row.name, t.table): t for row in captures for t in of_old(row)}
            found |= {(t.capture, t.table): t for t in tables}
            self._tables = captures, tables, [found[name] for name in sorted(found)]
        return self._tables[2]

    async def table(self, capture: str, table: str, *, fresh: bool = True) -> CaptureTableRow | None:
        found = await self._metastore.get(CAPTURE_TABLES, capture, table, fresh=fresh)
        if found is None:
            row = await self.get(CaptureRow, capture, fresh=False)
            found = next((t for t in of_old(row) if t.table == table), None) if row is not None else None
        return found

    async def change_table(
        self, capture: str, table: str, change: Callable[[CaptureTableRow | None], CaptureTableRow | None]
    ) -> CaptureTableRow | None:
        """Write what `change` makes of the row; None deletes it. Returns what is there now (CA3).

        Raises what `change` raises, InvalidError for a row too large for the metastore, UnknownOutcomeError after
        WRITE_BUDGET_S.
        """
        changed: CaptureTableRow | None = await self._change(CAPTURE_TABLES, CAPTURE_TABLES.key(capture, table), change)
        return changed

    async def group_configs(self, *, fresh: bool = True) -> Sequence[GroupConfigRow]:
        """Of all groups that have some. The very same list while none of them was written."""
        found: list[GroupConfigRow] = await self._metastore.rows(GROUP_CONFIGS, fresh=fresh)
        return found

    async def change_group_config(
        self, group: str, change: Callable[[dict[str, str]], dict[str, str]]
    ) -> dict[str, str]:
        """Write what `change` makes of the group's configs, {} where there are none; as `change_table`."""

        def changed(old: GroupConfigRow | None) -> GroupConfigRow | None:
            config = change(old.config if old is not None else {})
            return GroupConfigRow(group, config) if config else None

        row: GroupConfigRow | None = await self._change(GROUP_CONFIGS, GROUP_CONFIGS.key(group), changed)
        return row.config if row is not None else {}

    async def _change(self, family: Family[Any], key: bytes, change: Callable[[Any], Any]) -> Any:
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
            await self._pause(until_s, key, error)

    async def create_topic(
        self, name: str, partitions: int, *, kind: str = "stream", config: dict[str, str] | None = None
    ) -> TopicRow:
        """Raises ConflictError(current=TopicRow) when the name is taken, InvalidError on a bad name or count."""
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

        return attempts[await self._write(TOPICS, name, created)]

    async def change_topic(self, name: str, change: Callable[[TopicRow], TopicRow]) -> TopicRow:
        """Write what `change` makes of the topic's row, whose name, id and kind stay; returns what is there now.

        `change` is called again where another writer was faster. Raises what it raises, MissingError when there is no
        topic.
        """
        attempts: dict[str, TopicRow] = {}

        def changed(found: bytes, attempt: str) -> Change:
            if not found:
                raise MissingError(f"no such topic: topic={name}.")
            old: TopicRow = TOPICS.decode(TOPICS.key(name), found)
            row = attempts[attempt] = change(old)
            return [TOPICS.encode(row)] if row != old else ()

        return attempts[await self._write(TOPICS, name, changed)]

    async def grow_topic(self, name: str, partitions: int) -> TopicRow:
        """Give a topic more partitions. Raises what `grown` raises, and MissingError."""
        return await self.change_topic(name, lambda row: grown(row, partitions))

    async def partition_bytes(self, topic_id: str) -> dict[int, int]:
        """Bytes of each partition of a topic as of its newest checkpoint; one without records may be missing."""
        found = Counter({row.partition: row.size_bytes for row in await self._metastore.rows(PARTITIONS, topic_id)})
        found += Counter({r.partition: r.size_bytes for r in await self._metastore.rows(L1_PARTITIONS, topic_id)})
        return dict(found)

    async def delete(self, kind: type[Row], name: str) -> None:
        """Raises MissingError."""
        family: Family[Any] = _FAMILIES[kind]
        key: bytes = family.key(name)

        def deleted(found: bytes, _: str) -> Change:
            if not found:
                raise MissingError(f"no such {family.name}: name={name}.")
            return [(key, b""), *_by_id(family, key, found, None)]

        await self._write(family, name, deleted)

    async def _write(self, family: Family[Any], name: str, change: Callable[[bytes, str], Change]) -> str:
        """Ask `change(value or b"", nonce)` what to write, and write it if nobody was faster; the nonce that won.

        `change` raises to refuse; nothing to write is a success. Raises UnknownOutcomeError when it cannot be told
        whether an attempt landed, or not within WRITE_BUDGET_S.
        """
        key, name_key = family.key(name), NAMES.key(family.name, name)
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        open_attempts: dict[str, int] = {}
        """nonce → seqno of the name that it expected; those whose outcome nobody told us"""
        while True:
            nonce = self._rand.nonce()
            try:
                # The name last: a row changes only together with its name, so where the name is as an open attempt
                # expected it, the row read before it is that moment's too, and not the one the attempt just wrote.
                found, named = await self._metastore.get_rows([key, name_key])
            except UnavailableError as error:
                if not open_attempts:
                    raise
                await self._pause(until_s, name_key, error)
                continue
            seqno = named.seqno if named is not None else 0
            if open_attempts and seqno not in open_attempts.values():
                return _landed(named, name_key, open_attempts)
            rows = change(found.value if found is not None else b"", nonce)
            if not rows:
                return nonce
            named_by_us = NAMES.encode(NameRow(family.name, name, nonce))
            expects = {name_key: seqno, key: found.seqno if found is not None else 0}
            try:
                await self._metastore.commit([*rows, named_by_us], expects=expects)
                return nonce
            except (ConflictError, FencedError, UnavailableError) as error:
                # This attempt did not happen. An earlier one may have: then to say so would be a lie.
                if isinstance(error, UnavailableError) and not open_attempts:
                    raise
                await self._pause(until_s, name_key, error)
            except UnknownOutcomeError as error:
                open_attempts[nonce] = seqno
                await self._pause(until_s, name_key, error)

    async def _pause(self, until_s: float, name_key: bytes, error: TidemillError) -> None:
        """Before the next attempt, if there is to be one."""
        if not isinstance(error, ConflictError) and self._clock.monotonic_s() > until_s:
            raise UnknownOutcomeError(
                f"A row may have been written: name={name_key!r} cause={error.message!r}.",
                fix="Look at it again before writing it anew.",
            ) from error
        await asyncio.sleep(self._rand.uniform(0, PAUSE_S))


def _landed(named: VersionedRow | None, name_key: bytes, open_attempts: Collection[str]) -> str:
    """Somebody changed the name since: ours is the newest change, or hidden below another's."""
    attempt = NAMES.decode(name_key, named.value).attempt if named is not None else ""
    if attempt not in open_attempts:
        raise UnknownOutcomeError(
            f"A later change hides whether a row was written: name={name_key!r}.",
            fix="Look at it again before writing it anew.",
        )
    return attempt


def _by_id(family: Family[Any], key: bytes, found: bytes, row: Any) -> Change:
    """What a change of a topic's row does to its rows by id."""
    if family is not TOPICS:
        return ()
    old = TOPICS.decode(key, found) if found else None
    rows: dict[bytes, bytes] = {TOPIC_IDS.key(old.topic_id): b""} if old is not None else {}
    if row is not None:
        rows |= [TOPIC_IDS.encode(TopicIdRow(row.topic_id, row.name))]
    return list(rows.items())


__all__ = [
    "PARTITIONS_MAX",
    "Accepted",
    "CaptureRow",
    "CaptureTableRow",
    "CapturedColumn",
    "Catalogue",
    "FormerType",
    "PipelineRow",
    "SetAside",
    "TableCopy",
    "TableSnapshot",
    "TopicRow",
    "check_topic_name",
    "grown",
]
