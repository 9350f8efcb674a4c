"""pgoutput, protocol version 1, with logical messages: bytes → messages. Pure.

    Begin     B  int64 final_lsn   int64 commit_time_us   int32 xid
    Commit    C  int8 flags   int64 commit_lsn   int64 end_lsn   int64 commit_time_us
    Relation  R  int32 oid   cstring schema   cstring table   int8 identity   int16 n   n × column
                 column: int8 flags (1 = identity key)   cstring name   int32 type_oid   int32 type_mod
    Insert    I  int32 oid   'N' tuple
    Update    U  int32 oid   ['K'|'O' tuple]   'N' tuple
    Delete    D  int32 oid   'K'|'O' tuple
    Truncate  T  int32 n   int8 flags (1 cascade, 2 restart identity)   n × int32 oid
    Message   M  int8 flags (1 = transactional)   int64 lsn   cstring prefix   int32 length   bytes
    Type      Y  int32 oid   cstring schema   cstring name            Origin  O  int64 lsn   cstring name
    tuple        int16 n   n × ('n' null | 'u' unchanged TOAST | 't' int32 length, text)

A value that is not UTF-8 cannot be read (from a database with the encoding SQL_ASCII). In a name, each such byte
becomes a surrogate (naming.py).

Integers are big-endian, times are µs since 2000-01-01 UTC. Begin.final_lsn equals Commit.commit_lsn: the start of the
commit record. https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import msgspec

from tidemill.base.errors import CorruptError, InvalidError

POSTGRES_EPOCH_MS: Final = 946_684_800_000


class Unchanged:
    """Type of UNCHANGED, the value of a TOASTed column that an UPDATE did not touch."""

    _only: Unchanged | None = None

    def __new__(cls) -> Unchanged:
        cls._only = cls._only or super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()
Value = str | None | Unchanged
Tuple = list[Value]


class Begin(msgspec.Struct, frozen=True):
    final_lsn: int
    commit_time_ms: int
    xid: int


class Commit(msgspec.Struct, frozen=True):
    commit_lsn: int
    end_lsn: int
    commit_time_ms: int


class WireColumn(msgspec.Struct, frozen=True):
    name: str
    type_oid: int
    type_mod: int
    identity: bool


class RelationMessage(msgspec.Struct, frozen=True):
    """Description of a relation. `identity`: d default, n nothing, f full, i index."""

    oid: int
    schema: str
    table: str
    identity: str
    columns: tuple[WireColumn, ...]


class Insert(msgspec.Struct, frozen=True):
    oid: int
    new: Tuple


class Update(msgspec.Struct, frozen=True):
    """Update of a row. `old_kind`: O the whole old row (identity FULL), K its key only, "" absent."""

    oid: int
    old_kind: Literal["", "K", "O"]
    old: Tuple | None
    new: Tuple


class Delete(msgspec.Struct, frozen=True):
    oid: int
    old_kind: Literal["K", "O"]
    old: Tuple


class Truncate(msgspec.Struct, frozen=True):
    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


class LogicalMessage(msgspec.Struct, frozen=True):
    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class TypeMessage(msgspec.Struct, frozen=True):
    oid: int
    schema: str
    name: str


class Origin(msgspec.Struct, frozen=True):
    lsn: int
    name: str


Message = Begin | Commit | RelationMessage | Insert | Update | Delete | Truncate | LogicalMessage | TypeMessage | Origin

_BEGIN = struct.Struct(">qqI")
_COMMIT = struct.Struct(">Bqqq")
_TRUNCATE_HEAD = struct.Struct(">IB")
_I64 = struct.Struct(">q")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_COLUMN_TAIL = struct.Struct(">Ii")
_MESSAGE_HEAD = struct.Struct(">Bq")
_TEXT, _NULL, _UNCHANGED = b"tnu"


def decode_message(data: bytes) -> Message:
    """Decode one message. Raises CorruptError for anything that is not exactly one well-formed message, InvalidError
    for a value that is not UTF-8.
    """
    try:
        kind = data[:1]
        match kind:
            case b"I":
                new, end = _decode_tuple(data, 6)
                _require_layout(data[5:6] == b"N" and end == len(data), data)
                return Insert(_U32.unpack_from(data, 1)[0], new)
            case b"U":
                return _decode_update(data)
            case b"D":
                old, end = _decode_tuple(data, 6)
                _require_layout(data[5:6] in (b"K", b"O") and end == len(data), data)
                return Delete(_U32.unpack_from(data, 1)[0], "O" if data[5:6] == b"O" else "K", old)
            case b"B":
                _require_layout(len(data) == 1 + _BEGIN.size, data)
                final_lsn, time_us, xid = _BEGIN.unpack_from(data, 1)
                return Begin(final_lsn, _time_ms(time_us), xid)
            case b"C":
                _require_layout(len(data) == 1 + _COMMIT.size, data)
                _, commit_lsn, end_lsn, time_us = _COMMIT.unpack_from(data, 1)
                return Commit(commit_lsn, end_lsn, _time_ms(time_us))
            case b"R":
                return _decode_relation(data)
            case b"T":
                count, flags = _TRUNCATE_HEAD.unpack_from(data, 1)
                _require_layout(len(data) == 6 + 4 * count, data)
                oids = [_U32.unpack_from(data, at)[0] for at in range(6, len(data), 4)]
                return Truncate(tuple(oids), bool(flags & 1), bool(flags & 2))
            case b"M":
                return _decode_logical_message(data)
            case b"Y":
                schema, at = _decode_cstring(data, 5)
                name, end = _decode_cstring(data, at)
                _require_layout(end == len(data), data)
                return TypeMessage(_U32.unpack_from(data, 1)[0], schema or "pg_catalog", name)
            case b"O":
                name, end = _decode_cstring(data, 9)
                _require_layout(end == len(data), data)
                return Origin(_I64.unpack_from(data, 1)[0], name)
    except UnicodeDecodeError as error:
        raise not_utf8_error(error) from error
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptError(f"malformed pgoutput message: head={data[:24].hex()} size={len(data)}.") from error
    raise CorruptError(f"unknown pgoutput message: kind={kind!r} size={len(data)}.")


def not_utf8_error(error: UnicodeDecodeError) -> InvalidError:
    odd = error.object[error.start : error.start + 8].hex()
    return InvalidError(f"a value is not UTF-8: bytes={odd}.", fix="Write it as UTF-8.")


_KINDS = {
    b"B": "begin", b"C": "commit", b"R": "relation", b"I": "insert", b"U": "update", b"D": "delete",
    b"T": "truncate", b"M": "message", b"Y": "type", b"O": "origin",
}  # fmt: skip
_SINGLE_TABLE_KINDS = (b"R", b"I", b"U", b"D")
LOGICAL_MESSAGE = b"M"
PREFIX_AT = 10
"""Offset of the prefix in a logical message."""


def kind_of(data: bytes) -> str:
    """Return the name of a message's kind for people, also for one that cannot be decoded."""
    return _KINDS.get(data[:1], repr(data[:1]))


