"""Settings of one process's handle on a domain, and the services that it uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.limits import LEASE_TTL_MS, METASTORE_PERSIST_INTERVAL_S
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.metastore.domain.commit.write_path import VOLATILE_BYTES
from tidemill.metastore.lsm.compaction.executor import CompactionExecutor
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.options import Options
from tidemill.objects.store import ObjectStore


class DomainSettings(msgspec.Struct, frozen=True):
    lead: bool = True
    """Always try for the lease (a node). False: follow, and send commits to the leader (a tool)."""

    may_lead: bool = True
    """Try for the lease, if `lead` is False, while a request of this process waits for a reply."""

    linger_s: float = 2.0
    """A temporary leader (`lead` False) gives the lease up after this time without work."""

    lease_ttl_ms: int = LEASE_TTL_MS
    persist_interval_s: float = METASTORE_PERSIST_INTERVAL_S
    """Approximate limit of the time from a row's commit until it is in the bucket."""

    flush_timeout_s: float = 60.0
    """Timeout of one attempt to persist."""

    request_timeout_s: float = 30.0
    """A commit through the request log that gets no reply ends with UnknownOutcomeError after this time."""

    follow_pause_s: float = 0.05
    """Minimum pause between a follower's reads of the log; `sync` does not wait for it."""

    volatile_bytes: int = VOLATILE_BYTES
    rollup_after_records: int = 64
    """The log is rolled up after a manifest once it has at least this number of records."""

    options: Options = Options()


@dataclass(frozen=True)
class DomainContext:
    """Identity, settings and services of a domain in one process. `holder` names the process in the lease."""

    consensus: Consensus
    objects: ObjectStore
    name: str
    holder: str
    clock: Clock
    rand: Rand
    settings: DomainSettings = field(default_factory=DomainSettings)
    tracker: StatusTracker = field(default_factory=StatusTracker)
    merger: CompactionExecutor | None = None

    @property
    def log(self) -> str:
        """Name of the domain's log and of its lease."""
        return log_name(self.name)

    def files(self, domain_uuid: str) -> SstFiles:
        return SstFiles(self.objects, prefix_of(domain_uuid))

    def bucket(self, domain_uuid: str) -> BucketManifests:
        return BucketManifests(self.objects, prefix_of(domain_uuid), self.rand)


def prefix_of(domain_uuid: str) -> str:
    """Return the prefix of a domain's files and manifests in the bucket."""
    return f"metastore/{domain_uuid}/"


def log_name(domain: str) -> str:
    """Return the name of the log of a domain, and of its lease."""
    return f"metastore/{domain}"
