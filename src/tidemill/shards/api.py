"""The fronts of `shards`: durable multisets over time, and the bindings that give records their time.

S1  since and upper only advance; a read at t is exact when since ≤ t < upper.
S2  compare-and-append moves upper and shows the batch, or does neither.

Rows travel as Arrow tables: the shard's columns, then `_time` int64 (ms) and `_diff` int64 (±1).
Stored parts carry `_hash` uint64 (of the key columns) as well and are sorted by it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from tidemill.base.errors import FencedError, InvalidError

TIME = "_time"
DIFF = "_diff"
HASH = "_hash"


class HistoryLostError(InvalidError):
    """The time asked for lies below since, or did when the batches were chosen: start again from newer contents."""


class SchemaEvolvedError(FencedError):
    """The shard's schema is newer than the handle's: open it again. Nothing was read or written."""


class Column(msgspec.Struct, frozen=True):
    """`type`: bool int16 int32 int64 float32 float64 string binary date timestamp(us, UTC) timestamp_ntz decimal(p,s)
    json.

    `default`: what rows hold that were written before the column was added, in PostgreSQL's text form; None = null.
    `version`: the version of the schema that brought the column. `retired`: the one from which on its source has no
    such column, and rows that are written hold null in it; 0 = it has.
    """

    name: str
    type: str
    default: str | None = None
    version: int = 1
    retired: int = 0


class ShardSchema(msgspec.Struct, frozen=True):
    """Columns in order, and the names of those that form the key (empty = the whole row).

    `version` rises by one with every change (RFC 0003); two schemas of one shard with one version are equal.
    """

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    buckets: int = 1
    version: int = 1


def part_key(shard_id: str, writer: str, written_at_ms: int, nonce: str) -> str:
    """`shards/<shard id>/<writer>@<ms>-<nonce>.parquet`, never reused (O1)."""
    return f"shards/{shard_id}/{writer}@{written_at_ms}-{nonce}.parquet"


STAGED = "staged"
"""Stands in place of a shard's id in the keys of what is staged for a write: no shard ever names it."""


def staged_key(writer: str, written_at_ms: int, nonce: str) -> str:
    """`shards/staged/<writer>@<ms>-<nonce>.arrow`, never reused (O1)."""
    return f"shards/{STAGED}/{writer}@{written_at_ms}-{nonce}.arrow"


def written_ms(object_key: str) -> int:
    """When the object was written, by its writer's clock; -1 when its key does not tell (inline, an older format)."""
    stamp = object_key.rpartition("@")[2].partition("-")[0] if "@" in object_key else ""
    return int(stamp) if stamp.isascii() and stamp.isdigit() else -1


class Part(msgspec.Struct, frozen=True):
    """An immutable run of rows: an object, or the Parquet bytes themselves when small (`inline`).

    `crc`, `footer_crc`: CRC32C of all bytes and of the Parquet footer (`checksums`); -1 = it was written without.
    """

    rows: int
    size_bytes: int
    bucket: int = 0
    object_key: str = ""
    inline: bytes = b""
    min_hash: int = 0
    max_hash: int = 0
    crc: int = -1
    footer_crc: int = -1


class Batch(msgspec.Struct, frozen=True):
    """All updates with lower ≤ time < upper; rows outside these bounds in its parts are filtered by readers."""

    lower: int
    upper: int
    parts: tuple[Part, ...]
    writer: str = ""
    token: str = ""
    summed_to: int = -1
    """A merge has summed all updates up to this time: what they say of a row stands in it once."""
    schema_version: int = 1
    """The newest version of the shard's schema that a part of it was written under."""


class Delta(msgspec.Struct, frozen=True):
    """What one listen step yields: complete updates for [lower, upper); `rows` may be empty (progress)."""

    lower: int
    upper: int
    rows: Any  # pa.Table, with _time and _diff


