"""Topic configs that exist, with their defaults, as DescribeConfigs shows them and CreateTopics accepts them.

What a config does is decided where the data lies (`topics`); here are only the names, Kafka's own.
"""

from __future__ import annotations

from typing import Final

import msgspec

STRING: Final = 2
INT: Final = 3
LONG: Final = 5
LIST: Final = 7


class TopicConfig(msgspec.Struct, frozen=True):
    """type: Kafka's config type number (KIP-569)."""

    default: str
    type: int


TOPIC_CONFIGS: Final[dict[str, TopicConfig]] = {
    "cleanup.policy": TopicConfig("delete", LIST),
    "compression.type": TopicConfig("producer", STRING),
    "delete.retention.ms": TopicConfig("86400000", LONG),
    "max.message.bytes": TopicConfig("104857600", INT),
    "message.timestamp.type": TopicConfig("CreateTime", STRING),
    "min.insync.replicas": TopicConfig("1", INT),
    "retention.bytes": TopicConfig("-1", LONG),
    "retention.ms": TopicConfig("-1", LONG),
    "segment.bytes": TopicConfig("1073741824", INT),
    "segment.ms": TopicConfig("604800000", LONG),
}
