"""Configs of single groups: every key of Kafka 4 that is of a protocol served here. Pure; names are Kafka's own.

A group's own value is bounded by the node's `GroupLimits`, as Kafka's is by group.consumer.min and max. Where the
bounds are others by now than when it was set, the nearest value that they allow counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.kafka.groups.classic_state import GroupLimits
from tidemill.topics.config.alter import Kind
from tidemill.topics.config.configs import Setting

_INT: Final = 2**31 - 1

HEARTBEAT: Final = "consumer.heartbeat.interval.ms"
SESSION: Final = "consumer.session.timeout.ms"
SETTINGS: Final[dict[str, Setting]] = {
    HEARTBEAT: Setting(
        "5000", "int", "How often members of the consumer protocol are told to be heard of.",
        "consumer_heartbeat_ms", 1, _INT, broker="group.consumer.heartbeat.interval.ms",
    ),
    SESSION: Setting(
        "45000", "int", "A member of the consumer protocol that is not heard of for so long is fenced.",
        "consumer_session_ms", 1, _INT, broker="group.consumer.session.timeout.ms",
    ),
}  # fmt: skip
_REFUSED: Final = {"share.": "Share groups (KIP-932)", "streams.": "Streams groups (KIP-1071)"}


def check(config: Mapping[str, str]) -> None:
    """Raises InvalidError, naming the first config that is unknown or cannot be read."""
    for name, value in sorted(config.items()):
        for prefix, what in _REFUSED.items():
            if name.startswith(prefix):
                raise InvalidError(f"not served: name={name}.", fix=f"{what} are not served here.")
        if name not in SETTINGS:
            raise InvalidError(f"unknown group config: name={name}.", fix=f"Known are {', '.join(SETTINGS)}.")
        SETTINGS[name].parse(name, value)


GROUP: Final = Kind(SETTINGS, check)


def refuse_change(limits: GroupLimits, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raises InvalidError for what the node does not allow; what stands already and is not touched is not judged."""
    for name, value in after.items():
        if before.get(name) == value:
            continue
        check({name: value})
        low, high = _bounds(limits, name)
        if not low <= int(value) <= high:
            raise InvalidError(f"bad value: name={name} value={value!r}.", fix=f"Use {low} to {high}.")
    wanted = _nearest(limits, after)
    if before != after and wanted.consumer_session_ms <= wanted.consumer_heartbeat_ms:
        raise InvalidError(
            f"{SESSION} must be greater than {HEARTBEAT}: session={wanted.consumer_session_ms} "
            f"heartbeat={wanted.consumer_heartbeat_ms}.",
            fix="Set both.",
        )


def limited(limits: GroupLimits, config: Mapping[str, str]) -> GroupLimits:
    """What holds for a group with these configs, which may be older than the node's bounds, or another version's."""
    wanted = _nearest(limits, config)
    session_ms = wanted.consumer_session_ms
    return msgspec.structs.replace(wanted, consumer_heartbeat_ms=min(wanted.consumer_heartbeat_ms, session_ms - 1))


def value_of(limits: GroupLimits, name: str) -> str:
    return str(getattr(limits, SETTINGS[name].field))


def _nearest(limits: GroupLimits, config: Mapping[str, str]) -> GroupLimits:
    values: dict[str, int] = {}
    for name, value in config.items():
        if name in SETTINGS and value.isascii() and value.isdecimal():
            low, high = _bounds(limits, name)
            values[SETTINGS[name].field] = min(max(int(value), low), high)
    return msgspec.structs.replace(limits, **values)


def _bounds(limits: GroupLimits, name: str) -> tuple[int, int]:
    found: tuple[int, int] = getattr(limits, f"{SETTINGS[name].field}_bounds")
    return found
