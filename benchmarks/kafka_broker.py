"""A broker in a process of its own, for `produce.py` and `consume.py`: tidemill's, or librdkafka's C mock.

    kafka_broker.py tidemill OBJECTS_URL CONSENSUS_URL     the endpoint over the real topics room
    kafka_broker.py mock                                   librdkafka's mock cluster, one broker, memory only

Prints `listening HOST:PORT` and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO


async def tidemill(objects_url: str, consensus_url: str) -> None:
    from tidemill.base.clock import Rand, SystemClock
    from tidemill.consensus.open import open_consensus
    from tidemill.kafka import KafkaServer
    from tidemill.metastore.catalogue import Catalogue
    from tidemill.metastore.open import metastore_on
    from tidemill.objects.open import open_objects
    from tidemill.topics.leadership import Alone
    from tidemill.topics.log import LocalTopics

    clock, rand = SystemClock(), Rand()
    objects = await open_objects(objects_url, clock, rand)
    consensus = await open_consensus(consensus_url, clock, rand)
    metastore = metastore_on(consensus, objects, clock, rand)
    catalogue = Catalogue(metastore, clock, rand)
    topics = LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand, assignment=Alone("n1", 1))
    await topics.start()
    server = KafkaServer(
        topics=topics,
        catalogue=catalogue,
        consensus=consensus,
        nodes=None,
        clock=clock,
        rand=rand,
        name="n1",
        node_id=1,
    )
    print(f"listening 127.0.0.1:{await server.start()}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.aclose()
    await topics.aclose()
    await metastore.aclose()
    await consensus.aclose()
    await objects.aclose()


def mock() -> None:
    import confluent_kafka as ck

    holder = ck.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    broker = next(iter(holder.list_topics(timeout=10).brokers.values()))
    print(f"listening {broker.host}:{broker.port}", flush=True)
    sys.stdin.read()


class Broker:
    """A started broker as seen from the benchmark: its address and the CPU it has used."""

    def __init__(self, *arguments: str) -> None:
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = ""
        output: IO[str] | None = self.process.stdout
        assert output is not None
        for line in output:
            if line.startswith("listening "):
                self.address = line.split()[1]
                break
        if not self.address:
            raise RuntimeError(f"the broker did not start: {arguments}")

    def cpu_s(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Broker]:
    broker = Broker(*arguments)
    try:
        yield broker
    finally:
        broker.stop()


if __name__ == "__main__":
    if sys.argv[1] == "tidemill":
        asyncio.run(tidemill(sys.argv[2], sys.argv[3]))
    else:
        mock()
