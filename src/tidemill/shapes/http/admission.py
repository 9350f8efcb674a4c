"""Limits the number of concurrent requests, from the first byte of a request to the last byte of its response.

Long polls, event streams and slow readers are included. Requests beyond the limit get 503 with Retry-After, after which
the protocol's client retries.
"""

from __future__ import annotations


class AdmissionSlot:
    """The place of one request; `release` is idempotent."""

    def __init__(self, admission: AdmissionControl, initial: bool) -> None:
        self._admission: AdmissionControl | None = admission
        self._initial = initial

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.under_way[self._initial] -= 1


class AdmissionControl:
    """Counts requests. `max_initial`: limit of requests for initial rows; `max_existing`: limit of all others."""

    def __init__(self, max_initial: int, max_existing: int) -> None:
        self._limits = {True: max_initial, False: max_existing}
        self.under_way = {True: 0, False: 0}
        self.refused = 0

    def reserve(self, initial: bool) -> AdmissionSlot | None:
        """Reserve a place; return None if the limit is reached."""
        if self.under_way[initial] >= self._limits[initial]:
            self.refused += 1
            return None
        self.under_way[initial] += 1
        return AdmissionSlot(self, initial)
