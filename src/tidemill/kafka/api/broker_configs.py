"""A broker's configs as Kafka names them: what its settings are, for DescribeConfigs. None is changed while it runs.

`key` is where tidemill.toml sets it, "" for what cannot be otherwise here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.kafka.api.context import Context
from tidemill.kafka.groups.assignors import ASSIGNORS
from tidemill.topics.config.alter import InvalidConfigRequestError
from tidemill.topics.config.configs import SETTINGS

TOPIC: Final = 2
BROKER: Final = 4
GROUP: Final = 32
"""Resource types of configs."""


class BrokerConfig(msgspec.Struct, frozen=True):
    name: str
    kind: str
    value: str
    says: str
    key: str = ""


def broker_configs(context: Context) -> list[BrokerConfig]:
    """By name. Those that are a topic config's default come from the table of topic configs."""
    settings = context.settings
    own, listeners = context.own, context.listeners

    def setting(name: str, kind: str, key: str, value: object, says: str) -> BrokerConfig:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return BrokerConfig(name, kind, text, says, key and f"kafka.{key}")

    def bound(name: str, value: int, says: str) -> BrokerConfig:
        name = f"group.consumer.{name}"
        return setting(name, "int", name.replace(".", "_"), value, says)

    limits = settings.group_limits
    found = [
        BrokerConfig("advertised.listeners", "list", ",".join(f"{each.name}://{each.told}" for each in listeners),
                     "What clients of each listener are told.", "kafka.listeners"),
        setting("auto.create.topics.enable", "boolean", "auto_create_topics", settings.auto_create_topics,
                "A client may create a topic by naming it."),
        BrokerConfig("broker.id", "int", str(own.node_id), "Given to the node's name when it was first seen.",
                     "node.name"),
        BrokerConfig("cluster.id", "string", settings.cluster_id, "The same for every node."),
        setting("connections.max.idle.ms", "long", "", round(settings.idle_timeout_s * 1000),
                "A connection without a request for so long is closed."),
        BrokerConfig("default.replication.factor", "int", "1", "Copies are the bucket's."),
        BrokerConfig("delete.topic.enable", "boolean", "true", "What no capture and no pipeline uses may be deleted."),
        setting("fetch.max.bytes", "int", "", settings.fetch_bytes_max, "A Fetch response is cut at about this size."),
        setting("max.connections", "int", "connections_max", settings.connections_max, "Connections at once."),
        setting("max.connections.per.ip", "int", "connections_per_address_max", settings.connections_per_address_max,
                "Connections of one address at once."),
        BrokerConfig("group.consumer.assignors", "list", ",".join(ASSIGNORS), "The first one, where nobody asks."),
        setting("group.consumer.heartbeat.interval.ms", "int", "group_consumer_heartbeat_interval_ms",
                settings.group_consumer_heartbeat_interval_ms, "What members of the consumer protocol are told."),
        bound("max.heartbeat.interval.ms", limits.consumer_heartbeat_ms_bounds[1], "The most that a group may set."),
        bound("max.session.timeout.ms", limits.consumer_session_ms_bounds[1], "The most that a group may set."),
        setting("group.consumer.max.size", "int", "group_members_max", settings.group_members_max,
                "Members of a group of the consumer protocol."),
        bound("min.heartbeat.interval.ms", limits.consumer_heartbeat_ms_bounds[0], "The least that a group may set."),
        bound("min.session.timeout.ms", limits.consumer_session_ms_bounds[0], "The least that a group may set."),
        setting("group.consumer.migration.policy", "string", "group_consumer_migration_policy",
                settings.group_consumer_migration_policy,
                "May a group change its protocol while members are in it?"),
        setting("group.consumer.session.timeout.ms", "int", "group_consumer_session_timeout_ms",
                settings.group_consumer_session_timeout_ms,
                "A member of the consumer protocol that is not heard of for so long is fenced."),
        BrokerConfig("group.coordinator.rebalance.protocols", "list", "classic,consumer", "Of KIP-848 and before."),
        setting("group.initial.rebalance.delay.ms", "int", "group_initial_rebalance_delay_ms",
                settings.group_initial_rebalance_delay_ms, "A group that was empty waits so long for more members."),
        setting("group.max.session.timeout.ms", "int", "group_max_session_timeout_ms",
                settings.group_max_session_timeout_ms, "The longest a member of the classic protocol may ask for."),
        setting("group.max.size", "int", "group_members_max", settings.group_members_max, "Members of a group."),
        setting("group.min.session.timeout.ms", "int", "group_min_session_timeout_ms",
                settings.group_min_session_timeout_ms, "The shortest a member of the classic protocol may ask for."),
        BrokerConfig("listener.security.protocol.map", "string",
                     ",".join(f"{each.name}:{each.security}" for each in listeners),
                     "How clients of each listener come in.", "kafka.listeners"),
        BrokerConfig("listeners", "list", ",".join(f"{each.name}://{each.bound}" for each in listeners),
                     "Where it listens; the default one is node.kafka.", "kafka.listeners"),
        setting("max.incremental.fetch.session.cache.slots", "int", "fetch_sessions_max", settings.fetch_sessions_max,
                "Fetch sessions at once."),
        BrokerConfig("node.id", "int", str(own.node_id), "As broker.id.", "node.name"),
        setting("num.partitions", "int", "default_partitions", settings.default_partitions,
                "Partitions of a topic that is created without a count."),
        setting("socket.request.max.bytes", "int", "", settings.request_bytes_max, "The largest request."),
        setting("transaction.max.timeout.ms", "int", "transaction_timeout_max_ms", settings.transaction_timeout_max_ms,
                "The longest time-out of a transaction that a producer may ask for."),
        setting("transactional.id.expiration.ms", "int", "transactional_id_expires_ms",
                settings.transactional_id_expires_ms, "A transactional id unused for so long is forgotten."),
    ]  # fmt: skip
    defaults = settings.topic_defaults
    keys = {"retention.ms": "kafka.retention_ms", "retention.bytes": "kafka.retention_bytes"}
    for name, topic in SETTINGS.items():
        if topic.broker:
            value = defaults.get(name, topic.default)
            found.append(BrokerConfig(topic.broker, topic.kind, value, topic.says, keys.get(name, "")))
    return sorted(found, key=lambda config: config.name)


