"""The configs of groups as one process knows them: rows of the catalogue, read again when one changes.

Each node holds all of them for itself, as Kafka's brokers do, whichever groups it coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tidemill.base.errors import InvalidError
from tidemill.kafka.groups import configs
from tidemill.kafka.groups.classic_state import GroupLimits
from tidemill.metastore.cached_rows import refresh_for_ever
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.rows.group_configs import GroupConfigRow

REFRESH_S: Final = 2.0
GROUPS_MAX: Final = 10_000
"""Groups with configs of their own."""


class GroupConfigs:
    """`limits`: of a group that has none of its own."""

    def __init__(self, catalogue: Catalogue, limits: GroupLimits) -> None:
        self._catalogue = catalogue
        self._limits = limits
        self._rows: Sequence[GroupConfigRow] | None = None
        self._own: Mapping[str, GroupConfigRow] = {}
        self._followers: list[Callable[[], None]] = []

    def limits(self, group: str) -> GroupLimits:
        """Of this group. Plain."""
        row = self._own.get(group)
        return self._limits if row is None else configs.limited(self._limits, row.config)

    def on_change(self, follow: Callable[[], None]) -> None:
        """Call it whenever another answer may be given."""
        self._followers.append(follow)

    async def refresh(self, *, fresh: bool = True) -> None:
        """Raises Unavailable."""
        rows = await self._catalogue.group_configs(fresh=fresh)
        if rows is not self._rows:
            self._rows, self._own = rows, {row.group: row for row in rows}
            for follow in self._followers:
                follow()

    async def run(self) -> None:
        """Refresh for ever."""
        await refresh_for_ever(self, REFRESH_S, "kafka.group_configs_not_read")

    async def of(self, group: str) -> Mapping[str, str]:
        """What the group itself says. Raises Unavailable."""
        await self.refresh()
        row = self._own.get(group)
        return row.config if row is not None else {}

    async def names(self) -> list[str]:
        """Groups with configs of their own."""
        await self.refresh()
        return sorted(self._own)

    async def change(
        self, group: str, change: Callable[[dict[str, str]], dict[str, str]], *, validate_only: bool = False
    ) -> Mapping[str, str]:
        """All of it or nothing; what the group says then. Raises what `change` raises, InvalidError for what the node
        does not allow."""

        def changed(config: dict[str, str]) -> dict[str, str]:
            new = change(config)
            configs.refuse_change(self._limits, config, new)
            return new

        own = await self.of(group)
        if not own and len(self._own) >= GROUPS_MAX:
            raise InvalidError(
                f"too many groups with configs: limit={GROUPS_MAX}.", fix="Set the node's, for all groups."
            )
        if validate_only:
            return changed(dict(own))
        new = await self._catalogue.change_group_config(group, changed)
        await self.refresh()
        return new
