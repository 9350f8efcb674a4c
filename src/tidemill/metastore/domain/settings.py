"""What one process's handle on a domain may be told, and what it stands on."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.metastore.domain.write_path import VOLATILE_BYTES
from tidemill.metastore.lsm.compaction.executor import Merger
from tidemill.metastore.lsm.file_store import Files
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.options import Options
from tidemill.objects.store import ObjectStore

FAULTS = frozenset({"lower-manifest", "forget-delta", "replay-at-persisted", "silent-reject"})
"""Planted by the simulation, which must find each.

lower-manifest        apply takes a manifest below the stored one (`apply`)
forget-delta          a reset forgets the deltas (`apply`)
replay-at-persisted   a new leader counts the batch after the persisted one as persisted, and never replays it
silent-reject         a manifest that was refused counts as written (`replicated_manifest`)
"""


class DomainSettings(msgspec.Struct, frozen=True):
    lead: bool = True
    """Always try for the lease (a node). False: follow, and send commits to whoever leads (a tool)."""

    may_lead: bool = True
    """Where `lead` is False: try for the lease while a request of one's own waits for an answer."""

    linger_s: float = 2.0
    """A leader for want of another gives the lease up after so long without a commit of its own."""

    lease_ttl_ms: int = LEASE_TTL_MS
    persist_interval_s: float = 30.0
    """A row is in the bucket at most about this long after its commit."""

    flush_timeout_s: float = 60.0
    """One attempt at persisting."""

    request_timeout_s: float = 30.0
    """A commit through the request log without an answer ends as Unknown after so long."""

    follow_pause_s: float = 0.05
    """A follower reads the log at most this often; `sync` does not wait for it."""

    volatile_bytes: int = VOLATILE_BYTES
    rollup_after_records: int = 64
    """The log is rolled up after a manifest once it has so many records."""

    options: Options = Options()


class DomainContext(NamedTuple):
    """What a domain stands on, in one process."""

    name: str
    consensus: Consensus
    objects: ObjectStore
    holder: str
    clock: Clock
    rand: Rand
    settings: DomainSettings
    tracker: StatusTracker
    merger: Merger | None
    faults: frozenset[str]

    @property
    def log(self) -> str:
        """Name of the domain's log and of its lease."""
        return f"metastore/{self.name}"

    def files(self, domain_uuid: str) -> Files:
        return Files(self.objects, prefix_of(domain_uuid))

    def bucket(self, domain_uuid: str) -> BucketManifests:
        return BucketManifests(self.objects, prefix_of(domain_uuid), self.rand)


def prefix_of(domain_uuid: str) -> str:
    """Where a domain's files and manifests are in the bucket."""
    return f"metastore/{domain_uuid}/"
