"""Administration and authentication by the clients of Java, kafkajs, franz-go and sarama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.kafka import foreign
from support.kafka.foreign import PARTITIONS, SETTINGS, Driver, Members, Refused, numbered, of
from support.kafka.harness import RealBroker
from support.kafka.security import PASSWORD, Authority, add, gate, token
from support.waiting import eventually
from tidemill.kafka import error_codes
from tidemill.security.sasl import MECHANISMS

ALICE = {"mechanism": "PLAIN", "user": "alice", "password": PASSWORD}


@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_topics_are_made_grown_altered_cut_and_deleted(connected: Callable[[str], Driver], name: str) -> None:
    client = connected(name)
    topic = f"admin-{name}"
    client("create", topic=topic, partitions=2, configs={"retention.ms": "86400000"})
    with pytest.raises(Refused) as refused:
        client("create", topic=topic, partitions=2, configs={})
    assert refused.value.code == error_codes.TOPIC_ALREADY_EXISTS
    assert topic in client("topics")
    assert client("configs", topic=topic)["retention.ms"] == "86400000"
    client("alter", topic=topic, configs={"retention.ms": None, "max.message.bytes": "2000000"})
    configs = client("configs", topic=topic)
    assert (configs["retention.ms"], configs["max.message.bytes"]) == ("-1", "2000000")
    with pytest.raises(Refused) as refused:
        client("alter", topic=topic, configs={"max.message.bytes": "many"})
    assert refused.value.code == error_codes.INVALID_CONFIG
    client("grow", topic=topic, partitions=PARTITIONS)
    eventually(lambda: client("describe", topic=topic) == PARTITIONS)
    with pytest.raises(Refused) as refused:
        client("grow", topic=topic, partitions=1)
    assert refused.value.code == error_codes.INVALID_PARTITIONS
    client.produce(topic, numbered(0, 40))
    assert client("offset", topic=topic, partition=3, at=-1) == 10
    assert client("offset", topic=topic, partition=3, at=0) == 0
    assert client("truncate", topic=topic, partition=3, offset=6) == 6
    assert client("offset", topic=topic, partition=3, at=-2) == 6
    rows = client.read(topic, PARTITIONS, 34)
    assert [row[1] for row in rows if row[0] == 3] == [6, 7, 8, 9]
    with pytest.raises(Refused):
        client("truncate", topic=topic, partition=3, offset=11)
    client("delete", topic=topic)
    eventually(lambda: topic not in client("topics"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealBroker, Authority]]:
    authority = Authority(tmp_path_factory.mktemp("ca"))
    broker = RealBroker(settings=SETTINGS, gate=gate(authority))
    add(broker, "alice")
    broker.create_topic("secure", 1)
    yield broker, authority
    broker.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_clients_come_in_by_every_mechanism_within_tls(
    drivers: Callable[[str], Driver], secure: tuple[RealBroker, Authority], name: str, mechanism: str
) -> None:
    broker, authority = secure
    client = drivers(name)
    proof = {"mechanism": mechanism, "password": token("alice") if mechanism == "OAUTHBEARER" else PASSWORD}
    client("connect", **(ALICE | proof), bootstrap=broker.address, ca=str(authority.certificate))
    [offset] = client.produce("secure", [[0, None, f"{name} {mechanism}"]])
    assert client.read("secure", 1, offset + 1)[-1][3] == f"{name} {mechanism}"


@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_a_wrong_password_is_told_as_such(
    drivers: Callable[[str], Driver], secure: tuple[RealBroker, Authority], name: str
) -> None:
    broker, authority = secure
    client = drivers(name)
    wrong = {**ALICE, "bootstrap": broker.address, "ca": str(authority.certificate), "password": "wrong"}

    def come_in() -> None:
        client("connect", **wrong)
        client("describe", topic="secure")

    with pytest.raises(Refused, match=r"(?i)authenticat|sasl"):
        come_in()


@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_a_certificate_says_who_a_client_is(drivers: Callable[[str], Driver], name: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    broker = RealBroker(settings=SETTINGS, gate=authority.gate("required"))
    try:
        client = drivers(name)
        broker.create_topic("certified", 1)
        certificate, key = authority.client("alice")
        proof = {"ca": str(authority.certificate), "certificate": certificate, "key": key}
        client("connect", bootstrap=broker.address, **proof)
        assert client.produce("certified", [[0, "k", "v"]]) == [0]
    finally:
        broker.close()


@pytest.mark.parametrize("name", of(*foreign.ALL))
def test_rules_are_written_by_who_may_and_hold_for_who_may_not(drivers: Callable[[str], Driver], name: str) -> None:
    broker = RealBroker(settings=SETTINGS, gate=gate(), super_users=("User:root",))
    try:
        for user in ("root", "alice"):
            add(broker, user)
        client = drivers(name)
        broker.create_topic("guarded", 1)
        client("connect", bootstrap=broker.address, **ALICE)
        with pytest.raises(Refused):
            client("describe", topic="guarded")
        client("connect", bootstrap=broker.address, **(ALICE | {"user": "root"}))
        client("acl_add", topic="guarded", principal="User:alice")
        assert client("acls") == 1
        client("connect", bootstrap=broker.address, **ALICE)
        assert eventually(lambda: described(client)) == 1
        with pytest.raises(Refused) as refused:
            client.produce("guarded", [[0, "k", "v"]])
        assert refused.value.code in (error_codes.TOPIC_AUTHORIZATION_FAILED, error_codes.CLUSTER_AUTHORIZATION_FAILED)
        client("connect", bootstrap=broker.address, **(ALICE | {"user": "root"}))
        assert client("acl_delete", topic="guarded", principal="User:alice") == 1
        assert client("acls") == 0
    finally:
        broker.close()


def described(client: Driver) -> int:
    try:
        found: int = client("describe", topic="guarded")
    except Refused:
        return 0
    return found


OPERATIONS = {
    "cluster": 1,
    "topic by id": "ops",
    "topic by an unknown id": "UNKNOWN_TOPIC_ID",
    "earliest local": 0,
    "latest tiered": -1,
    "committed end": 10,
    "broker configs": True,
    "alter a broker": "INVALID_REQUEST",
    "config resources": True,
    "log dirs": 1,
    "replica log dirs": "LOG_DIR_NOT_FOUND",
    "elect leaders": "ELECTION_NOT_NEEDED",
    "reassign": "INVALID_REPLICA_ASSIGNMENT",
    "reassignments": 0,
    "producers": 1,
    "an unknown transaction": "TRANSACTIONAL_ID_NOT_FOUND",
    "fence producers": None,
    "fenced transaction": "EMPTY",
    "set offsets": None,
    "offset that was set": "3m",
    "delete offsets": None,
    "remove members": "UNKNOWN_MEMBER_ID",
    "an unknown group": "GROUP_ID_NOT_FOUND",
    "delete an unknown group": "GROUP_ID_NOT_FOUND",
    "group operations": True,
    "set a quota": None,
    "quotas": {"producer_byte_rate": 1e6},
    "an unknown quota": "INVALID_REQUEST",
    "scram users": 0,
    "features": ["group.version", "transaction.version"],
    "metadata quorum": "UNSUPPORTED_VERSION",
    "delegation tokens": "UNSUPPORTED_VERSION",
    "unregister a broker": "UNSUPPORTED_VERSION",
    "share groups": "UNSUPPORTED_VERSION",
    "streams groups": "UNSUPPORTED_VERSION",
}


@pytest.mark.java
def test_whatever_javas_admin_asks_is_answered_or_refused_by_name(
    connected: Callable[[str], Driver], shared: RealBroker
) -> None:
    client = connected("java")
    shared.create_topic("ops", 1)
    client.produce("ops", [[0, "k", str(n)] for n in range(10)])
    members = Members(client, "ops", "eager")
    members.join("a")
    members.have(10)
    members.leave("a")
    assert client("operations", topic="ops", group="ops") == OPERATIONS
