"""What a process of a pipeline has open: the bucket, consensus, and one event loop to call them from.

A driver opens its own `Stores`. Spark's workers (planners, executors) share one per process through
`shared`, opened on first use: after the fork, since neither event loops nor connections survive one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.errors import InvalidError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.consensus.api import Consensus
from tidemill.consensus.client_base import ConsensusClientBase
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.bucket_claim import Ownership
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import metastore_on
from tidemill.objects.factory import local_directory, open_objects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Remap, ShardSchema
from tidemill.shards.executor import Cpu, pooled_cpu
from tidemill.spark.environment import CONSENSUS_VARIABLE, OBJECTS_VARIABLE
from tidemill.topics.api import PartitionReader

if TYPE_CHECKING:
    from tidemill.shards.handle import LogShard


class Urls(msgspec.Struct, frozen=True):
    """Where the durable halves live. An empty one is in the environment: secrets travel to workers there alone."""

    objects: str
    consensus: str

    def here(self) -> Urls:
        """With what the environment says for what is empty. Raises InvalidError where it says nothing."""
        return Urls(_told(self.objects, OBJECTS_VARIABLE), _told(self.consensus, CONSENSUS_VARIABLE))


IN_ENVIRONMENT = Urls("", "")


def _told(url: str, variable: str) -> str:
    found = url or os.environ.get(variable, "")
    if not found:
        raise InvalidError(f"no URL of a store: variable={variable}.", fix="Give the URLs that tidemill.toml has.")
    return found


class Stores:
    """`urls` is what workers are told (`Urls.here`)."""

    def __init__(
        self, urls: Urls, objects: RetryingObjects, consensus: Consensus, clock: Clock, rand: Rand, domains: int = 0
    ) -> None:
        from tidemill.topics.l1.reader import l1_reader
        from tidemill.topics.partition_reader import PartitionReaderImpl

        self.urls = urls
        self.directory = local_directory(urls.objects)
        """Of the bucket, where it is one of this machine; whatever workers are told."""
        self.objects = objects
        self.consensus = consensus
        self.clock = clock
        self.rand = rand
        self.metastore = metastore_on(consensus, objects, clock, rand, domains=domains)
        self.catalogue = Catalogue(self.metastore, clock, rand)
        self._threads = ThreadPoolExecutor(2, "shards")
        self.cpu: Cpu = pooled_cpu(self._threads)
        """For shards: encoding and merging must not keep marks and consensus waiting."""
        self.topics: PartitionReader = PartitionReaderImpl(
            consensus, objects, l1_reader(self.metastore, objects, clock, rand)
        )

    async def shard(self, name: str, schema: ShardSchema | None = None) -> LogShard:
        """A shard's handle; with `schema` it is created when absent, and evolved. Raises as `open_shard` does."""
        from tidemill.shards.registry import open_shard

        return await open_shard(self.consensus, self.objects, self.clock, self.rand, name, schema, cpu=self.cpu)

    async def remap(self, name: str) -> Remap:
        from tidemill.shards.registry import open_remap

        return await open_remap(self.consensus, self.clock, self.rand, name)

    @property
    def life(self) -> str:
        """Names the life of consensus that this process has seen to be a continuation of what it knew before."""
        return self.consensus.life if isinstance(self.consensus, ConsensusClientBase) else ""

    @property
    def moved_back(self) -> bool:
        """Did consensus return to an earlier state? Then these stores serve nothing any more."""
        return isinstance(self.consensus, ConsensusClientBase) and self.consensus.seen.lost is not None

    async def keep_owning(self, begun: Callable[[], None]) -> None:
        """Until the bucket belongs to another cluster: raises Replaced. From `begun()` on nothing is acknowledged or
        deleted that is not this cluster's (`metastore.claim` CL4). Raises Unavailable, too, before that."""
        owner = Ownership(self.objects, self.clock, await self.metastore.cluster())
        begun()
        self.objects.may_delete = owner.may_delete
        if isinstance(self.consensus, ConsensusClientBase):
            self.consensus.owner = owner
        await owner.run()

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False)
        await self.metastore.aclose()
        await self.consensus.aclose()
        await self.objects.aclose()


async def open_stores(urls: Urls, clock: Clock | None = None, rand: Rand | None = None, *, domains: int = 0) -> Stores:
    """`domains` as configured, 0 = as the cluster has. Raises InvalidError (a URL is wrong), Unavailable, naming
    which."""
    clock, rand = clock or SystemClock(), rand or Rand()
    objects = await open_objects(urls.objects, clock, rand)
    try:
        consensus = await open_consensus(urls.consensus, clock, rand)
    except BaseException:
        await objects.aclose()
        raise
    return Stores(urls, objects, consensus, clock, rand, domains)


class _Shared:
    def __init__(self) -> None:
        self.portal = BlockingPortal("tidemill-worker")
        self.stores: dict[Urls, Stores] = {}
        self.objects: dict[str, ObjectStore] = {}


_by_process: dict[int, _Shared] = {}


def _here() -> _Shared:
    pid = os.getpid()
    if pid not in _by_process:
        _by_process.clear()
        _by_process[pid] = _Shared()
    return _by_process[pid]


def shared(urls: Urls) -> tuple[BlockingPortal, Stores]:
    """This process's portal and stores, opened once."""
    here, urls = _here(), urls.here()
    if urls in here.stores and here.stores[urls].moved_back:
        # Readers hold nothing across their calls: they go on with what exists.
        here.portal.call(here.stores.pop(urls).aclose())
    if urls not in here.stores:
        here.stores[urls] = here.portal.call(open_stores(urls))
    return here.portal, here.stores[urls]


def shared_objects(url: str) -> tuple[BlockingPortal, ObjectStore]:
    """The bucket alone: what a task needs that only reads batches and writes parts."""
    here, url = _here(), _told(url, OBJECTS_VARIABLE)
    if url not in here.objects:
        here.objects[url] = here.portal.call(open_objects(url, SystemClock(), Rand()))
    return here.portal, here.objects[url]
