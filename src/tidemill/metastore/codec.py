"""Bytes of a domain's log records and rollups: msgpack arrays, positional, with append-only tags.

    record   = [tag, field…]                 one update; unknown tags are Corrupt, extra fields are ignored
      1 set uuid    [1, domain_uuid]
      2 write       [2, domain_uuid, [key…], [value…]]     as many keys as values; "" as a value deletes
      3 persist     [3, domain_uuid, manifest]
      4 reset       [4, domain_uuid, manifest | nil]
    manifest = [data, last_seqno, epoch, number]
    rollup   = [1, domain_uuid, seqno_delta, epoch_delta, manifest | nil, [[seqno, [key…], [value…]]…]]

Keys, values and data are msgpack bin; uuids are strings. Decoding makes the one copy of keys and values
that the volatile buffer and the memtable share. The leading 1 of a rollup is the format's number.
"""

from __future__ import annotations

from collections import deque

import msgspec

from tidemill.base.errors import Corrupt
from tidemill.metastore.commands import Command
from tidemill.metastore.state import DomainState, PersistedManifest, VolatileBatch, sum_bytes

ROLLUP_FORMAT = 1

_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode


class _Rollup(msgspec.Struct, array_like=True):
    format: int
    domain_uuid: str
    seqno_delta: int
    epoch_delta: int
    manifest: PersistedManifest | None
    volatile: list[VolatileBatch]


_decode_rollup = msgspec.msgpack.Decoder(_Rollup).decode
_decode_head = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def encode_command(command: Command) -> bytes:
    return _encode(command)


def decode_command(data: bytes) -> Command:
    """Raises Corrupt when the bytes are no update of this format."""
    try:
        command: Command = _decode_command(data)
        return command
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"A record of a domain's log cannot be read: size_bytes={len(data)} reason={str(error)!r}.",
            fix="Upgrade tidemill if a newer one wrote it.",
        ) from error


def encode_state(state: DomainState) -> bytes:
    """A rollup: everything a reader needs instead of the records before it."""
    return _encode(
        _Rollup(
            ROLLUP_FORMAT,
            state.domain_uuid,
            state.seqno_delta,
            state.epoch_delta,
            state.manifest,
            list(state.volatile),
        )
    )


def decode_state(data: bytes) -> DomainState:
    """Raises Corrupt when the bytes are no rollup of this format."""
    try:
        head = _decode_head(data)
        written = msgspec.msgpack.decode(head[0], type=int) if head else 0
        if written != ROLLUP_FORMAT:
            raise Corrupt(
                f"A domain's rollup has an unknown format: format={written} known={ROLLUP_FORMAT}.",
                fix="Upgrade tidemill: a newer one wrote it.",
            )
        rollup = _decode_rollup(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"A domain's rollup cannot be read: size_bytes={len(data)} reason={str(error)!r}.") from error
    state = DomainState()
    state.domain_uuid = rollup.domain_uuid
    state.seqno_delta, state.epoch_delta = rollup.seqno_delta, rollup.epoch_delta
    state.manifest = rollup.manifest
    state.volatile = deque(rollup.volatile)
    state.volatile_bytes = sum_bytes(rollup.volatile)
    return state
