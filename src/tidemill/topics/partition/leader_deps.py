"""Dependencies of the partition leaders of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.api import ConfirmTransaction
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.transaction_verification import reject_without_coordinator
from tidemill.topics.produce.validator_pool import BatchValidator

if TYPE_CHECKING:
    from tidemill.topics.partition.leader import PartitionLeader


class LeaderDeps(msgspec.Struct, frozen=True):
    """Dependencies that all partitions of one process share."""

    consensus: Consensus
    objects: ObjectStore
    writer: L0Writer
    checker: BatchValidator
    clock: Clock
    rand: Rand
    settings: TopicSettings
    tasks: Tasks
    appends: asyncio.Semaphore
    """Limits concurrent appends, so that one reply of consensus does not resume all partitions in one loop turn."""
    moved: Callable[[str, int], None] = lambda *_: None
    """Called with (topic id, partition) when its last stable offset moved, or it was opened here. A plain call."""
    confirm: ConfirmTransaction = reject_without_coordinator
    touched: Callable[[PartitionLeader], None] = lambda _: None
    """Called when the data behind the partition's stage status may have changed. A plain call."""
