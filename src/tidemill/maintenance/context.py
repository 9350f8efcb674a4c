"""What the keeper's jobs may use, and what they are told to keep (`[retention]` of the configuration)."""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.consensus.api import Consensus
from tidemill.metastore.metastore import Metastore
from tidemill.objects.store import ObjectStore
from tidemill.shards.executor import Cpu, inline_cpu


class Retention(msgspec.Struct, frozen=True):
    """How long what nobody reads any more stays. Times in seconds.

    history_s        a shard's past that can be read without a hold, and the bindings with it
    collect_after_s  between the moment that an object is replaced and its deletion: a read shorter than this needs
                     no hold
    orphans_after_s  an object that was written and never referred to; a writer paused for longer writes it again
    group_offsets_s  what a group without members has committed (Kafka's offsets.retention.minutes)
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
        """A shard's since trails the history by less than this: moving it is a write, worth it for a quarter."""
        return self.history_ms // 4


class JobContext(msgspec.Struct, frozen=True):
    """What a job may use. `cpu`: where merges compute, off the loop that serves."""

    consensus: Consensus
    objects: ObjectStore
    metastore: Metastore
    clock: Clock
    rand: Rand
    retention: Retention
    cpu: Cpu = inline_cpu
