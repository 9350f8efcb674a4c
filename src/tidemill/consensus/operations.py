"""The operations of the contract, each defined once: its wire form, its result, its checks and its effect.

Wire: msgspec encodes an operation as the array `[tag, field, …]`, the payload of the SQLite protocol. The parameter of
the base class is the type of the result; `current` is the type of the state that a rejection carries.

`validate` rejects an operation that is invalid in any state, before it costs a round trip. `apply` is the rule: it
reads an engine's state, then writes the new state, or raises the outcome without having written. Fencing, the single
winner and lease expiry (see `api`) are decided there, for the memory and SQLite engines. PostgreSQL states the same
rules in SQL; the contract suite proves that both agree.

A write changes durable state. Every other operation may be repeated after a lost connection.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from tidemill.base.errors import ConflictError, FencedError, InvalidError, MissingError
from tidemill.base.limits import LOG_RECORD_BYTES, MIB, REGISTER_BYTES
from tidemill.consensus.api import Changes, Lease, LogHead, LogSlice, Versioned
from tidemill.consensus.engine_state import EngineState, LeaseRow

APPEND_BYTES = 64 * MIB
"""Limit for all records of one append together; they are sent and committed as one piece."""

NAME_BYTES = 512
"""Limit for keys, log names, lease names, holders and nonces, in UTF-8.

