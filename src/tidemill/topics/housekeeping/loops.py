"""Loops of a node's topics. Each is supervised: a failure is reported under the name of the loop, which then restarts.

topics:catalogue   reads the catalogue
topics:leaders     detects partitions that another node has taken over
topics:retention   advances log starts
topics:reconcile   moves settled batches to L1
topics:hot         opens partitions with batches outside L1
topics:marks       reports the stage statuses
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError, ends_process
from tidemill.base.runtime.tasks import Tasks, run_unit
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.housekeeping.reconciliation import Reconciliation
from tidemill.topics.led_partitions import LedPartitions
from tidemill.topics.lifecycle.retention import RetentionRunner
from tidemill.topics.status_report import TopicStatuses
from tidemill.topics.topic_rows import TopicRows

_log = structlog.get_logger()


class TopicLoops:
    """Loops of one process. `reconciliation`: None if nothing is moved to L1."""

    def __init__(
        self,
        rows: TopicRows,
        partitions: LedPartitions,
        retainer: RetentionRunner,
        reconciliation: Reconciliation | None,
        statuses: TopicStatuses,
        settings: TopicSettings,
        clock: Clock,
    ) -> None:
        self._rows = rows
        self._partitions = partitions
        self._retainer = retainer
        self._reconciliation = reconciliation
        self._statuses = statuses
        self._settings = settings
        self._clock = clock

    def start(self, tasks: Tasks) -> None:
        """Spawn the loops."""
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "topics:catalogue": self._follow_catalogue,
            "topics:leaders": self._check_leaders,
            "topics:retention": self._run_retention,
            "topics:marks": self._report_statuses,
        }
        if self._reconciliation is not None:
            loops["topics:reconcile"] = self._reconciliation.scheduler.run
            loops["topics:hot"] = self._open_hot_partitions
        for name, body in loops.items():
            tasks.spawn(run_unit(name, body, tracker=self._statuses.tracker, clock=self._clock), name=name)

    async def _follow_catalogue(self) -> None:
        while True:
            await asyncio.sleep(self._settings.catalogue_poll_s)
            try:
                await self._rows.refresh()
            except TidemillError as error:
                if ends_process(error):
                    raise
                _log.warning("catalogue not read", cause=str(error))
            else:
                self._statuses.tracker.clear_failure("topics:catalogue")

    async def _check_leaders(self) -> None:
        while True:
            await asyncio.sleep(self._settings.leaders_check_s)
            await self._partitions.heads.check_heads()
            self._statuses.tracker.clear_failure("topics:leaders")

    async def _run_retention(self) -> None:
        while True:
            await asyncio.sleep(self._settings.retention_check_s)
            await self._rows.refresh()
            await self._retainer.run_round(self._rows.topics)
            self._statuses.tracker.clear_failure("topics:retention")

    async def _open_hot_partitions(self) -> None:
        assert self._reconciliation is not None
        while True:
            await self._reconciliation.open_hot_partitions()
            self._statuses.tracker.clear_failure("topics:hot")
            await asyncio.sleep(self._settings.reconcile_max_s)

    async def _report_statuses(self) -> None:
        while True:
            self._statuses.update()
            self._statuses.tracker.clear_failure("topics:marks")
            await asyncio.sleep(self._settings.mark_interval_s)
