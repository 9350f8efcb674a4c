"""Named listeners: a client gets every node's address for the listener that it connected to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from confluent_kafka import Producer
from kio.index import load_request_schema

from support.kafka.harness import Cluster, FakeBroker
from support.kafka.raw import RawClient, encode, nested
from support.waiting import eventually
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import advertised_addresses, exposed_servers, parse
from tidemill.base.errors import InvalidError
from tidemill.kafka import BrokerServices, KafkaServer
from tidemill.kafka.net.listeners import DEFAULT, Listener
from tidemill.node.settings_from_config import kafka_listeners

ALL_TOPICS = b"\xff\xff\xff\xff"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("a", "b", listeners={"a": ("outside", "inside"), "b": ("outside",)})
    yield cluster
    cluster.close()


def reported(port: int) -> tuple[set[tuple[str, int]], list[int]]:
    """Return (the brokers' addresses, leader of each partition) in the Metadata for clients of this port."""
    with RawClient(port) as client:
        answer = client.ask(3, 5, ALL_TOPICS + b"\x00")
        brokers = {(b.host, int(b.port)) for b in answer.brokers}
        assert brokers == {(b.host, int(b.port)) for b in client.ask(60, 0, describe_cluster()).brokers}
        return brokers, [int(p.leader_id) for t in answer.topics for p in t.partitions]


def describe_cluster() -> bytes:
    return encode(load_request_schema(60, 0)(include_cluster_authorized_operations=False))


def test_every_client_is_told_the_addresses_of_its_own_listener(cluster: Cluster) -> None:
    a, b = cluster.nodes
    cluster.portal.call(a.catalogue.create_topic("t", 16))
    eventually(lambda: len(reported(b.port)[1]) == 16)
    for node in (a, b):
        assert reported(node.port)[0] == {("127.0.0.1", a.port), ("127.0.0.1", b.port)}
        brokers, leaders = reported(node.ports["outside"])
        assert brokers == {("localhost", a.ports["outside"]), ("localhost", b.ports["outside"])}
        assert -1 not in leaders
    inside, leaders = reported(a.ports["inside"])
    assert inside == {("localhost", a.ports["inside"])}
    assert set(leaders) == {1, -1}, "what b leads cannot be reached by a listener that b has not"


def test_a_client_that_came_by_a_listener_reaches_every_leader_by_it(cluster: Cluster) -> None:
    a, _ = cluster.nodes
    cluster.portal.call(a.catalogue.create_topic("out", 8))
    producer = Producer({"bootstrap.servers": f"localhost:{a.ports['outside']}"})
    failed: list[Any] = []
    for partition in range(8):
        producer.produce("out", b"v", partition=partition, on_delivery=lambda e, _: failed.append(e) if e else None)
    assert producer.flush(60) == 0
    assert failed == []


def test_describe_configs_lists_the_listeners_as_kafka_writes_them(cluster: Cluster) -> None:
    a = cluster.nodes[0]
    schema = load_request_schema(32, 4)
    resource = nested(schema, "resources")(resource_type=4, resource_name="1", configuration_keys=None)
    with RawClient(a.ports["inside"]) as client:
        body = encode(schema(resources=(resource,), include_synonyms=False, include_documentation=False))
        found = {c.name: c.value for c in client.ask(32, 4, body).results[0].configs}
    assert found["advertised.listeners"].split(",") == [
        f"default://127.0.0.1:{a.port}",
        f"outside://localhost:{a.ports['outside']}",
        f"inside://localhost:{a.ports['inside']}",
    ]
    assert found["listener.security.protocol.map"] == "default:PLAINTEXT,outside:PLAINTEXT,inside:PLAINTEXT"


def test_a_listener_that_cannot_be_bound_names_its_key_and_leaves_nothing_open(fake_broker: FakeBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = KafkaServer(
            BrokerServices(
                topics=fake_broker.topics,
                catalogue=fake_broker.catalogue,
                consensus=fake_broker.consensus,
                nodes=None,
                clock=SystemClock(),
                rand=Rand(),
                name="n1",
            ),
            [
                Listener(DEFAULT, "127.0.0.1", 0),
                Listener("out", "127.0.0.1", taken.getsockname()[1], key="kafka.listeners.out.address"),
            ],
        )
        with pytest.raises(InvalidError, match=r"kafka\.listeners\.out\.address"):
            fake_broker.portal.call(server.start())
        assert server.ports == {}


def test_listeners_of_a_wildcard_advertise_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    others = {
        "bound": {"address": "[::]:9094"},
        "own": {"address": "0.0.0.0:9095", "advertised": "out.example.com:19095"},
    }
    values = {"node": {"kafka": "0.0.0.0:9092"}, "kafka": {"listeners": others}}

    def sent_to(**node: str) -> list[str]:
        config = parse({**values, "node": {**values["node"], **node}}, origin="t.toml")
        found = kafka_listeners(config, cast("Any", None), advertised_addresses(config))
        return [f"{each.advertised_host}:{each.advertised_port}" for each in found]

    assert sent_to() == ["box:9092", "box:9094", "out.example.com:19095"]
    assert sent_to(advertised_host="k.example.com") == [
        "k.example.com:9092",
        "k.example.com:9094",
        "out.example.com:19095",
    ]


def test_listeners_are_read_from_the_configuration_and_open_ones_are_told() -> None:
    section = {
        "advertised": "kafka.example.com:443",
        "listeners": {"out": {"address": "0.0.0.0:9094", "advertised": "out.example.com:19094"}},
    }
    config = parse({"kafka": section}, origin="t.toml")
    assert exposed_servers(config) == ["kafka.listeners.out.address=0.0.0.0:9094"]
    for wrong in (
        {"listeners": {"default": {"address": "h:1"}}},
        {"listeners": {"Out": {"address": "h:1"}}},
        {"listeners": {"out": {}}},
        {"listeners": {"out": {"address": "h"}}},
        {"listeners": {"out": {"address": "h:1", "advertised": "0.0.0.0:1"}}},
        {"advertised": "h:0"},
        {"listeners": {"out": {"address": "h:1", "security": "tls"}}},
        {"listeners": {"out": {"address": "h:1", "security": "ssl"}}},
    ):
        with pytest.raises(InvalidError, match=r"kafka\.|security"):
            parse({"kafka": wrong}, origin="t.toml")
