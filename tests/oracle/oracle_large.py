"""Transactions of 200,000 rows on one table, while the shapes of every other table continue.

The table has no history: the folded topic and the rows of clients are compared with SELECT alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from oracle_tables import Column, Table
from oracle_topics import READ_S

ROWS = 200_000
GROUPS = 100
SETTLE_S = 300.0
"""Time for a transaction of this size to reach all readers, on a machine with other work."""
TABLE = Table(-1, "public", "large", [Column("id", "bigint"), Column("grp", "integer"), Column("v", "text")], ["id"])
DDL = f"CREATE TABLE {TABLE.sql_name} (id bigint PRIMARY KEY, grp integer, v text)"
WHERE = "grp = 7"
KINDS = {
    "insert": f"INSERT INTO {TABLE.sql_name} SELECT g, g % {GROUPS}, 'row ' || g FROM generate_series(1, {ROWS}) g",
    "update": f"UPDATE {TABLE.sql_name} SET grp = (grp + 1) % {GROUPS}, v = v || '.'",
    "delete": f"DELETE FROM {TABLE.sql_name}",
}
"""Statements, executed in this order in separate transactions."""


def transact(connection: psycopg.Connection[Any], kind: str, while_open: Callable[[], None]) -> None:
    done = connection.execute(KINDS[kind])
    assert done.rowcount == ROWS, f"{kind} of {done.rowcount} rows"
    while_open()
    connection.commit()


def differing(brokers: str, topic: str, rows: list[tuple[Any, ...]]) -> list[str]:
    """Return the differences between the folded topic and `rows`, which are (id, grp, v) as text."""
    found, twice = _folded(brokers, topic)
    wanted = {int(row[0]): row for row in rows}
    wrong = [key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)]
    shown = [f"topic {topic}: {len(wrong)} rows differ, key {k}: {wanted.get(k)} / {found.get(k)}" for k in wrong[:1]]
    return [*shown, *(f"a place stands twice in topic {topic}: {place}" for place in twice[:1])]


def _folded(brokers: str, topic: str) -> tuple[dict[int, tuple[str, ...]], list[tuple[int, int]]]:
    """Return the topic's rows by key, and the places of records that follow a record with the same or a later place."""
    consumer = Consumer(
        {"bootstrap.servers": brokers, "group.id": "large", "enable.partition.eof": True, "check.crcs": True,
         "enable.auto.commit": False, "isolation.level": "read_committed", "log_level": 0}
    )  # fmt: skip
    rows: dict[int, bytes] = {}
    twice: list[tuple[int, int]] = []
    last: tuple[int, int] = (-1, -1)
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        while True:
            messages = consumer.consume(10_000, 1.0) or consumer.consume(1, READ_S)
            assert messages, f"topic {topic} cannot be read"
            for message in messages:
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, f"topic {topic}: {error}"
                    return {key: _row(value) for key, value in rows.items()}, twice
                lsn, _, ordinal = next(v for name, v in message.headers() if name == "tm.pos").partition(b"_")
                place = (int(lsn), int(ordinal))
                if place <= last:
                    twice.append(place)
                last = place
                key = int(json.loads(message.key())["id"])
                if message.value() is None:
                    rows.pop(key, None)
                else:
                    rows[key] = message.value()
    finally:
        consumer.close()


def _row(value: bytes) -> tuple[str, ...]:
    found = json.loads(value, parse_int=str)
    return found["id"], found["grp"], found["v"]
