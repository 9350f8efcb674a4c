"""Topic configs: what is honoured, typed, and nothing else. A value that would change nothing is refused, so that
nobody relies on it; names are Kafka's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Final

import msgspec

from tidemill.base.errors import Invalid
from tidemill.base.limits import KAFKA_REQUEST_BYTES

BATCH_BYTES_MIN: Final = 1024


class TopicConfig(msgspec.Struct, frozen=True):
    """retention_ms, retention_bytes: −1 keeps everything; bytes are of one partition, as in Kafka."""

    max_message_bytes: int = KAFKA_REQUEST_BYTES
    retention_ms: int = -1
    retention_bytes: int = -1


class Setting(msgspec.Struct, frozen=True):
    """One config as it is listed: `kind` is string, int, long or list; `field` is its place in TopicConfig, or "" for
    one that has a single value here."""

    default: str
    kind: str
    field: str = ""
    low: int = 0
    high: int = 0


SETTINGS: Final[dict[str, Setting]] = {
    "cleanup.policy": Setting("delete", "list"),
    "compression.type": Setting("producer", "string"),
    "max.message.bytes": Setting(
        str(KAFKA_REQUEST_BYTES), "int", "max_message_bytes", BATCH_BYTES_MIN, KAFKA_REQUEST_BYTES
    ),
    "message.timestamp.type": Setting("CreateTime", "string"),
    "min.insync.replicas": Setting("1", "int"),
    "retention.bytes": Setting("-1", "long", "retention_bytes", -1, 2**63 - 1),
    "retention.ms": Setting("-1", "long", "retention_ms", -1, 2**63 - 1),
}


def topic_config(config: Mapping[str, str]) -> TopicConfig:
    """The config of a topic's row. Raises Invalid, naming the first config that is unknown or not served so."""
    fields: dict[str, int] = {}
    for name, value in sorted(config.items()):
        setting = SETTINGS.get(name)
        if setting is None:
            raise Invalid(f"unknown topic config: name={name}.", fix=f"Known are {', '.join(SETTINGS)}.")
        if setting.field:
            fields[setting.field] = _number(name, value, setting)
        elif value != setting.default:
            raise Invalid(
                f"not served: name={name} value={value!r}.", fix=f"Leave it out, or set it to {setting.default}."
            )
    return TopicConfig(**fields)


def stored_config(config: Mapping[str, str]) -> TopicConfig:
    """As `topic_config`, of a row that may be older than the checks: what is not served now is passed over."""
    fields: dict[str, str] = {}
    for name, value in config.items():
        with contextlib.suppress(Invalid):
            topic_config({name: value})
            fields[name] = value
    return topic_config(fields)


def _number(name: str, value: str, setting: Setting) -> int:
    try:
        number = int(value)
    except ValueError:
        number = setting.low - 1
    if not setting.low <= number <= setting.high or not value.isascii():
        raise Invalid(f"bad value: name={name} value={value!r}.", fix=f"Use {setting.low} to {setting.high}.")
    return number
