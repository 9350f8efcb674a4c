"""Transactional producers of the chaos lane, and a copier that is exactly once.

A transaction has one record for each partition, and every fourth is aborted on purpose. One whose commit was asked for
and not answered is in neither set: it may be there, whole, or not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import confluent_kafka as ck

from chaos_load import EVERY_S, confluent_config, kafka_python_config
from chaos_thread import Worker

ABORTS_EVERY = 4
STEP_S = 10.0
TRANSACTION_MS = 30_000


class Ended(Exception):
    """The producer ended; another one of the same id must continue."""


class Transactional(Worker):
    """`committed` and `aborted`: transactions of which that is certain. `lives`: producers it took. `ended`: why each
    of them but the last ended."""

    goes_on = True
    """True if it commits again soon after a fault."""

    def __init__(self, name: str, addresses: str, topic: str, partitions: int) -> None:
        super().__init__(name)
        self.topic, self.partitions = topic, partitions
        self.addresses = addresses
        self.begun = self.lives = 0
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.committed_s: list[float] = []
        self.ended: list[str] = []

    def progress(self) -> str:
        return f"{len(self.committed_s)} committed"

    def _run(self) -> None:
        while not self._stop.is_set():
            self.lives += 1
            try:
                self._live()
            except Ended as end:
                self.ended.append(str(end))
                self._stop.wait(EVERY_S)

    def _live(self) -> None:
        """One producer's life. Raises Ended."""
        raise NotImplementedError

    def _values(self, transaction: int) -> list[bytes]:
        return [f"{self.name} {transaction} {number}".encode() for number in range(self.partitions)]

    def _begin(self) -> tuple[int, bool]:
        """(the next transaction, is it to be aborted?)"""
        transaction = self.begun
        self.begun += 1
        return transaction, transaction % ABORTS_EVERY == ABORTS_EVERY - 1

    def _committed(self, transaction: int) -> None:
        self.committed.add(transaction)
        self.committed_s.append(time.monotonic())


class ConfluentTransactional(Transactional):
    def _live(self) -> None:
        config = {**confluent_config(self.addresses), "transactional.id": self.name}
        producer = ck.Producer({**config, "transaction.timeout.ms": TRANSACTION_MS, "message.timeout.ms": 20_000})
        retried(lambda: producer.init_transactions(STEP_S))
        while not self._stop.is_set():
            transaction, aborts = self._begin()
            try:
                producer.begin_transaction()
                for partition, value in enumerate(self._values(transaction)):
                    producer.produce(self.topic, value, partition=partition)
                    producer.poll(0)
                if not aborts:
                    retried(lambda: producer.commit_transaction(STEP_S))
                    self._committed(transaction)
            except Abort:
                aborts = True
            if aborts:
                retried(lambda: producer.abort_transaction(STEP_S))
                self.aborted.add(transaction)
            self._stop.wait(EVERY_S)


class Abort(Exception):
    """The transaction must be aborted, and was not committed."""


def retried(call: Callable[[], Any], limit_s: float = TRANSACTION_MS / 1000) -> Any:
    """Retry a call as librdkafka recommends, for as long as the transaction may be open. Raises Abort, Ended."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except ck.KafkaException as error:
            (found,) = error.args
            if found.retriable() and time.monotonic() < until_s:
                continue
            if found.txn_requires_abort():
                raise Abort(str(found)) from error
            raise Ended(str(found)) from error


class KafkaPythonTransactional(Transactional):
    goes_on = False
    """False: a request that timed out ends its producer, and the next one waits for the same node first."""

    def _live(self) -> None:
        from kafka.errors import KafkaError

        from kafka import KafkaProducer

        logging.getLogger("kafka").setLevel(logging.CRITICAL)
        producer = KafkaProducer(
            **{**kafka_python_config(self.addresses), "request_timeout_ms": int(STEP_S * 1000)},
            transactional_id=self.name,
            transaction_timeout_ms=TRANSACTION_MS,
            max_block_ms=int(STEP_S * 1000),  # to begin, to end: time in which its application decides about a retry
        )
        try:
            producer.init_transactions()
            while not self._stop.is_set():
                transaction, aborts = self._begin()
                producer.begin_transaction()
                for partition, value in enumerate(self._values(transaction)):
                    producer.send(self.topic, value, partition=partition)
                if aborts:
                    bounded(producer.abort_transaction)
                    self.aborted.add(transaction)
                else:
                    bounded(producer.commit_transaction)
                    self._committed(transaction)
                self._stop.wait(EVERY_S)
        except KafkaError as error:
            raise Ended(repr(error)) from error
        finally:
            with contextlib.suppress(KafkaError):  # that a request is still out is why it ends
                producer.close(0)


def bounded(call: Callable[[], Any], limit_s: float = TRANSACTION_MS / 1000) -> None:
    """Make a call without a time limit in a thread, which is abandoned after the limit. Raises Ended."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        done.result(limit_s)
    except TimeoutError:
        raise Ended(f"not answered in {limit_s:.0f} s: {call.__name__}") from None


class Copier(Transactional):
    """A copier that reads `source` in a group, writes each record to the same partition of `topic`, and commits
    both as one. An interrupted copy starts again at the committed offset.
    """

    def __init__(self, name: str, addresses: str, source: str, topic: str, partitions: int) -> None:
        super().__init__(name, addresses, topic, partitions)
        self.source = source
        self.copied = 0

    def _live(self) -> None:
        config = {**confluent_config(self.addresses), "transactional.id": self.name}
        producer = ck.Producer({**config, "transaction.timeout.ms": TRANSACTION_MS, "message.timeout.ms": 20_000})
        retried(lambda: producer.init_transactions(STEP_S))
        consumer = ck.Consumer(
            {
                "bootstrap.servers": self.addresses,
                "group.id": self.name,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "session.timeout.ms": 6_000,
                "socket.timeout.ms": 3_000,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )
        try:
            consumer.subscribe([self.source])
            while not self._stop.is_set():
                messages = [m for m in consumer.consume(2_000, 0.3) if m.error() is None]
                if messages:
                    self._copy(producer, consumer, messages)
        except Abort as abort:
            retried(lambda: producer.abort_transaction(STEP_S))
            raise Ended(str(abort)) from abort  # its consumer is ahead of what is committed
        finally:
            consumer.close()

    def _copy(self, producer: Any, consumer: Any, messages: list[Any]) -> None:
        producer.begin_transaction()
        ends: dict[int, int] = {}
        for message in messages:
            producer.produce(self.topic, message.value(), partition=message.partition())
            producer.poll(0)
            ends[message.partition()] = message.offset() + 1
        offsets = [ck.TopicPartition(self.source, partition, end) for partition, end in ends.items()]
        group = consumer.consumer_group_metadata()

        def send_offsets() -> None:
            retried(lambda: producer.send_offsets_to_transaction(offsets, group, STEP_S), STEP_S)

        # librdkafka 2.16.0 ignores the time limit here: the group's coordinator leaves the cluster's metadata, and
        # until another connection changes its state the successor is not looked up (seen: 73 s instead of 10 s).
        bounded(send_offsets, 2 * STEP_S)
        retried(lambda: producer.commit_transaction(STEP_S))
        self.copied += len(messages)
        self.committed_s.append(time.monotonic())