def oid_of(data: bytes) -> int | None:
    """Return the oid of the one relation that a message is about, also for one that cannot be decoded; None if it names
    none or several.
    """
    return _U32.unpack_from(data, 1)[0] if data[:1] in _SINGLE_TABLE_KINDS and len(data) >= 5 else None


def _decode_update(data: bytes) -> Update:
    old: Tuple | None = None
    old_kind: Literal["", "K", "O"] = ""
    at = 5
    if data[5:6] in (b"K", b"O"):
        old_kind = "O" if data[5:6] == b"O" else "K"
        old, at = _decode_tuple(data, 6)
    _require_layout(data[at : at + 1] == b"N", data)
    new, end = _decode_tuple(data, at + 1)
    _require_layout(end == len(data), data)
    return Update(_U32.unpack_from(data, 1)[0], old_kind, old, new)


def _decode_tuple(data: bytes, at: int) -> tuple[Tuple, int]:
    """Return the values of one tuple and its end. The hot loop of capture: bare ints and slices."""
    count = (data[at] << 8) | data[at + 1]
    at += 2
    values: Tuple = []
    append = values.append
    for _ in range(count):
        kind = data[at]
        if kind == _TEXT:
            start = at + 5
            at = start + int.from_bytes(data[at + 1 : start], "big")
            append(data[start:at].decode())
        elif kind == _NULL:
            at += 1
            append(None)
        elif kind == _UNCHANGED:
            at += 1
            append(UNCHANGED)
        else:
            raise ValueError(f"tuple value kind {kind}")
    return values, at


def _decode_relation(data: bytes) -> RelationMessage:
    schema, at = _decode_cstring(data, 5)
    table, at = _decode_cstring(data, at)
    identity = chr(data[at])
    (count,) = _U16.unpack_from(data, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        flags = data[at]
        name, at = _decode_cstring(data, at + 1)
        type_oid, type_mod = _COLUMN_TAIL.unpack_from(data, at)
        at += _COLUMN_TAIL.size
        columns.append(WireColumn(name, type_oid, type_mod, bool(flags & 1)))
    _require_layout(at == len(data), data)
    # An empty schema name stands for pg_catalog.
    return RelationMessage(_U32.unpack_from(data, 1)[0], schema or "pg_catalog", table, identity, tuple(columns))


def _decode_logical_message(data: bytes) -> LogicalMessage:
    flags, lsn = _MESSAGE_HEAD.unpack_from(data, 1)
    prefix, at = _decode_cstring(data, PREFIX_AT)
    (size,) = _U32.unpack_from(data, at)
    _require_layout(at + 4 + size == len(data), data)
    return LogicalMessage(bool(flags & 1), lsn, prefix, data[at + 4 :])


def _decode_cstring(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(errors="surrogateescape"), end + 1


def _time_ms(postgres_us: int) -> int:
    return POSTGRES_EPOCH_MS + postgres_us // 1000


def _require_layout(holds: bool, data: bytes) -> None:
    if not holds:
        raise ValueError("unexpected layout")
