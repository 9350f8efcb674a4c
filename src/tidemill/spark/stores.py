"""Open stores of a process of a pipeline: the bucket, consensus, and one event loop to call them from.

A driver opens its own `Stores`. Spark's workers (planners, executors) share one per process through `shared_stores`. It
is opened on first use, which is after the fork, because neither event loops nor connections survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.consensus.api import Consensus
from tidemill.consensus.client_base import ConsensusClientBase
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.bucket_claim import BucketOwnership
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore, open_bucket
from tidemill.objects.factory import open_objects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Remap, RunCpuWork, ShardSchema, run_on_pool
from tidemill.spark.settings import OBJECTS_VARIABLE, StoreUrls, resolve_url
from tidemill.topics.api import PartitionReader

if TYPE_CHECKING:
    from tidemill.shards.handle import LogShard


class Stores:
    """Open stores; `urls` is passed on to workers (see `StoreUrls.resolve`)."""

    def __init__(
        self,
        urls: StoreUrls,
        objects: RetryingObjects,
        consensus: Consensus,
        clock: Clock,
        rand: Rand,
        domains: int = 0,
    ) -> None:
        from tidemill.topics.l1.reader import open_l1_reader
        from tidemill.topics.partition_reader import LogPartitionReader

        self.urls = urls
        self.objects_url = urls.objects
        """URL of the bucket, with its secrets, independent of the URLs that workers receive."""
        self.objects = objects
        self.consensus = consensus
        self.clock = clock
        self.rand = rand
        self.metastore = create_metastore(consensus, objects, clock, rand, domains=domains)
        self.catalogue = Catalogue(self.metastore, clock, rand)
        self._threads = ThreadPoolExecutor(2, "shards")
        self.cpu: RunCpuWork = run_on_pool(self._threads)
        """Executor for shards: encoding and merging must not delay status updates and consensus."""
        self.topics: PartitionReader = LogPartitionReader(
            consensus, objects, open_l1_reader(self.metastore, objects, clock, rand)
        )

    async def shard(self, name: str, schema: ShardSchema | None = None, *, writer: str = "") -> LogShard:
        """Return a shard's handle; with `schema` it is created if absent, and evolved. Raises as `open_shard`."""
        from tidemill.shards.registry import open_shard

        opened = await open_shard(self.consensus, self.objects, self.clock, self.rand, name, schema, cpu=self.cpu)
        opened.writer = writer or opened.writer
        return opened

    async def remap(self, name: str) -> Remap:
        from tidemill.shards.registry import open_remap

        return await open_remap(self.consensus, self.clock, self.rand, name)

    @property
    def consensus_life(self) -> str:
        """Identifier of the life of consensus that this process has verified to continue the state it saw before."""
        return self.consensus.life if isinstance(self.consensus, ConsensusClientBase) else ""

    @property
    def is_rolled_back(self) -> bool:
        """True if consensus was rolled back to an earlier state; then these stores serve no more calls."""
        return isinstance(self.consensus, ConsensusClientBase) and self.consensus.seen.lost is not None

    async def watch_ownership(self, begun: Callable[[], None]) -> None:
        """Check that the bucket belongs to this cluster until it does not; then raise ClusterReplacedError.

        From `begun()` on, this process acknowledges appends and deletes objects only while it knows that no other
        cluster has claimed the bucket (`metastore.bucket_claim`). Raises UnavailableError before that, too.
        """
        owner = BucketOwnership(self.objects, self.clock, await self.metastore.cluster())
        begun()
        self.objects.may_delete = owner.check_may_delete
        if isinstance(self.consensus, ConsensusClientBase):
            self.consensus.owner = owner
        await owner.run()

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False)
        await self.metastore.aclose()
        await self.consensus.aclose()
        await self.objects.aclose()


async def open_stores(
    urls: StoreUrls, clock: Clock | None = None, rand: Rand | None = None, *, domains: int = 0, create: bool = True
) -> Stores:
    """Open the stores; `domains` as configured, 0 = the cluster's number. Readers do not `create` what is missing.

    Raises InvalidError (a URL is wrong), MissingError (there is no cluster) or UnavailableError, naming the store.
    """
    clock, rand = clock or SystemClock(), rand or Rand()
    consensus = await open_consensus(urls.consensus, clock, rand, create=create)
    try:
        objects = await open_bucket(consensus, urls.objects, clock, rand)
    except BaseException:
        await consensus.aclose()
        raise
    return Stores(urls, objects, consensus, clock, rand, domains)


class _ProcessStores:
    def __init__(self) -> None:
        self.portal = BlockingPortal("tidemill-worker")
        self.stores: dict[StoreUrls, Stores] = {}
        self.objects: dict[str, ObjectStore] = {}


_by_process: dict[int, _ProcessStores] = {}


def _process_stores() -> _ProcessStores:
    pid = os.getpid()
    if pid not in _by_process:
        _by_process.clear()
        _by_process[pid] = _ProcessStores()
    return _by_process[pid]


def shared_stores(urls: StoreUrls) -> tuple[BlockingPortal, Stores]:
    """Return this process's portal and stores, opened once."""
    here, urls = _process_stores(), urls.resolve()
    if urls in here.stores and here.stores[urls].is_rolled_back:
        # Readers hold no state across calls: they continue with the state that exists.
        here.portal.call(here.stores.pop(urls).aclose())
    if urls not in here.stores:
        here.stores[urls] = here.portal.call(open_stores(urls, create=False))
    return here.portal, here.stores[urls]


def shared_objects(url: str) -> tuple[BlockingPortal, ObjectStore]:
    """Return the portal and the bucket alone, for a task that only reads batches and writes parts."""
    here, url = _process_stores(), resolve_url(url, OBJECTS_VARIABLE)
    if url not in here.objects:
        here.objects[url] = here.portal.call(open_objects(url, SystemClock(), Rand(), create=False))
    return here.portal, here.objects[url]
