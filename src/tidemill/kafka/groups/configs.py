"""Configs of single groups: all of Kafka 4's keys for the supported protocols. Pure; names are Kafka's own.

The node's `GroupLimits` bound a group's own value, as group.consumer.min and max do in Kafka. If the bounds changed
after a value was set, the nearest allowed value applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.kafka.groups.classic_state import GroupLimits
from tidemill.topics.config.alter import ConfigKind
from tidemill.topics.config.configs import Setting

_INT: Final = 2**31 - 1

HEARTBEAT: Final = "consumer.heartbeat.interval.ms"
SESSION: Final = "consumer.session.timeout.ms"
SETTINGS: Final[dict[str, Setting]] = {
    HEARTBEAT: Setting(
        "5000", "int", "Heartbeat interval of members of the consumer protocol.",
        "consumer_heartbeat_ms", 1, _INT, broker="group.consumer.heartbeat.interval.ms",
    ),
    SESSION: Setting(
        "45000", "int", "A member of the consumer protocol without a heartbeat for this long is fenced.",
        "consumer_session_ms", 1, _INT, broker="group.consumer.session.timeout.ms",
    ),
}  # fmt: skip
_UNSUPPORTED_PREFIXES: Final = {"share.": "Share groups (KIP-932)", "streams.": "Streams groups (KIP-1071)"}


def check(config: Mapping[str, str]) -> None:
    """Raise InvalidError with the first config that is unknown or unreadable."""
    for name, value in sorted(config.items()):
        for prefix, what in _UNSUPPORTED_PREFIXES.items():
            if name.startswith(prefix):
                raise InvalidError(
                    f"group type is not supported: name={name}.", fix=f"Remove it: {what} are not supported."
                )
        if name not in SETTINGS:
            raise InvalidError(f"unknown group config: name={name}.", fix=f"Use one of {', '.join(SETTINGS)}.")
        SETTINGS[name].parse(name, value)


GROUP: Final = ConfigKind(SETTINGS, check)


def check_change(limits: GroupLimits, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise InvalidError if the node does not allow the change. Unchanged values are not checked."""
    for name, value in after.items():
        if before.get(name) == value:
            continue
        check({name: value})
        low, high = _bounds(limits, name)
        if not low <= int(value) <= high:
            raise InvalidError(f"bad value: name={name} value={value!r}.", fix=f"Use {low} to {high}.")
    wanted = _clamped(limits, after)
    if before != after and wanted.consumer_session_ms <= wanted.consumer_heartbeat_ms:
        raise InvalidError(
            f"{SESSION} must be greater than {HEARTBEAT}: session={wanted.consumer_session_ms} "
            f"heartbeat={wanted.consumer_heartbeat_ms}.",
            fix="Set both.",
        )


def apply_configs(limits: GroupLimits, config: Mapping[str, str]) -> GroupLimits:
    """Return the limits of a group with these configs, which may be older than the node's bounds or from another
    version.
    """
    wanted = _clamped(limits, config)
    session_ms = wanted.consumer_session_ms
    return msgspec.structs.replace(wanted, consumer_heartbeat_ms=min(wanted.consumer_heartbeat_ms, session_ms - 1))


def value_of(limits: GroupLimits, name: str) -> str:
    return str(getattr(limits, SETTINGS[name].field))


def _clamped(limits: GroupLimits, config: Mapping[str, str]) -> GroupLimits:
    values: dict[str, int] = {}
    for name, value in config.items():
        if name in SETTINGS and value.isascii() and value.isdecimal():
            low, high = _bounds(limits, name)
            values[SETTINGS[name].field] = min(max(int(value), low), high)
    return msgspec.structs.replace(limits, **values)


def _bounds(limits: GroupLimits, name: str) -> tuple[int, int]:
    found: tuple[int, int] = getattr(limits, f"{SETTINGS[name].field}_bounds")
    return found
