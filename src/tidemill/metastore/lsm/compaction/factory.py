"""Factory of the merger for a store: it uses a worker process if another process can access the objects."""

from __future__ import annotations

from tidemill.base.clock import Clock
from tidemill.metastore.lsm.compaction.executor import CompactionExecutor, SizeBasedExecutor
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor
from tidemill.metastore.lsm.compaction.worker.client import WorkerExecutor
from tidemill.metastore.lsm.options import Options
from tidemill.objects.store import ObjectStore


def open_executor(objects: ObjectStore, objects_url: str, options: Options, clock: Clock) -> CompactionExecutor:
    """Return one merger for all domains of a node, on `objects` at this URL. No process starts before a large job."""
    inline = InlineExecutor(objects, options, clock)
    if objects_url.startswith("memory:"):
        return inline
    return SizeBasedExecutor(inline, WorkerExecutor(objects_url, options), options)
