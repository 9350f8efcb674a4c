"""Bytes of a shard's log records and rollups: msgpack arrays, positional, with append-only tags.

    record   = [tag, field…]                 one command; unknown tags raise CorruptError, extra fields are ignored
      1 create      [1, name, shard_id, schema]
      2 append      [2, batch]
      3 hold        [3, reader, since, expires_ms, now_ms]
      4 release     [4, reader, now_ms]
      5 downgrade   [5, owner, epoch, since, now_ms]
      6 replace     [6, [[lower, upper, token]…], batch, at_ms]      at_ms absent = 0
      7 close       [7]
      8 drop        [8, shard_id]
      9 collected   [9, version]
     10 sweep       [10, before_ms]
     11 evolve      [11, [column…], [column…], at_ms]               columns to add, columns to widen
     12 evolve      [12, [column…], [column…], [name…], at_ms]      and columns to retire
    schema   = [[[name, type]…], [key…], buckets]                   version 1; later versions:
               [[column…], [key…], buckets, version]
    column   = [name, type, default, version, retired]              default nil = null, retired absent = 0
    batch    = [lower, upper, writer, token, [part…], summed_to, schema_version]
                                                                    summed_to absent = -1, schema_version absent = 1
    part     = [rows, size_bytes, bucket, object_key, inline, min_hash, max_hash, crc, footer_crc]
                                                                    the last two absent = written without checksums
    rollup   = [2, name, shard_id, schema, since, upper, closed, version,
                [[reader, since, expires_ms, epoch, version]…], [[writer, token, lower, upper]…], [batch…],
                [[version, at_ms, size_bytes, [object_key…]]…], swept_ms, dropped,
                [[version, upper, at_ms, [added…], [[widened, type]…], [retired…]]…]]

The leading number of a rollup is its format: a reader that meets a newer one raises CorruptError. A shard whose
schema never changed is written in format 2, which lacks the last field; one without retired columns in format 3, which
lacks the lists of retired columns; any other in format 4.
Integers are non-negative; min_hash and max_hash are full unsigned 64 bits.
"""

from __future__ import annotations

from typing import Any, assert_never

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.shards.api import Batch, Column, Part, ShardSchema
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.state.commands import (
    Append,
    BatchId,
    Close,
    Command,
    Create,
    DowngradeSince,
    Drop,
    Evolve,
    MarkCollected,
    ReleaseHold,
    Replace,
    SetHold,
    Sweep,
)
from tidemill.shards.state.state import Garbage, ReadHold, SchemaVersion, ShardState, WriterToken, batch_sums

ROLLUP_FORMAT = 4
EVOLVED_FORMAT = 3
UNCHANGED_FORMAT = 2

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def encode_command(command: Command) -> bytes:
    match command:
        case Create(name, shard_id, schema):
            out: list[Any] = [1, name, shard_id, _schema_out(schema)]
        case Append(batch):
            out = [2, _batch_out(batch)]
        case SetHold(reader, since, expires_ms, now_ms):
            out = [3, reader, since, expires_ms, now_ms]
        case ReleaseHold(reader, now_ms):
            out = [4, reader, now_ms]
        case DowngradeSince(owner, epoch, since, now_ms):
            out = [5, owner, epoch, since, now_ms]
        case Replace(replaced, merged, at_ms):
            out = [6, [[r.lower, r.upper, r.token] for r in replaced], _batch_out(merged), at_ms]
        case Close():
            out = [7]
        case Drop(shard_id):
            out = [8, shard_id]
        case MarkCollected(version):
            out = [9, version]
        case Sweep(before_ms):
            out = [10, before_ms]
        case Evolve(changes, at_ms) if changes.retire:
            add, widen = ([_column_out(c) for c in columns] for columns in (changes.add, changes.widen))
            out = [12, add, widen, list(changes.retire), at_ms]
        case Evolve(changes, at_ms):
            out = [11, [_column_out(c) for c in changes.add], [_column_out(c) for c in changes.widen], at_ms]
        case _:
            assert_never(command)
    return _encode(out)


def decode_command(data: bytes) -> Command:
    """Decode a command. Raises CorruptError if the bytes are no command of this format."""
    try:
        match _decode(data):
            case [1, name, shard_id, schema, *_]:
                return Create(name, shard_id, _schema_in(schema))
            case [2, batch, *_]:
                return Append(_batch_in(batch))
            case [3, reader, since, expires_ms, now_ms, *_]:
                return SetHold(reader, since, expires_ms, now_ms)
            case [4, reader, now_ms, *_]:
                return ReleaseHold(reader, now_ms)
            case [5, owner, epoch, since, now_ms, *_]:
                return DowngradeSince(owner, epoch, since, now_ms)
            case [6, replaced, merged, *rest]:
                ids = tuple(BatchId(r[0], r[1], r[2]) for r in replaced)
                return Replace(ids, _batch_in(merged), rest[0] if rest else 0)
            case [7, *_]:
                return Close()
            case [8, shard_id, *_]:
                return Drop(shard_id)
            case [9, version, *_]:
                return MarkCollected(version)
            case [10, before_ms, *_]:
                return Sweep(before_ms)
            case [11, add, widen, at_ms, *_]:
                return Evolve(SchemaChanges(_columns_in(add), _columns_in(widen)), at_ms)
            case [12, add, widen, retire, at_ms, *_]:
                return Evolve(SchemaChanges(_columns_in(add), _columns_in(widen), tuple(retire)), at_ms)
            case [tag, *_]:
                raise CorruptError(f"unknown table command: tag={tag!r}.", fix="Upgrade tidemill.")
    except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise CorruptError(f"table log record is unreadable: bytes={len(data)} ({error}).") from error
    raise CorruptError(f"table log record is no array: bytes={len(data)}.")


