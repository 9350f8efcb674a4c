"""A client of fetch sessions by hand: what it asks for is kept and said as KIP-227 lets it, and nothing else."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from kio.index import load_request_schema

from support.kafka.raw import RawClient, encode, fields, nested
from tidemill.metastore.catalogue import TopicRow

Place = tuple[str, int]
"""(topic, partition)"""


class Reported(NamedTuple):
    """One partition of an answer. `batches`: (first offset, record count) of each."""

    code: int
    high_watermark: int
    last_stable: int
    log_start: int
    batches: tuple[tuple[int, int], ...]


class Answer(NamedTuple):
    code: int
    session_id: int
    reported: dict[Place, Reported]
    order: list[Place]


def body_of(
    version: int,
    ids: Mapping[str, uuid.UUID],
    asked: Mapping[Place, int],
    *,
    session_id: int = 0,
    epoch: int = -1,
    forgotten: tuple[Place, ...] = (),
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    partition_bytes: int = 1 << 20,
    committed: bool = False,
) -> bytes:
    """`asked`: offsets; partitions of one topic that follow each other are one group of the request."""
    schema = load_request_schema(1, version)
    topic = nested(schema, "topics")
    element = nested(topic, "partitions")

    def named(name: str) -> dict[str, Any]:
        return {"topic": name, "topic_id": ids.get(name, uuid.UUID(int=77))}

    topics = []
    for name, group in groupby(asked.items(), key=lambda each: each[0][0]):
        partitions = tuple(
            fields(element, partition=partition, fetch_offset=offset, partition_max_bytes=partition_bytes)
            for (_, partition), offset in group
        )
        topics.append(fields(topic, **named(name), partitions=partitions))
    gone = nested(schema, "forgotten_topics_data") if forgotten else None
    return encode(
        fields(
            schema,
            replica_id=-1,
            max_wait=datetime.timedelta(milliseconds=max_wait_ms),
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            isolation_level=int(committed),
            session_id=session_id,
            session_epoch=epoch,
            topics=tuple(topics),
            forgotten_topics_data=tuple(fields(gone, **named(name), partitions=(p,)) for name, p in forgotten),
            rack_id="",
        )
    )


class Fetcher:
    """A client that names topics or their ids, depending on the version. `rows`: the topics that it knows."""

    def __init__(self, port: int, rows: list[TopicRow], version: int = 13) -> None:
        self.client = RawClient(port)
        self.version = version
        self._ids = {row.name: uuid.UUID(row.topic_id) for row in rows}
        self._names = {topic_id: name for name, topic_id in self._ids.items()}

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.sock.close()

    def body(self, asked: Mapping[Place, int], **how: Any) -> bytes:
        return body_of(self.version, self._ids, asked, **how)

    def fetch(self, asked: Mapping[Place, int], **how: Any) -> Answer:
        return self.read(self.client.ask(1, self.version, self.body(asked, **how)))

    def read(self, answer: Any) -> Answer:
        reported: dict[Place, Reported] = {}
        for topic in answer.responses:
            name = topic.topic if self.version < 13 else self._names.get(topic.topic_id, "?")
            for each in topic.partitions:
                place = (name, each.partition_index)
                assert place not in reported, "a partition is answered once"
                batches = tuple(_batches(bytes(each.records or b"")))
                reported[place] = Reported(
                    int(each.error_code),
                    each.high_watermark,
                    each.last_stable_offset,
                    getattr(each, "log_start_offset", -1),
                    batches,
                )
        return Answer(int(getattr(answer, "error_code", 0)), getattr(answer, "session_id", 0), reported, list(reported))


def _batches(data: bytes) -> list[tuple[int, int]]:
    found, at = [], 0
    while at < len(data):
        base = int.from_bytes(data[at : at + 8], "big")
        found.append((base, int.from_bytes(data[at + 57 : at + 61], "big")))
        at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")
    return found
