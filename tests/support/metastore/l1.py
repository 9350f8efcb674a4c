"""A metastore whose partitions have moved L0 objects into L1."""

from __future__ import annotations

from support.metastore.checkpoint_world import World, persisted
from tidemill.base.clock import Rand
from tidemill.topics.l0.object_cache import ObjectCache
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reconciler import Reconciler


async def moved(world: World, steps: int = 4) -> None:
    """Some steps of the world, all of them in L1, some more that are hot, all of it in the bucket."""
    await persisted(world, steps)
    rows = ExtentStore(world.metastore, world.clock, Rand())
    reconciler = Reconciler(rows, world.topics._around, world.objects, ObjectCache(0), world.topics._led)
    done = await reconciler.run_round(world.topic.topic_id, range(2))
    assert done.failed is None and done.size_bytes
    await world.topics._commits.drain(30)
    await persisted(world, steps)
