"""Choice of the partitions whose settled batches move to L1.

last stable offset moved ──▶ scheduled, if the topic is reconciled ──▶ round of the reconciler
assigned, but not open   ──▶ opened, if batches are outside L1, which schedules it
"""

from __future__ import annotations

import contextlib

import msgspec

from tidemill.base.errors import TidemillError
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reconcile_scheduler import ReconcileScheduler
from tidemill.topics.l1.reconciler import Reconciler
from tidemill.topics.led_partitions import LedPartitions
from tidemill.topics.topic_rows import TopicRows


class Reconciliation:
    """Reconciled partitions of one node.

    Invariant: compacted topics are always reconciled, because only L1 is compacted; others if `settings.reconcile`
    is set.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        scheduler: ReconcileScheduler,
        extents: ExtentStore,
        rows: TopicRows,
        partitions: LedPartitions,
        settings: TopicSettings,
    ) -> None:
        self.scheduler = scheduler
        self._reconciler = reconciler
        self._extents = extents
        self._rows = rows
        self._partitions = partitions
        self._settings = settings

    def schedule(self, topic_id: str, partition: int) -> None:
        if self._is_reconciled(topic_id):
            self.scheduler.schedule(topic_id, partition)

    def figures(self) -> dict[str, object]:
        """Return the figures of the reconciler."""
        return msgspec.structs.asdict(self._reconciler.figures)

    async def open_hot_partitions(self) -> None:
        """Open assigned partitions that still have batches outside L1, though no request has used them since the start.
        Once open, they are reconciled."""
        if not (self._settings.reconcile or self._rows.compacted):
            return
        partitions = self._partitions
        for topic_id, partition in await self._extents.hot_partitions():
            wanted = topic_id in self._rows.topics and self._is_reconciled(topic_id)
            if wanted and partitions.is_assigned(topic_id, partition) and (topic_id, partition) not in partitions.led:
                # The error is reported under the topic's own stage status, and the open is retried.
                with contextlib.suppress(TidemillError):
                    await partitions.opened(topic_id, partition)

    def _is_reconciled(self, topic_id: str) -> bool:
        return self._settings.reconcile or topic_id in self._rows.compacted
