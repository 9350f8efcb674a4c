"""From stores to a metastore over real domains.

A node leads (`NODE`): it tries for every domain's lease as long as it runs. A tool follows (`TOOL`) and sends its
commits to whoever leads; where nobody does, it leads for a moment itself. Neither creates a cluster on a bucket
that holds one already, and both claim the bucket before they read or write anything (`bucket_claim` CL2).
"""

from __future__ import annotations

import os

from tidemill.base.clock import Clock, Rand
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.metastore.api import Rows
from tidemill.metastore.bucket_claim import check_unclaimed, claim
from tidemill.metastore.cluster import Cluster, domain_name
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainSettings
from tidemill.metastore.lsm.compaction.executor import Merger
from tidemill.metastore.metastore import Metastore
from tidemill.objects.store import ObjectStore

NODE = DomainSettings(lead=True)
TOOL = DomainSettings(lead=False)


def metastore_on(
    consensus: Consensus,
    objects: ObjectStore,
    clock: Clock,
    rand: Rand,
    *,
    domains: int = 0,
    settings: DomainSettings = TOOL,
    holder: str = "",
    tracker: StatusTracker | None = None,
    merger: Merger | None = None,
) -> Metastore:
    """A metastore that opens at its first use. Close it before merger, consensus and objects.

    `merger` serves all its domains (`open_merger`); without one they merge on the loop.
    `holder` is `<node name>/<what tells its lives apart>`: a node's own earlier life need not be waited out.
    """
    holder = holder or f"tool/{os.getpid()}"
    name, _, _ = holder.partition("/")

    async def open_domain(cluster: Cluster, index: int) -> Rows:
        return await Domain.open(
            consensus,
            objects,
            domain_name(index),
            holder=holder,
            clock=clock,
            rand=rand,
            settings=settings,
            tracker=tracker,
            merger=merger,
            own_earlier_life=lambda other: settings.lead and other.startswith(f"{name}/"),
        )

    async def before_create() -> None:
        await check_unclaimed(objects)

    async def claimed(cluster: Cluster) -> None:
        await claim(objects, clock, cluster)

    return Metastore(consensus, open_domain, clock, rand, domains=domains, before_create=before_create, claim=claimed)


async def open_metastore(
    consensus: Consensus,
    objects: ObjectStore,
    clock: Clock,
    rand: Rand,
    *,
    domains: int = 0,
    settings: DomainSettings = TOOL,
    holder: str = "",
    tracker: StatusTracker | None = None,
) -> Metastore:
    """As `metastore_on`, opened now. Raises Invalid (another number of domains), Replaced, Unavailable, Corrupt."""
    metastore = metastore_on(
        consensus, objects, clock, rand, domains=domains, settings=settings, holder=holder, tracker=tracker
    )
    await metastore.start()
    return metastore
