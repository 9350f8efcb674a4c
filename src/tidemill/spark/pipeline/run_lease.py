"""Lease of a run in a session of the caller: one (pipeline, instance) runs once.

Invariant (any number of writers): the lease only prevents that two sessions do the same work by mistake. The tables are
exact without it, because every append is a compare-and-append.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import structlog

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, TidemillError
from tidemill.base.limits import LEASE_TTL_MS, STATUS_BLIND_AFTER_MS
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark.settings import StoreUrls

LEASE_WAIT_MS = LEASE_TTL_MS + 2_000
"""Time to wait for the lease: that of a killed process expires within it."""
RETRY_S = 0.25

log = structlog.get_logger()


class RunLease:
    """Lease of one (pipeline, instance), for one run. It is renewed by one thread."""

    def __init__(self, urls: StoreUrls, name: str, instance: str, holder: str) -> None:
        self._clock, self._rand = SystemClock(), Rand()
        self._name = f"pipeline/{name}/{instance}"
        self._holder = f"{holder} {self._rand.nonce()}"
        self._portal = BlockingPortal(f"lease-{name}")
        self._lease: Lease | None = None
        self._renewed_s = 0.0
        try:
            self._consensus: Consensus = self._portal.call(
                open_consensus(urls.consensus, self._clock, self._rand, create=False)
            )
        except BaseException:
            self._portal.close()
            raise

    def acquire(self) -> str | None:
        """Acquire the lease, waiting for one that a killed process left; return the holder if that is another. Raises
        UnavailableError."""
        until_s = self._clock.monotonic_s() + LEASE_WAIT_MS / 1000
        while True:
            try:
                self._lease = self._portal.call(self._consensus.acquire(self._name, self._holder, LEASE_TTL_MS))
                self._renewed_s = self._clock.monotonic_s()
                return None
            except ConflictError as error:
                if self._clock.monotonic_s() >= until_s:
                    return _holder_of(error)
            threading.Event().wait(RETRY_S)

    def renew(self) -> str | None:
        """Renew the lease when it is due; return the holder if that is another by now."""
        if self._clock.monotonic_s() - self._renewed_s < LEASE_TTL_MS / 3000:
            return None
        try:
            self._lease = self._portal.call(self._consensus.acquire(self._name, self._holder, LEASE_TTL_MS))
            self._renewed_s = self._clock.monotonic_s()
        except ConflictError as error:
            return _holder_of(error)
        except (TidemillError, CancelledError) as error:  # cancelled: the run ends
            log.warning("lease not renewed", lease=self._name, error=str(error))
        return None

    def drop_report(self, pipeline: str, process: str) -> None:
        """Drop the report of a run that ended in order, if another driver of the pipeline reports. Otherwise `status`
        shows the run as silent, because nothing maintains its tables."""

        async def drop() -> None:
            board = StatusBoard(self._consensus, self._rand)
            oldest_ms = self._clock.now_ms() - STATUS_BLIND_AFTER_MS
            for report in await board.reports():
                other = report.process != process and f"{report.process}:".startswith(f"pipeline:{pipeline}:")
                if other and report.at_ms >= oldest_ms:
                    return await board.drop_report(process)

        try:
            self._portal.call(drop())
        except TidemillError as error:
            log.info("report not dropped", process=process, cause=str(error))

    def close(self) -> None:
        try:
            if self._lease is not None:
                self._portal.call(self._consensus.release(self._name, self._holder, self._lease.term))
            self._portal.call(self._consensus.aclose())
        except TidemillError as error:
            log.info("lease not released; it expires", lease=self._name, cause=str(error))
        finally:
            self._portal.close()


def _holder_of(error: ConflictError) -> str:
    """Return the holder without its nonce."""
    return error.current.holder.rpartition(" ")[0] if isinstance(error.current, Lease) else "another session"
