"""Candidacy of one process for a domain's lease, and the failures of its attempts to lead or follow.

    start ─► acquire the lease ─► lead_term, while the lease is held ─► again, while the lease is wanted

The lease is named like the domain's log. It decides which process tries; the log's term decides which one succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import FencedError, TidemillError, ends_process
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.leader_election import Body, LeaseRequest, run_while_leading
from tidemill.metastore.domain.settings import DomainContext

_log = structlog.get_logger()

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
FAILURE_VALID_S = 10.0
"""Time after which a failure is out of date. It exceeds the longest pause between two attempts."""
FAILURE_CONFIRMED_AFTER_S = 2.0


class FailureRecord:
    """Failures of one process's attempts to lead or follow a domain."""

    def __init__(self, clock: Clock) -> None:
        self.last: TidemillError | None = None
        """Reason why the last attempt failed; None after one that succeeded."""
        self._clock = clock
        self._last_s = self._first_s = float("-inf")
        """Times of the last and the first of a series of failures."""
        self._cannot_follow = False

    def record(self, error: TidemillError, *, following: bool = False) -> None:
        now_s = self._clock.monotonic_s()
        if self.last is None or now_s - self._last_s > FAILURE_VALID_S:
            self._first_s = now_s
        self.last, self._last_s, self._cannot_follow = error, now_s, following

    def record_following(self) -> None:
        """Record that following works. It proves nothing about a failure to lead."""
        if self._cannot_follow:
            self.last, self._cannot_follow = None, False

    def persistent(self) -> TidemillError | None:
        """Return a failure that persists: it has repeated for FAILURE_CONFIRMED_AFTER_S and is at most FAILURE_VALID_S
        old.

        A single failure does not count: every follower has one when consensus pauses for a moment. After
        FAILURE_VALID_S without another failure a different process leads."""
        if self._clock.monotonic_s() - self._last_s > FAILURE_VALID_S:
            return None
        return None if self._last_s - self._first_s < FAILURE_CONFIRMED_AFTER_S else self.last


class Candidacy:
    """Tries for the lease while it is `wanted`, and runs `lead_term` each time it is acquired."""

    def __init__(
        self,
        context: DomainContext,
        lead_term: Body,
        *,
        wanted: Callable[[], bool],
        own_earlier_life: Callable[[str], bool],
        tasks: Tasks,
    ) -> None:
        self.failures = FailureRecord(context.clock)
        self._context = context
        self._lead_term = lead_term
        self._wanted = wanted
        self._own_earlier_life = own_earlier_life
        self._tasks = tasks
        self._competing = False

    def start(self) -> None:
        """Compete for the lease, in a task, unless this process already does."""
        if not self._competing:
            self._competing = True
            self._tasks.spawn(self._compete(), name=f"lead {self._context.log}")

    async def _compete(self) -> None:
        context, pause_s = self._context, RETRY_FIRST_S
        try:
            while self._wanted():
                try:
                    await run_while_leading(
                        context.consensus,
                        LeaseRequest(context.log, context.holder, ttl_ms=context.settings.lease_ttl_ms),
                        self._lead_term,
                        own_earlier_life=self._own_earlier_life,
                        wanted=self._wanted,
                    )
                    if self.failures.last is None:
                        pause_s = RETRY_FIRST_S
                except TidemillError as error:
                    if ends_process(error):
                        raise
                    self.failures.record(error)
                    if isinstance(error, FencedError):
                        pause_s = RETRY_FIRST_S  # only a later term helps, and each try is one
                    _log.warning("could not lead", domain=context.name, cause=error.message)
                await asyncio.sleep(context.rand.uniform(pause_s / 2, pause_s))
                pause_s = min(2 * pause_s, RETRY_MAX_S)
        finally:
            self._competing = False

    async def release_lease(self) -> None:
        """Release this process's lease, including one whose acquisition was interrupted."""
        context = self._context
        for lease in await context.consensus.leases(context.log):
            if lease.name == context.log and lease.holder == context.holder and lease.live:
                await context.consensus.release(lease.name, lease.holder, lease.term)
