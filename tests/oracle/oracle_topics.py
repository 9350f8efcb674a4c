"""Captured topics, read with Kafka's own client and folded by key, and the catalogue's rows of their tables."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from oracle_history import Row, Shown

from tidemill.capture.catalog.schema_versions import columns_at_version
from tidemill.metastore.catalogue import CaptureTableRow

READ_S = 60.0


@dataclass(frozen=True)
class Record:
    """One record of a topic. place: (commit LSN, ordinal)."""

    partition: int
    offset: int
    place: tuple[int, int]
    xid: int
    version: int
    key: dict[str, Any] | None
    value: dict[str, Any] | None


def read_topic(brokers: str, topic: str) -> list[Record]:
    """Return all records of a topic by partition. Raises AssertionError if it cannot be read within READ_S."""
    consumer = Consumer(
        {"bootstrap.servers": brokers, "group.id": "oracle", "enable.partition.eof": True, "check.crcs": True,
         "enable.auto.commit": False, "isolation.level": "read_committed", "log_level": 0}
    )  # fmt: skip
    try:
        found = consumer.list_topics(topic, timeout=READ_S).topics[topic]
        assert found.error is None, f"topic {topic}: {found.error}"
        places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in found.partitions]
        consumer.assign(places)
        open_, records = set(found.partitions), []
        while open_:
            message = consumer.poll(READ_S)
            assert message is not None, f"topic {topic} cannot be read: partitions {open_}"
            if message.error() is None:
                records.append(_record(message))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                open_.discard(message.partition())
            else:
                raise AssertionError(f"topic {topic}: {message.error()}")
        return sorted(records, key=lambda r: (r.partition, r.offset))
    finally:
        consumer.close()


def _record(message: Any) -> Record:
    headers = {name: (value or b"").decode() for name, value in message.headers() or []}
    lsn, _, ordinal = headers["tm.pos"].partition("_")
    key, value = message.key(), message.value()
    return Record(
        message.partition(), message.offset(), (int(lsn), int(ordinal)), int(headers.get("tm.xid") or 0),
        int(headers.get("tm.version") or 1), _values(key), _values(value),
    )  # fmt: skip


def _values(text: bytes | None) -> dict[str, Any] | None:
    """Parse JSON, with numbers as their original text."""
    if text is None:
        return None
    found = json.loads(text, parse_int=str, parse_float=str)
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in found.items()}


def twice(records: Sequence[Record]) -> list[Record]:
    """Return the records that follow a record with the same or a later place in their partition."""
    return [b for a, b in pairwise(records) if a.partition == b.partition and b.place <= a.place]


def table_of(row: CaptureTableRow, records: Sequence[Record], key: Sequence[str]) -> dict[Shown, Row]:
    """Fold the topic into a table under its newest description, by the documented rules for readers."""
    rows: dict[Shown, tuple[Row, int]] = {}
    newest = columns_at_version(row.columns, row.version)
    for record in records:
        assert record.version <= row.version, "a version that the catalogue does not know"
        if record.key is None:
            for at in [at for at, (_, partition) in rows.items() if partition == record.partition]:
                del rows[at]
            continue
        at = tuple(record.key[name] for name in key)
        rows.pop(at, None)
        if record.value is not None:
            then = {c.name: c.type_name for c in columns_at_version(row.columns, record.version)}
            assert record.value.keys() == then.keys(), f"columns of version {record.version}: {record.value}"
            made = {c.name: _now(record.value[c.name], then[c.name], c.type_name) if c.name in then else c.default
                    for c in newest}  # fmt: skip
            rows[at] = (made, record.partition)
    return {at: made for at, (made, _) in rows.items()}


def _now(value: str | None, then: str, now: str) -> str | None:
    """A real stays the number that it was."""
    if value is None or then == now or (then, now) != ("real", "double precision"):
        return value
    return repr(struct.unpack("f", struct.pack("f", float(value)))[0])


def alike(kind: str, a: str | None, b: str | None) -> bool:
    """Compare two texts of one value. Floats are compared by value, because other programs print other texts, and a
    `real` has more digits once its column is wider than when it was captured. A boolean's default is compared by its
    letter."""
    if kind == "boolean" and a is not None and b is not None:
        return a[0] == b[0]
    if a == b or a is None or b is None or kind not in ("real", "double precision"):
        return a == b
    with np.errstate(over="ignore"):
        x, y = (np.float32(a), np.float32(b)) if kind == "real" else (float(a), float(b))
    return bool(x == y or (x != x and y != y))
