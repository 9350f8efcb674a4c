"""Topics of the catalogue, as of its last read. Requests look topics up here, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tidemill.base.errors import ClosedError
from tidemill.base.runtime.tasks import Tasks
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.topics.lifecycle.retention import is_compacted

REFRESH_TASK = "topics refresh"

Topics = Mapping[str, TopicRow]
"""Topic id → row."""


class TopicRows:
    """Rows of one process.

    Invariant: `topics` and `compacted` are of one read, and `on_change(topics before, compacted before)` was called for
    it before any other task saw it. `topics` is a new mapping after each change, and is not modified.
    """

    def __init__(self, catalogue: Catalogue, tasks: Tasks, on_change: Callable[[Topics, set[str]], None]) -> None:
        self.topics: Topics = {}
        self.compacted: set[str] = set()
        """Ids of compacted topics."""
        self.is_closed = False
        self._catalogue = catalogue
        self._tasks = tasks
        self._on_change = on_change
        self._rows: Sequence[TopicRow] = ()
        self._reading: asyncio.Task[None] | None = None

    def find_partition(self, topic_id: str, partition: int) -> TopicRow | None:
        """Return the row of the partition's topic; None if there is no such partition."""
        row = self.topics.get(topic_id)
        return row if row is not None and 0 <= partition < row.partitions else None

    async def refresh(self) -> None:
        """Read the catalogue. Topics created before this call are seen. Concurrent calls share a read that begins after
        them, since one that is already running may miss their topics."""
        under_way = self._reading
        if under_way is not None:
            await asyncio.wait([under_way])
        if self.is_closed:
            raise ClosedError("the topics of this node were closed.")
        if self._reading is None:
            self._reading = self._tasks.spawn(self._read(), name=REFRESH_TASK)
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            rows = await self._catalogue.list(TopicRow)
        finally:
            self._reading = None
        if rows is self._rows:
            return
        self._rows = rows
        before, self.topics = self.topics, {row.topic_id: row for row in rows}
        already, self.compacted = self.compacted, {row.topic_id for row in rows if is_compacted(row)}
        self._on_change(before, already)
