"""A process to be killed: produces idempotently to every partition and prints each acknowledged batch.

python killed_producer.py DIRECTORY TOPIC_ID PARTITIONS ROUND
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics


async def main(directory: Path, topic_id: str, partitions: int, life: int) -> None:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite:{directory / 'consensus.db'}", clock, rand)
    objects = await open_objects(str(directory / "objects"), clock, rand)
    topics = LocalTopics(
        consensus,
        objects,
        Catalogue(create_metastore(consensus, objects, clock, rand), clock, rand),
        clock=clock,
        rand=rand,
        settings=TopicSettings(object_bytes=4000, rollup_records=20),
    )

    async def produce(partition: int) -> None:
        number = 0
        while True:
            values = [f"{life}.{number + i}" for i in range(5)]
            sent = [
                topics.produce_nowait(
                    topic_id,
                    partition,
                    encode_batch(
                        [Record(None, value.encode(), (), 1)],
                        producer_id=life * 100 + partition,
                        producer_epoch=0,
                        base_sequence=number + i,
                    ),
                )
                for i, value in enumerate(values)
            ]
            for value, future in zip(values, sent, strict=True):
                print(f"{partition} {(await future).base_offset} {value}", flush=True)
            number += len(values)

    await asyncio.gather(*(produce(partition) for partition in range(partitions)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
