"""Dependencies of the maintenance jobs, and the limits they obey (`[retention]` of the configuration)."""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.consensus.api import Consensus
from tidemill.metastore.metastore import Metastore
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import RunCpuWork, run_inline


class Retention(msgspec.Struct, frozen=True):
    """Times, in seconds, for which unused data stays.

    history_s        the past of a shard that can be read without a hold, and the bindings with it
    collect_after_s  time between the replacement of an object and its deletion: a shorter read needs no hold
    orphans_after_s  age of an object that was written and never referred to; a writer that was paused for longer
                     writes it again
    group_offsets_s  committed offsets of a group without members (Kafka's offsets.retention.minutes)
    """

    history_s: float = 60.0
    collect_after_s: float = 120.0
    orphans_after_s: float = 6 * 3600.0
    group_offsets_s: float = 7 * 86_400.0

    @property
    def history_ms(self) -> int:
        return int(self.history_s * 1000)

    @property
    def group_offsets_ms(self) -> int:
        return int(self.group_offsets_s * 1000)

    @property
    def step_ms(self) -> int:
        """Step of since. A shard's since may trail the history by less than this, because moving it is a write,
        worth it only for a quarter."""
        return self.history_ms // 4


class JobContext(msgspec.Struct, frozen=True):
    """Dependencies of a job. `cpu` runs the computation of merges off the loop that serves."""

    consensus: Consensus
    objects: ObjectStore
    metastore: Metastore
    clock: Clock
    rand: Rand
    retention: Retention
    cpu: RunCpuWork = run_inline
