"""Factory of the merger for a store: it uses a worker process if another process can access the objects."""

from __future__ import annotations

from tidemill.base.clock import Clock
from tidemill.metastore.lsm.compaction.executor import ChoosingMerger, Merger
from tidemill.metastore.lsm.compaction.inline_executor import InlineMerger
from tidemill.metastore.lsm.compaction.worker.client import WorkerMerger
from tidemill.metastore.lsm.options import Options
from tidemill.objects.store import ObjectStore


def open_merger(objects: ObjectStore, objects_url: str, options: Options, clock: Clock) -> Merger:
    """Return one merger for all domains of a node, on `objects` at this URL. No process starts before a large job."""
    inline = InlineMerger(objects, options, clock)
    if objects_url.startswith("memory:"):
        return inline
    return ChoosingMerger(inline, WorkerMerger(objects_url, options), options)
