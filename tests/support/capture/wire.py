"""Messages of pgoutput, and a log that decodes them."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Sequence
from typing import Any

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Column, Fragment, Relation
from tidemill.capture.decode.receive_batch import RowRun, split_into_steps
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.decode.undecodable import UndecodableMessageError, feed_frame
from tidemill.capture.postgres.replication_stream import FramedMessage
from tidemill.capture.postgres.standby_status import Keepalive
from tidemill.topics.api import ProduceResult

INT4, INT8, FLOAT8, BOOL, TEXT, NUMERIC, STAMP = 23, 20, 701, 16, 25, 1700, 1184

OID, DATE, TIME, PLAIN_STAMP, BYTEA = 26, 1082, 1083, 1114, 17

UNCHANGED = object()

RELATIONS = {
    1: Relation(
        1, "public", "narrow",
        (Column("id", INT4, -1, "", 0), Column("n", INT8, -1, "", -1), Column("t", TEXT, -1, "", -1)),
    ),
    2: Relation(
        2, "public", 'wi"de\nä',
        (
            Column("f", FLOAT8, -1, "", -1), Column('k"1\\', TEXT, -1, "", 1), Column("b", BOOL, -1, "", -1),
            Column("ключ", NUMERIC, -1, "", 0), Column("toast", TEXT, -1, "", -1), Column("at", STAMP, -1, "", -1),
        ),
        version=12,
    ),
    3: Relation(3, "public", "alone", (Column("id", TEXT, -1, "", 0),)),
    4: Relation(4, "public", "zeros", (Column("id", FLOAT8, -1, "", 0), Column("f", FLOAT8, -1, "", -1))),
    5: Relation(
        5, "public", "forms",
        (
            Column("day", DATE, -1, "", 0), Column("o", OID, -1, "", -1), Column("t", TIME, -1, "", -1),
            Column("t3", TIME, 3, "", -1), Column("s", PLAIN_STAMP, -1, "", -1), Column("s3", PLAIN_STAMP, 3, "", -1),
            Column("z", STAMP, -1, "", -1), Column("after", BYTEA, -1, "", -1),
        ),
    ),
}  # fmt: skip

ODD = '\0\x01\x1f\n\r\t\b\f"\\/ä€😀\x7f\x80\u2028a'
"""Characters that JSON escapes, characters that look as if they needed it, and characters of several bytes."""


def value(rand: random.Random, type_oid: int) -> str:
    match type_oid:
        case 23:
            return str(rand.randint(0, 40))
        case 20:
            return str(rand.randint(-(2**63), 2**63 - 1))
        case 701:
            return rand.choice(["NaN", "Infinity", "-Infinity", "0", "-1.5e-300", "12.25", "-NaN", "-0"])
        case 16:
            return rand.choice(["t", "f"] * 40 + ["true", ""])
        case 1700:
            return rand.choice(["1.50", "NaN", "-0.001", "7"])
        case 1184:
            usual = ["2026-11-23 10:00:00.123456+00", "1969-12-31 23:59:59.5+00"]
            return rand.choice(usual * 40 + ["infinity", "0044-03-15 00:00:00+00 BC", "10000-01-01 00:00:00+00"])
        case 26:
            return str(rand.randint(0, 2**32 - 1))
        case 1082:
            return rand.choice(["2026-11-23", "1969-12-31", "0001-01-01"] * 40 + ["infinity", "10000-01-01"])
        case 1083:
            return rand.choice(["10:00:00", "23:59:59.999", "00:00:00.25"] * 40 + ["24:00:00"])
        case 1114:
            usual = ["2026-11-23 10:00:00.123", "1969-12-31 23:59:59.999", "0001-01-01 00:00:00"]
            return rand.choice(usual * 40 + ["-infinity", "0044-03-15 00:00:00 BC"])
        case 17:
            return rand.choice(["\\x", "\\x0aff", "\\x" + "00" * 200])
        case _:
            return rand.choice(
                [
                    "",
                    "x" * rand.randint(0, 300),
                    "plain text",
                    "".join(rand.choices(ODD, k=rand.randint(1, 8))),
                    "žluť 名",
                ]
            )


def encoded_tuple(values: Sequence[Any]) -> bytes:
    out = [struct.pack(">H", len(values))]
    for value in values:
        if value is None or value is UNCHANGED:
            out.append(b"n" if value is None else b"u")
        else:
            data = value.encode() if isinstance(value, str) else value
            out.append(b"t" + struct.pack(">I", len(data)) + data)
    return b"".join(out)


def message(kind: str, oid: int, old: Sequence[Any] | None, new: Sequence[Any] | None) -> bytes:
    out = kind.encode() + struct.pack(">I", oid)
    out += b"" if old is None else b"O" + encoded_tuple(old)
    return out + (b"" if new is None else b"N" + encoded_tuple(new))


def framed(lsn: int, payload: bytes) -> bytes:
    return b"w" + struct.pack(">qqq", lsn, lsn, 0) + payload


def bursts(rand: random.Random, count: int) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(rand.choice([1, 3, 40, 200, 200]))
    return sizes


class Log:
    """A topic log that accepts batches in the order of the calls, immediately."""

    def __init__(self, held: dict[tuple[str, int], int] | None = None) -> None:
        self.batches: dict[tuple[str, int], list[bytes]] = {}
        self.trailers: dict[tuple[str, int], list[bytes]] = {}
        self.next: dict[tuple[str, int], int] = {}

    def produce_nowait(
        self, topic_id: str, partition: int, data: bytearray, *, trailer: bytes = b""
    ) -> asyncio.Future[ProduceResult]:
        place = (topic_id, partition)
        self.batches.setdefault(place, []).append(bytes(data))
        self.trailers.setdefault(place, []).append(trailer)
        count = int.from_bytes(data[57:61], "big")
        base = self.next.get(place, int.from_bytes(data[53:57], "big"))
        self.next[place] = base + count
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        future.set_result(ProduceResult(base, 0, 0))
        return future


class Notices:
    def flushed(self, consumer: str, position: ChangePosition) -> None: ...


def feed(
    frames: Sequence[bytes],
    bursts: Sequence[int] | None,
    least: int,
    *,
    parks: bool = True,
    relations: dict[int, Relation] = RELATIONS,
) -> tuple[list[Fragment], list[str]]:
    """The fragments, and what was poison, as a session reads them; `bursts` None: message by message."""
    converter = TransactionBuilder(relations, max_changes=17, max_bytes=20_000)
    fragments: list[Fragment] = []
    poisoned: list[str] = []

    def one(item: FramedMessage | Keepalive) -> None:
        if isinstance(item, Keepalive):
            return
        try:
            out = feed_frame(item, converter)
        except UndecodableMessageError as error:
            poisoned.append(str(error))
            converter.skip_message(item.payload)
            if parks and error.oid in RELATIONS and len(poisoned) % 2:
                converter.pause_relation(error.oid, converter.commit_lsn)
            return
        fragments.extend([out] if isinstance(out, Fragment) else [])

    at = 0
    for size in bursts or [1] * len(frames):
        for step in split_into_steps(frames[at : at + size], converter, least if bursts else 1 << 60):
            if not isinstance(step, RowRun):
                one(step)
                continue
            place = step.start
            while place < step.end:
                if not converter.accepts_segment(step.segment):
                    one(step.parse_frame_at(place))
                    place += 1
                    continue
                fragment, place = converter.feed_rows(step.segment, place, step.end)
                fragments.extend([fragment] if fragment is not None else [])
        at += size
    return fragments, poisoned
