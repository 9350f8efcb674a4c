"""Interfaces of `shards`: durable multisets over time, and the bindings that assign times to records.

Invariant (frontiers): since and upper only advance; a read at t is exact if since ≤ t < upper.

Invariant (atomic append): compare-and-append moves upper and makes the batch visible, or does neither.

Rows travel as Arrow tables: the shard's columns, then `_time` int64 (ms) and `_diff` int64 (±1). Stored parts also have
`_hash` uint64 (of the key columns) and are sorted by it.

Heavy synchronous work is given to a `RunCpuWork`: inline (simulation, Spark drivers) or on a thread pool (servers).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import msgspec
import pyarrow as pa

from tidemill.base.errors import FencedError, InvalidError

TIME = "_time"
DIFF = "_diff"
HASH = "_hash"

T = TypeVar("T")


class HistoryLostError(InvalidError):
    """The requested time is below since, or was when the batches were chosen: start again from newer contents."""


class SchemaEvolvedError(FencedError):
    """The shard's schema is newer than the handle's: reopen the handle. Nothing was read or written."""


class Column(msgspec.Struct, frozen=True):
    """One column of a shard.

    type      bool int16 int32 int64 float32 float64 string binary date timestamp(us, UTC) timestamp_ntz decimal(p,s)
              json
    default   value of rows written before the column was added, in PostgreSQL's text form; None = null
    version   version of the schema that added the column
    retired   version from which the source has no such column, so that new rows are null in it; 0 = it has one
    """

    name: str
    type: str
    default: str | None = None
    version: int = 1
    retired: int = 0


class ShardSchema(msgspec.Struct, frozen=True):
    """Columns in order, and the names of the key columns (empty = the whole row).

    `version` rises by one with every change (RFC 0003); two schemas of one shard with the same version are equal.
    """

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    buckets: int = 1
    version: int = 1


def part_key(shard_id: str, writer: str, written_at_ms: int, nonce: str) -> str:
    """Return `shards/<shard id>/<writer>@<ms>-<nonce>.parquet`. Invariant: a key is never reused."""
    return f"shards/{shard_id}/{writer}@{written_at_ms}-{nonce}.parquet"


STAGED = "staged"
"""Replacement of the shard id in the keys of objects staged for a write. No shard ever refers to such a key."""


def staged_key(writer: str, written_at_ms: int, nonce: str) -> str:
    """Return `shards/staged/<writer>@<ms>-<nonce>.arrow`. Invariant: a key is never reused."""
    return f"shards/{STAGED}/{writer}@{written_at_ms}-{nonce}.arrow"


def written_ms(object_key: str) -> int:
    """Return when the object was written, by its writer's clock; -1 if its key has no time (inline, an older
    format).
    """
    stamp = object_key.rpartition("@")[2].partition("-")[0] if "@" in object_key else ""
    return int(stamp) if stamp.isascii() and stamp.isdigit() else -1


class Part(msgspec.Struct, frozen=True):
    """An immutable run of rows: an object, or the Parquet bytes themselves when small (`inline`).

    `crc` and `footer_crc` are the CRC32C of all bytes and of the Parquet footer (`checksums`); -1 = written without.
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
    """All updates with lower ≤ time < upper. Readers filter out rows of its parts outside these bounds."""

    lower: int
    upper: int
    parts: tuple[Part, ...]
    writer: str = ""
    token: str = ""
    summed_to: int = -1
    """Time up to which a merge has summed all updates: there each row has one update per distinct value."""
    schema_version: int = 1
    """Newest version of the shard's schema under which one of its parts was written."""


class Delta(msgspec.Struct, frozen=True):
    """Result of one listen step: all updates of [lower, upper). `rows` may be empty (progress)."""

    lower: int
    upper: int
    rows: Any  # pa.Table, with _time and _diff


