"""A reserve of file descriptors, with which a node can still report that none is left.

    descriptors are free        the reserve is full
    none is free                the reserve is released: health, stage statuses and commits use its
                                descriptors, and the node reports the problem
    the reserve fills again     the problem is resolved

The report gives the count of open descriptors; /proc/PID/fd lists them.
"""

from __future__ import annotations

import asyncio
import os

import structlog

from tidemill.base.runtime import file_descriptors

CHECK_INTERVAL_S = 0.5
RESERVE_SIZE = 32
"""Size of the reserve: enough for health requests, a few files of the stores, and clients of the sequencer."""

log = structlog.get_logger()


class DescriptorReserve:
    """Reserve of one process. `run` runs until cancelled."""

    def __init__(self, count: int = RESERVE_SIZE) -> None:
        self._count = count
        self._reserve = file_descriptors.DescriptorReserve(count)
        self._gone = False

    async def run(self) -> None:
        """Check the reserve every CHECK_INTERVAL_S until cancelled, then close it."""
        try:
            while True:
                self.refill_and_probe()
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            self._reserve.close()

    def refill_and_probe(self) -> None:
        """Fill the reserve, and test whether one more descriptor is free for others. Does not yield to the loop."""
        self._reserve.fill()
        gone = len(self._reserve) < self._count or not _can_open_descriptor()
        if gone:
            self._reserve.close()
        if gone and not self._gone:
            log.error(
                "no file descriptor is left",
                open=file_descriptors.open_count(),
                limit=file_descriptors.current_shares().limit,
            )
        self._gone = gone

    def trouble(self) -> str:
        """Return one sentence while no descriptor is available, otherwise "". Never waits."""
        if not self._gone:
            return ""
        return (
            "No file descriptor is left in this process (EMFILE):"
            f" pid={os.getpid()} open={file_descriptors.open_count()} limit={file_descriptors.current_shares().limit}."
            " Raise the limit of open files (ulimit -n), or find out what holds them: /proc/PID/fd."
        )


def _can_open_descriptor() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
