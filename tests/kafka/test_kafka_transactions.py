"""Transactions of third-party clients, checked against the records that their consumers see; coordinators that fail."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient

from support.kafka.harness import Cluster, RealBroker
from support.kafka.transactions import DEADLINE_S, QUIET, producer, shown
from support.waiting import eventually
from tidemill.base.errors import UnavailableError
from tidemill.kafka import error_codes
from tidemill.kafka.transactions.coordinator import TransactionCoordinator
from tidemill.kafka.transactions.state import State, Transaction


def transactions_of(broker: RealBroker) -> dict[str, Transaction]:
    coordinator = broker.server._transactions
    assert isinstance(coordinator, TransactionCoordinator)
    return broker.portal.call(coordinator.all())


def test_committed_transactions_are_shown_whole_and_aborted_ones_never(broker: RealBroker) -> None:
    broker.create_topic("t", 2)
    client = producer(broker.address, "tx")
    committed, everything = [], []
    for number in range(6):
        client.begin_transaction()
        values = [f"{number}.{part}".encode() for part in range(5)]
        for part, value in enumerate(values):
            client.produce("t", value, partition=part % 2)
        client.flush(DEADLINE_S)
        everything += values
        if number % 3 == 1:
            client.abort_transaction(DEADLINE_S)
        else:
            client.commit_transaction(DEADLINE_S)
            committed += values
        assert shown(broker.address, "t", 2) == sorted(committed)
    client.begin_transaction()
    client.produce("t", b"open", partition=0)
    client.flush(DEADLINE_S)
    assert shown(broker.address, "t", 2) == sorted(committed)
    assert shown(broker.address, "t", 2, committed=False) == sorted([*everything, b"open"])
    # a transaction that is open during the restart may continue
    broker.restart()
    client.commit_transaction(DEADLINE_S)
    assert shown(broker.address, "t", 2) == sorted([*committed, b"open"])


def test_a_second_producer_of_the_same_id_fences_the_first_and_aborts_what_it_left_open(broker: RealBroker) -> None:
    broker.create_topic("t", 1)
    first = producer(broker.address, "tx")
    first.begin_transaction()
    first.produce("t", b"left open", partition=0)
    first.flush(DEADLINE_S)
    second = producer(broker.address, "tx")
    second.begin_transaction()
    second.produce("t", b"mine", partition=0)
    second.commit_transaction(DEADLINE_S)
    with pytest.raises(ck.KafkaException) as fenced:
        first.commit_transaction(DEADLINE_S)
    assert fenced.value.args[0].code() == ck.KafkaError._FENCED
    assert shown(broker.address, "t", 1) == [b"mine"]


def test_offsets_are_the_groups_when_the_transaction_is_committed_and_only_then(broker: RealBroker) -> None:
    broker.create_topic("in", 2)
    broker.create_topic("out", 1)
    client = producer(broker.address, "tx")
    member = ck.Consumer({"bootstrap.servers": broker.address, "group.id": "workers", **QUIET})
    place = [ck.TopicPartition("in", 0)]

    def committed() -> int:
        return int(member.committed(place, timeout=DEADLINE_S)[0].offset)

    for offset, commit in ((5, True), (9, False), (7, True)):
        before = committed()
        client.begin_transaction()
        client.produce("out", b"v", partition=0)
        offsets = [ck.TopicPartition("in", 0, offset)]
        client.send_offsets_to_transaction(offsets, member.consumer_group_metadata(), DEADLINE_S)
        if commit:
            client.commit_transaction(DEADLINE_S)
        else:
            client.abort_transaction(DEADLINE_S)
        assert committed() == (offset if commit else before)
    member.close()


def test_who_takes_a_partition_over_waits_for_the_offsets_that_a_transaction_may_change(broker: RealBroker) -> None:
    broker.create_topic("in", 2)
    client = producer(broker.address, "tx")
    member = ck.Consumer({"bootstrap.servers": broker.address, "group.id": "workers", **QUIET})

    def committed(partition: int, within_s: float = 1.0) -> int:
        return int(member.committed([ck.TopicPartition("in", partition)], timeout=within_s)[0].offset)

    client.list_topics("in", timeout=DEADLINE_S)  # so that the endpoint knows the topic
    member.commit(offsets=[ck.TopicPartition("in", 1, 4)], asynchronous=False)
    for commit in (True, False):
        client.begin_transaction()
        offsets = [ck.TopicPartition("in", 0, 8)]
        client.send_offsets_to_transaction(offsets, member.consumer_group_metadata(), DEADLINE_S)
        pending = broker.portal.call(broker.server._transactions.undecided("workers"))  # type: ignore[union-attr]
        assert len(pending) == 1
        with pytest.raises(ck.KafkaException) as waiting:  # librdkafka retries until its time-out
            committed(0)
        assert waiting.value.args[0].code() in (ck.KafkaError._TIMED_OUT, ck.KafkaError.UNSTABLE_OFFSET_COMMIT)
        assert committed(1, DEADLINE_S) == 4
        client.commit_transaction(DEADLINE_S) if commit else client.abort_transaction(DEADLINE_S)
        assert committed(0, DEADLINE_S) == 8
    member.close()


def test_an_open_transaction_is_aborted_in_time_and_its_producer_is_fenced(broker: RealBroker) -> None:
    broker.create_topic("t", 1)
    slow = producer(broker.address, "slow", **{"transaction.timeout.ms": 4000, "message.timeout.ms": 3900})
    slow.begin_transaction()
    slow.produce("t", b"too late", partition=0)
    slow.flush(DEADLINE_S)
    plain = ck.Producer({"bootstrap.servers": broker.address, **QUIET})
    plain.produce("t", b"behind it", partition=0)
    plain.flush(DEADLINE_S)
    eventually(lambda: transactions_of(broker)["slow"].state is State.COMPLETE_ABORT)
    assert shown(broker.address, "t", 1) == [b"behind it"]
    with pytest.raises(ck.KafkaException):
        slow.commit_transaction(DEADLINE_S)


def test_a_transactional_id_that_nobody_used_for_long_is_forgotten_and_an_open_one_is_not(broker: RealBroker) -> None:
    broker.create_topic("t", 1)
    idle, busy = producer(broker.address, "idle"), producer(broker.address, "busy")
    for client in (idle, busy):
        client.begin_transaction()
        client.produce("t", b"v", partition=0)
        client.flush(DEADLINE_S)
    idle.commit_transaction(DEADLINE_S)
    transactions = broker.server._transactions
    assert transactions is not None
    broker.portal.call(transactions.take_over())
    assert transactions_of(broker).keys() == {"idle", "busy"}
    transactions._expires_ms = -1_000  # as if that time had passed
    broker.portal.call(transactions.take_over())
    assert transactions_of(broker).keys() == {"busy"}
    transactions._expires_ms = 1 << 40
    busy.commit_transaction(DEADLINE_S)
    again = producer(broker.address, "idle")
    again.begin_transaction()
    again.produce("t", b"w", partition=0)
    again.commit_transaction(DEADLINE_S)
    assert shown(broker.address, "t", 1) == [b"v", b"v", b"w"]


def test_a_transaction_ends_though_a_topic_of_it_is_deleted(broker: RealBroker) -> None:
    broker.create_topic("t", 1)
    broker.create_topic("gone", 1)
    client = producer(broker.address, "tx")
    client.begin_transaction()
    for topic in ("t", "gone"):
        client.produce(topic, b"v", partition=0)
    client.flush(DEADLINE_S)
    admin = AdminClient({"bootstrap.servers": broker.address, **QUIET})
    admin.delete_topics(["gone"])["gone"].result(DEADLINE_S)
    client.commit_transaction(DEADLINE_S)
    eventually(lambda: transactions_of(broker)["tx"].state is State.COMPLETE_COMMIT)
    assert shown(broker.address, "t", 1) == [b"v"]


def test_a_timeout_beyond_the_most_is_refused(broker: RealBroker) -> None:
    client = ck.Producer(
        {"bootstrap.servers": broker.address, "transactional.id": "x", "transaction.timeout.ms": 900_001, **QUIET}
    )
    with pytest.raises(ck.KafkaException) as refused:
        client.init_transactions(DEADLINE_S)
    assert refused.value.args[0].code() == ck.KafkaError.INVALID_TRANSACTION_TIMEOUT


@pytest.fixture
def stuck(broker: RealBroker, monkeypatch: pytest.MonkeyPatch) -> RealBroker:
    """A broker whose partitions accept no markers until it is restarted."""
    broker.create_topic("t", 2)
    broker.create_topic("in", 1)

    async def away(*_: object) -> None:
        raise UnavailableError("no marker today.")

    monkeypatch.setattr(broker.topics, "mark", away)
    monkeypatch.setattr("tidemill.kafka.transactions.coordinator.ANSWER_WAIT_S", 0.2)
    return broker


@pytest.mark.parametrize("commit", [True, False])
def test_what_was_decided_is_carried_to_its_end_by_the_next_coordinator(stuck: RealBroker, commit: bool) -> None:
    """The node stops between prepare and complete."""
    client = producer(stuck.address, "tx")
    client.begin_transaction()
    for part in range(2):
        client.produce("t", b"v%d" % part, partition=part)
    metadata = ck.Consumer({"bootstrap.servers": stuck.address, "group.id": "g", **QUIET})
    client.send_offsets_to_transaction([ck.TopicPartition("in", 0, 3)], metadata.consumer_group_metadata(), DEADLINE_S)
    client.flush(DEADLINE_S)
    client.commit_transaction(DEADLINE_S) if commit else client.abort_transaction(DEADLINE_S)
    found = transactions_of(stuck)["tx"]
    assert found.state is (State.PREPARE_COMMIT if commit else State.PREPARE_ABORT)
    assert shown(stuck.address, "t", 2) == []
    stuck.restart()
    eventually(lambda: not transactions_of(stuck)["tx"].state.prepared)
    assert shown(stuck.address, "t", 2) == ([b"v0", b"v1"] if commit else [])
    offset = metadata.committed([ck.TopicPartition("in", 0)], timeout=DEADLINE_S)[0].offset
    assert offset == (3 if commit else ck.OFFSET_INVALID)
    client.begin_transaction()
    client.produce("t", b"next", partition=0)
    client.commit_transaction(DEADLINE_S)
    assert b"next" in shown(stuck.address, "t", 2)


def test_partitions_of_other_nodes_are_marked_by_them_and_a_dead_coordinator_is_replaced() -> None:
    cluster = Cluster("n1", "n2", "n3")
    try:
        node = cluster.nodes[0]
        row = cluster.portal.call(node.catalogue.create_topic("t", 6))
        leaders = {node.topics.leader_of(row.topic_id, index) for index in range(6)}
        assert len(leaders) > 1
        client = producer(cluster.addresses, "tx")
        for number in range(3):
            client.begin_transaction()
            for part in range(6):
                client.produce("t", b"%d.%d" % (number, part), partition=part)
            client.commit_transaction(DEADLINE_S)
        whole = sorted(b"%d.%d" % (number, part) for number in range(3) for part in range(6))
        eventually(lambda: shown(cluster.addresses, "t", 6) == whole)

        client.begin_transaction()
        client.produce("t", b"last", partition=0)
        client.flush(DEADLINE_S)
        server = node.server._transactions
        assert server is not None
        owner = next(n for n in cluster.nodes if n.server._transactions._coordinates("tx"))  # type: ignore[union-attr]
        cluster.stop(owner)
        with contextlib.suppress(ck.KafkaException):
            client.commit_transaction(DEADLINE_S)
        eventually(lambda: shown(cluster.addresses, "t", 6) == sorted([*whole, b"last"]))
    finally:
        cluster.close()


def test_kafka_pythons_producer_and_consumer(broker: RealBroker) -> None:
    from kafka import KafkaConsumer, KafkaProducer, TopicPartition

    broker.create_topic("t", 1)
    client = KafkaProducer(bootstrap_servers=broker.address, transactional_id="kp")
    client.init_transactions()
    for value, commit in ((b"a", True), (b"b", False), (b"c", True)):
        client.begin_transaction()
        client.send("t", value, partition=0)
        client.flush()
        client.commit_transaction() if commit else client.abort_transaction()
    client.close()
    for level, wanted in (("read_committed", [b"a", b"c"]), ("read_uncommitted", [b"a", b"b", b"c"])):
        reader = KafkaConsumer(
            bootstrap_servers=broker.address, isolation_level=level, consumer_timeout_ms=2000, group_id=None
        )
        reader.assign([TopicPartition("t", 0)])
        reader.seek_to_beginning()
        found: list[bytes] = []

        def more(found: list[bytes] = found, reader: Any = reader, wanted: list[bytes] = wanted) -> bool:
            for records in reader.poll(200).values():
                found += [record.value for record in records]
            return found == wanted

        eventually(more)
        reader.close()


def test_an_operators_abort_is_carried_out_by_the_nodes_that_run() -> None:
    from tidemill.base.clock import Rand, SystemClock
    from tidemill.kafka.transactions.store import abort

    cluster = Cluster("n1", "n2")
    try:
        node = cluster.nodes[0]
        cluster.portal.call(node.catalogue.create_topic("t", 4))
        client = producer(cluster.addresses, "tx")
        client.begin_transaction()
        for part in range(4):
            client.produce("t", b"never", partition=part)
        client.flush(DEADLINE_S)
        aborting = abort(node.consensus, SystemClock(), Rand(), "tx", wait_s=DEADLINE_S)
        assert cluster.portal.call(aborting).state is State.COMPLETE_ABORT
        assert shown(cluster.addresses, "t", 4) == []
        with pytest.raises(ck.KafkaException):
            client.commit_transaction(DEADLINE_S)
    finally:
        cluster.close()


async def test_aiokafkas_producer_and_consumer(broker: RealBroker) -> None:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

    broker.create_topic("t", 1)
    client = AIOKafkaProducer(bootstrap_servers=broker.address, transactional_id="aio")
    await client.start()
    for value, commit in ((b"a", True), (b"b", False), (b"c", True)):
        await client.begin_transaction()
        await client.send_and_wait("t", value, partition=0)
        if commit:
            await client.send_offsets_to_transaction({TopicPartition("t", 0): 7}, "aio-group")
            await client.commit_transaction()
        else:
            await client.abort_transaction()
    await client.stop()
    reader = AIOKafkaConsumer(
        bootstrap_servers=broker.address, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await reader.start()
    reader.assign([TopicPartition("t", 0)])
    async with asyncio.timeout(DEADLINE_S):
        assert [(await reader.getone()).value for _ in range(2)] == [b"a", b"c"]
    await reader.stop()


def test_admin_lists_and_describes_transactions_and_producers(broker: RealBroker) -> None:
    from kafka.errors import BrokerResponseError

    from kafka import KafkaAdminClient

    broker.create_topic("t", 1)
    client = producer(broker.address, "tx ü/1")
    client.begin_transaction()
    client.produce("t", b"v", partition=0)
    client.flush(DEADLINE_S)
    assert AdminClient({"bootstrap.servers": broker.address, **QUIET}).list_topics(timeout=DEADLINE_S).topics
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    try:
        listed = admin.list_transactions()
        assert "tx ü/1" in str(listed) and "Ongoing" in str(listed)
        described = admin.describe_transactions(["tx ü/1"])
        assert "Ongoing" in str(described) and "'t'" in str(described)
        for pattern, matches in (("tx .*", True), ("(?i)TX ü/[0-9]|y", True), ("", True), ("x", False), ("x.*", False)):
            listed = admin.list_transactions(transactional_id_pattern=pattern)
            assert ("tx ü/1" in str(listed)) == matches, pattern
        for pattern in ("(", "x)|(y", "(?=x)", "x" * 1_001):
            with pytest.raises(BrokerResponseError, match=f"Error {error_codes.INVALID_REGULAR_EXPRESSION}"):
                admin.list_transactions(transactional_id_pattern=pattern)
    finally:
        admin.close()
    client.abort_transaction(DEADLINE_S)