A PostgreSQL index entry holds about 2,700 bytes.
"""

LEASE_TTL_MAX_MS = (1 << 55) - 1
"""Limit for the time to live of a lease. Added to any time, it still fits the 63 bits of every engine."""

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Op(msgspec.Struct, Generic[ResultT_co], frozen=True, array_like=True):
    writes: ClassVar[bool] = False
    current: ClassVar[Any] = None

    def validate(self) -> None:
        """Raise InvalidError for an operation that is invalid in any state."""
        raise NotImplementedError

    def apply(self, state: EngineState, now_ms: int) -> ResultT_co:
        """Check, then write, then return the result. Raises the outcome without having written."""
        raise NotImplementedError


# registers ------------------------------------------------------------------------------------------
class Head(Op[Versioned | None], frozen=True, tag=1):
    key: str

    def validate(self) -> None:
        _check_query_text("key", self.key)

    def apply(self, state: EngineState, now_ms: int) -> Versioned | None:
        return state.version(self.key)


class Cas(Op[Versioned], frozen=True, tag=2):
    writes: ClassVar[bool] = True
    current: ClassVar[Any] = Versioned | None
    key: str
    expected_seq: int
    data: bytes
    nonce: str

    def validate(self) -> None:
        _check_name("key", self.key)
        _check_name("nonce", self.nonce)
        _check_integer("expected_seq", self.expected_seq)
        if len(self.data) > REGISTER_BYTES:
            raise _too_large_error("register", self.key, len(self.data), REGISTER_BYTES)

    def apply(self, state: EngineState, now_ms: int) -> Versioned:
        _check_version(state.version(self.key), self)
        version = Versioned(self.expected_seq + 1, self.data, self.nonce)
        state.put_version(self.key, version)
        return version


class Drop(Op[None], frozen=True, tag=13):
    writes: ClassVar[bool] = True
    current: ClassVar[Any] = Versioned | None
    key: str
    expected_seq: int

    def validate(self) -> None:
        _check_name("key", self.key)
        _check_integer("expected_seq", self.expected_seq)
        if self.expected_seq == 0:
            raise InvalidError(f"cannot drop an absent register: key={self.key!r}.", fix="Read the register first.")

    def apply(self, state: EngineState, now_ms: int) -> None:
        _check_version(state.version(self.key), self)
        state.put_version(self.key, None)


class Scan(Op[list[tuple[str, Versioned]]], frozen=True, tag=3):
    prefix: str

    def validate(self) -> None:
        _check_query_text("prefix", self.prefix)

    def apply(self, state: EngineState, now_ms: int) -> list[tuple[str, Versioned]]:
        return state.versions(self.prefix)


def _check_version(current: Versioned | None, op: Cas | Drop) -> None:
    if (current.seq if current else 0) != op.expected_seq:
        raise cas_conflict_error(current, op)


def cas_conflict_error(current: Versioned | None, op: Cas | Drop) -> ConflictError:
    seq = current.seq if current else 0
    return ConflictError(
        f"the register is at another version: key={op.key!r} expected_seq={op.expected_seq} seq={seq}.", current=current
    )


# fenced logs ----------------------------------------------------------------------------------------
class HeadOfLog(Op[LogHead], frozen=True, tag=4):
    log: str

    def validate(self) -> None:
        _check_query_text("log", self.log)

    def apply(self, state: EngineState, now_ms: int) -> LogHead:
        return state.head(self.log)


class Fence(Op[LogHead], frozen=True, tag=5):
    writes: ClassVar[bool] = True
    current: ClassVar[Any] = LogHead
    log: str
    term: int

    def validate(self) -> None:
        _check_name("log", self.log)
        _check_integer("term", self.term)

    def apply(self, state: EngineState, now_ms: int) -> LogHead:
        head = state.head(self.log)
        if self.term < head.term:
            raise fenced_error(head, self)
        if self.term > head.term:
            head = LogHead(self.term, head.start, head.next)
            state.put_head(self.log, head)
        return head


class Append(Op[LogHead], frozen=True, tag=6):
    writes: ClassVar[bool] = True
    current: ClassVar[Any] = LogHead
    log: str
    term: int
    expected_next: int
    records: tuple[bytes, ...]
    nonce: str

    def validate(self) -> None:
        _check_name("log", self.log)
        _check_name("nonce", self.nonce)
        _check_integer("term", self.term)
        _check_integer("expected_next", self.expected_next)
        if not self.records:
            raise InvalidError(
                f"an append needs at least one record: log={self.log!r}.",
                fix="Use fence to raise a term without records.",
            )
        total = 0
        for record in self.records:
            if len(record) > LOG_RECORD_BYTES:
                raise _too_large_error("record", self.log, len(record), LOG_RECORD_BYTES)
            total += len(record)
        if total > APPEND_BYTES:
            raise _too_large_error("append", self.log, total, APPEND_BYTES)

    def apply(self, state: EngineState, now_ms: int) -> LogHead:
        head = state.head(self.log)
        if self.term < head.term:
            raise fenced_error(head, self)
        if self.expected_next != head.next:
            raise append_conflict_error(head, self)
        head = LogHead(self.term, head.start, head.next + len(self.records))
        state.put_head(self.log, head, self)
        return head


class Read(Op[LogSlice], frozen=True, tag=7):
    log: str
    start: int
    limit_records: int
    limit_bytes: int

    def validate(self) -> None:
        _check_name("log", self.log)
        _check_integer("start", self.start)
        _check_integer("limit_bytes", self.limit_bytes)

    def apply(self, state: EngineState, now_ms: int) -> LogSlice:
        head = state.head(self.log)
        if self.start < head.start:
            raise truncated_error(head, self)
        return LogSlice(tuple(state.records_of(self, head)) if self.start < head.next else (), head)


class Truncate(Op[LogHead], frozen=True, tag=8):
    writes: ClassVar[bool] = True
    log: str
    before: int

    def validate(self) -> None:
        _check_name("log", self.log)
        _check_integer("before", self.before)

    def apply(self, state: EngineState, now_ms: int) -> LogHead:
        head = state.head(self.log)
        cut = self.cut(head)
        if cut is not head:
            state.put_head(self.log, cut)
        return cut

    def cut(self, head: LogHead) -> LogHead:
        """Return the head after the truncation; the same one if it removes nothing."""
        if self.before > head.next:
            raise InvalidError(
                f"cannot truncate past the log's end: log={self.log!r} before={self.before} next={head.next}.",
                fix="Truncate at or below head.next.",
            )
        return head if self.before <= head.start else LogHead(head.term, self.before, head.next)


class Wait(Op[bool], frozen=True, tag=9):
    """Answered as soon as head.next > beyond. The client owns the deadline; it cancels with `CancelWait`."""

    log: str
    beyond: int

    def validate(self) -> None:
        _check_query_text("log", self.log)

    def apply(self, state: EngineState, now_ms: int) -> bool:
        return state.head(self.log).next > self.beyond


class Changed(Op[Changes], frozen=True, tag=14):
    prefix: str
    since: str = ""

    def validate(self) -> None:
        _check_query_text("prefix", self.prefix)
        _check_query_text("token", self.since)

    def apply(self, state: EngineState, now_ms: int) -> Changes:
        return state.changes(self)


def fenced_error(head: LogHead, op: Fence | Append) -> FencedError:
    return FencedError(f"a newer term was fenced: log={op.log!r} term={op.term} newer={head.term}.", current=head)


def append_conflict_error(head: LogHead, op: Append) -> ConflictError:
    return ConflictError(
        f"the log ends at another position: log={op.log!r} expected_next={op.expected_next} next={head.next}.",
        current=head,
    )


def truncated_error(head: LogHead, op: Read) -> MissingError:
    return MissingError(
        f"the records were truncated: log={op.log!r} asked={op.start} start={head.start}.",
        fix="Start again from head.start, where the rollup is.",
    )


# leases ---------------------------------------------------------------------------------------------
class Acquire(Op[Lease], frozen=True, tag=10):
    writes: ClassVar[bool] = True
    current: ClassVar[Any] = Lease | None
    name: str
    holder: str
    ttl_ms: int
    info: bytes = b""

    def validate(self) -> None:
        _check_name("lease name", self.name)
        _check_name("holder", self.holder)
        if not 0 < self.ttl_ms <= LEASE_TTL_MAX_MS:
            raise InvalidError(
                f"a lease lasts 1 to {LEASE_TTL_MAX_MS} ms: name={self.name!r} ttl_ms={self.ttl_ms}.",
                fix="Pass a ttl_ms in this range.",
            )
        if len(self.info) > REGISTER_BYTES:
            raise _too_large_error("lease info", self.name, len(self.info), REGISTER_BYTES)

    def apply(self, state: EngineState, now_ms: int) -> Lease:
        row = state.lease(self.name)
        if row is None:
            term = 1
        elif row.holder == self.holder:
            term = row.term
        elif row.is_live(now_ms):
            raise lease_conflict_error(row.view(now_ms))
        else:
            term = row.term + 1
        row = LeaseRow(self.name, self.holder, term, self.ttl_ms, now_ms + self.ttl_ms, self.info)
        state.put_lease(row)
        return row.view(now_ms)


class Release(Op[None], frozen=True, tag=11):
    writes: ClassVar[bool] = True
    name: str
    holder: str
    term: int

    def validate(self) -> None:
        _check_query_text("lease name", self.name)
        _check_query_text("holder", self.holder)

    def apply(self, state: EngineState, now_ms: int) -> None:
        row = state.lease(self.name)
        if row is not None and row.holder == self.holder and row.term == self.term:
            state.put_lease(LeaseRow(row.name, "", row.term, row.ttl_ms, 0, row.info))


class Leases(Op[list[Lease]], frozen=True, tag=12):
    prefix: str

    def validate(self) -> None:
        _check_query_text("prefix", self.prefix)

    def apply(self, state: EngineState, now_ms: int) -> list[Lease]:
        return [row.view(now_ms) for row in state.leases_of(self.prefix)]


def lease_conflict_error(current: Lease) -> ConflictError:
    return ConflictError(
        f"the lease is held: name={current.name!r} holder={current.holder!r} remaining_ms={current.remaining_ms}.",
        current=current,
    )


WriteOp = Cas | Drop | Fence | Append | Truncate | Acquire | Release
AnyOp = WriteOp | Head | Scan | HeadOfLog | Read | Wait | Leases | Changed


# checks ---------------------------------------------------------------------------------------------
def _check_query_text(what: str, value: str) -> None:
    """Check a name in a query.

    It may name something that cannot exist, but it is batched with others, so every engine must accept it as text.
    """
    if "\0" in value or not (value.isascii() or _is_text(value)):
        raise InvalidError(
            f"a {what} must be text without NUL: {what.replace(' ', '_')}={value[:80]!r}.", fix="Correct the name."
        )


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
