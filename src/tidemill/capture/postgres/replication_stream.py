"""The replication stream of one slot: frames in, status updates out."""

from __future__ import annotations

import asyncio

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.errors import CorruptError
from tidemill.base.limits import KAFKA_REQUEST_BYTES
from tidemill.capture.postgres.connection import PgConnection, identifier, literal
from tidemill.capture.postgres.standby_status import (
    PAYLOAD_START,
    Keepalive,
    ReplicationStatus,
    decode_keepalive,
    wal_start_of,
)

MESSAGE_BYTES = 2 * KAFKA_REQUEST_BYTES
"""Maximum size of a message: an UPDATE carries the old row and the new one, each no larger than a record may be.
PostgreSQL's own limit is 1 GiB, and decoding and encoding a message needs several times its size, so of a larger one
only the head is stored.
"""
HEAD_BYTES = 64
STATUS_MIN_INTERVAL_S = 0.02


class FramedMessage(msgspec.Struct, frozen=True):
    """Bytes of one pgoutput message, and its place in the WAL. `left_out`: number of bytes that were removed."""

    lsn: int
    payload: bytes
    left_out: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.payload) + self.left_out


def parse_frame(frame: bytes) -> FramedMessage | Keepalive:
    """Parse a frame. Raises CorruptError for an unknown one."""
    kind = frame[:1]
    if kind == b"w" and len(frame) >= PAYLOAD_START:
        left_out = len(frame) - PAYLOAD_START - HEAD_BYTES if len(frame) > MESSAGE_BYTES else 0
        return FramedMessage(wal_start_of(frame), frame[PAYLOAD_START : len(frame) - left_out], left_out)
    if kind == b"k":
        return decode_keepalive(frame)
    raise CorruptError(f"unknown frame in the replication stream: kind={kind!r} size={len(frame)}.")


class ReplicationStream:
    def __init__(self, wire: PgConnection) -> None:
        self._wire = wire

    async def start(self, slot: str, publication: str) -> None:
        """Start at the slot's confirmed position. Raises SlotLostError, SqlError (the slot is active elsewhere),
        UnavailableError.
        """
        names = literal(identifier(publication)).strip()
        await self._wire.start_copy_both(
            f"START_REPLICATION SLOT {identifier(slot)} LOGICAL 0/0 "
            f"(proto_version '1', publication_names {names}, messages 'true')"
        )

    async def receive(self) -> list[bytes]:
        """Return every frame that is available, in order, at least one; `parse_frame` parses one."""
        return await self._wire.receive()

    async def send_status(self, update: bytes) -> None:
        await self._wire.send(update)

    async def aclose(self) -> None:
        await self._wire.aclose()


class StatusSender:
    """Task that reports the received and flushed positions to the server. `due`: something moved."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.due = asyncio.Event()
        self._ask_keepalive = False

    def request_keepalive(self) -> None:
        self._ask_keepalive = True
        self.due.set()

    async def run(self, stream: ReplicationStream, status: ReplicationStatus, interval_s: float) -> None:
        """Send a status soon after something moved, and at least every `interval_s`, even while everything else is
        stuck.
        """
        while True:
            ask, self._ask_keepalive = self._ask_keepalive, False
            await stream.send_status(status.encode(self._clock.now_ms(), ask=ask))
            await asyncio.sleep(STATUS_MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(interval_s):
                    await self.due.wait()
            except TimeoutError:
                pass
            self.due.clear()
