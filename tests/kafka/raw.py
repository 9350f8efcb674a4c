"""A client that speaks Kafka by hand, through kio's writers and readers: what real clients never do."""

from __future__ import annotations

import io
import socket
import struct
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from tidemill.topics.batch import Record, encode_batch


def batch(
    values: list[bytes], *, producer: tuple[int, int, int] = (-1, -1, -1), codec: str = "none", base_ms: int = 1_000
) -> bytes:
    """One record batch v2; producer = (id, epoch, first sequence)."""
    producer_id, epoch, sequence = producer
    records = [Record(None, value, timestamp_ms=base_ms + i) for i, value in enumerate(values)]
    return encode_batch(
        records, compression=codec, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
    )


def request_frame(key: int, version: int, correlation_id: int, body: bytes, client_id: str | None = "raw") -> bytes:
    flexible = load_request_schema(key, version).__flexible__
    name = b"\xff\xff" if client_id is None else struct.pack(">h", len(client_id)) + client_id.encode()
    head = struct.pack(">hhi", key, version, correlation_id) + name + (b"\x00" if flexible else b"")
    return struct.pack(">i", len(head) + len(body)) + head + body


def encode(entity: Any) -> bytes:
    with io.BytesIO() as buffer:
        entity_writer(type(entity))(buffer, entity)
        return buffer.getvalue()


def produce_body(topic: str, parts: list[tuple[int, bytes | None]], *, acks: int = -1, transaction: str = "") -> bytes:
    """Produce v3 to v8."""
    out = struct.pack(">h", len(transaction)) + transaction.encode() if transaction else b"\xff\xff"
    out += struct.pack(">hii", acks, 1000, 1) + struct.pack(">h", len(topic)) + topic.encode()
    out += struct.pack(">i", len(parts))
    for partition, records in parts:
        out += struct.pack(">ii", partition, -1 if records is None else len(records)) + (records or b"")
    return out


def fetch_body(topic: str, partition: int, offset: int, *, max_wait_ms: int = 500, min_bytes: int = 1) -> bytes:
    """Fetch v4."""
    out = struct.pack(">iiiib", -1, max_wait_ms, min_bytes, 1 << 20, 0)
    out += struct.pack(">i", 1) + struct.pack(">h", len(topic)) + topic.encode()
    return out + struct.pack(">iiqi", 1, partition, offset, 1 << 20)


class RawClient:
    def __init__(self, port: int, timeout_s: float = 10.0) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout_s)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def send(self, key: int, version: int, correlation_id: int, body: bytes) -> None:
        self.sock.sendall(request_frame(key, version, correlation_id, body))

    def receive(self) -> tuple[int, bytes]:
        """(correlation id, the rest of the response)."""
        (size,) = struct.unpack(">i", self._exactly(4))
        data = self._exactly(size)
        return struct.unpack_from(">i", data)[0], data[4:]

    def ask(self, key: int, version: int, body: bytes, correlation_id: int = 7) -> Any:
        """The response as kio reads it."""
        self.send(key, version, correlation_id, body)
        got, data = self.receive()
        assert got == correlation_id
        return decode(key, version, data)

    def is_closed(self) -> bool:
        """True when the broker has closed this connection; waits for it."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            if not piece:
                raise EOFError("the broker closed the connection")
            data += piece
        return data


def decode(key: int, version: int, data: bytes) -> Any:
    """A response after its correlation id."""
    schema = load_response_schema(key, version)
    if schema.__header_schema__.__version__ == 1:
        assert data[0] == 0
        data = data[1:]
    entity, size = entity_reader(schema)(memoryview(data).toreadonly(), 0)
    assert size == len(data)
    return entity
