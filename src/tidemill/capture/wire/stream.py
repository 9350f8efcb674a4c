"""The replication stream of one slot: frames in, status updates out."""

from __future__ import annotations

import msgspec

from tidemill.base.errors import Corrupt
from tidemill.capture.wire.connection import Wire, identifier, literal
from tidemill.capture.wire.pgoutput import Message, decode
from tidemill.capture.wire.status import PAYLOAD_START, Keepalive, decode_keepalive


class Framed(msgspec.Struct, frozen=True):
    """A pgoutput message and the size of its payload."""

    message: Message
    size_bytes: int


class ReplicationStream:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def start(self, slot: str, publication: str) -> None:
        """From the slot's confirmed position. Raises SlotLost, SqlError (the slot is active elsewhere), Unavailable."""
        names = literal(identifier(publication)).strip()
        await self._wire.start_copy_both(
            f"START_REPLICATION SLOT {identifier(slot)} LOGICAL 0/0 "
            f"(proto_version '1', publication_names {names}, messages 'true')"
        )

    async def receive(self) -> list[Framed | Keepalive]:
        """Everything at hand, in order, at least one item."""
        items: list[Framed | Keepalive] = []
        for frame in await self._wire.receive():
            kind = frame[0]
            if kind == 0x77:  # w
                payload = frame[PAYLOAD_START:]
                items.append(Framed(decode(payload), len(payload)))
            elif kind == 0x6B:  # k
                items.append(decode_keepalive(frame))
            else:
                raise Corrupt(f"unknown frame in the replication stream: kind={kind} size={len(frame)}.")
        return items

    async def send_status(self, update: bytes) -> None:
        await self._wire.send(update)

    async def aclose(self) -> None:
        await self._wire.aclose()
