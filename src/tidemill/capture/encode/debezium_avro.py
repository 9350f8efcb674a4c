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
from tidemill.base.pgtypes.avro import NULL, THERE, Kind, kind_of, prefix
from tidemill.base.pgtypes.debezium import form_of, plain, written
from tidemill.capture.changes import Column, Relation, Row
from tidemill.capture.encode.debezium_json import Source, Tail
from tidemill.topics.batch.encode import signed

MOST = (1 << 63) - 1
"""Value for timestamps that exceed a long: those after 294247-01-10, in microseconds."""
_FIRST_BRANCH = b"\x00"


class AvroEncoder:
    """Encoder of one relation, like EventEncoder. `source` has the ids of its version's schemas."""

    def __init__(self, relation: Relation, source: Source) -> None:
        self.relation = relation
        key_id, value_id = source.schemas[relation.version - 1]
        self.key_prefix, self.value_prefix = prefix(key_id), prefix(value_id)
        self._key = [(c.name, writer_of(c, of_key=True)) for c in relation.key_columns]
        self._row = [(c.name, c.key_index < 0, writer_of(c)) for c in relation.columns]
        self._begin = b"".join(map(text, (__version__, "postgresql", source.name)))
        self._database = text(source.database)
        self._place = text(relation.schema) + text(relation.table)
        self._made: tuple[tuple[int, int | None, int], Tail] | None = None
        """Cached tail of the current transaction: encoding its numbers costs more than the rest of a small row."""

    def key(self, row: Row) -> bytes:
        return self.key_prefix + b"".join([write(_said(row, name)) for name, write in self._key])

    def head(self, before: Row | None, after: Row | None) -> bytes:
        return self.value_prefix + self._maybe(before) + self._maybe(after)

    def tail(self, commit_lsn: int, xid: int | None, time_ms: int) -> Tail:
        """Return the tail of a transaction's events. `xid` None: of the copy; `commit_lsn` is the snapshot's."""
        asked = (commit_lsn, xid, time_ms)
        if self._made is None or self._made[0] != asked:
            self._made = asked, self._tail(*asked)
        return self._made[1]

    def _tail(self, commit_lsn: int, xid: int | None, time_ms: int) -> Tail:
        snapshot, of = ("true", NULL) if xid is None else ("false", THERE + signed(xid))
        place = b'["%d","' % commit_lsn
        end = b'"]'
        at_ms = THERE + signed(time_ms)
        return Tail(
            self._begin + signed(time_ms) + _FIRST_BRANCH + text(snapshot) + self._database + THERE,
            end + THERE + signed(time_ms * 1_000) + THERE + signed(time_ms * 1_000_000) + self._place + of
            + THERE + signed(commit_lsn) + NULL + NULL + signed(1),
            at_ms,
            place,
            len(place) + len(end),
        )  # fmt: skip

    def _maybe(self, row: Row | None) -> bytes:
        if row is None:
            return NULL
        parts = [THERE]
        for name, may_be_null, write in self._row:
            value = row[name]
            if may_be_null:
                parts.append(NULL if value is None else THERE + write(value))
            else:
                parts.append(write(_said(row, name)))
        return b"".join(parts)


def _said(row: Row, name: str) -> str:
    value = row[name]
    if value is None:
        raise ValueError(f"a column of the key is null: column={name}")
    return value


def text(value: str) -> bytes:
    data = value.encode()
    return signed(len(data)) + data


def writer_of(column: Column, *, of_key: bool = False) -> Callable[[str], bytes]:
    """Return the function that encodes PostgreSQL's text as the body of the column's kind. That function raises the
    errors of an invalid text.
    """
    form, kind = form_of(column.type_oid, column.type_mod), kind_of(column.type_oid, column.type_mod)
    if kind == "varint":
        number = written(form)
        return lambda value: signed(min(int(number(value)), MOST))
    if kind == "boolean":
        return lambda value: b"\x01" if value[0] == "t" else b"\x00"
    if kind == "string":
        said = plain(form)
        return lambda value: text(said(value))
    return lambda value: floats([value], kind, of_key=of_key)


def floats(texts: Sequence[str], kind: Kind, *, of_key: bool) -> bytes:
    """Encode floats as PostgreSQL reads them: a float is the one nearest to the text, not to the double
    nearest to it.
    """
    array = pa.array(texts, pa.string()).cast(pa.float32() if kind == "float" else pa.float64())
    values = array.to_numpy(zero_copy_only=False)
    return bytes((values + 0 if of_key else values).tobytes())  # −0 + 0 is 0
