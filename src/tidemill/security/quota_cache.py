"""Quotas of a cluster as one process caches them: rows of the metastore (rows/security), re-read when one changes.

Each node applies the full quota independently of the others, as Kafka's brokers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.metastore.cached_rows import refresh_forever
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import QUOTAS
from tidemill.metastore.rows.security import QuotaRow
from tidemill.security.quotas import Quota, QuotaLimits, check_quota
from tidemill.security.retrying_write import write_rows

REFRESH_S: Final = 2.0
QUOTAS_MAX: Final = 10_000
_FIX: Final = "Describe the quotas to check."


class QuotaCache:
    def __init__(self, metastore: Metastore, clock: Clock) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rows: Sequence[QuotaRow] | None = None
        self.limits = QuotaLimits()

    async def refresh(self, *, fresh: bool = True) -> None:
        """Re-read the quotas if a row changed. Raises Unavailable."""
        rows = await self._metastore.rows(QUOTAS, fresh=fresh)
        if rows is not self._rows:
            self.limits.replace(map(_quota, rows))
            self._rows = rows

    async def run(self) -> None:
        """Refresh indefinitely."""
        await refresh_forever(self, REFRESH_S, "access.quotas_not_read")

    async def list(self) -> Sequence[Quota]:
        return [_quota(row) for row in await self._metastore.rows(QUOTAS)]

    async def change(self, put: Sequence[Quota], removed: Sequence[Quota]) -> None:
        """Put and remove quotas atomically. The values of `removed` are ignored. Raises InvalidError."""
        for quota in put:
            check_quota(quota)
        if put:
            known = {_key(row) for row in await self._metastore.rows(QUOTAS)}
            changed = set(map(_key, put))
            if changed - known and len((known | changed) - set(map(_key, removed))) > QUOTAS_MAX:
                raise InvalidError(f"too many quotas: limit={QUOTAS_MAX}.", fix="Use defaults.")
        rows = [QUOTAS.encode(QuotaRow(each.user, each.client, each.name, each.value)) for each in put]
        rows += [(QUOTAS.key(each.user, each.client, each.name), b"") for each in removed]
        await write_rows(self._metastore, self._clock, rows, _FIX)
        await self.refresh()


def _key(quota: Quota | QuotaRow) -> tuple[str, str, str]:
    return quota.user, quota.client, quota.name


def _quota(row: QuotaRow) -> Quota:
    return Quota(row.user, row.client, row.name, row.value)
