"""Kafka client of `tidemill topic`. Memory for queued records is bounded, and Ctrl-C ends the client cleanly."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from tidemill.base.clock import SystemClock
from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.base.limits import KAFKA_REQUEST_BYTES
from tidemill.cli.topic.line_format import LineParser

QUEUE_KB = 32 << 10
"""Limit of the records in flight that librdkafka buffers."""
REQUEST_TIMEOUT_S = 15.0
POLL_S = 0.2
"""Poll interval; Ctrl-C is handled between polls."""
FLUSH_S = 60.0
INTERRUPTED = 130


class ProduceResult(msgspec.Struct):
    """Outcome of `produce`. `failed` says why the first unacknowledged record was not acknowledged."""

    sent: int = 0
    acknowledged: int = 0
    failed: str = ""
    interrupted: bool = False

    def summary(self, topic: str) -> str:
        text = f"{self.acknowledged:,} of {self.sent:,} records acknowledged by {topic}"
        return f"{text}; first failure: {self.failed}" if self.failed else text

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return INTERRUPTED
        return 1 if self.acknowledged < self.sent or self.failed else 0


def produce(settings: dict[str, Any], topic: str, partition: int, source: BinaryIO, lines: LineParser) -> ProduceResult:
    """Produce every line of `source`, in order.

    Raises InvalidError for a line that is no record, after the records before it are acknowledged; MissingError,
    UnavailableError.
    """
    from confluent_kafka import KafkaException, Producer

    limits = {"queue.buffering.max.kbytes": QUEUE_KB, "message.max.bytes": KAFKA_REQUEST_BYTES}
    client = _create_client(Producer, {"enable.idempotence": True, "linger.ms": 20, **limits, **settings})
    count = _partition_count(client, topic)
    done = ProduceResult()

    def delivered(error: Any, _: Any) -> None:
        if error is None:
            done.acknowledged += 1
        elif not done.failed:
            done.failed = str(error)

    refused: TidemillError | None = None
    try:
        while data := source.readline(KAFKA_REQUEST_BYTES + 2):
            if len(data) > KAFKA_REQUEST_BYTES:
                raise InvalidError(f"a line is too long: bytes>{KAFKA_REQUEST_BYTES}.")
            record = lines.read(data.removesuffix(b"\n"))
            into = record.partition if record.partition >= 0 else partition
            if into >= count:
                raise MissingError(f"no such partition: topic={topic} partition={into} partitions={count}.")
            _send_record(client, topic, into, record, delivered)
            done.sent += 1
    except KeyboardInterrupt:
        done.interrupted = True
    except (TidemillError, KafkaException) as error:
        refused = (
            error if isinstance(error, TidemillError) else UnavailableError(f"the Kafka client failed: cause={error}.")
        )
    _flush_producer(client, done)
    if refused is not None:
        print(done.summary(topic), file=sys.stderr)
        raise refused
    return done


def _send_record(client: Any, topic: str, partition: int, record: Any, delivered: Callable[[Any, Any], None]) -> None:
    more = {"timestamp": record.timestamp_ms} if record.timestamp_ms >= 0 else {}
    more |= {"partition": partition} if partition >= 0 else {}
    while True:
        try:
            client.produce(topic, record.value, record.key, headers=list(record.headers), on_delivery=delivered, **more)
        except BufferError:
            client.poll(POLL_S)  # the queue is full: wait until some records are acknowledged
        else:
            client.poll(0)
            return


def _flush_producer(client: Any, done: ProduceResult) -> None:
    left = client.flush(FLUSH_S)
    if left and not done.failed:
        done.failed = f"{left} records were not acknowledged after {FLUSH_S:.0f} s"


class ConsumeRange(msgspec.Struct, frozen=True):
    """Arguments of the command line. An empty `end` means no end; `count` 0 means all."""

    begin: str
    end: str
    partitions: tuple[int, ...] = ()
    count: int = 0


def consume(
    settings: dict[str, Any], topic: str, asked: ConsumeRange, line: Callable[[Any], bytes], out: BinaryIO
) -> int:
    """Write the requested records to `out` and return the exit code. Raises InvalidError, MissingError,
    UnavailableError."""
    from confluent_kafka import Consumer

    limits = {"queued.max.messages.kbytes": QUEUE_KB, "fetch.message.max.bytes": 4 << 20}
    own = {"group.id": "tidemill-topic-consume", "enable.auto.commit": False, "enable.partition.eof": True}
    client = _create_client(Consumer, {**own, **limits, **settings, "auto.offset.reset": "error"})
    try:
        _consume(client, topic, asked, line, out)
        out.flush()
    except KeyboardInterrupt:
        out.flush()
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has enough. The interpreter flushes again when it exits: into /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        client.close()
    return 0


def _consume(client: Any, topic: str, asked: ConsumeRange, line: Callable[[Any], bytes], out: BinaryIO) -> None:
    from confluent_kafka import TopicPartition

    count = _partition_count(client, topic)
    unknown = [each for each in asked.partitions if not 0 <= each < count]
    if unknown:
        raise MissingError(f"no such partition: topic={topic} partition={unknown[0]} partitions={count}.")
    spans = {each: _offset_range(client, topic, each, asked) for each in asked.partitions or range(count)}
    open_ends = {each: end for each, (begin, end) in spans.items() if end is None or begin < end}
    client.assign([TopicPartition(topic, each, spans[each][0]) for each in open_ends])
    left = asked.count or -1
    idle = True
    while open_ends and left:
        message = client.poll(0.0 if not idle else POLL_S)
        if message is None:
            if not idle:
                out.flush()
            idle = True
            continue
        idle = False
        place, end = message.partition(), open_ends.get(message.partition())
        if message.error() is not None:
            if not _is_end_of_partition(message):
                raise UnavailableError(f"reading failed: topic={topic} partition={place} cause={message.error()}.")
            past = message.offset()
        else:
            past = message.offset() + 1
            if place in open_ends and (end is None or past <= end):
                out.write(line(message))
                left -= 1
        if place in open_ends and end is not None and past >= end:
            del open_ends[place]
            client.pause([TopicPartition(topic, place)])


def _is_end_of_partition(message: Any) -> bool:
    from confluent_kafka import KafkaError

    return bool(message.error().code() == KafkaError._PARTITION_EOF)


def _offset_range(client: Any, topic: str, partition: int, asked: ConsumeRange) -> tuple[int, int | None]:
    """Return the offsets [begin, end) of one partition, no end to follow. Raises InvalidError, UnavailableError."""
    from confluent_kafka import TopicPartition

    place = TopicPartition(topic, partition)
    low, high = _call_broker(lambda: client.get_watermark_offsets(place, timeout=REQUEST_TIMEOUT_S))

    def resolve_position(text: str) -> int:
        if text in ("start", "end"):
            return int(low if text == "start" else high)
        if text.startswith("@") and text[1:].isdecimal():
            wanted = [TopicPartition(topic, partition, int(text[1:]))]
            (found,) = _call_broker(lambda: client.offsets_for_times(wanted, timeout=REQUEST_TIMEOUT_S))
            return int(found.offset if found.offset >= 0 else high)
        if text.startswith("-") and text[1:].isdecimal():
            return max(int(low), int(high) - int(text[1:]))
        if text.isdecimal() and text.isascii():
            return int(text)
        raise InvalidError(
            f"invalid position in a topic: {text!r}.", fix="Use start, end, an offset, -N or @MILLISECONDS."
        )

    begin = resolve_position(asked.begin)
    if not low <= begin <= high:
        raise InvalidError(
            f"no such offset: topic={topic} partition={partition} offset={begin}.", fix=f"Use {low} to {high}."
        )
    return begin, resolve_position(asked.end) if asked.end else None


def _create_client(kind: Any, settings: dict[str, Any]) -> Any:
    from confluent_kafka import KafkaException

    try:
        return kind({**settings, "log_level": 2})
    except KafkaException as error:
        raise InvalidError(f"invalid client property: cause={error}.", fix="Correct --client.") from error


def _partition_count(client: Any, topic: str) -> int:
    found = _call_broker(lambda: client.list_topics(topic, timeout=REQUEST_TIMEOUT_S)).topics[topic]
    if found.error is not None:
        raise MissingError(f"no such topic: topic={topic} cause={found.error}.", fix="Create it: tidemill topic create")
    return len(found.partitions)


def _call_broker(call: Callable[[], Any]) -> Any:
    from confluent_kafka import KafkaException

    began_s = SystemClock().monotonic_s()
    try:
        return call()
    except KafkaException as error:
        waited_s = SystemClock().monotonic_s() - began_s
        raise UnavailableError(
            f"no node answers: cause={error.args[0]} waited_s={waited_s:.0f}.",
            fix="Start a node with `tidemill up`, or correct --bootstrap.",
        ) from error
