"""One broker in a process of its own, to be killed: objects in a directory, consensus in SQLite.

usage: broker_process.py DIRECTORY PORT     prints "listening PORT" once clients may come
"""

from __future__ import annotations

import asyncio
import sys

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.open import open_consensus
from tidemill.kafka import KafkaServer
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.open import metastore_on
from tidemill.objects.open import open_objects
from tidemill.topics.leadership import Membership, NodeInfo
from tidemill.topics.log import LocalTopics


async def serve(directory: str, port: int) -> None:
    clock, rand = SystemClock(), Rand()
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", clock, rand)
    metastore = metastore_on(consensus, objects, clock, rand)
    catalogue = Catalogue(metastore, clock, rand)
    membership = Membership(consensus, "n1", NodeInfo("127.0.0.1", port), clock, rand)
    await membership.start()
    topics = LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand, assignment=membership)
    await topics.start()
    server = KafkaServer(
        topics=topics,
        catalogue=catalogue,
        consensus=consensus,
        nodes=membership,
        clock=clock,
        rand=rand,
        name="n1",
        port=port,
    )
    print("listening", await server.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
