"""Transactions of version 2 (KIP-890) by raw requests, as clients of Kafka 4 send them: one epoch per transaction, and
no partition added in advance.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from typing import Any

import pytest
from kio.index import load_request_schema

from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, batch, encode, fields, nested
from support.kafka.transactions import shown
from tidemill.kafka import error_codes
from tidemill.kafka.transactions.state import EPOCH_LAST, State, key_of
from tidemill.kafka.transactions.store import change
from tidemill.kafka.transactions.transitions import Decision
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import Marker, ProduceTransaction
from tidemill.topics.batch.control_batch import as_transactional

ID, GROUP = "tx", "g"
Identity = tuple[int, int]


def ask(client: RawClient, key: int, version: int, **values: Any) -> Any:
    return client.ask(key, version, encode(fields(load_request_schema(key, version), **values)))


class Client:
    """A producer of one transactional id."""

    def __init__(self, raw: RawClient) -> None:
        self._raw = raw
        self.identity: Identity = (-1, -1)

    def init(self, identity: Identity = (-1, -1)) -> int:
        minute = datetime.timedelta(minutes=1)
        answer = ask(
            self._raw, 22, 5, transactional_id=ID, transaction_timeout=minute, producer_id=identity[0],
            producer_epoch=identity[1],
        )  # fmt: skip
        if not int(answer.error_code):
            self.identity = (int(answer.producer_id), int(answer.producer_epoch))
        return int(answer.error_code)

    def produce(self, value: bytes, sequence: int, partition: int = 0, identity: Identity | None = None) -> int:
        schema = load_request_schema(0, 12)
        topic = nested(schema, "topic_data")
        records = as_transactional(batch([value], producer=(*(identity or self.identity), sequence)))
        place = nested(topic, "partition_data")(index=partition, records=records)
        answer = ask(
            self._raw, 0, 12, transactional_id=ID, acks=-1, timeout=datetime.timedelta(seconds=10),
            topic_data=(topic(name="t", partition_data=(place,)),),
        )  # fmt: skip
        return int(answer.responses[0].partition_responses[0].error_code)

    def commit_offset(self, offset: int) -> int:
        schema = load_request_schema(28, 5)
        topic = nested(schema, "topics")
        place = nested(topic, "partitions")(
            partition_index=0, committed_offset=offset, committed_leader_epoch=-1, committed_metadata=""
        )
        answer = ask(
            self._raw, 28, 5, transactional_id=ID, group_id=GROUP, producer_id=self.identity[0],
            producer_epoch=self.identity[1], generation_id=-1, member_id="", group_instance_id=None,
            topics=(topic(name="t", partitions=(place,)),),
        )  # fmt: skip
        return int(answer.topics[0].partitions[0].error_code)

    def end(self, *, commit: bool, identity: Identity | None = None) -> tuple[int, Identity]:
        """End the transaction. Return the error code and the producer's next identity, which the client adopts unless
        `identity` is given.
        """
        named = identity or self.identity
        answer = ask(
            self._raw, 26, 5, transactional_id=ID, producer_id=named[0], producer_epoch=named[1], committed=commit
        )  # fmt: skip
        given = (int(answer.producer_id), int(answer.producer_epoch))
        if not int(answer.error_code) and identity is None:
            self.identity = given
        return int(answer.error_code), given

    def offset(self) -> int:
        schema = load_request_schema(9, 8)
        group = nested(schema, "groups")
        topics = (nested(group, "topics")(name="t", partition_indexes=(0,)),)
        answer = ask(self._raw, 9, 8, groups=(group(group_id=GROUP, topics=topics),), require_stable=True)
        place = answer.groups[0].topics[0].partitions[0]
        return -int(place.error_code) if int(place.error_code) else int(place.committed_offset)


@pytest.fixture
def topic(broker: RealBroker) -> RealBroker:
    broker.create_topic("t", 2)
    return broker


@pytest.fixture
def client(topic: RealBroker) -> Iterator[Client]:
    with RawClient(topic.port) as raw:
        made = Client(raw)
        assert made.init() == 0
        yield made


def test_clients_are_told_that_it_is_finalised(topic: RealBroker) -> None:
    with RawClient(topic.port) as raw:
        for version in (3, 4):
            answer = ask(raw, 18, version, client_software_name="raw", client_software_version="1")
            assert answer.finalized_features_epoch == 0
            levels = {str(each.name): int(each.max_version_level) for each in answer.finalized_features}
            assert levels["transaction.version"] == 2
            assert {str(each.name): int(each.max_version) for each in answer.supported_features} == levels


def test_produce_and_offset_commit_add_what_they_write_to_and_every_end_gives_an_epoch(
    topic: RealBroker, client: Client
) -> None:
    producer_id, epoch = client.identity
    assert client.produce(b"a", 0) == 0
    assert client.produce(b"b", 0, partition=1) == 0
    assert client.commit_offset(5) == 0
    assert client.offset() == -error_codes.UNSTABLE_OFFSET_COMMIT
    assert client.end(commit=True) == (0, (producer_id, epoch + 1))
    assert client.offset() == 5
    assert client.produce(b"c", 0) == 0
    assert client.commit_offset(9) == 0
    assert client.end(commit=False) == (0, (producer_id, epoch + 2))
    assert client.offset() == 5
    assert client.commit_offset(7) == 0, "a transaction may consist of offsets alone"
    assert client.end(commit=True) == (0, (producer_id, epoch + 3))
    assert client.offset() == 7
    assert shown(topic.address, "t", 2) == [b"a", b"b"]


def test_what_comes_late_of_a_transaction_is_not_of_the_next(topic: RealBroker, client: Client) -> None:
    late = client.identity
    assert client.produce(b"a", 0) == 0
    assert client.end(commit=True)[0] == 0
    assert client.produce(b"late", 1, identity=late) == error_codes.INVALID_PRODUCER_EPOCH
    assert client.produce(b"late", 0, partition=1, identity=late) == error_codes.INVALID_PRODUCER_EPOCH
    assert client.produce(b"b", 0) == 0
    assert client.produce(b"late", 1, identity=late) == error_codes.INVALID_PRODUCER_EPOCH
    assert client.end(commit=True)[0] == 0
    assert shown(topic.address, "t", 2) == [b"a", b"b"]


def test_an_end_that_is_asked_for_again_is_told_the_same_and_never_the_other_way_round(client: Client) -> None:
    first = client.identity
    assert client.produce(b"a", 0) == 0
    ended = client.end(commit=True)
    assert ended[0] == 0
    assert client.end(commit=True, identity=first) == ended
    assert client.end(commit=False, identity=first)[0] == error_codes.INVALID_TXN_STATE
    assert client.produce(b"b", 0) == 0
    assert client.end(commit=True, identity=first)[0] == error_codes.PRODUCER_FENCED
    assert client.end(commit=True)[0] == 0
    assert client.end(commit=True)[0] == error_codes.INVALID_TXN_STATE, "there is nothing to be committed"


def test_an_abort_of_nothing_gives_an_epoch_too(topic: RealBroker, client: Client) -> None:
    producer_id, epoch = client.identity
    assert client.end(commit=False) == (0, (producer_id, epoch + 1))
    assert client.end(commit=False, identity=(producer_id, epoch)) == (0, (producer_id, epoch + 1))
    assert client.end(commit=False) == (0, (producer_id, epoch + 2))
    assert client.produce(b"a", 0, identity=(producer_id, epoch)) == error_codes.INVALID_PRODUCER_EPOCH
    assert client.produce(b"a", 0) == 0
    assert client.end(commit=True)[0] == 0
    assert shown(topic.address, "t", 2) == [b"a"]


def test_who_did_not_hear_the_end_begins_anew_with_its_old_epoch(client: Client) -> None:
    before = client.identity
    assert client.produce(b"a", 0) == 0
    assert client.end(commit=True, identity=before)[0] == 0
    assert client.init(before) == 0
    assert client.identity == (before[0], before[1] + 1)
    assert client.init(before) == error_codes.PRODUCER_FENCED or client.identity == (before[0], before[1] + 1)
    assert client.produce(b"b", 0) == 0
    assert client.init(before) == error_codes.PRODUCER_FENCED


def test_epochs_that_are_used_up_give_way_to_another_producer_id(topic: RealBroker, client: Client) -> None:
    producer_id, _ = client.identity

    def nearly(found: Any) -> Decision:
        return Decision(0, type(found)(producer_id, EPOCH_LAST, State.EMPTY, found.timeout_ms))

    topic.portal.call(change(topic.consensus, topic.rand, ID, nearly))
    client.identity = (producer_id, EPOCH_LAST)
    assert client.produce(b"a", 0) == 0
    code, given = client.end(commit=True)
    assert code == 0 and given[0] != producer_id and given[1] == 0
    assert client.end(commit=True, identity=(producer_id, EPOCH_LAST)) == (0, given)
    assert client.produce(b"b", 0) == 0
    assert client.end(commit=True) == (0, (given[0], 1))
    assert shown(topic.address, "t", 2) == [b"a", b"b"]


def test_a_batch_waits_for_the_end_of_the_transaction_before_it(
    topic: RealBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to EndTxn may precede the last marker. The next batch is then retriable, not refused."""
    monkeypatch.setattr("tidemill.kafka.transactions.coordinator.ANSWER_WAIT_S", 0.01)
    mark, go_on = topic.topics.mark, asyncio.Event()

    async def later(*what: Any) -> None:
        await go_on.wait()
        await mark(*what)

    monkeypatch.setattr(topic.topics, "mark", later)
    assert client.produce(b"a", 0) == 0
    assert client.end(commit=True)[0] == 0
    assert client.produce(b"b", 0, partition=1) == error_codes.CONCURRENT_TRANSACTIONS
    assert client.end(commit=False)[0] == error_codes.CONCURRENT_TRANSACTIONS

    async def release() -> None:
        go_on.set()

    topic.portal.call(release())
    while (code := client.produce(b"b", 0, partition=1)) == error_codes.CONCURRENT_TRANSACTIONS:
        pass
    assert code == 0
    assert client.end(commit=True)[0] == 0
    assert shown(topic.address, "t", 2) == [b"a", b"b"]


