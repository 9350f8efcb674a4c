"""Configs of single groups: all of Kafka 4's keys for the supported protocols, and their cache. Names are Kafka's own.

The node's `GroupLimits` bound a group's own value, as group.consumer.min and max do in Kafka. If the bounds changed
after a value was set, the nearest allowed value applies.

The configs are rows of the catalogue, read again when one changes. Each node caches all of them, as Kafka's brokers do,
regardless of the groups that it coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.kafka.groups.classic.state import GroupLimits
from tidemill.metastore.cached_rows import refresh_forever
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.rows.groups import GroupConfigRow
from tidemill.topics.config.alter import ConfigKind
from tidemill.topics.config.configs import Setting

REFRESH_S: Final = 2.0
GROUPS_MAX: Final = 10_000
"""Maximum number of groups with configs of their own."""
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


class GroupConfigCache:
    """Cached group configs. `limits` are those of a group without its own configs."""

    def __init__(self, catalogue: Catalogue, limits: GroupLimits) -> None:
        self._catalogue = catalogue
        self._limits = limits
        self._rows: Sequence[GroupConfigRow] | None = None
        self._own: Mapping[str, GroupConfigRow] = {}
        self._followers: list[Callable[[], None]] = []

    def limits(self, group: str) -> GroupLimits:
        """Return the limits of a group from the cache."""
        row = self._own.get(group)
        return self._limits if row is None else apply_configs(self._limits, row.config)

    def on_change(self, follow: Callable[[], None]) -> None:
        """Register a callback for every change of the answers."""
        self._followers.append(follow)

    async def refresh(self, *, fresh: bool = True) -> None:
        """Read the rows again if they changed. Raises UnavailableError."""
        rows = await self._catalogue.group_configs(fresh=fresh)
        if rows is not self._rows:
            self._rows, self._own = rows, {row.group: row for row in rows}
            for follow in self._followers:
                follow()

    async def run(self) -> None:
        """Refresh forever."""
        await refresh_forever(self, REFRESH_S, "kafka.group_configs_not_read")

    async def own_configs(self, group: str) -> Mapping[str, str]:
        """Return the group's own configs. Raises UnavailableError."""
        await self.refresh()
        row = self._own.get(group)
        return row.config if row is not None else {}

    async def names(self) -> list[str]:
        """Return the groups that have configs of their own."""
        await self.refresh()
        return sorted(self._own)

    async def change(
        self, group: str, change: Callable[[dict[str, str]], dict[str, str]], *, validate_only: bool = False
    ) -> Mapping[str, str]:
        """Change the configs of a group, all or none, and return the new ones.

        Raises what `change` raises, and InvalidError if the node's bounds are exceeded.
        """

        def changed(config: dict[str, str]) -> dict[str, str]:
            new = change(config)
            check_change(self._limits, config, new)
            return new

        own = await self.own_configs(group)
        if not own and len(self._own) >= GROUPS_MAX:
            raise InvalidError(
                f"too many groups with configs: limit={GROUPS_MAX}.", fix="Set the node's configs for all groups."
            )
        if validate_only:
            return changed(dict(own))
        new = await self._catalogue.change_group_config(group, changed)
        await self.refresh()
        return new
