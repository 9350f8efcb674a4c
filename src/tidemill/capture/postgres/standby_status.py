"""Reports to PostgreSQL: the frames of the stream and the table of received and flushed positions. Pure.

    XLogData          w  int64 wal_start   int64 wal_end   int64 send_time_us   payload
    keepalive         k  int64 wal_end   int64 send_time_us   int8 reply_requested
    status update     r  int64 write   int64 flush   int64 apply   int64 clock_us   int8 reply_requested
    (https://www.postgresql.org/docs/current/protocol-replication.html; times are µs since 2000-01-01)

Positions here are *inclusive commit LSNs*: position L says that every transaction whose commit record starts at or
below L is included. The server skips transactions whose commit record starts below the reported position, hence the
wire carries L + 1. A keepalive's wal_end W is the start of the next record, which may still be a commit, so it stands
for W − 1. (Reporting W + 1 would lose exactly that commit.)

    event                          received               flushed
    commit handled at L            max(·, L)              unchanged; last_seen_txn = L, up_to_date recomputed
    keepalive W, outside a txn     max(·, W − 1)          max(·, W − 1) only if up_to_date
    keepalive W, inside a txn      unchanged              unchanged
    flush notice L                 max(·, L)              up_to_date ? received : max(·, L); recomputed first

`up_to_date` ⇔ everything seen is confirmed. It is recomputed after both the commit and the flush notice: skipping the
first would let keepalives confirm transactions that are still in buffers (electric #4731).
"""

from __future__ import annotations

import struct

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.capture.postgres.pgoutput import POSTGRES_EPOCH_MS

_XLOG_DATA = struct.Struct(">cqqq")
_KEEPALIVE = struct.Struct(">cqqB")
_STATUS = struct.Struct(">cqqqqB")
PAYLOAD_START = _XLOG_DATA.size


class Keepalive(msgspec.Struct, frozen=True):
    wal_end: int
    reply_requested: bool


def decode_keepalive(data: bytes) -> Keepalive:
    """Decode a keepalive. Raises CorruptError."""
    if len(data) != _KEEPALIVE.size or data[:1] != b"k":
        raise CorruptError(f"malformed keepalive: bytes={data[:32].hex()}.")
    _, wal_end, _, reply = _KEEPALIVE.unpack(data)
    return Keepalive(wal_end, bool(reply))


def wal_start_of(frame: bytes) -> int:
    """Return the WAL start of an XLogData frame."""
    return int.from_bytes(frame[1:9], "big")


def encode_status(received: int, flushed: int, now_ms: int, *, ask: bool = False) -> bytes:
    """Encode a standby status update for the inclusive positions `received` and `flushed`. `ask` requests a keepalive
    in return.
    """
    clock_us = (now_ms - POSTGRES_EPOCH_MS) * 1000
    return _STATUS.pack(b"r", received + 1, flushed + 1, flushed + 1, clock_us, int(ask))


class ReplicationStatus:
    """The table of the module docstring as an object. `start` is the slot's confirmed position, inclusive."""

    def __init__(self, start: int) -> None:
        self.received = start
        self.flushed = start
        self.confirmed = start
        self.sent = start
        """Position that was last reported to the server as flushed."""
        self.last_seen_txn = start
        self.up_to_date = True
        self.hold: int | None = None
        """Limit of the position that is reported as flushed, while a table is copied concurrently with the stream."""
        self.bound: int | None = None
        """Second limit, the position of the newest binding. None = nothing is bound."""

    @property
    def reported_flush(self) -> int:
        """Position that is reported to the server as flushed."""
        return min(limit for limit in (self.flushed, self.hold, self.bound) if limit is not None)

    def record_commit(self, commit_lsn: int) -> None:
        """Note that every sink has received the transaction (not: has flushed it)."""
        self.received = max(self.received, commit_lsn)
        self.last_seen_txn = max(self.last_seen_txn, commit_lsn)
        self._recompute_up_to_date()

    def record_keepalive(self, wal_end: int, *, inside_txn: bool) -> None:
        if inside_txn:
            return
        self.received = max(self.received, wal_end - 1)
        if self.up_to_date:
            self.flushed = max(self.flushed, wal_end - 1)

    def record_flush_notice(self, lsn: int) -> None:
        """Note that, according to the flush tracker, every transaction at or below `lsn` is durable in every sink."""
        self.confirmed = max(self.confirmed, lsn)
        self._recompute_up_to_date()
        self.received = max(self.received, lsn)
        self.flushed = self.received if self.up_to_date else max(self.flushed, lsn)

    def _recompute_up_to_date(self) -> None:
        self.up_to_date = self.confirmed >= self.last_seen_txn

    def encode(self, now_ms: int, *, ask: bool = False) -> bytes:
        self.sent = self.reported_flush
        return encode_status(self.received, self.sent, now_ms, ask=ask)


def keepalive_interval_s(wal_sender_timeout_ms: int) -> float:
    """Return the interval at which a status is sent even if nothing moves: a third of the server's patience, at most 15
    s.
    """
    return 15.0 if wal_sender_timeout_ms <= 0 else min(wal_sender_timeout_ms / 3000, 15.0)