class Shard(Protocol):
    """A handle of one process.

    `name` is the shard's name. `shard_id` identifies this life of it and is never reused by another shard. Frontiers
    are plain ms here, wrapped at the package's edge.

    `schema` is the newest at the time when the handle was opened, and stays fixed: rows are read and written under it.
    Batches of an older schema are read under it. A batch of a newer schema raises SchemaEvolvedError, and so does an
    append after one.
    """

    name: str
    shard_id: str
    schema: ShardSchema

    async def frontiers(self, *, fresh: bool = True) -> tuple[int, int]:
        """Return (since, upper); read from consensus if `fresh`, else as cached."""
        ...

    async def write_part(self, rows: pa.Table, bucket: int = 0) -> Part:
        """Sort, encode and store rows (with _time and _diff). Nothing refers to the part until it is appended."""
        ...

    async def compare_and_append(self, lower: int, upper: int, parts: Sequence[Part], token: str) -> int:
        """Make the batch visible and move upper from `lower` to `upper`; return the new upper.

        Raises ConflictError(current=int upper) if upper ≠ lower; an unknown outcome is resolved inside by token. Empty
        `parts` publish progress. Raises InvalidError for inconsistent bounds, before any network call.
        """
        ...

    async def snapshot(self, as_of: int, timeout_s: float | None = None) -> pa.Table:
        """Return the consolidated contents at `as_of` (no _time, no _diff). Waits for upper > as_of.

        Raises HistoryLostError below since.
        """
        ...

    async def batches(self, lower: int) -> list[Batch]:
        """Return the batches whose upper > `lower`, contiguous, up to the current upper: every update from `lower` on.

        Raises HistoryLostError if since has reached `lower`: updates below it may then have later times.
        """
        ...

    async def batches_until(self, as_of: int, timeout_s: float | None = None) -> list[Batch]:
        """Return batches whose updates with time ≤ `as_of` sum to the contents at it.

        Waits and raises as `snapshot`.
        """
        ...

    async def read_batch(self, batch: Batch, lower: int, upper: int) -> pa.Table:
        """Return the rows of the batch with lower ≤ _time < upper."""
        ...

    def listen(self, lower: int) -> AsyncIterator[Delta]:
        """Yield every update with time ≥ lower, exactly once, then wait for more. Includes deltas of progress only."""
        ...

    def hold_during(self, what: str, since: int) -> AbstractAsyncContextManager[None]:
        """Keep every time ≥ `since` readable inside the context, and everything chosen there, for any duration.

        For one long read; short ones need no hold. Entering raises HistoryLostError, UnavailableError or
        UnknownOutcomeError.
        """
        ...

    async def wait_upper(self, beyond: int, timeout_s: float) -> int:
        """Wait for upper > beyond, at most until the timeout; return the current upper."""
        ...


class Binding(msgspec.Struct, frozen=True):
    """Mapping from a time to next offsets per partition. A record gets the smallest time whose offsets are beyond it.

    offsets         topic id → next offset of each partition (exclusive end of what this time covers)
    lsn             for a captured database: the commit LSN of the last transaction covered, else 0
    source_time_ms  when the newest covered change was committed at its source (0 = unknown)
    tag             content of the marker that requested this binding, or ""
    era             number of times the captured database returned to an earlier state; LSNs are ordered within one era
    """

    time_ms: int
    offsets: dict[str, tuple[int, ...]]
    lsn: int = 0
    source_time_ms: int = 0
    tag: str = ""
    era: int = 0


class BindingsPage(msgspec.Struct, frozen=True):
    """Bindings from a time on, as of one read: `bindings` oldest first, at most the requested number.

    base    the binding in force just before that time; None before the first
    newest  the newest binding of the source; None before the first
    """

    base: Binding | None
    bindings: list[Binding]
    newest: Binding | None


class Remap(Protocol):
    """Bindings of one source, minted by compare-and-append. Names: `capture/<name>` or `topic/<name>`."""

    name: str

    async def latest(self) -> Binding | None: ...

    async def mint(self, binding: Binding) -> Binding:
        """Append a binding if its time is above the latest and no offset goes back; the first minter wins.

        Raises ConflictError(current=Binding | None): the loser reads the newest binding and mints only what is still
        missing.
        """
        ...

    async def advance(self, time_ms: int) -> Binding | None:
        """Raise the newest binding's time to at least `time_ms`, everything else unchanged. None before the first."""
        ...

    async def after(self, time_ms: int, limit: int = 10_000) -> list[Binding]:
        """Return the bindings with time > time_ms, oldest first. Raises HistoryLostError if some were truncated."""
        ...

    async def at(self, time_ms: int) -> Binding | None:
        """Return the binding in force at time_ms: the newest with time ≤ time_ms; None before the first and below 0.

        Raises HistoryLostError if it was truncated.
        """
        ...

    async def page(self, lower: int, limit: int = 10_000) -> BindingsPage:
        """Return the bindings with time ≥ lower, the one in force before them, and the newest, in one round trip.

        Combines `after`, `at` and `latest`, and raises HistoryLostError as they do.
        """
        ...

    async def wait(self, beyond_ms: int, timeout_s: float) -> Binding | None:
        """Wait for a binding newer than beyond_ms. Return the newest one, or None after the timeout."""
        ...


class RunCpuWork(Protocol):
    async def __call__(self, work: Callable[[], T]) -> T: ...


async def run_inline(work: Callable[[], T]) -> T:
    """Run immediately, on the loop's thread: deterministic, and right if nothing else needs the loop."""
    return work()


def run_on_pool(executor: Executor) -> RunCpuWork:
    """Run on `executor`, so that a server's loop continues concurrently. The caller closes the executor."""

    async def run(work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    return run
