"""Byte formats of a partition's log records and rollup objects.

log record     msgpack array [tag, fields…]
                 1  at_ms, [object key…], [[object index, first byte, size, base offset, record count,
                    producer id, producer epoch, base sequence, max timestamp, kind]…]
                 2  object key, size, [commands that the object does not include yet…]
                 3  at_ms, log start, writer, below, reconciled, aborted start
rollup object  'TMPR' | version uint8 = 1 | msgpack map | crc32c uint32 of all preceding bytes, little-endian
                 columns are little-endian int64/uint32 arrays as binary; `aborted` as in `transactions`
"""

from __future__ import annotations

import sys
from array import array

import crc32c
import msgspec

from tidemill.base.errors import CorruptError
from tidemill.topics.partition.state_machine.commands import Command
from tidemill.topics.partition.state_machine.producer_state import ProducerState
from tidemill.topics.partition.state_machine.state import PartitionState, SettledMark, running_maximum
from tidemill.topics.partition.state_machine.transactions import AbortedIndex, OpenTransaction

MAGIC = b"TMPR\x01"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class _Snapshot(msgspec.Struct, frozen=True):
    applied: int
    log_start: int
    high_watermark: int
    last_at_ms: int
    terms: list[tuple[int, int]]
    producers: list[tuple[int, ProducerState]]
    object_keys: list[str]
    bases: bytes
    objects: bytes
    first_bytes: bytes
    sizes: bytes
    max_timestamps: bytes
    settled: SettledMark = SettledMark()
    transactions: list[tuple[int, OpenTransaction]] = []
    aborted: bytes = b""
    reconciled: int = 0
    aborted_start: int = 0


def encode_command(command: Command) -> bytes:
    return _encoder.encode(command)


def decode_command(data: bytes) -> Command:
    """Decode a log record. Raises CorruptError if it is malformed."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptError(f"unreadable record of a partition log: cause={error}.") from error


def encode_state(state: PartitionState) -> bytes:
    """Encode the rollup object of `state`, without expired producers."""
    live = list(state.live_producers())
    snapshot = _Snapshot(
        state.applied,
        state.log_start,
        state.high_watermark,
        state.last_at_ms,
        state.terms,
        live,
        state.object_keys,
        _column(state.bases),
        _column(state.objects),
        _column(state.first_bytes),
        _column(state.sizes),
        _column(state.max_timestamps),
        state.settled,
        list(state.transactions.items()),
        state.aborted.encode(),
        state.reconciled,
        state.aborted_start,
    )
    body = MAGIC + _encoder.encode(snapshot)
    return body + int(crc32c.crc32c(body)).to_bytes(4, "little")


def decode_state(data: bytes, object_key: str) -> PartitionState:
    """Decode the state as of the rollup's own position: `applied` is the position of its log record.

    Raises CorruptError.
    """
    body, crc = data[:-4], data[-4:]
    if not body.startswith(MAGIC) or crc32c.crc32c(body).to_bytes(4, "little") != crc:
        raise CorruptError(f"damaged rollup object: key={object_key}.")
    try:
        snapshot = msgspec.msgpack.decode(body[len(MAGIC) :], type=_Snapshot)
    except msgspec.DecodeError as error:
        raise CorruptError(f"unreadable rollup object: key={object_key} cause={error}.") from error
    state = PartitionState()
    state.applied = snapshot.applied
    state.log_start = snapshot.log_start
    state.reconciled = snapshot.reconciled
    state.aborted_start = snapshot.aborted_start
    state.high_watermark = snapshot.high_watermark
    state.last_at_ms = snapshot.last_at_ms
    state.settled = snapshot.settled
    state.transactions = dict(snapshot.transactions)
    state.aborted = AbortedIndex(snapshot.aborted)
    state.terms = list(snapshot.terms)
    state.producers = dict(snapshot.producers)
    state.object_keys = list(snapshot.object_keys)
    columns = (state.bases, state.objects, state.first_bytes, state.sizes, state.max_timestamps)
    stored = (snapshot.bases, snapshot.objects, snapshot.first_bytes, snapshot.sizes, snapshot.max_timestamps)
    for column, raw in zip(columns, stored, strict=True):
        column.frombytes(raw)
        if sys.byteorder == "big":
            column.byteswap()
    state.highest_timestamps = running_maximum(state.max_timestamps)
    return state


def _column(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
