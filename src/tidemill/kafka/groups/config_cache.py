"""Cache of the configs of groups: rows of the catalogue, read again when one changes.

Each node caches all of them, as Kafka's brokers do, regardless of the groups that it coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tidemill.base.errors import InvalidError
from tidemill.kafka.groups import configs
from tidemill.kafka.groups.classic_state import GroupLimits
from tidemill.metastore.cached_rows import refresh_forever
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.rows.groups import GroupConfigRow

REFRESH_S: Final = 2.0
GROUPS_MAX: Final = 10_000
"""Maximum number of groups with configs of their own."""


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
        return self._limits if row is None else configs.apply_configs(self._limits, row.config)

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
            configs.check_change(self._limits, config, new)
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