def encode_state(state: ShardState) -> bytes:
    """Encode a rollup: everything that a reader needs instead of the records before it."""
    changed = state.schema.version > 1
    lost = any(c.retired for c in state.schema.columns) or any(v.retired for v in state.versions)
    out = [
        ROLLUP_FORMAT if lost else EVOLVED_FORMAT if changed else UNCHANGED_FORMAT,
        state.name,
        state.shard_id,
        _schema_out(state.schema),
        state.since,
        state.upper,
        state.closed,
        state.version,
        [[h.reader, h.since, h.expires_ms, h.epoch, h.version] for h in state.holds],
        [[w.writer, w.token, w.lower, w.upper] for w in state.writers],
        [_batch_out(b) for b in state.batches],
        [[g.version, g.at_ms, g.size_bytes, list(g.objects)] for g in state.garbage],
        state.swept_ms,
        state.dropped,
    ]
    if changed:
        out.append([_version_out(v, lost) for v in state.versions])
    return _encode(out)


def decode_state(data: bytes) -> ShardState:
    """Decode a rollup. Raises CorruptError if the bytes are no rollup of this format."""
    try:
        fields = _decode(data)
        if fields[0] not in (UNCHANGED_FORMAT, EVOLVED_FORMAT, ROLLUP_FORMAT):
            raise CorruptError(
                f"unknown rollup format: format={fields[0]!r}.", fix="Upgrade tidemill: a newer one wrote it."
            )
        name, shard_id, schema, since, upper, closed, version, holds, writers, batches = fields[1:11]
        garbage, swept_ms, dropped = fields[11:14]
        versions = fields[14] if fields[0] > UNCHANGED_FORMAT else []
        decoded = tuple(_batch_in(b) for b in batches)
        sums = [batch_sums(b) for b in decoded]
        return ShardState(
            name,
            shard_id,
            _schema_in(schema),
            since,
            upper,
            decoded,
            tuple(ReadHold(*h) for h in holds),
            tuple(WriterToken(*w) for w in writers),
            closed,
            rows=sum(s[0] for s in sums),
            size_bytes=sum(s[1] for s in sums),
            inline_bytes=sum(s[2] for s in sums),
            version=version,
            garbage=tuple(Garbage(g[0], g[1], g[2], tuple(g[3])) for g in garbage),
            swept_ms=swept_ms,
            dropped=dropped,
            versions=tuple(
                SchemaVersion(v[0], v[1], v[2], tuple(v[3]), tuple((w[0], w[1]) for w in v[4]), _names_in(v))
                for v in versions
            ),
        )
    except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise CorruptError(f"table rollup is unreadable: bytes={len(data)} ({error}).") from error


def encode_batch(batch: Batch) -> bytes:
    """Encode one batch alone, including parts and inline bytes (layout `batch`)."""
    return _encode(_batch_out(batch))


def decode_batch(data: bytes) -> Batch:
    """Decode one batch. Raises CorruptError."""
    try:
        return _batch_in(_decode(data))
    except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise CorruptError(f"table batch is unreadable: bytes={len(data)} ({error}).") from error


def _schema_out(schema: ShardSchema) -> list[Any]:
    if schema.version == 1:
        return [[[c.name, c.type] for c in schema.columns], list(schema.key), schema.buckets]
    return [[_column_out(c) for c in schema.columns], list(schema.key), schema.buckets, schema.version]


def _schema_in(fields: list[Any]) -> ShardSchema:
    columns = _columns_in(fields[0])
    return ShardSchema(columns, tuple(fields[1]), fields[2], fields[3] if len(fields) > 3 else 1)


def _column_out(column: Column) -> list[Any]:
    out = [column.name, column.type, column.default, column.version]
    return [*out, column.retired] if column.retired else out


def _columns_in(fields: list[Any]) -> tuple[Column, ...]:
    return tuple(Column(*c[:5]) for c in fields)


def _names_in(version: list[Any]) -> tuple[str, ...]:
    return tuple(version[5]) if len(version) > 5 else ()


def _version_out(v: SchemaVersion, lost: bool) -> list[Any]:
    out = [v.version, v.upper, v.at_ms, list(v.added), [list(w) for w in v.widened]]
    return [*out, list(v.retired)] if lost else out


def _batch_out(batch: Batch) -> list[Any]:
    out = [batch.lower, batch.upper, batch.writer, batch.token, [_part_out(p) for p in batch.parts], batch.summed_to]
    return out if batch.schema_version == 1 else [*out, batch.schema_version]


def _part_out(p: Part) -> list[Any]:
    out = [p.rows, p.size_bytes, p.bucket, p.object_key, p.inline, p.min_hash, p.max_hash]
    return out if p.crc < 0 else [*out, p.crc, p.footer_crc]


def _batch_in(fields: list[Any]) -> Batch:
    parts = tuple(Part(*p[:9]) for p in fields[4])
    summed_to = fields[5] if len(fields) > 5 else -1
    return Batch(fields[0], fields[1], parts, fields[2], fields[3], summed_to, fields[6] if len(fields) > 6 else 1)
