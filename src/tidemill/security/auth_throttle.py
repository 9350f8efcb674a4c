"""Delays after failed authentications, by client address: each failure is answered more slowly than the one before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 2.0
FORGOTTEN_AFTER_S: Final = 60.0
ADDRESSES_MAX: Final = 1_000
"""Limit of addresses whose failures are remembered."""


class AuthFailureThrottle:
    """Failure counts by address, and the delay that they cause: it doubles with each failure. Pure and bounded."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def delay_s(self, host: str, now_s: float) -> float:
        count, last_s = self._counts.pop(host, (0, now_s))
        count = 1 if now_s - last_s > FORGOTTEN_AFTER_S else count + 1
        self._counts[host] = (count, now_s)
        if len(self._counts) > ADDRESSES_MAX:
            self._counts.popitem(last=False)
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(count - 1, 10)))
