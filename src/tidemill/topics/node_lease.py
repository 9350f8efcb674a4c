"""The lease that shows that a node is alive: its renewals, its lapses, and the grace after an outage of consensus.

- Lapse: the lease expired, by this node's own clock. Another node may have led this node's partitions since. The clock
  is one that continues while the machine is suspended, because consensus does not wait for it.
- Grace: an expired lease proves that its node is dead only to a node that could renew its own. While consensus is
  unavailable, all leases expire. For a moment after that, in which live nodes renew, no lease counts as expired.

A late cancellation or a wrong clock costs time only: fencing makes writes safe.
"""

from __future__ import annotations

import asyncio

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import ConflictError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.leader_election import LeaseRequest

_log = structlog.get_logger()

RETRY_PAUSE_S = 0.05
RENEWED_WITHIN_S = 1.0
"""Time after an outage of consensus within which every live node has renewed its lease: the longest pause between two
connection attempts of its client."""


class NodeLease:
    """Lease of this process's node. `request.info` may be replaced; the next renewal publishes it."""

    def __init__(self, consensus: Consensus, request: LeaseRequest, clock: Clock) -> None:
        self.request = request
        self._consensus = consensus
        self._clock = clock
        self._ttl_s = request.ttl_ms / 1000
        self._lease: Lease | None = None
        self._renewed_s = 0.0
        """Send time of the last successful renewal."""
        self._lapses = 0
        self._late = False
        """True if the last renewal is old enough that others' leases may have expired for the same reason."""
        self._grace_until_s = 0.0

    async def acquire(self) -> None:
        """Acquire the lease, also from an earlier process of this node. Raises UnavailableError."""
        while True:
            asked_s = self._clock.boot_s()
            try:
                self._lease = await self.request.acquire(self._consensus)
                self._renewed_s = asked_s
                return
            except ConflictError as conflict:
                current = conflict.current
                if not isinstance(current, Lease):
                    raise
                _log.info("taking over the lease of an earlier process of this node", lease=current.name)
                await self._consensus.release(current.name, current.holder, current.term)
            except UnknownOutcomeError:
                await asyncio.sleep(RETRY_PAUSE_S)

    async def renew(self) -> None:
        """Renew the lease. Raises ConflictError if a later process of this node has it, UnavailableError and
        UnknownOutcomeError."""
        asked_s = self._clock.boot_s()
        self._lease = await self.request.acquire(self._consensus)
        self.grace_after_answer_s()
        if self._has_lapsed():
            self._lapses += 2  # One more than while it had run out.
        self._renewed_s = asked_s

    def surrender_lease(self) -> Lease | None:
        """Return the lease to be released; None if it is not held. From here on it does not lapse."""
        lease, self._lease = self._lease, None
        return lease

    def lapses(self) -> int:
        """Return a number that changes when the lease expires, and when it is renewed after that."""
        return self._lapses + self._has_lapsed()

    def _has_lapsed(self) -> bool:
        return self._lease is not None and self._clock.boot_s() - self._renewed_s >= self._ttl_s

    def grace_after_answer_s(self) -> float:
        """Return for how long an expired lease of another node still counts as live, now that consensus answered."""
        now_s = self._clock.boot_s()
        # Every lease is renewed within a third of its time, so this is the earliest time at which another one can
        # expire.
        late = self._lease is not None and now_s - self._renewed_s >= self._ttl_s * 2 / 3
        if late and not self._late:
            self._grace_until_s = now_s + RENEWED_WITHIN_S
        self._late = late
        return max(0.0, self._grace_until_s - now_s)
