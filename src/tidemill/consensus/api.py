"""The consensus contract: registers, fenced logs and leases over an existing engine.

Invariants:

- Fencing: after a term is fenced, no append of an earlier term takes effect.
- Single winner: exactly one writer writes each register version and each log position. Every stored version holds its
  sequence number and the writer's nonce. A dropped register counts from 1 again (see `Consensus.drop`).
- Three outcomes: a call returns (it happened), raises ConflictError or FencedError with the current state (it did not
  happen), or raises UnknownOutcomeError (it may have happened). UnavailableError means that it did not happen.
- No rollback: state that was acknowledged to a client, or read by it, is part of every later state that it sees.
  Otherwise the client fails permanently (`rollback_detection`).
- Lease expiry: the engine's clock decides when a lease expires. Safety comes only from fencing with the lease's term.

One contract suite (`tests/contracts/consensus.py`) runs on memory, SQLite and PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import UnknownOutcomeError


class Versioned(msgspec.Struct, frozen=True):
    """One version of a register. `seq` counts from 1."""

    seq: int
    data: bytes
    nonce: str


class LogHead(msgspec.Struct, frozen=True):
    """Bounds of a log: positions [start, next) are present, and `term` is the highest term fenced or appended.

    An unwritten log is (0, 0, 0).
    """

    term: int
    start: int
    next: int


class LogRecord(msgspec.Struct, frozen=True):
    position: int
    term: int
    nonce: str
    data: bytes


class LogSlice(msgspec.Struct, frozen=True):
    """Consecutive records from the requested position on; `head` is as of the read."""

    records: tuple[LogRecord, ...]
    head: LogHead


class Changes(msgspec.Struct, frozen=True):
    """Heads of changed logs, by name. Pass `token` to the next call; `more` means that the answer is incomplete."""

    heads: tuple[tuple[str, LogHead], ...]
    token: str
    more: bool


REPORT_PREFIX = "board/"
"""Key prefix of status reports (`status.board`). Each is about its writer alone."""


class Lease(msgspec.Struct, frozen=True):
    """A lease as read. `term` grows by one whenever the holder changes and never repeats, so fence with it.

    `live` and `remaining_ms` (at most `ttl_ms`) are as of the engine's clock at the time of the read. A lease whose
    engine's clock was set back since by more than `ttl_ms` is not live.
    """

    name: str
    holder: str
    term: int
    ttl_ms: int
    remaining_ms: int
    live: bool
    info: bytes = b""


class Consensus(Protocol):
    """The client's contract.

    Every method may raise UnavailableError or ClosedError; every write may also raise UnknownOutcomeError. Once an
    answer shows that the engine lost state that this client had seen (`rollback_detection`), every method raises
    StoreRolledBackError (a ClosedError) from then on, and the process must exit.
    """

    # registers -----------------------------------------------------------------------------------
    async def head(self, key: str) -> Versioned | None: ...

    async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
        """Write version expected_seq + 1 if the current version is expected_seq (0 = absent).

        Raises ConflictError(current: Versioned | None), and InvalidError if data exceeds limits.REGISTER_BYTES.
        """
        ...

    async def drop(self, key: str, expected_seq: int) -> None:
        """Remove the register if its version is expected_seq ≥ 1. Raises ConflictError(current: Versioned | None).

        A dropped key starts again at version 1, so a client that remembers an older version could mistake the new one
        for its own. Drop only keys that one process writes, keys that are never written again, and keys under
        `rollback_detection.REWRITTEN_PREFIXES`. For any other key, a version below one already seen means that the
        engine rolled back.
        """
        ...

    async def scan(self, prefix: str) -> list[tuple[str, Versioned]]:
        """Return all registers whose key starts with `prefix`, in key order."""
        ...

    # fenced logs ---------------------------------------------------------------------------------
    async def log_head(self, log: str) -> LogHead: ...

    async def fence(self, log: str, term: int) -> LogHead:
        """Raise the log's term to `term`; a no-op for the current term. Raises FencedError(current: LogHead)."""
        ...

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        """Append all records at expected_next, or none; return the new head.

        `term` must be ≥ the stored term, and replaces it. Raises FencedError(current: LogHead) for an older term and
        ConflictError(current: LogHead) if next ≠ expected_next. Writers that race as equals all use term 0. Concurrent
        appends to many logs share one durable commit (group commit).
        """
        ...

    async def read(self, log: str, start: int, limit_records: int = 1000, limit_bytes: int = 4 << 20) -> LogSlice:
        """Return records from `start` on, at least one if any is present. Raises MissingError if start < head.start."""
        ...

    async def changed(self, prefix: str, since: str = "") -> Changes:
        """Return the logs whose name starts with `prefix` and whose head changed since the token `since` was issued.

        An engine may return more logs than those; it returns all of them for "". A consumer that tracks every log calls
        this instead of reading every head: while no log changes, it costs one request for any number of logs.
        """
        ...

    async def truncate(self, log: str, before: int) -> LogHead:
        """Delete positions < before (monotone; InvalidError if before > next). Positions are not renumbered."""
        ...

    async def wait(self, log: str, beyond: int, timeout_s: float) -> bool:
        """Return True as soon as head.next > beyond, False after the timeout. A hint: read to be certain."""
        ...

    # leases --------------------------------------------------------------------------------------
    async def acquire(self, name: str, holder: str, ttl_ms: int, info: bytes = b"") -> Lease:
        """Acquire a free or expired lease, or renew the caller's own (same term; info is replaced).

        Raises ConflictError(current: Lease) while another holder's lease is live; InvalidError unless `ttl_ms` is
        between 1 and `operations.LEASE_TTL_MAX_MS`. A holder name belongs to one process life only, so that a process
        that acquires the lease again after a crash gets a new term.
        """
        ...

    async def release(self, name: str, holder: str, term: int) -> None:
        """Release the lease now; a no-op unless this holder holds it in this term. The term is not reused."""
        ...

    async def leases(self, prefix: str) -> list[Lease]:
        """Return all leases, live and expired, whose name starts with `prefix`, in name order."""
        ...

    def trouble(self) -> str:
        """Return one sentence on what does not work now, and the known cause; "" while the client works.

        Never waits and never raises. A client does not die: it reconnects, and its trouble then ends.
        """
        ...

    async def aclose(self) -> None: ...


