"""Producers of the chaos lane: three foreign libraries, with and without a producer id.

Each sends numbers to every partition, and records which were acknowledged, when, and at which offset. A request to a
frozen node is abandoned after REQUEST_S, where the library permits it: otherwise its successor would wait for a minute.
The leader is looked up twice a second instead of every five minutes, so that a pause is the cluster's and not its
client's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import confluent_kafka as ck

from chaos_judge import Acked
from chaos_thread import Worker

EVERY_S = 0.1
EACH = 3
"""Records for a partition every EVERY_S."""
REQUEST_S = 3.0
DELIVERY_S = 120.0
WAITING = 150
"""Unacknowledged records of kafka-python without an id, beyond which it gets no more, like a full buffer of an
application.

With one request in flight it cannot look up the leader while each of its connections has one out (3.0.12:
`least_loaded_node` skips them), so under continuous load it may never learn of a new leader. In a run of 300 s it found
no node to ask 490 times in a row, and dropped its oldest batches.
"""


class Sender(Worker):
    """A producer. `name` has no spaces. `once`: it is idempotent. Records that the library dropped are in `failed`."""

    ordered_without_id = True
    """True if it sends nothing before the records that it has to resend."""

    gives_up = False
    """True if it abandons a silent node in time, and asks another one for the leader."""

    def __init__(self, name: str, addresses: str, topic: str, partitions: int, *, once: bool = True) -> None:
        super().__init__(name)
        self.topic, self.once = topic, once
        self.addresses = addresses
        self.sent = [0] * partitions
        self.acked: list[list[Acked]] = [[] for _ in range(partitions)]

    def progress(self) -> str:
        return f"{sum(map(len, self.acked))} of {sum(self.sent)}"

    def _next(self, partition: int) -> tuple[int, bytes]:
        number = self.sent[partition]
        self.sent[partition] += 1
        return number, f"{self.name} {number}".encode()

    def _stored(self, partition: int, number: int, offset: int) -> None:
        self.acked[partition].append(Acked(time.monotonic(), number, offset))


class Confluent(Sender):
    gives_up = True
    ordered_without_id = False
    """False also with `max.in.flight=1`: it counts requests in flight by connection, not by partition (issue 1969).
    When the leader moves during a request, the records queued after it reach the new leader first.

    So it has many in flight, and is the one producer without ids that does not wait: the other two have one request
    out, or wait for a frozen node until it continues.
    """

    def _run(self) -> None:
        config = {**confluent_config(self.addresses), "linger.ms": 5}
        config |= {"enable.idempotence": True} if self.once else {"acks": "all"}
        producer = ck.Producer(config)
        due_s = time.monotonic()
        while not self._stop.is_set():
            for partition in range(len(self.sent)):
                for _ in range(EACH):
                    number, value = self._next(partition)
                    producer.produce(
                        self.topic, value, partition=partition, on_delivery=self._reported(partition, number)
                    )
            due_s += EVERY_S
            while (wait_s := due_s - time.monotonic()) > 0:
                producer.poll(wait_s)
        if left := producer.flush(DELIVERY_S):
            self.failed.append(f"not flushed: {left}")

    def _reported(self, partition: int, number: int) -> Any:
        def reported(error: Any, message: Any) -> None:
            if error is None:
                self._stored(partition, number, message.offset())
            else:
                self.failed.append(str(error))

        return reported


def confluent_config(addresses: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": addresses,
        "message.timeout.ms": int(DELIVERY_S * 1000),
        "socket.timeout.ms": int(REQUEST_S * 1000),
        "reconnect.backoff.max.ms": 200,
        "retry.backoff.ms": 20,
        "retry.backoff.max.ms": 200,
        "topic.metadata.refresh.fast.interval.ms": 50,
        "topic.metadata.refresh.interval.ms": 500,
        "log_level": 0,
    }


class KafkaPython(Sender):
    """A producer that asks the silent node itself for the leader, for one time limit after another."""

    def _run(self) -> None:
        from kafka import KafkaProducer

        logging.getLogger("kafka").setLevel(logging.CRITICAL)
        # Without an id only one request at a time keeps the order: a failed one would be sent again behind its next.
        alone = {} if self.once else {"enable_idempotence": False, "max_in_flight_requests_per_connection": 1}
        producer = KafkaProducer(**kafka_python_config(self.addresses), linger_ms=5, **alone)
        due_s = time.monotonic()
        while not self._stop.is_set():
            for partition in range(len(self.sent) if self.once or self._waiting() < WAITING else 0):
                for _ in range(EACH):
                    number, value = self._next(partition)
                    future = producer.send(self.topic, value, partition=partition)
                    future.add_callback(self._sent, partition, number).add_errback(self._broke)
            due_s += EVERY_S
            self._stop.wait(max(0.0, due_s - time.monotonic()))
        producer.flush(DELIVERY_S)
        producer.close(5)

    def _waiting(self) -> int:
        return sum(self.sent) - sum(map(len, self.acked)) - len(self.failed)

    def _sent(self, partition: int, number: int, metadata: Any) -> None:
        self._stored(partition, number, metadata.offset)

    def _broke(self, error: Any) -> None:
        self.failed.append(repr(error))


def kafka_python_config(addresses: str) -> dict[str, Any]:
    return {
        "bootstrap_servers": addresses.split(","),
        "request_timeout_ms": int(REQUEST_S * 1000),
        "delivery_timeout_ms": int(DELIVERY_S * 1000),
        "reconnect_backoff_max_ms": 200,
        "retry_backoff_ms": 50,
    }


class AioKafka(Sender):
    """A producer whose time limit of a request is also that of a batch, so it waits until a frozen node continues."""

    def _run(self) -> None:
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        asyncio.run(self._produce())

    async def _produce(self) -> None:
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(
            bootstrap_servers=self.addresses,
            enable_idempotence=self.once,
            acks="all",
            linger_ms=5,
            request_timeout_ms=int(DELIVERY_S * 1000),
            retry_backoff_ms=50,
        )
        await producer.start()
        waiting: set[asyncio.Future[Any]] = set()
        due_s = time.monotonic()
        while not self._stop.is_set():
            for partition in range(len(self.sent)):
                for _ in range(EACH):
                    number, value = self._next(partition)
                    future = await producer.send(self.topic, value, partition=partition)
                    waiting.add(future)
                    future.add_done_callback(waiting.discard)
                    future.add_done_callback(self._reported(partition, number))
            due_s += EVERY_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await asyncio.wait([*waiting, asyncio.ensure_future(producer.flush())], timeout=DELIVERY_S)
        await producer.stop()

    def _reported(self, partition: int, number: int) -> Any:
        def reported(future: asyncio.Future[Any]) -> None:
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._stored(partition, number, future.result().offset)
            else:
                self.failed.append(repr(error))

        return reported
