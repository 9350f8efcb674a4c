"""Factory of a metastore over real domains, from consensus and an object store.

A node leads (`NODE`): it tries to get the lease of every domain as long as it runs. A tool follows (`TOOL`) and sends
its commits to the leader; without a leader, it leads for a moment itself. Neither creates a cluster on a bucket that
already has one, and both claim the bucket before they read or write anything (`bucket_claim`).
"""

from __future__ import annotations

import os

from tidemill.base.clock import Clock, Rand
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.metastore.api import DomainRows
from tidemill.metastore.bucket_claim import check_unclaimed, claim_bucket
from tidemill.metastore.cluster import REGISTER, Cluster, domain_name
from tidemill.metastore.domain.domain import Domain, has_been_led
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
from tidemill.metastore.lsm.compaction.executor import CompactionExecutor
from tidemill.metastore.metastore import Metastore
from tidemill.objects.factory import open_objects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectStore

NODE = DomainSettings(lead=True)
TOOL = DomainSettings(lead=False)


async def open_bucket(consensus: Consensus, url: str, clock: Clock, rand: Rand) -> RetryingObjects:
    """Open the bucket of the cluster in consensus, as `open_objects` does. A local directory is created only before the
    cluster is: later, a missing one is a file system that is not mounted (UnavailableError)."""
    return await open_objects(url, clock, rand, create=await consensus.head(REGISTER) is None)


def create_metastore(
    consensus: Consensus,
    objects: ObjectStore,
    clock: Clock,
    rand: Rand,
    *,
    domains: int = 0,
    settings: DomainSettings = TOOL,
    holder: str = "",
    tracker: StatusTracker | None = None,
    merger: CompactionExecutor | None = None,
) -> Metastore:
    """Return a metastore that opens at its first use. Close it before merger, consensus and objects.

    `merger` runs the compactions of all domains (`open_executor`); without one they run on the event loop.
    `holder` is `<node name>/<unique id of the process>`: a node need not wait for the lease of an earlier
    process of the same node to expire.
    """
    holder = holder or f"tool/{os.getpid()}"
    name, _, _ = holder.partition("/")

    async def open_domain(cluster: Cluster, index: int) -> DomainRows:
        return await Domain.open(
            DomainContext(
                consensus,
                objects,
                domain_name(index),
                holder=holder,
                clock=clock,
                rand=rand,
                settings=settings,
                tracker=tracker or StatusTracker(),
                merger=merger,
            ),
            own_earlier_life=lambda other: settings.lead and other.startswith(f"{name}/"),
        )

    async def before_create() -> None:
        await check_unclaimed(objects)

    async def claimed(cluster: Cluster) -> None:
        async def has_begun() -> bool:
            names = map(domain_name, range(cluster.domains))
            return any([await has_been_led(consensus, name, rand) for name in names])

        await claim_bucket(consensus, objects, clock, rand, cluster, has_begun=has_begun)

    return Metastore(consensus, open_domain, clock, rand, domains=domains, before_create=before_create, claim=claimed)
