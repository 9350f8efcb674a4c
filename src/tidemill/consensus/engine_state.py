"""State of an engine: how an operation reads and writes it, rows of leases, and the clock by which they expire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from tidemill.base.clock import Clock
from tidemill.consensus.api import Changes, Lease, LogHead, LogRecord, Versioned

if TYPE_CHECKING:
    from tidemill.consensus.operations import Append, Changed, Read

UNWRITTEN = LogHead(0, 0, 0)

LEASE_SPAN_TTLS = 2
"""Limit of a lease's remaining time, in its `ttl_ms`: a clock that is set back by one `ttl_ms` expires no lease."""


class LeaseRow(msgspec.Struct, frozen=True):
    """A lease as stored. A released one has holder "" and is never live; its term is not reused.

    A lease is granted for `ttl_ms`. A remaining time above LEASE_SPAN_TTLS times `ttl_ms` shows that the clock was set
    back, or that another host's clock granted the lease. Such a lease counts as expired. A live holder renews it by the
    new clock.
    """

    name: str
    holder: str
    term: int
    ttl_ms: int
    expires_ms: int
    info: bytes = b""

    def is_live(self, now_ms: int) -> bool:
        return bool(self.holder) and 0 < self.expires_ms - now_ms <= LEASE_SPAN_TTLS * self.ttl_ms

    def view(self, now_ms: int) -> Lease:
        live = self.is_live(now_ms)
        remaining_ms = min(self.expires_ms - now_ms, self.ttl_ms) if live else 0
        return Lease(self.name, self.holder, self.term, self.ttl_ms, remaining_ms, live, self.info)


class EngineState(Protocol):
    """State of an engine as one operation reads and writes it. A write need not be durable yet."""

    def head(self, log: str) -> LogHead: ...

    def put_head(self, log: str, head: LogHead, appended: Append | None = None) -> None: ...

    def records_of(self, op: Read, head: LogHead) -> Sequence[LogRecord]: ...

    def changes(self, op: Changed) -> Changes: ...

    def version(self, key: str) -> Versioned | None: ...

    def put_version(self, key: str, version: Versioned | None) -> None: ...

    def versions(self, prefix: str) -> list[tuple[str, Versioned]]: ...

    def lease(self, name: str) -> LeaseRow | None: ...

    def put_lease(self, row: LeaseRow) -> None: ...

    def leases_of(self, prefix: str) -> Iterable[LeaseRow]: ...


class EngineClock:
    """Clock that starts at the later of the wall clock and the last time ever seen, then runs monotonically.

    Steps of the wall clock during a life therefore neither expire a lease early nor prolong one. The clock never goes
    back, within a process life or across them.
    """

    def __init__(self, clock: Clock, last_seen_ms: int = 0) -> None:
        self._clock = clock
        self._base_ms = max(clock.now_ms(), last_seen_ms)
        self._started_s = clock.monotonic_s()

    def now_ms(self) -> int:
        return self._base_ms + round((self._clock.monotonic_s() - self._started_s) * 1000)


def prefix_within(records: list[LogRecord], limit_bytes: int) -> tuple[LogRecord, ...]:
    """Return the longest prefix of at most limit_bytes, but at least one record."""
    total = 0
    for index, record in enumerate(records):
        total += len(record.data)
        if total > limit_bytes and index > 0:
            return tuple(records[:index])
    return tuple(records)
