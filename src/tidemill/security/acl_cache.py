"""ACL rules of a cluster as one process caches them: rows of the metastore (rows/security), re-read when one changes.

A rule written by this process takes effect here immediately, and in other processes within REFRESH_S plus the
metastore's STALE_S.

While the rules cannot be read, those read last still decide. Before the first successful read only super users are
allowed anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.metastore.cached_rows import refresh_forever, write_rows
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import ACLS
from tidemill.metastore.rows.security import AclRow
from tidemill.security.acls import AclRule, Authorizer, RuleFilter, check_rule

REFRESH_S: Final = 1.0
RULES_MAX: Final = 10_000
_FIX: Final = "Check with `tidemill acl list`."


class AclCache:
    def __init__(self, metastore: Metastore, clock: Clock, super_users: Iterable[str] = ()) -> None:
        self._metastore = metastore
        self._clock = clock
        self._super_users = tuple(super_users)
        self._rows: Sequence[AclRow] | None = None
        self.authorizer = Authorizer((), self._super_users)

    async def refresh(self, *, fresh: bool = True) -> None:
        """Re-read the rules if a row changed. Raises UnavailableError."""
        rows = await self._metastore.rows(ACLS, fresh=fresh)
        if rows is not self._rows:
            self.authorizer = Authorizer(map(_rule_of_row, rows), self._super_users)
            self._rows = rows

    async def run(self) -> None:
        """Refresh indefinitely."""
        await refresh_forever(self, REFRESH_S, "access.rules_not_read")

    async def find(self, wanted: RuleFilter) -> list[AclRule]:
        return [rule for row in await self._metastore.rows(ACLS) if wanted.matches(rule := _rule_of_row(row))]

    async def add(self, rules: Sequence[AclRule]) -> None:
        """Add all rules atomically. Raises InvalidError for an invalid rule, or for too many rules in all."""
        for rule in rules:
            check_rule(rule)
        known = {_rule_of_row(row) for row in await self._metastore.rows(ACLS)}
        new = sorted(set(rules) - known)
        if len(known) + len(new) > RULES_MAX:
            raise InvalidError(f"too many rules: limit={RULES_MAX} have={len(known)}.", fix="Use prefixed rules.")
        now_ms = self._clock.now_ms()
        await self._commit([ACLS.encode(AclRow(*_fields(rule), now_ms)) for rule in new])

    async def delete(self, rules: Sequence[AclRule]) -> None:
        await self._commit([(ACLS.key(*_fields(rule)), b"") for rule in rules])

    async def _commit(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        await write_rows(self._metastore, self._clock, rows, _FIX)
        await self.refresh()


def _rule_of_row(row: AclRow) -> AclRule:
    return AclRule(row.resource, row.pattern, row.name, row.principal, row.host, row.operation, row.permission)


def _fields(rule: AclRule) -> tuple[int, int, str, str, str, int, int]:
    return rule.resource, rule.pattern, rule.name, rule.principal, rule.host, rule.operation, rule.permission
