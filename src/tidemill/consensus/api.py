"""The consensus contract: registers, fenced logs and leases over an existing engine.

C1  After a term is fenced, none of its appends lands.
C2  A register or log position is written by exactly one winner; every stored version holds its
    sequence and the writer's nonce. A register that was dropped counts anew (`drop` says for whom that is right).
C3  Exactly three outcomes: it returned (ok), Conflict/Fenced with the current state (did not happen),
    Unknown (may have happened). Unavailable means it certainly did not happen.
C5  What was acknowledged to a client, or read by it, is in every later state that it is shown; else it ends
    (`rollback_detection`).
C4  Expiry of a lease is decided by the engine's clock; safety comes only from fencing with its term.

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
    """term: the highest term fenced or appended. [start, next): positions present. An unwritten log is (0, 0, 0)."""

    term: int
    start: int
    next: int


class LogRecord(msgspec.Struct, frozen=True):
    position: int
    term: int
    nonce: str
    data: bytes


class LogSlice(msgspec.Struct, frozen=True):
    """Records from the asked position on, consecutive; `head` as of the read."""

    records: tuple[LogRecord, ...]
    head: LogHead


class Changes(msgspec.Struct, frozen=True):
    """`heads`: names and heads of logs. `token` is where to go on; `more`: at once, for this was not all."""

    heads: tuple[tuple[str, LogHead], ...]
    token: str
    more: bool


REPORTS = "board/"
"""Registers that begin so are reports of processes (`board`): each is about its writer alone."""


class Lease(msgspec.Struct, frozen=True):
    """`term` grows by one at every change of holder and never repeats: use it to fence.

    `live` and `remaining_ms` are as of the engine's clock when this was read.
    """

    name: str
    holder: str
    term: int
    ttl_ms: int
    remaining_ms: int
    live: bool
    info: bytes = b""


class Consensus(Protocol):
    """Every method may raise Unavailable or Closed; every write may raise UnknownOutcomeError.

    Every method raises MovedBack (a Closed), for ever, once an answer showed that the engine lost what this client had
    seen of it (`rollback_detection`): the process ends.
    """

    # registers -----------------------------------------------------------------------------------
    async def head(self, key: str) -> Versioned | None: ...

    async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
        """Write version expected_seq + 1 if the current is expected_seq (0 = absent).

        Raises Conflict(current: Versioned | None). Data is at most limits.REGISTER_BYTES (Invalid).
        """
        ...

    async def drop(self, key: str, expected_seq: int) -> None:
        """Remove the register if its version is expected_seq ≥ 1. Raises Conflict(current: Versioned | None).

        A key that was dropped begins again at version 1: who still holds an older version may take the new one for
        his own. So only keys whose writer is one process, or that are never written again, are dropped, and those that
        `rollback_detection.REWRITTEN` names: a version below one that was seen shows otherwise that consensus moved
        back.
        """
        ...

    async def scan(self, prefix: str) -> list[tuple[str, Versioned]]:
        """All registers whose key starts with `prefix`, in key order."""
        ...

    # fenced logs ---------------------------------------------------------------------------------
    async def log_head(self, log: str) -> LogHead: ...

    async def fence(self, log: str, term: int) -> LogHead:
        """Raise the log's term to `term`. Same term again is a no-op. Raises Fenced(current: LogHead)."""
        ...

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        """Append records at expected_next, all or none; returns the new head.

        term must be ≥ the stored term (and becomes it). Raises Fenced(current: LogHead) for an older term,
        Conflict(current: LogHead) when next ≠ expected_next. Writers that race as equals all use term 0.
        Concurrent appends to many logs share one durable commit (group commit).
        """
        ...

    async def read(self, log: str, start: int, limit_records: int = 1000, limit_bytes: int = 4 << 20) -> LogSlice:
        """Records from `start` (at least one if any is present). Raises Missing(…) when start < head.start."""
        ...

    async def changed(self, prefix: str, since: str = "") -> Changes:
        """The logs whose name starts with `prefix` and whose head changed after the token `since` was handed out.

        At least those: an engine may name others, and all there are, as for "". Who keeps something of every log asks
        this instead of every log; while nothing happens it costs one request, however many there are.
        """
        ...

    async def truncate(self, log: str, before: int) -> LogHead:
        """Forget positions < before (monotone; before ≤ next, else Invalid). Numbering goes on."""
        ...

    async def wait(self, log: str, beyond: int, timeout_s: float) -> bool:
        """True as soon as head.next > beyond; False after timeout. A hint: callers read to be sure."""
        ...

    # leases --------------------------------------------------------------------------------------
    async def acquire(self, name: str, holder: str, ttl_ms: int, info: bytes = b"") -> Lease:
        """Take a free or expired lease, or renew one's own (term unchanged; info replaced).

        Raises Conflict(current: Lease) while another holder's lease is live. A holder name is used by one
        process life only, so that re-acquiring after a crash gets a new term.
        """
        ...

    async def release(self, name: str, holder: str, term: int) -> None:
        """Give the lease up now; a no-op unless held by this holder in this term. The term stays spent."""
        ...

    async def leases(self, prefix: str) -> list[Lease]:
        """All leases, live and expired, whose name starts with `prefix`, in name order."""
        ...

    def trouble(self) -> str:
        """One sentence: what does not work now, and what is known of why. Empty while this client does its work.

        Never waits and never raises. A client does not die: it reconnects, and its trouble ends with that.
        """
        ...

    async def aclose(self) -> None: ...


async def changes(consensus: Consensus, prefix: str, since: str = "") -> tuple[dict[str, LogHead], str]:
    """All that `changed` has to say: (head by log, the next token). Raises Unavailable."""
    heads: dict[str, LogHead] = {}
    while True:
        found = await consensus.changed(prefix, since)
        heads.update(found.heads)
        since = found.token
        if not found.more:
            return heads, since


async def resolve_append(consensus: Consensus, log: str, expected_next: int, nonce: str) -> bool:
    """After Unknown from `append`: did the attempt with `nonce` land at expected_next?

    True and False are both certain only while no other attempt with this nonce can still be on its
    way; backends end an attempt before they answer Unknown, or refuse it later by expected_next.
    """
    head = await consensus.log_head(log)
    if head.next <= expected_next:
        return False
    found = await consensus.read(log, expected_next, limit_records=1)
    return bool(found.records) and found.records[0].nonce == nonce


async def resolve_cas(consensus: Consensus, key: str, expected_seq: int, nonce: str) -> Versioned | None:
    """After Unknown from `cas`: the version that `nonce` wrote, or None when it certainly wrote nothing.

    Raises UnknownOutcomeError when a later version hides the answer: the register forgets what it overwrote.
    """
    current = await consensus.head(key)
    if current is None or current.seq <= expected_seq:
        return None
    if current.seq == expected_seq + 1:
        return current if current.nonce == nonce else None
    raise UnknownOutcomeError(
        f"A later version hides the outcome: key={key!r} expected_seq={expected_seq} seq={current.seq}.",
        fix="Re-read the register and decide again from its present contents.",
    )
