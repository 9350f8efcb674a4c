"""Configs of groups (resource type GROUP): permitted values, visibility, and the time from which members
follow them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_request_schema

from support.kafka.groups.consumer import beat
from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import RawClient, alter, described, encode, fields, nested
from support.kafka.security import add, allow, as_user, gate
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.errors import InvalidError
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.groups.classic.state import GroupLimits
from tidemill.kafka.groups.configs import HEARTBEAT, SESSION, GroupConfigCache, apply_configs, check_change
from tidemill.security.acls import Operation, Resource
from tidemill.topics.config.alter import AlterOp

GROUP = 32
SETTINGS = KafkaSettings(
    KafkaSection(
        group_initial_rebalance_delay_ms=0,
        group_consumer_session_timeout_ms=60_000,
        group_consumer_min_session_timeout_ms=500,
        group_consumer_max_session_timeout_ms=50_000,
        group_consumer_heartbeat_interval_ms=200,
    )
)
Changes = list[tuple[str, int, str | None]]


@pytest.fixture(scope="module")
def broker() -> Iterator[RealBroker]:
    made = RealBroker(settings=SETTINGS)
    made.create_topic("t", 3)
    yield made
    made.close()


def change(broker: Any, group: str, changes: Changes, **how: Any) -> int:
    return alter(broker, changes, kind=GROUP, name=group, **how)


def shown(broker: Any, group: str) -> dict[str, tuple[str, int]]:
    """name → (value, source)"""
    return {c.name: (c.value, int(c.config_source)) for c in described(broker, GROUP, group).configs}


values = st.dictionaries(st.sampled_from([HEARTBEAT, SESSION]), st.integers(0, 100_000).map(str))


@given(before=values, after=values, low=st.integers(1, 50_000), high=st.integers(50_000, 90_000))
def test_what_is_taken_holds_exactly_and_whatever_stands_is_within_bounds(
    before: dict[str, str], after: dict[str, str], low: int, high: int
) -> None:
    limits = GroupLimits(consumer_session_ms_bounds=(low, high), consumer_session_ms=50_000)
    for config in (before, after):
        held = apply_configs(limits, config)
        assert low <= held.consumer_session_ms <= high
        assert held.consumer_heartbeat_ms < held.consumer_session_ms
    try:
        check_change(limits, before, after)
    except InvalidError:
        assert before != after
        return
    held = apply_configs(limits, after)
    for name, value in after.items():
        if before.get(name) != value:
            reported = held.consumer_session_ms if name == SESSION else held.consumer_heartbeat_ms
            assert str(reported) == value


def test_a_group_has_configs_of_its_own_over_the_node_s_also_before_it_is_there(broker: RealBroker) -> None:
    assert shown(broker, "early") == {HEARTBEAT: ("200", 4), SESSION: ("60000", 4)}
    assert change(broker, "early", [(SESSION, AlterOp.SET, "1000")], validate_only=True) == 0
    assert shown(broker, "early")[SESSION] == ("60000", 4)
    assert change(broker, "early", [(SESSION, AlterOp.SET, "1000")]) == 0
    assert shown(broker, "early") == {HEARTBEAT: ("200", 4), SESSION: ("1000", 8)}
    found = next(c for c in described(broker, GROUP, "early").configs if c.name == SESSION)
    assert [(s.name, s.value, int(s.source)) for s in found.synonyms] == [
        (SESSION, "1000", 8),
        ("group.consumer.session.timeout.ms", "60000", 4),
    ]
    assert not found.read_only and "fenced" in found.documentation
    assert change(broker, "early", [(HEARTBEAT, AlterOp.SET, "300")], key=33, version=2) == 0
    assert shown(broker, "early") == {HEARTBEAT: ("300", 8), SESSION: ("60000", 4)}, "the named ones are all there are"
    assert (
        change(
            broker,
            "early",
            [(HEARTBEAT, AlterOp.DELETE, None), (SESSION, AlterOp.DELETE, None), ("no.such", AlterOp.DELETE, None)],
        )
        == 0
    )
    assert shown(broker, "early") == {HEARTBEAT: ("200", 4), SESSION: ("60000", 4)}
    assert broker.portal.call(broker.catalogue.group_configs()) == []


REFUSED: list[tuple[Changes, int]] = [
    ([(SESSION, AlterOp.SET, "499")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, "60001")], error_codes.INVALID_CONFIG),
    ([(HEARTBEAT, AlterOp.SET, "199")], error_codes.INVALID_CONFIG),
    ([(HEARTBEAT, AlterOp.SET, "15001")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, "9000"), (HEARTBEAT, AlterOp.SET, "9000")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, "soon")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, "")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, "\u0661\u0662\u0663\u0664")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, "9" * 5000)], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.APPEND, "1000")], error_codes.INVALID_CONFIG),
    ([("share.session.timeout.ms", AlterOp.SET, "45000")], error_codes.INVALID_CONFIG),
    ([("streams.num.standby.replicas", AlterOp.SET, "1")], error_codes.INVALID_CONFIG),
    ([("retention.ms", AlterOp.SET, "45000")], error_codes.INVALID_CONFIG),
    ([("no.such", AlterOp.DELETE, None), ("no.other", AlterOp.SET, "1")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, "2000"), ("no.such", AlterOp.SET, "1")], error_codes.INVALID_CONFIG),
    ([(SESSION, AlterOp.SET, None)], error_codes.INVALID_REQUEST),
    ([(SESSION, AlterOp.SET, "2000"), (SESSION, AlterOp.SET, "3000")], error_codes.INVALID_REQUEST),
    ([(SESSION, 9, "2000")], error_codes.INVALID_REQUEST),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_may_not_be_set_is_refused_whole(broker: RealBroker, changes: Changes, expected: int) -> None:
    before = shown(broker, "refused")
    for validate_only in (True, False):
        assert change(broker, "refused", changes, validate_only=validate_only) == expected
    assert shown(broker, "refused") == before
    assert "refused" not in {row.group for row in broker.portal.call(broker.catalogue.group_configs())}


def test_a_group_without_a_name_or_with_one_that_no_group_can_have_is_refused(broker: RealBroker) -> None:
    for name in ("", "x" * 600):
        assert change(broker, name, [(SESSION, AlterOp.SET, "1000")]) == error_codes.INVALID_REQUEST
        assert int(described(broker, GROUP, name).error_code) == error_codes.INVALID_REQUEST


def test_groups_that_have_configs_are_listed(broker: RealBroker) -> None:
    assert change(broker, "listed", [(SESSION, AlterOp.SET, "1000")]) == 0

    def listed(*types: int) -> set[tuple[int, str]]:
        with RawClient(broker.port) as client:
            answer = client.ask(74, 1, encode(load_request_schema(74, 1)(resource_types=types)))
        assert int(answer.error_code) == 0
        return {(int(r.resource_type), str(r.resource_name)) for r in answer.config_resources}

    assert (GROUP, "listed") in listed() and (2, "t") in listed()
    assert (GROUP, "listed") in listed(GROUP) and {kind for kind, _ in listed(GROUP)} == {GROUP}
    assert change(broker, "listed", [(SESSION, AlterOp.DELETE, None)]) == 0
    assert (GROUP, "listed") not in listed(GROUP)


async def members(broker: RealBroker, group: str) -> int:
    assert broker.server is not None and broker.server._groups is not None
    found = broker.server._groups.loaded_group(group)
    return len(found.group.members) if found is not None else 0


def test_members_live_by_what_their_group_says_from_their_next_heartbeat_on(broker: RealBroker) -> None:
    with RawClient(broker.port) as client:
        joined = beat(client, "live", "m", 0)
        assert (int(joined.error_code), joined.heartbeat_interval.total_seconds()) == (0, 0.2)
        assert change(broker, "live", [(SESSION, AlterOp.SET, "500"), (HEARTBEAT, AlterOp.SET, "400")]) == 0
        reported = beat(client, "live", "m", joined.member_epoch)
        assert reported.heartbeat_interval.total_seconds() == 0.4
        # The member is silent from here on: its session expires long before the node's default would.
        eventually(lambda: broker.portal.call(members(broker, "live")) == 0)
        assert int(beat(client, "live", "m", reported.member_epoch).error_code) == error_codes.UNKNOWN_MEMBER_ID
        assert change(broker, "live", [(SESSION, AlterOp.DELETE, None), (HEARTBEAT, AlterOp.DELETE, None)]) == 0
        assert beat(client, "live", "m", 0).heartbeat_interval.total_seconds() == 0.2


def test_a_client_alters_and_describes_a_group(broker: RealBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    entry = ConfigEntry(SESSION, "45000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, "client", incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(30)
    asked = ConfigResource(ResourceType.GROUP, "client")
    found = admin.describe_configs([asked])[asked].result(30)
    assert {name: entry.value for name, entry in found.items()} == {SESSION: "45000", HEARTBEAT: "200"}


def test_what_was_set_with_wider_bounds_is_held_within_the_ones_of_now() -> None:
    limits = KafkaSettings().group_limits
    held = apply_configs(limits, {SESSION: "500", HEARTBEAT: "90000", "share.later": "1", "streams.x": "y"})
    assert (held.consumer_session_ms, held.consumer_heartbeat_ms) == (45_000, 15_000)
    check_change(limits, {SESSION: "500"}, {SESSION: "500", HEARTBEAT: "6000"})


def test_a_group_s_configs_are_seen_and_altered_by_who_may() -> None:
    broker = FakeBroker(gate=gate(), super_users=("User:root",))
    try:
        add(broker, "alice")
        allow(broker, "alice", Operation.DESCRIBE_CONFIGS, Resource.GROUP, "seen")
        allow(broker, "alice", Operation.ALTER_CONFIGS, Resource.GROUP, "own")

        def codes(client: RawClient, key: int, version: int, answered: str) -> dict[str, int]:
            schema = load_request_schema(key, version)
            resource = nested(schema, "resources")
            own: dict[str, Any] = {"configs": ()} if key == 44 else {"configuration_keys": None}
            asked = tuple(
                fields(resource, resource_type=GROUP, resource_name=n, **own) for n in ("seen", "own", "other")
            )
            answer = client.ask(key, version, encode(fields(schema, resources=asked, validate_only=False)))
            return {str(each.resource_name): int(each.error_code) for each in getattr(answer, answered)}

        denied = error_codes.GROUP_AUTHORIZATION_FAILED
        with as_user(broker, "alice") as client:
            assert codes(client, 32, 4, "results") == {"seen": 0, "own": 0, "other": denied}
            assert codes(client, 44, 1, "responses") == {"seen": denied, "own": 0, "other": denied}
    finally:
        broker.close()


def test_other_nodes_follow_and_a_group_that_is_deleted_keeps_its_configs(broker: RealBroker) -> None:
    other = GroupConfigCache(broker.catalogue, SETTINGS.group_limits)
    broker.portal.call(other.refresh())
    reported: list[int] = []
    other.on_change(lambda: reported.append(other.limits("kept").consumer_session_ms))
    with RawClient(broker.port) as client:
        epoch = int(beat(client, "kept", "m", 0).member_epoch)
        assert change(broker, "kept", [(SESSION, AlterOp.SET, "7000")]) == 0
        broker.portal.call(other.refresh())
        broker.portal.call(other.refresh())
        assert reported == [7000]
        assert int(beat(client, "kept", "m", -1).error_code) == 0, epoch
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.delete_consumer_groups(["kept"])["kept"].result(30)
    assert shown(broker, "kept")[SESSION] == ("7000", 8)
