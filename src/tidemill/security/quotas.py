"""Client quotas: how much of a thing somebody may use in a second on one node. Pure but for the clock's reading.

An entity is a user, a client id, or both; each by name, or the default of those that have none of their own. The first
of these that has a quota counts, as in Kafka (KIP-55, KIP-257):

    user and client · user and default client · user · default user and client · both defaults · default user ·
    client · default client

QU1  A quota is a bucket that fills at its rate and holds BURST_S of it. What is used is taken out at once, also beyond
     what is there; the debt is how long its user is not heard (KIP-219). So the rate holds over any time longer than
     the burst, whatever the sizes.
QU2  Of time (KIP-124) the rate is in per cent of what one event loop works; its silence is short, as Kafka's is.
QU3  A bucket that is full again says nothing and is forgotten; at most BUCKETS_MAX are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.security.principals import NAME_CHARS_MAX

PRODUCE: Final = "producer_byte_rate"
CONSUME: Final = "consumer_byte_rate"
REQUEST: Final = "request_percentage"
NAMES: Final = (PRODUCE, CONSUME, REQUEST)
NOBODY: Final = ""
DEFAULT: Final = "*"
BURST_S: Final = 1.0
THROTTLE_MAX_MS: Final = {PRODUCE: 30_000, CONSUME: 30_000, REQUEST: 1_000}
BUCKETS_MAX: Final = 10_000


def named(name: str | None) -> str:
    """How an entity's user or client is kept: None = the default."""
    return DEFAULT if name is None else f"={name}"


class Quota(msgspec.Struct, frozen=True, order=True):
    """`user`, `client`: NOBODY, DEFAULT or `named(NAME)`; `value` in bytes a second, of REQUEST in per cent."""

    user: str
    client: str
    name: str
    value: float


def check_quota(quota: Quota) -> None:
    """Raises InvalidError."""
    why = ""
    if quota.name not in NAMES:
        why = f"no such quota here: key={quota.name!r}"
    elif not 0 < quota.value < 1e15:
        why = f"a quota is more than nothing: {quota.name}={quota.value}"
    elif not (quota.user or quota.client):
        why = "a quota is a user's or a client id's"
    elif any(len(each) > NAME_CHARS_MAX + 1 or "\x00" in each for each in (quota.user, quota.client)):
        why = f"a name is too long: limit={NAME_CHARS_MAX}"
    if why:
        raise InvalidError(
            f"{why}.",
            fix=f"Known are {PRODUCE} and {CONSUME} in bytes a second and {REQUEST}, of a user, a client-id or both.",
        )


class Limits:
    """The quotas of a cluster, and what was used of them on this node."""

    def __init__(self, quotas: Iterable[Quota] = ()) -> None:
        self._rates: dict[tuple[str, str, str], float] = {}
        self._buckets: OrderedDict[tuple[str, str, str], tuple[float, float]] = OrderedDict()
        self.replace(quotas)

    @property
    def none(self) -> bool:
        return not self._rates

    def replace(self, quotas: Iterable[Quota]) -> None:
        """What was used stays used."""
        self._rates = {(each.name, each.user, each.client): each.value for each in quotas}
        self.of_time = any(name == REQUEST for name, _, _ in self._rates)
        """Somebody's time is limited."""

    def use(self, name: str, user: str, client: str, amount: float, now_s: float) -> int:
        """Take `amount` out; how many milliseconds its user is not to be heard from now on."""
        found = self._find(name, user, client)
        if found is None:
            return 0
        key, rate = found
        burst = rate * BURST_S
        balance, since_s = self._buckets.pop(key, (burst, now_s))
        balance = min(burst, balance + (now_s - since_s) * rate) - amount
        # A debt beyond the longest silence would never be asked for.
        balance = max(balance, -rate * THROTTLE_MAX_MS[name] / 1000)
        self._buckets[key] = balance, now_s
        while len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)
        return 0 if balance >= 0 else max(1, round(-balance / rate * 1000))

    def _find(self, name: str, user: str, client: str) -> tuple[tuple[str, str, str], float] | None:
        """(whose bucket, rate): of a default everyone has a bucket of their own."""
        u, c = named(user), named(client[:NAME_CHARS_MAX])
        for at_user, at_client in (
            (u, c),
            (u, DEFAULT),
            (u, NOBODY),
            (DEFAULT, c),
            (DEFAULT, DEFAULT),
            (DEFAULT, NOBODY),
            (NOBODY, c),
            (NOBODY, DEFAULT),
        ):
            rate = self._rates.get((name, at_user, at_client))
            if rate is not None:
                return (name, at_user and u, at_client and c), rate
        return None