async def read_all_changes(consensus: Consensus, prefix: str, since: str = "") -> tuple[dict[str, LogHead], str]:
    """Call `changed` until the answer is complete: (head by log, the next token). Raises UnavailableError."""
    heads: dict[str, LogHead] = {}
    while True:
        found = await consensus.changed(prefix, since)
        heads.update(found.heads)
        since = found.token
        if not found.more:
            return heads, since


async def resolve_append(consensus: Consensus, log: str, expected_next: int, nonce: str) -> bool:
    """Return whether the attempt with `nonce` landed at expected_next, after `append` raised UnknownOutcomeError.

    The answer is certain only if no other attempt with this nonce can still be in flight. Backends end an attempt
    before they raise UnknownOutcomeError, or reject it later by expected_next.
    """
    head = await consensus.log_head(log)
    if head.next <= expected_next:
        return False
    found = await consensus.read(log, expected_next, limit_records=1)
    return bool(found.records) and found.records[0].nonce == nonce


async def resolve_cas(consensus: Consensus, key: str, expected_seq: int, nonce: str) -> Versioned | None:
    """Return the version that `nonce` wrote, after `cas` raised UnknownOutcomeError; None if it wrote nothing.

    Raises UnknownOutcomeError if a later version hides the answer: the register does not store what it overwrote.
    """
    current = await consensus.head(key)
    if current is None or current.seq <= expected_seq:
        return None
    if current.seq == expected_seq + 1:
        return current if current.nonce == nonce else None
    raise UnknownOutcomeError(
        f"a later version hides the outcome: key={key!r} expected_seq={expected_seq} seq={current.seq}.",
        fix="Re-read the register and decide again from its current contents.",
    )