THROTTLES: Final = (
    "leader.replication.throttled.rate",
    "follower.replication.throttled.rate",
    "replica.alter.log.dirs.io.max.bytes.per.second",
)
"""Dynamic configs of a broker that kafka-reassign-partitions sets (KIP-73)."""

DEFAULT_BROKER: Final = ""
"""The resource name of what is the same for all brokers."""


def is_own(context: Context, resource_name: str) -> bool:
    return resource_name == str(context.own.node_id)


def refuse_change(context: Context, resource_name: str, names: Sequence[str]) -> None:
    """`names`: what is to be set. Raises InvalidConfigRequestError, or InvalidError for a config that does not exist;
    nothing to change is fine. So is deleting: none is ever set, and Kafka's tools delete throttles of replication that
    they have not set."""
    if resource_name != DEFAULT_BROKER and not is_own(context, resource_name):
        raise InvalidConfigRequestError(
            f"another broker's configs: asked={resource_name!r} this={context.own.node_id}."
        )
    known = {config.name: config for config in broker_configs(context)}
    for name in names:
        if name in THROTTLES:
            raise InvalidConfigRequestError(
                f"no replica follows another, so there is nothing to throttle: name={name}."
            )
        if name not in known:
            raise InvalidError(f"unknown broker config: name={name}.")
        key = known[name].key
        fix = f"Set {key} in tidemill.toml and start the node anew." if key else "It cannot be otherwise here."
        raise InvalidConfigRequestError(f"a broker's configs do not change while it runs: name={name}.", fix=fix)