def test_a_marker_that_comes_late_does_not_end_the_next_transaction(topic: RealBroker, client: Client) -> None:
    """The late marker comes from a slow node that completed the previous transaction. It carries the epoch of the
    producer's next transaction.
    """
    assert client.produce(b"a", 0) == 0
    assert client.end(commit=True)[0] == 0
    assert client.produce(b"b", 0) == 0
    row = topic.portal.call(topic.catalogue.get(TopicRow, "t"))
    assert row is not None
    topic.portal.call(topic.topics.mark(row.topic_id, 0, Marker(*client.identity, commit=True, bumped=True)))
    assert shown(topic.address, "t", 2) == [b"a"]
    assert client.produce(b"c", 1) == 0
    assert client.end(commit=False)[0] == 0
    assert shown(topic.address, "t", 2) == [b"a"]


def test_many_partitions_are_added_by_few_writes(topic: RealBroker, client: Client) -> None:
    """Batches for several partitions arrive together, and one write adds all that are waiting."""
    transactions = topic.server._transactions
    assert transactions is not None

    async def together(places: int) -> tuple[list[object], int]:
        before = (await topic.consensus.head(key_of(ID))).seq  # type: ignore[union-attr]
        confirmed = await asyncio.gather(
            *(transactions.confirm(ProduceTransaction(ID, adds=True), *client.identity, "t", p) for p in range(places))
        )
        return list(confirmed), (await topic.consensus.head(key_of(ID))).seq - before  # type: ignore[union-attr]

    confirmed, writes = topic.portal.call(together(100))
    assert confirmed == [None] * 100
    assert writes <= 3
    found = topic.portal.call(transactions.read(ID))
    assert found is not None and found.partitions == {"t": tuple(range(100))}


