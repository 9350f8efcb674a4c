"""Change events in Debezium's envelope: the JSON that its PostgreSQL connector writes with `schemas.enable=false`.

    head     {"before": row, "after": row                    depends on the rows only
    tail     ,"source":{…},"transaction":null,"op":…,"ts_ms":…}    on the relation, the transaction, the place in it

    source   version   tidemill's                  snapshot  "true" for rows of the copy, otherwise "false"
             name      of the capture              sequence  [commit LSN, place in the transaction]: orders all events
             lsn       of the commit               txId      null for rows of the copy          xmin   null
             ts_ms     of the commit; ts_us and ts_ns are the same moment; of the copy, when the row was copied

Invariant (reproducible records): except for tidemill's version, no content of a record of the stream depends on when or
by which process it is made, so records that are made again after a crash are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tidemill import __version__
from tidemill.base.pgtypes.debezium import escape
from tidemill.capture.changes import Relation, Row
from tidemill.capture.encode.row_encoder import RowEncoder, event_form
from tidemill.topics.batch.varint import encode_varint

BEFORE, AFTER = b'{"before":', b',"after":'
OPS = {"insert": b"c", "update": b"u", "delete": b"d", "truncate": b"t"}
SNAPSHOT_OP = b"r"
NEW_KEY_HEADER, OLD_KEY_HEADER = "__debezium.newkey", "__debezium.oldkey"
"""Headers of the two halves of a changed key: the key of the other half."""


class EventSource(msgspec.Struct, frozen=True):
    """Origin of events: the names of the capture and of its database. `schemas`: the ids of the schemas of key and
    value under each version of the table's description, if they are Avro (debezium_avro.py).
    """

    name: str
    database: str
    schemas: tuple[tuple[int, int], ...] = ()


class EventTail(NamedTuple):
    """Tail of the events of one transaction. The ordinal and the op, which is one byte, come between its pieces. In
    Avro the ordinal is part of a string, which begins with its length, one byte: `place` and the ordinal; `around`
    counts the string's bytes without the ordinal's digits.
    """

    first: bytes
    second: bytes
    third: bytes
    place: bytes = b""
    around: int = 0

    @property
    def size_bytes(self) -> int:
        """Size without the ordinal's digits."""
        size = len(self.first) + len(self.place) + len(self.second) + 1 + len(self.third)
        return size + 1 if self.around else size

    def encode(self, ordinal: int, op: bytes) -> bytes:
        digits = b"%d" % ordinal
        length = encode_varint(self.around + len(digits)) if self.around else b""
        return b"".join((self.first, length, self.place, digits, self.second, op, self.third))


class EventEncoder:
    """Encoder of one relation. `key(row)` is that of `RowEncoder`, in the forms of events."""

    def __init__(self, relation: Relation, source: EventSource) -> None:
        self.relation = relation
        rows = RowEncoder(relation, event_form)
        self.key, self._row = rows.key, rows.value
        of = f'{{"version":{escape(__version__)},"connector":"postgresql","name":{escape(source.name)}'
        self._begin = f',"source":{of},"ts_ms":'
        self._database = f',"db":{escape(source.database)},"sequence":"[\\"'
        self._place = f',"schema":{escape(relation.schema)},"table":{escape(relation.table)},"txId":'

    def encode_head(self, before: Row | None, after: Row | None) -> bytes:
        old = b"null" if before is None else self._row(before)
        return BEFORE + old + AFTER + (b"null" if after is None else self._row(after))

    def encode_tail(self, commit_lsn: int, xid: int | None, time_ms: int) -> EventTail:
        """Return the tail of a transaction's events. `xid` None: of the copy; `commit_lsn` is the snapshot's."""
        snapshot, of = ("true", "null") if xid is None else ("false", str(xid))
        first = f'{self._begin}{time_ms},"snapshot":"{snapshot}"{self._database}{commit_lsn}\\",\\"'
        second = (
            f'\\"]","ts_us":{time_ms * 1_000},"ts_ns":{time_ms * 1_000_000}{self._place}{of},"lsn":{commit_lsn}'
            ',"xmin":null},"transaction":null,"op":"'
        )
        return EventTail(first.encode(), second.encode(), f'","ts_ms":{time_ms}}}'.encode())
