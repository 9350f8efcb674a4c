"""Client quotas: how much one client may use per second on one node. `QuotaLimits` is pure: it is given the time.

An entity is a user, a client id, or both; each is given by name, or is the default for names without their own quota.
The first of these that has a quota applies, as in Kafka (KIP-55, KIP-257):

    user and client · user and default client · user · default user and client · both defaults · default user ·
    client · default client

Each quota is a token bucket that fills at the quota's rate and holds BURST_S of it. An amount used is deducted
immediately, even when the bucket holds less; the debt determines for how long the client is throttled (KIP-219). So the
rate holds over any period longer than the burst, regardless of request sizes.

The rate of a request time quota (KIP-124) is a percentage of one event loop's time; its throttle time has a short
maximum, as in Kafka.

At most BUCKETS_MAX buckets are kept; the least recently used is forgotten first, which resets it to full.

The quotas of a cluster are rows of the metastore (rows/security). Each process caches them and re-reads them when one
changes. Each node applies the full quota independently of the others, as Kafka's brokers do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.metastore.cached_rows import refresh_forever, write_rows
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import QUOTAS
from tidemill.metastore.rows.security import QuotaRow
from tidemill.security.principals import NAME_CHARS_MAX

PRODUCE: Final = "producer_byte_rate"
CONSUME: Final = "consumer_byte_rate"
REQUEST: Final = "request_percentage"
NAMES: Final = (PRODUCE, CONSUME, REQUEST)
NO_ENTITY: Final = ""
DEFAULT: Final = "*"
BURST_S: Final = 1.0
THROTTLE_MAX_MS: Final = {PRODUCE: 30_000, CONSUME: 30_000, REQUEST: 1_000}
BUCKETS_MAX: Final = 10_000
REFRESH_S: Final = 2.0
QUOTAS_MAX: Final = 10_000
_FIX: Final = "Describe the quotas to check."


def stored_name(name: str | None) -> str:
    """Return the stored form of an entity's user or client. None is the default entity."""
    return DEFAULT if name is None else f"={name}"


class Quota(msgspec.Struct, frozen=True, order=True):
    """`user`, `client`: the empty string (not part of the entity), DEFAULT or `stored_name(NAME)`. `value`: bytes per
    second, or per cent for REQUEST."""

    user: str
    client: str
    name: str
    value: float


def check_quota(quota: Quota) -> None:
    """Raise InvalidError for an unknown quota, a bad value or a bad entity."""
    why = ""
    if quota.name not in NAMES:
        why = f"unknown quota: key={quota.name!r}"
    elif not 0 < quota.value < 1e15:
        why = f"a quota must be positive: {quota.name}={quota.value}"
    elif not (quota.user or quota.client):
        why = "a quota needs a user or a client id"
    elif any(len(each) > NAME_CHARS_MAX + 1 or "\x00" in each for each in (quota.user, quota.client)):
        why = f"a user or client name is too long: limit={NAME_CHARS_MAX}"
    if why:
        raise InvalidError(
            f"{why}.",
            fix=f"Use {PRODUCE} or {CONSUME} in bytes per second, or {REQUEST}, for a user, a client-id or both.",
        )


class QuotaLimits:
    """Quotas of a cluster, and the usage of each on this node."""

    def __init__(self, quotas: Iterable[Quota] = ()) -> None:
        self._rates: dict[tuple[str, str, str], float] = {}
        self._buckets: OrderedDict[tuple[str, str, str], tuple[float, float]] = OrderedDict()
        self.replace(quotas)

    @property
    def is_empty(self) -> bool:
        return not self._rates

    def replace(self, quotas: Iterable[Quota]) -> None:
        """Replace the quotas. Recorded usage is retained."""
        self._rates = {(each.name, each.user, each.client): each.value for each in quotas}
        self.of_time = any(name == REQUEST for name, _, _ in self._rates)
        """True if some entity has a request time quota."""

    def record_usage(self, name: str, user: str, client: str, amount: float, now_s: float) -> int:
        """Deduct `amount`; return for how many milliseconds the client must be throttled from now on."""
        found = self._find_bucket(name, user, client)
        if found is None:
            return 0
        key, rate = found
        burst = rate * BURST_S
        balance, since_s = self._buckets.pop(key, (burst, now_s))
        balance = min(burst, balance + (now_s - since_s) * rate) - amount
        # The throttle time is capped, so a debt beyond the cap would never be enforced.
        balance = max(balance, -rate * THROTTLE_MAX_MS[name] / 1000)
        self._buckets[key] = balance, now_s
        while len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)
        return 0 if balance >= 0 else max(1, round(-balance / rate * 1000))

    def _find_bucket(self, name: str, user: str, client: str) -> tuple[tuple[str, str, str], float] | None:
        """Return (bucket key, rate). A default quota gives each name its own bucket."""
        u, c = stored_name(user), stored_name(client[:NAME_CHARS_MAX])
        for at_user, at_client in (
            (u, c),
            (u, DEFAULT),
            (u, NO_ENTITY),
            (DEFAULT, c),
            (DEFAULT, DEFAULT),
            (DEFAULT, NO_ENTITY),
            (NO_ENTITY, c),
            (NO_ENTITY, DEFAULT),
        ):
            rate = self._rates.get((name, at_user, at_client))
            if rate is not None:
                return (name, at_user and u, at_client and c), rate
        return None


class QuotaCache:
    def __init__(self, metastore: Metastore, clock: Clock) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rows: Sequence[QuotaRow] | None = None
        self.limits = QuotaLimits()

    async def refresh(self, *, fresh: bool = True) -> None:
        """Re-read the quotas if a row changed. Raises UnavailableError."""
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
