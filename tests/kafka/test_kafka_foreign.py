"""Apache Kafka's Java client, kafkajs, franz-go and sarama, unmodified: records, groups, transactions, failover."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.kafka import foreign
from support.kafka.foreign import PARTITIONS, SETTINGS, Driver, Members, Refused, numbered, of, share
from support.kafka.harness import Cluster, RealBroker
from support.waiting import eventually
from tidemill.kafka import error_codes

FENCED = (error_codes.INVALID_PRODUCER_EPOCH, error_codes.PRODUCER_FENCED)
CODECS = [
    *((name, codec) for name in foreign.ALL for codec in ("none", "gzip")),
    *((name, codec) for name in ("java", "franz-go", "sarama") for codec in ("snappy", "lz4", "zstd")),
]


@pytest.mark.parametrize(("name", "codec"), [pytest.param(*one, marks=foreign.MARKS[one[0]]) for one in CODECS])
def test_what_goes_in_comes_out_in_order_under_every_codec(
    connected: Callable[[str], Driver], shared: RealBroker, name: str, codec: str
) -> None:
    client = connected(name)
    topic = f"in-{name}-{codec}"
    shared.create_topic(topic, PARTITIONS)
    records = [*numbered(0, 60), [0, None, "no key"], [1, "gone", None], [2, "ключ", "é" * 1_000], [3, "", ""]]
    offsets = client.produce(topic, records, idempotent=codec != "gzip", compression=codec)
    rows = client.read(topic, PARTITIONS, len(records))
    wanted = [[p, offset, key, value] for (p, key, value), offset in zip(records, offsets, strict=True)]
    assert rows == sorted(wanted, key=lambda row: (row[0], row[1]))
    assert [row[1] for row in rows] == [offset for _ in range(PARTITIONS) for offset in range(16)]


@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_a_topic_that_is_not_there_is_made_for_its_first_record(connected: Callable[[str], Driver], name: str) -> None:
    client = connected(name)
    assert client.produce(f"new.{name}_1", [[0, "k", "v"]]) == [0]
    assert client("describe", topic=f"new.{name}_1") == SETTINGS.section.default_partitions


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=foreign.MARKS[name])
        for name, strategy in (
            ("java", "eager"),
            ("java", "cooperative"),
            ("java", "consumer"),
            ("kafkajs", "eager"),
            ("franz-go", "eager"),
            ("franz-go", "cooperative"),
            ("sarama", "eager"),
        )
    ],
)
def test_members_come_and_go_and_every_record_is_read_once(
    connected: Callable[[str], Driver], shared: RealBroker, name: str, strategy: str
) -> None:
    client = connected(name)
    topic = f"group-{name}-{strategy}"
    shared.create_topic(topic, PARTITIONS)
    members = Members(client, topic, strategy)
    members.join("a")
    eventually(lambda: share(members.states()))
    client.produce(topic, numbered(0, 40))
    members.have(40)
    before = client("state", member="a")["revoked"]
    members.join("b")
    eventually(lambda: share(members.states()))
    taken = client("state", member="a")["revoked"] - before
    assert taken == (4 if strategy == "eager" else 2), "an eager member gives up all it has"
    client.produce(topic, numbered(40, 40))
    members.have(80)
    assert client("group", group=topic) == {"state": "Stable", "members": 2}
    members.leave("a")
    eventually(lambda: share(members.states()))
    client.produce(topic, numbered(80, 40))
    members.have(120)
    members.leave("b")
    assert client("committed", group=topic, topic=topic) == {str(p): 30 for p in range(PARTITIONS)}
    assert topic in client("groups")
    client("delete_group", group=topic)
    assert topic not in client("groups")


ROLLED = (
    ("java", "eager"),
    ("java", "cooperative"),
    ("kafkajs", "eager"),
    ("franz-go", "eager"),
    ("franz-go", "cooperative"),
    ("sarama", "eager"),
)


@pytest.mark.java
@pytest.mark.parametrize(("name", "strategy"), [pytest.param(*one, marks=foreign.MARKS[one[0]]) for one in ROLLED])
def test_a_member_of_the_consumer_protocol_joins_classic_ones_of_any_client_and_leaves_them_again(
    connected: Callable[[str], Driver], shared: RealBroker, name: str, strategy: str
) -> None:
    client, java = connected(name), connected("java")
    topic = f"rolled-{name}-{strategy}"
    shared.create_topic(topic, PARTITIONS)
    old, new = Members(client, topic, strategy), Members(java, topic, "consumer")

    def have(count: int) -> None:
        """Every number was read exactly once, by either group of members."""
        eventually(lambda: len(old.values()) + len(new.values()) >= count)
        assert sorted([*old.values(), *new.values()], key=int) == [str(n) for n in range(count)]

    old.join("a")
    old.join("b")
    eventually(lambda: share(old.states()))
    client.produce(topic, numbered(0, 40))
    have(40)
    new.join("m")
    eventually(lambda: share([*old.states(), *new.states()]))
    client.produce(topic, numbered(40, 40))
    have(80)
    old.leave("b")
    eventually(lambda: share([*old.states(), *new.states()]))
    client.produce(topic, numbered(80, 40))
    have(120)
    new.leave("m")
    eventually(lambda: share(old.states()))
    client.produce(topic, numbered(120, 40))
    have(160)
    old.leave("a")
    assert client("committed", group=topic, topic=topic) == {str(p): 40 for p in range(PARTITIONS)}


STATIC = (("java", "eager"), ("java", "consumer"), ("franz-go", "eager"), ("sarama", "eager"))


@pytest.mark.parametrize(("name", "strategy"), [pytest.param(*one, marks=foreign.MARKS[one[0]]) for one in STATIC])
def test_a_static_member_that_comes_back_finds_its_partitions_and_moves_nobody(
    connected: Callable[[str], Driver], shared: RealBroker, name: str, strategy: str
) -> None:
    client = connected(name)
    topic = f"static-{name}-{strategy}"
    shared.create_topic(topic, PARTITIONS)
    members = Members(client, topic, strategy)
    members.join("a", "instance-a")
    members.join("b", "instance-b")
    eventually(lambda: share(members.states()))
    a, b = members.states()
    members.leave("a")
    members.join("again", "instance-a")
    eventually(lambda: share(members.states()))
    assert client("state", member="again")["assigned"] == a["assigned"]
    assert client("state", member="b")["assignments"] == b["assignments"]
    members.leave("again")
    members.leave("b")


@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_transactions_are_shown_whole_or_not_at_all_and_a_second_producer_fences_the_first(
    connected: Callable[[str], Driver], shared: RealBroker, name: str
) -> None:
    client = connected(name)
    topic = f"txn-{name}"
    shared.create_topic(topic, PARTITIONS)

    def within(producer: str, first: int, commit: bool | None) -> None:
        client("begin", producer=producer, id=topic, timeout_ms=30_000)
        client("send", producer=producer, topic=topic, records=numbered(first, 8))
        if commit is not None:
            client("end", producer=producer, commit=commit)

    within("first", 0, True)
    within("first", 100, False)
    within("first", 8, True)
    within("first", 200, None)
    within("second", 16, True)

    def fenced() -> None:
        client("send", producer="first", topic=topic, records=numbered(208, 8))
        client("end", producer="first", commit=True)

    with pytest.raises(Refused) as refused:
        fenced()
    assert refused.value.code in FENCED
    client.produce(topic, numbered(24, 8))
    assert sorted(int(row[3]) for row in client.read(topic, PARTITIONS, 32)) == [*range(32)]
    uncommitted = client.read(topic, PARTITIONS, 48, isolation="read_uncommitted")
    assert sorted(int(row[3]) for row in uncommitted) == [*range(32), *range(100, 108), *range(200, 208)]
    for producer in ("first", "second"):
        client("close", producer=producer)


@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_records_and_their_offsets_are_transferred_in_transactions(
    connected: Callable[[str], Driver], shared: RealBroker, name: str
) -> None:
    client = connected(name)
    source, target = f"source-{name}", f"target-{name}"
    for topic in (source, target):
        shared.create_topic(topic, PARTITIONS)
    for first in (0, 40):
        client.produce(source, numbered(first, 40))
        assert client("transfer", topic=source, to=target, group=source, id=source, count=40) == 0
    rows = client.read(target, PARTITIONS, 80)
    assert sorted(int(row[3]) for row in rows) == [*range(80)]
    for partition in range(PARTITIONS):
        values = [int(row[3]) for row in rows if row[0] == partition]
        assert values == sorted(values)
    assert client("committed", group=source, topic=source) == {str(p): 20 for p in range(PARTITIONS)}


MOVED = (*((name, "eager") for name in foreign.ALL), ("java", "consumer"))


@pytest.mark.parametrize(("name", "strategy"), [pytest.param(*one, marks=foreign.MARKS[one[0]]) for one in MOVED])
def test_clients_go_on_when_a_node_leaves_and_returns(
    drivers: Callable[[str], Driver], name: str, strategy: str
) -> None:
    cluster = Cluster("n1", "n2", settings=SETTINGS)
    try:
        client = drivers(name)
        client("connect", bootstrap=cluster.addresses)
        client("create", topic="moved", partitions=PARTITIONS, configs={})
        members = Members(client, "moved", strategy)
        members.join("a")
        eventually(lambda: share(members.states()))
        client.produce("moved", numbered(0, 40))
        members.have(40)
        node = cluster.nodes[0]
        cluster.stop(node)
        client.produce("moved", numbered(40, 40))
        eventually(lambda: set(members.values()) >= {str(n) for n in range(80)})
        cluster.start(node)
        client.produce("moved", numbered(80, 40))
        eventually(lambda: set(members.values()) >= {str(n) for n in range(120)})
        members.leave("a")
        assert len(client.read("moved", PARTITIONS, 120)) == 120
    finally:
        cluster.close()


@pytest.mark.parametrize("name", of("java", "franz-go"))
def test_a_transfer_goes_on_while_nodes_leave_and_return_and_copies_each_record_once(
    drivers: Callable[[str], Driver], name: str
) -> None:
    cluster = Cluster("n1", "n2", "n3", settings=SETTINGS)
    copying = Driver(name)
    try:
        client = drivers(name)
        for each in (client, copying):
            each("connect", bootstrap=cluster.addresses)
        for topic in ("source", "target"):
            client("create", topic=topic, partitions=PARTITIONS, configs={})
        with ThreadPoolExecutor(1) as pool:
            transfer = pool.submit(copying, "transfer", topic="source", to="target", group="g", id="copy", count=120)
            for node, first in zip(cluster.nodes, (0, 40, 80), strict=True):
                client.produce("source", numbered(first, 20))
                cluster.stop(node)
                client.produce("source", numbered(first + 20, 20))
                cluster.start(node)
            assert transfer.result(foreign.PATIENCE_S) == 0
        rows = client.read("target", PARTITIONS, 120)
        assert sorted(int(row[3]) for row in rows) == [*range(120)]
        assert client("committed", group="g", topic="source") == {str(p): 30 for p in range(PARTITIONS)}
    finally:
        copying.close()
        cluster.close()


@pytest.mark.go
@pytest.mark.parametrize("version", ["2.1.0", "2.8.0"])
def test_a_client_of_years_ago_is_served(connected: Callable[[str], Driver], shared: RealBroker, version: str) -> None:
    """sarama speaks the protocol versions of the configured Kafka release. 2.1 is the oldest that Kafka 4 serves
    (KIP-896).
    """
    client = connected("sarama")
    client("connect", bootstrap=shared.address, version=version)
    source, target = f"old-{version}", f"new-{version}"
    for topic in (source, target):
        shared.create_topic(topic, PARTITIONS)
    client.produce(source, numbered(0, 40), compression="lz4")
    assert client("transfer", topic=source, to=target, group=source, id=source, count=40) == 0
    assert sorted(int(row[3]) for row in client.read(target, PARTITIONS, 40)) == [*range(40)]
    assert client("committed", group=source, topic=source) == {str(p): 10 for p in range(PARTITIONS)}