def test_an_operator_ends_a_transaction_in_one_partition(topic: RealBroker, client: Client) -> None:
    """WriteTxnMarkers as `kafka-transactions.sh abort` sends it; an epoch older than that of the open transaction ends
    nothing.
    """
    with RawClient(topic.port) as raw:
        marker = nested(load_request_schema(27, 1), "markers")

        def mark(epoch: int, *, commit: bool = False) -> int:
            place = nested(marker, "topics")(name="t", partition_indexes=(0,))
            reported = fields(
                marker, producer_id=client.identity[0], producer_epoch=epoch, transaction_result=commit,
                coordinator_epoch=0, topics=(place,),
            )  # fmt: skip
            answer = ask(raw, 27, 1, markers=(reported,))
            return int(answer.markers[0].topics[0].partitions[0].error_code)

        def hanging() -> list[int]:
            """Return the start offsets of the partition's open transactions, as `kafka-transactions.sh find-hanging`
            reads them.
            """
            place = nested(load_request_schema(61, 0), "topics")(name="t", partition_indexes=(0,))
            partition = ask(raw, 61, 0, topics=(place,)).topics[0].partitions[0]
            return [p.current_txn_start_offset for p in partition.active_producers if p.current_txn_start_offset >= 0]

        assert client.end(commit=False)[0] == 0
        assert client.produce(b"a", 0) == 0
        assert client.produce(b"b", 0, partition=1) == 0
        assert hanging() == [0]
        mark(client.identity[1] - 1)
        assert hanging() == [0]
        assert mark(client.identity[1]) == 0
        assert hanging() == []
        assert client.end(commit=True)[0] == 0
        assert shown(topic.address, "t", 2) == [b"b"]