class Shard(Protocol):
    """A handle of one process. `name` is the shard's name, `shard_id` this life of it, which no other shard ever has;
    frontiers are plain ms here, wrapped at the room's edge.

    `schema` is the newest as of when the handle was opened, and stays: rows are given and taken under it. What was
    written before reads under it; what was written under a newer one raises SchemaEvolvedError, and so does an append
    after one.
    """

    name: str
    shard_id: str
    schema: ShardSchema

    async def frontiers(self, *, fresh: bool = True) -> tuple[int, int]:
        """(since, upper); fresh = read consensus, else as cached."""
        ...

    async def write_part(self, rows: pa.Table, bucket: int = 0) -> Part:
        """Sort, encode and store rows (with _time and _diff); nothing refers to the part until it is appended."""
        ...

    async def compare_and_append(self, lower: int, upper: int, parts: Sequence[Part], token: str) -> int:
        """Show the batch and move upper from `lower` to `upper`; returns the new upper.

        Raises Conflict(current=int upper) when upper ≠ lower; Unknown is resolved inside by token. Empty
        `parts` publish progress. Raises InvalidError on bounds that make no sense (before any network call).
        """
        ...

    async def snapshot(self, as_of: int, timeout_s: float | None = None) -> pa.Table:
        """Consolidated contents at `as_of` (no _time, no _diff). Waits for upper > as_of; Invalid below since."""
        ...

    async def batches(self, lower: int) -> list[Batch]:
        """Batches whose upper > `lower`, in order, contiguous, up to the current upper: every update from `lower` on.

        Raises HistoryLostError when since has reached `lower`: updates below it may then carry later times.
        """
        ...

    async def batches_until(self, as_of: int, timeout_s: float | None = None) -> list[Batch]:
        """Batches whose updates with time ≤ `as_of` sum up to the contents at it. Waits and raises as `snapshot`."""
        ...

    async def read_batch(self, batch: Batch, lower: int, upper: int) -> pa.Table:
        """Rows of the batch with lower ≤ _time < upper."""
        ...

    def listen(self, lower: int) -> AsyncIterator[Delta]:
        """Every update with time ≥ lower, exactly once, then waits for more. Progress-only deltas included."""
        ...

    def holding(self, what: str, since: int) -> AbstractAsyncContextManager[None]:
        """Inside, every time ≥ `since` stays readable, and so does what is chosen there, however long it takes.

        For one long read; short ones need none. Raises HistoryLostError, Unavailable, Unknown on entering.
        """
        ...

    async def wait_upper(self, beyond: int, timeout_s: float) -> int:
        """Current upper, returned as soon as it is > beyond or after the timeout."""
        ...


class Binding(msgspec.Struct, frozen=True):
    """time → next offsets per partition: a record gets the smallest time whose offsets pass it.

    offsets         topic id → next offset of each partition (exclusive end of what this time covers)
    lsn             for a captured database: the commit LSN of the last transaction covered, else 0
    source_time_ms  when the newest covered change was committed at its source (0 = unknown)
    tag             content of the marker that asked for this binding, or ""
    era             how often the captured database had returned to an earlier state; LSNs are ordered within one era
    """

    time_ms: int
    offsets: dict[str, tuple[int, ...]]
    lsn: int = 0
    source_time_ms: int = 0
    tag: str = ""
    era: int = 0


class BindingsPage(msgspec.Struct, frozen=True):
    """What is bound from a time on, as of one read: `bindings` oldest first, at most as many as were asked for.

    base    the binding in force just before that time; None before the first
    newest  of the source; None while there is none
    """

    base: Binding | None
    bindings: list[Binding]
    newest: Binding | None


class Remap(Protocol):
    """Bindings of one source, minted by compare-and-append. Names: `capture/<name>` or `topic/<name>`."""

    name: str

    async def latest(self) -> Binding | None: ...

    async def mint(self, binding: Binding) -> Binding:
        """Append if its time is above the latest and no offset goes back; the first minter wins.

        Raises Conflict(current=Binding | None): the loser syncs and mints only what is still missing.
        """
        ...

    async def advance(self, time_ms: int) -> Binding | None:
        """Make the newest binding's time at least `time_ms`, nothing else having changed; None while there is none."""
        ...

    async def after(self, time_ms: int, limit: int = 10_000) -> list[Binding]:
        """Bindings with time > time_ms, oldest first. Raises HistoryLostError when some of them are forgotten."""
        ...

    async def at(self, time_ms: int) -> Binding | None:
        """The binding in force at time_ms: the newest with time ≤ time_ms; None before the first and below 0.

        Raises HistoryLostError when it is forgotten.
        """
        ...

    async def page(self, lower: int, limit: int = 10_000) -> BindingsPage:
        """The bindings with time ≥ lower, what was in force before them, and the newest: `after`, `at` and `latest`
        for one round trip. Raises HistoryLostError as they do."""
        ...

    async def wait(self, beyond_ms: int, timeout_s: float) -> bool:
        """True as soon as a binding newer than beyond_ms exists."""
        ...
