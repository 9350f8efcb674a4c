"""Encoding of a domain's log records and rollups: msgpack arrays, positional, with append-only tags.

    record   = [tag, field…]                 one update; unknown tags are corrupt, extra fields are ignored
      1 set uuid    [1, domain_uuid]
      2 write       [2, domain_uuid, [key…], [value…]]     as many keys as values; "" as a value deletes
      3 persist     [3, domain_uuid, manifest]
      4 reset       [4, domain_uuid, manifest | nil]
    manifest = [data, last_seqno, epoch, number]
    rollup   = [1, domain_uuid, seqno_delta, epoch_delta, manifest | nil, [[seqno, [key…], [value…]]…]]

Keys, values and data are msgpack bin; uuids are strings. Decoding copies keys and values once; the volatile buffer and
the memtable share that copy. The leading 1 of a rollup is the format version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.metastore.domain.commands import Command
from tidemill.metastore.domain.state import DomainState, PersistedManifest, VolatileBatch, batch_bytes

ROLLUP_FORMAT = 1

SLICE_ROWS = 2_000
"""Rows of a rollup encoded or decoded in one step: a few milliseconds. A full buffer has some hundred thousand rows."""

B = TypeVar("B")

_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode


class _Rollup(msgspec.Struct, Generic[B], array_like=True):
    format: int
    domain_uuid: str
    seqno_delta: int
    epoch_delta: int
    manifest: PersistedManifest | None
    volatile: B


_decode_rollup = msgspec.msgpack.Decoder(_Rollup[list[msgspec.Raw]]).decode
_decode_batch = msgspec.msgpack.Decoder(VolatileBatch).decode
_decode_head = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def encode_command(command: Command) -> bytes:
    return _encode(command)


def decode_command(data: bytes) -> Command:
    """Decode an update. Raises CorruptError if the bytes are not an update of this format."""
    try:
        command: Command = _decode_command(data)
        return command
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"a record of a domain's log cannot be read: size_bytes={len(data)} reason={str(error)!r}.",
            fix="Upgrade tidemill if a newer version wrote it.",
        ) from error


def encode_state(state: DomainState) -> bytes:
    """Encode a rollup: everything a reader needs in place of the records before it."""
    return _encode(_rollup(state, list(state.volatile)))


async def encode_state_yielding(state: DomainState) -> bytes:
    """Encode the state as of the call, with the same bytes as `encode_state`, but yield to the event loop in
    between."""
    volatile = list(state.volatile)
    pieces = [_encode(_rollup(state, []))[:-1], _array_head(len(volatile))]
    rows = 0
    for batch in volatile:
        pieces.append(_encode(batch))
        rows += len(batch.keys)
        if rows >= SLICE_ROWS:
            rows = 0
            await asyncio.sleep(0)
    data = b"".join(pieces)
    await asyncio.sleep(0)
    return data


def _rollup(state: DomainState, volatile: list[VolatileBatch]) -> _Rollup[list[VolatileBatch]]:
    return _Rollup(ROLLUP_FORMAT, state.domain_uuid, state.seqno_delta, state.epoch_delta, state.manifest, volatile)


def decode_state(data: bytes) -> DomainState:
    """Decode a rollup. Raises CorruptError if the bytes are not a rollup of this format."""
    state, batches = _decode_steps(data)
    for _ in batches:
        pass
    return state


async def decode_state_yielding(data: bytes) -> DomainState:
    """Decode a rollup, as `decode_state`, but yield to the event loop in between."""
    state, batches = _decode_steps(data)
    for _ in batches:
        await asyncio.sleep(0)
    return state


def _decode_steps(data: bytes) -> tuple[DomainState, Iterator[None]]:
    """Return the state without its batches, and an iterator that adds them in steps of SLICE_ROWS rows."""
    state = DomainState()
    try:
        rollup = _decode_rollup(data)
    except msgspec.MsgspecError as error:
        _check_format(data)
        raise _undecodable_error(data, error) from error
    if rollup.format != ROLLUP_FORMAT:
        raise _unknown_format_error(rollup.format)
    state.domain_uuid = rollup.domain_uuid
    state.seqno_delta, state.epoch_delta = rollup.seqno_delta, rollup.epoch_delta
    state.manifest = rollup.manifest

    def batches() -> Iterator[None]:
        rows = 0
        try:
            for raw in rollup.volatile:
                batch = _decode_batch(raw)
                state.volatile.append(batch)
                state.volatile_bytes += batch_bytes(batch.keys, batch.values)
                rows += len(batch.keys)
                if rows >= SLICE_ROWS:
                    rows = 0
                    yield
        except msgspec.MsgspecError as error:
            raise _undecodable_error(data, error) from error

    return state, batches()


def _check_format(data: bytes) -> None:
    """Raise CorruptError for an unknown format. Called for undecodable bytes: another format need not look like this
    one."""
    try:
        head = _decode_head(data)
        written = msgspec.msgpack.decode(head[0], type=int) if head else 0
    except msgspec.MsgspecError as error:
        raise _undecodable_error(data, error) from error
    if written != ROLLUP_FORMAT:
        raise _unknown_format_error(written)


def _unknown_format_error(written: int) -> CorruptError:
    return CorruptError(
        f"a domain's rollup has an unknown format: format={written} known={ROLLUP_FORMAT}.",
        fix="Upgrade tidemill: a newer version wrote it.",
    )


def _undecodable_error(data: bytes, error: msgspec.MsgspecError) -> CorruptError:
    return CorruptError(f"a domain's rollup cannot be read: size_bytes={len(data)} reason={str(error)!r}.")


def _array_head(count: int) -> bytes:
    """Return the msgpack header of an array of `count` elements."""
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)
