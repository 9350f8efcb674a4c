"""Configs of a broker under Kafka's names, derived from its settings, for DescribeConfigs.

They are read-only at run time.

`key` is the key in tidemill.toml, "" for configs that have a fixed value here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.kafka.api.context import Context
from tidemill.kafka.groups.consumer.assignors import ASSIGNORS
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
    """Return the broker's configs, sorted by name.

    Defaults of topic configs come from the table of topic configs.
    """
    settings, section = context.settings, context.settings.section
    own, listeners = context.own, context.listeners

    def setting(name: str, kind: str, key: str, value: object, says: str) -> BrokerConfig:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return BrokerConfig(name, kind, text, says, key and f"kafka.{key}")

    def bound(name: str, value: int, says: str) -> BrokerConfig:
        name = f"group.consumer.{name}"
        return setting(name, "int", name.replace(".", "_"), value, says)

    limits = settings.group_limits
    found = [
        BrokerConfig("advertised.listeners", "list", ",".join(f"{each.name}://{each.advertised}" for each in listeners),
                     "Addresses that clients of each listener receive.", "kafka.listeners"),
        setting("auto.create.topics.enable", "boolean", "auto_create_topics", section.auto_create_topics,
                "Clients create topics by naming them."),
        BrokerConfig("broker.id", "int", str(own.node_id), "Assigned to the node's name when it first joined.",
                     "node.name"),
        BrokerConfig("cluster.id", "string", settings.cluster_id, "Equal on all nodes."),
        setting("connections.max.idle.ms", "long", "", round(settings.idle_timeout_s * 1000),
                "A connection without a request for this long is closed."),
        BrokerConfig("default.replication.factor", "int", "1", "The bucket replicates the data."),
        BrokerConfig("delete.topic.enable", "boolean", "true", "Topics that nothing uses can be deleted."),
        setting("fetch.max.bytes", "int", "", settings.fetch_bytes_max, "Approximate limit of a Fetch response."),
        setting("max.connections", "int", "connections_max", section.connections_max, "Maximum open connections."),
        setting("max.connections.per.ip", "int", "connections_per_address_max", section.connections_per_address_max,
                "Maximum open connections of one address."),
        BrokerConfig("group.consumer.assignors", "list", ",".join(ASSIGNORS), "The first one is the default."),
        setting("group.consumer.heartbeat.interval.ms", "int", "group_consumer_heartbeat_interval_ms",
                section.group_consumer_heartbeat_interval_ms, "Interval for members of the consumer protocol."),
        bound("max.heartbeat.interval.ms", limits.consumer_heartbeat_ms_bounds[1], "Maximum that a group may set."),
        bound("max.session.timeout.ms", limits.consumer_session_ms_bounds[1], "Maximum that a group may set."),
        setting("group.consumer.max.size", "int", "group_members_max", section.group_members_max,
                "Maximum members of a group of the consumer protocol."),
        bound("min.heartbeat.interval.ms", limits.consumer_heartbeat_ms_bounds[0], "Minimum that a group may set."),
        bound("min.session.timeout.ms", limits.consumer_session_ms_bounds[0], "Minimum that a group may set."),
        setting("group.consumer.migration.policy", "string", "group_consumer_migration_policy",
                section.group_consumer_migration_policy,
                "Protocol changes allowed to a group that has members."),
        setting("group.consumer.session.timeout.ms", "int", "group_consumer_session_timeout_ms",
                section.group_consumer_session_timeout_ms,
                "A member of the consumer protocol without a heartbeat for this long is fenced."),
        BrokerConfig("group.coordinator.rebalance.protocols", "list", "classic,consumer", "Group protocols."),
        setting("group.initial.rebalance.delay.ms", "int", "group_initial_rebalance_delay_ms",
                section.group_initial_rebalance_delay_ms, "An empty group waits this long for more members."),
        setting("group.max.session.timeout.ms", "int", "group_max_session_timeout_ms",
                section.group_max_session_timeout_ms, "Maximum that a member of the classic protocol may request."),
        setting("group.max.size", "int", "group_members_max", section.group_members_max, "Maximum members per group."),
        setting("group.min.session.timeout.ms", "int", "group_min_session_timeout_ms",
                section.group_min_session_timeout_ms, "Minimum that a member of the classic protocol may request."),
        BrokerConfig("listener.security.protocol.map", "string",
                     ",".join(f"{each.name}:{each.security}" for each in listeners),
                     "Security protocol of each listener.", "kafka.listeners"),
        BrokerConfig("listeners", "list", ",".join(f"{each.name}://{each.bound}" for each in listeners),
                     "Bound addresses; the default listener is node.kafka.", "kafka.listeners"),
        setting("max.incremental.fetch.session.cache.slots", "int", "fetch_sessions_max", section.fetch_sessions_max,
                "Maximum fetch sessions."),
        BrokerConfig("node.id", "int", str(own.node_id), "Equal to broker.id.", "node.name"),
        setting("num.partitions", "int", "default_partitions", section.default_partitions,
                "Partitions of a topic that is created without a count."),
        setting("socket.request.max.bytes", "int", "", settings.request_bytes_max, "Maximum size of a request."),
        setting("transaction.max.timeout.ms", "int", "transaction_timeout_max_ms", section.transaction_timeout_max_ms,
                "Longest transaction timeout that a producer may request."),
        setting("transactional.id.expiration.ms", "int", "transactional_id_expires_ms",
                section.transactional_id_expires_ms, "A transactional id unused for this long expires."),
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
"""Resource name of the default configs of all brokers."""


def is_this_broker(context: Context, resource_name: str) -> bool:
    return resource_name == str(context.own.node_id)


def reject_config_change(context: Context, resource_name: str, names: Sequence[str]) -> None:
    """Reject setting the configs `names` of a broker.

    Raises InvalidConfigRequestError, or InvalidError for an unknown config.

    An empty list is accepted. Deletions are accepted too: no config is ever set, and Kafka's tools delete replication
    throttles that they have not set.
    """
    if resource_name != DEFAULT_BROKER and not is_this_broker(context, resource_name):
        raise InvalidConfigRequestError(
            f"configs of another broker: asked={resource_name!r} this={context.own.node_id}."
        )
    known = {config.name: config for config in broker_configs(context)}
    for name in names:
        if name in THROTTLES:
            raise InvalidConfigRequestError(f"there is no replication between brokers to throttle: name={name}.")
        if name not in known:
            raise InvalidError(f"unknown broker config: name={name}.")
        key = known[name].key
        fix = f"Set {key} in tidemill.toml and restart the node." if key else "Its value is fixed."
        raise InvalidConfigRequestError(f"broker configs cannot change at run time: name={name}.", fix=fix)
