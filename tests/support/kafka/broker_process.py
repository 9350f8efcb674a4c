"""One broker in a separate process, which a test kills: objects in a directory, consensus in SQLite.

usage: broker_process.py DIRECTORY PORT [KEY=VALUE]…     prints "listening PORT" once it accepts clients

KEY=VALUE are settings of the endpoint (`kafka.NAME`) or of topics (`topics.NAME`), as JSON; `node.name` is "n1" by
default. Brokers that share a directory form a cluster. A separate HTTP port serves /metrics; it is printed too:
"metrics PORT".
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from prometheus_client import start_http_server

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.runtime.gc_tuning import install_gc_tuning
from tidemill.base.runtime.loop_lag import LoopLagMonitor
from tidemill.consensus.factory import open_consensus
from tidemill.kafka import BrokerServices, KafkaServer, KafkaSettings
from tidemill.kafka.net.listeners import DEFAULT, Listener
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Membership, NodeInfo


def settings_of(words: list[str], prefix: str) -> dict[str, Any]:
    pairs = (word.split("=", 1) for word in words)
    return {key.removeprefix(prefix): json.loads(value) for key, value in pairs if key.startswith(prefix)}


async def serve(directory: str, port: int, words: list[str]) -> None:
    clock, rand = SystemClock(), Rand()
    metrics, _ = start_http_server(0, "127.0.0.1")
    print("metrics", metrics.server_port, flush=True)
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", clock, rand)
    metastore = create_metastore(consensus, objects, clock, rand)
    catalogue = Catalogue(metastore, clock, rand)
    name = settings_of(words, "node.").get("name", "n1")
    membership = Membership(consensus, name, NodeInfo("127.0.0.1", port), clock, rand)
    await membership.start()
    topics = LocalTopics(
        consensus,
        objects,
        catalogue,
        clock=clock,
        rand=rand,
        assignment=membership,
        settings=TopicSettings(**settings_of(words, "topics.")),
    )
    await topics.start()
    limits = settings_of(words, "kafka.")
    section = {key: limits.pop(key) for key in KafkaSection.model_fields if key in limits}
    server = KafkaServer(
        BrokerServices(
            topics=topics, catalogue=catalogue, consensus=consensus, nodes=membership, clock=clock, rand=rand, name=name
        ),
        [Listener(DEFAULT, "127.0.0.1", port)],
        settings=KafkaSettings(KafkaSection(**section), **limits),
    )
    install_gc_tuning()
    print("listening", await server.start(), flush=True)
    await LoopLagMonitor(clock).run()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
