"""Change events in Avro, row by row: the same content as the JSON of debezium_json.py (avro_schemas.py).

    head     prefix │ before │ after            each 0x00, or 0x02 and the row
    tail     source │ transaction 0x00 │ op │ ts_ms     `first`, a length, `place`, the ordinal, `second`, op, `third`

Invariant (reproducible records): as in debezium_json.py. The schema ids are those in the catalogue, regardless of the
registry's present content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from tidemill import __version__
from tidemill.base.pgtypes.avro import NULL, PRESENT, Kind, record_prefix, value_kind
from tidemill.base.pgtypes.debezium import json_writer, string_writer, value_form
from tidemill.capture.changes import Column, Relation, Row
from tidemill.capture.encode.debezium_json import EventSource, EventTail
from tidemill.topics.batch.varint import encode_varint

MAX_LONG = (1 << 63) - 1
"""Value for timestamps that exceed a long: those after 294247-01-10, in microseconds."""
_FIRST_BRANCH = b"\x00"


class AvroEncoder:
    """Encoder of one relation, like EventEncoder. `source` has the ids of its version's schemas."""

    def __init__(self, relation: Relation, source: EventSource) -> None:
        self.relation = relation
        key_id, value_id = source.schemas[relation.version - 1]
        self.key_prefix, self.value_prefix = record_prefix(key_id), record_prefix(value_id)
        self._key = [(c.name, value_writer(c, of_key=True)) for c in relation.key_columns]
        self._row = [(c.name, c.key_index < 0, value_writer(c)) for c in relation.columns]
        self._begin = b"".join(map(encode_text, (__version__, "postgresql", source.name)))
        self._database = encode_text(source.database)
        self._place = encode_text(relation.schema) + encode_text(relation.table)
        self._made: tuple[tuple[int, int | None, int], EventTail] | None = None
        """Cached tail of the current transaction: encoding its numbers costs more than the rest of a small row."""

    def key(self, row: Row) -> bytes:
        return self.key_prefix + b"".join([write(_require_key_value(row, name)) for name, write in self._key])

    def encode_head(self, before: Row | None, after: Row | None) -> bytes:
        return self.value_prefix + self._encode_nullable_row(before) + self._encode_nullable_row(after)

    def encode_tail(self, commit_lsn: int, xid: int | None, time_ms: int) -> EventTail:
        """Return the tail of a transaction's events. `xid` None: of the copy; `commit_lsn` is the snapshot's."""
        asked = (commit_lsn, xid, time_ms)
        if self._made is None or self._made[0] != asked:
            self._made = asked, self._build_tail(*asked)
        return self._made[1]

    def _build_tail(self, commit_lsn: int, xid: int | None, time_ms: int) -> EventTail:
        snapshot, of = ("true", NULL) if xid is None else ("false", PRESENT + encode_varint(xid))
        place = b'["%d","' % commit_lsn
        end = b'"]'
        at_ms = PRESENT + encode_varint(time_ms)
        return EventTail(
            self._begin + encode_varint(time_ms) + _FIRST_BRANCH + encode_text(snapshot) + self._database + PRESENT,
            end + PRESENT + encode_varint(time_ms * 1_000) + PRESENT + encode_varint(time_ms * 1_000_000) + self._place
            + of + PRESENT + encode_varint(commit_lsn) + NULL + NULL + encode_varint(1),
            at_ms,
            place,
            len(place) + len(end),
        )  # fmt: skip

    def _encode_nullable_row(self, row: Row | None) -> bytes:
        if row is None:
            return NULL
        parts = [PRESENT]
        for name, may_be_null, write in self._row:
            value = row[name]
            if may_be_null:
                parts.append(NULL if value is None else PRESENT + write(value))
            else:
                parts.append(write(_require_key_value(row, name)))
        return b"".join(parts)


def _require_key_value(row: Row, name: str) -> str:
    value = row[name]
    if value is None:
        raise ValueError(f"a column of the key is null: column={name}")
    return value


def encode_text(value: str) -> bytes:
    data = value.encode()
    return encode_varint(len(data)) + data


def value_writer(column: Column, *, of_key: bool = False) -> Callable[[str], bytes]:
    """Return the function that encodes PostgreSQL's text as the body of the column's kind. That function raises the
    errors of an invalid text.
    """
    form, kind = value_form(column.type_oid, column.type_mod), value_kind(column.type_oid, column.type_mod)
    if kind == "varint":
        number = json_writer(form)
        return lambda value: encode_varint(min(int(number(value)), MAX_LONG))
    if kind == "boolean":
        return lambda value: b"\x01" if value[0] == "t" else b"\x00"
    if kind == "string":
        said = string_writer(form)
        return lambda value: encode_text(said(value))
    return lambda value: encode_floats([value], kind, of_key=of_key)


def encode_floats(texts: Sequence[str], kind: Kind, *, of_key: bool) -> bytes:
    """Encode floats as PostgreSQL reads them: a float is the one nearest to the text, not to the double
    nearest to it.
    """
    array = pa.array(texts, pa.string()).cast(pa.float32() if kind == "float" else pa.float64())
    values = array.to_numpy(zero_copy_only=False)
    return bytes((values + 0 if of_key else values).tobytes())  # −0 + 0 is 0
