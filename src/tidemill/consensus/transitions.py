"""The rules of the contract as pure functions over one entity, of the memory and SQLite engines, and their clock.

Fencing, the single winner and lease expiry (see `api`) are checked here. Each function returns the entity's new state,
or raises the outcome. None changes its arguments, so a rejected operation has no effect. PostgreSQL states the same
rules in SQL; the contract suite proves that both agree. The clock never goes back, within a process
life or across them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.errors import ConflictError, FencedError, InvalidError, MissingError
from tidemill.base.limits import LOG_RECORD_BYTES, MIB, REGISTER_BYTES
from tidemill.consensus.api import Lease, LogHead, LogRecord, Versioned
from tidemill.consensus.operations import (
    Acquire,
    AnyOp,
    Append,
    Cas,
    Changed,
    Drop,
    Fence,
    Head,
    HeadOfLog,
    Leases,
    Read,
    Release,
    Scan,
    Truncate,
    Wait,
)

APPEND_BYTES = 64 * MIB
"""Limit for all records of one append together; they are sent and committed as one piece."""

NAME_BYTES = 512
"""Limit for keys, log names, lease names, holders and nonces, in UTF-8.

A PostgreSQL index entry holds about 2,700 bytes.
"""

UNWRITTEN = LogHead(0, 0, 0)


class LeaseRow(msgspec.Struct, frozen=True):
    """A lease as stored. A released one has holder "" and is never live; its term is not reused."""

    name: str
    holder: str
    term: int
    ttl_ms: int
    expires_ms: int
    info: bytes = b""

    def view(self, now_ms: int) -> Lease:
        remaining_ms = max(0, self.expires_ms - now_ms) if self.holder else 0
        return Lease(self.name, self.holder, self.term, self.ttl_ms, remaining_ms, remaining_ms > 0, self.info)


class EngineClock:
    """Clock that starts at the later of the wall clock and the last time ever seen, then runs monotonically.

    Steps of the wall clock during a life therefore neither expire a lease early nor prolong one.
    """

    def __init__(self, clock: Clock, last_seen_ms: int = 0) -> None:
        self._clock = clock
        self._base_ms = max(clock.now_ms(), last_seen_ms)
        self._started_s = clock.monotonic_s()

    def now_ms(self) -> int:
        return self._base_ms + round((self._clock.monotonic_s() - self._started_s) * 1000)


def cas(current: Versioned | None, op: Cas) -> Versioned:
    if (current.seq if current else 0) != op.expected_seq:
        raise cas_conflict_error(current, op)
    return Versioned(op.expected_seq + 1, op.data, op.nonce)


def drop(current: Versioned | None, op: Drop) -> None:
    if (current.seq if current else 0) != op.expected_seq:
        raise cas_conflict_error(current, op)


def cas_conflict_error(current: Versioned | None, op: Cas | Drop) -> ConflictError:
    seq = current.seq if current else 0
    return ConflictError(
        f"the register is at another version: key={op.key!r} expected_seq={op.expected_seq} seq={seq}.", current=current
    )


def fence(head: LogHead, op: Fence) -> LogHead:
    if op.term < head.term:
        raise fenced_error(head, op.log, op.term)
    return head if op.term == head.term else LogHead(op.term, head.start, head.next)


def append(head: LogHead, op: Append) -> LogHead:
    if op.term < head.term:
        raise fenced_error(head, op.log, op.term)
    if op.expected_next != head.next:
        raise append_conflict_error(head, op)
    return LogHead(op.term, head.start, head.next + len(op.records))


def fenced_error(head: LogHead, log: str, term: int) -> FencedError:
    return FencedError(f"a newer term was fenced: log={log!r} term={term} newer={head.term}.", current=head)


def append_conflict_error(head: LogHead, op: Append) -> ConflictError:
    return ConflictError(
        f"the log ends at another position: log={op.log!r} expected_next={op.expected_next} next={head.next}.",
        current=head,
    )


def truncate(head: LogHead, op: Truncate) -> LogHead:
    if op.before > head.next:
        raise InvalidError(
            f"cannot truncate past the log's end: log={op.log!r} before={op.before} next={head.next}.",
            fix="Truncate at or below head.next.",
        )
    return head if op.before <= head.start else LogHead(head.term, op.before, head.next)


def check_read(head: LogHead, op: Read) -> None:
    if op.start < head.start:
        raise truncated_error(head, op)


def truncated_error(head: LogHead, op: Read) -> MissingError:
    return MissingError(
        f"the records were truncated: log={op.log!r} asked={op.start} start={head.start}.",
        fix="Start again from head.start, where the rollup is.",
    )


def prefix_within(records: list[LogRecord], limit_bytes: int) -> tuple[LogRecord, ...]:
    """Return the longest prefix of at most limit_bytes, but at least one record."""
    total = 0
    for index, record in enumerate(records):
        total += len(record.data)
        if total > limit_bytes and index > 0:
            return tuple(records[:index])
    return tuple(records)


def acquire(row: LeaseRow | None, op: Acquire, now_ms: int) -> LeaseRow:
    if row is None:
        term = 1
    elif row.holder == op.holder:
        term = row.term
    elif row.holder and row.expires_ms > now_ms:
        raise lease_conflict_error(row.view(now_ms))
    else:
        term = row.term + 1
    return LeaseRow(op.name, op.holder, term, op.ttl_ms, now_ms + op.ttl_ms, op.info)


def lease_conflict_error(current: Lease) -> ConflictError:
    return ConflictError(
        f"the lease is held: name={current.name!r} holder={current.holder!r} remaining_ms={current.remaining_ms}.",
        current=current,
    )


def release(row: LeaseRow | None, op: Release) -> LeaseRow | None:
    """Return the row after the release, or None if it does not change."""
    if row is None or row.holder != op.holder or row.term != op.term:
        return None
    return LeaseRow(row.name, "", row.term, row.ttl_ms, 0, row.info)


def validate_operation(op: AnyOp) -> None:
    """Reject an operation that is invalid in any state, before it costs a round trip. Raises InvalidError."""
    check = _VALIDATIONS.get(type(op))
    if check is not None:
        check(op)


def _validate_append(op: Append) -> None:
    _check_name("log", op.log)
    _check_name("nonce", op.nonce)
    _check_integer("term", op.term)
    _check_integer("expected_next", op.expected_next)
    if not op.records:
        raise InvalidError(
            f"an append needs at least one record: log={op.log!r}.", fix="Use fence to raise a term without records."
        )
    total = 0
    for record in op.records:
        if len(record) > LOG_RECORD_BYTES:
            raise _too_large_error("record", op.log, len(record), LOG_RECORD_BYTES)
        total += len(record)
    if total > APPEND_BYTES:
        raise _too_large_error("append", op.log, total, APPEND_BYTES)


def _validate_cas(op: Cas) -> None:
    _check_name("key", op.key)
    _check_name("nonce", op.nonce)
    _check_integer("expected_seq", op.expected_seq)
    if len(op.data) > REGISTER_BYTES:
        raise _too_large_error("register", op.key, len(op.data), REGISTER_BYTES)


def _validate_drop(op: Drop) -> None:
    _check_name("key", op.key)
    _check_integer("expected_seq", op.expected_seq)
    if op.expected_seq == 0:
        raise InvalidError(f"cannot drop an absent register: key={op.key!r}.", fix="Read the register first.")


def _validate_acquire(op: Acquire) -> None:
    _check_name("lease name", op.name)
    _check_name("holder", op.holder)
    _check_integer("ttl_ms", op.ttl_ms << 8)  # Added to a time, it still fits 63 bits.
    if op.ttl_ms <= 0:
        raise InvalidError(
            f"a lease lasts at least 1 ms: name={op.name!r} ttl_ms={op.ttl_ms}.", fix="Pass a longer ttl_ms."
        )
    if len(op.info) > REGISTER_BYTES:
        raise _too_large_error("lease info", op.name, len(op.info), REGISTER_BYTES)


def _validate_fence(op: Fence) -> None:
    _check_name("log", op.log)
    _check_integer("term", op.term)


def _validate_truncate(op: Truncate) -> None:
    _check_name("log", op.log)
    _check_integer("before", op.before)


def _validate_read(op: Read) -> None:
    _check_name("log", op.log)
    _check_integer("start", op.start)
    _check_integer("limit_bytes", op.limit_bytes)


def _validate_release(op: Release) -> None:
    _check_query_text("lease name", op.name)
    _check_query_text("holder", op.holder)


def _validate_changed(op: Changed) -> None:
    _check_query_text("prefix", op.prefix)
    _check_query_text("token", op.since)


def _check_query_text(what: str, value: str) -> None:
    """Check a name in a query.

    It may name something that cannot exist, but it is batched with others, so every engine must accept it as text.
    """
    if "\0" in value or not (value.isascii() or _is_text(value)):
        raise InvalidError(
            f"a {what} must be text without NUL: {what.replace(' ', '_')}={value[:80]!r}.", fix="Correct the name."
        )


_VALIDATIONS: dict[type, Callable[[Any], None]] = {
    Append: _validate_append,
    Cas: _validate_cas,
    Drop: _validate_drop,
    Acquire: _validate_acquire,
    Fence: _validate_fence,
    Truncate: _validate_truncate,
    Read: _validate_read,
    Head: lambda op: _check_query_text("key", op.key),
    HeadOfLog: lambda op: _check_query_text("log", op.log),
    Wait: lambda op: _check_query_text("log", op.log),
    Scan: lambda op: _check_query_text("prefix", op.prefix),
    Changed: _validate_changed,
    Leases: lambda op: _check_query_text("prefix", op.prefix),
    Release: _validate_release,
}


def _check_name(what: str, value: str) -> None:
    if value.isascii() and 0 < len(value) <= NAME_BYTES and "\0" not in value:
        return
    if not value or "\0" in value or len(value.encode(errors="replace")) > NAME_BYTES or not _is_text(value):
        raise InvalidError(
            f"a {what} must have 1 to {NAME_BYTES} bytes and no NUL: {what.replace(' ', '_')}={value[:80]!r}.",
            fix="Use a shorter, non-empty name.",
        )


def _is_text(value: str) -> bool:
    """False for lone surrogates, which no engine stores."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _check_integer(what: str, value: int) -> None:
    if not 0 <= value < 1 << 63:
        raise InvalidError(
            f"a {what} must be between 0 and 2^63 - 1: {what}={value}.", fix="Pass a value in this range."
        )


def _too_large_error(what: str, name: str, size_bytes: int, limit_bytes: int) -> InvalidError:
    return InvalidError(
        f"the {what} is too large: name={name!r} size_bytes={size_bytes} limit_bytes={limit_bytes}.",
        fix="Store the bytes as an object and keep its key here.",
    )
