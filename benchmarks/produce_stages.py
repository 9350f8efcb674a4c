"""Time of one Produce request by stage: processor time, and share of the acknowledgement latency.

    ./dev bench produce_stages [--record-bytes 1024] [--batch-bytes 65536] [--megabytes 60]

Method: the endpoint over a directory in this process, the sequencer of SQLite and an idempotent librdkafka client in
separate processes; 4 partitions. The functions of a stage are wrapped: its processor time is that of the calling thread
inside them, less that of other stages within, by batch; a stage's latency is the median over all batches from the end
of the one before it. The wrappers themselves cost some per cent.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafka_load import GB, MB, producer, send, show
from kafka_load import machine as described
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.status.logging import configure_logs
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.sqlite.client import SqliteConsensus
from tidemill.consensus.sqlite.connection import SequencerConnection
from tidemill.kafka import BrokerServices, KafkaServer
from tidemill.kafka.handlers import k00_produce
from tidemill.kafka.handlers.k00_produce import _ProduceAnswers
from tidemill.kafka.net.connection import Connection
from tidemill.kafka.net.framing import FrameReader
from tidemill.kafka.net.listeners import DEFAULT, Listener
from tidemill.kafka.server import client_session
from tidemill.kafka.server.client_session import ClientSession
from tidemill.kafka.server.request_quotas import ClientThrottle
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects import local
from tidemill.objects.factory import open_objects
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import SingleNodeAssignment
from tidemill.topics.partition import batch_intake, leader
from tidemill.topics.partition.batch_intake import BatchIntake
from tidemill.topics.partition.leader import PartitionLeader
from tidemill.topics.partition.live_batches import LiveBatches
from tidemill.topics.partition.pending_batch import PendingBatch
from tidemill.topics.produce import ProducerQueue, validator_pool

POINTS = ("staged", "gathered", "in the thread", "durable", "heard", "acknowledged")
BETWEEN = (
    "waits for those it shares with",
    "comes to the thread",
    "is written and synced",
    "is heard of",
    "log append",
)
LOOP, THREAD, SEQUENCER = "loop", "a thread", "sequencer"
STAGES: tuple[tuple[str, str, tuple[tuple[Any, str], ...]], ...] = (
    ("receive: the system call, the loop of reads", LOOP, ((Connection, "_readable"),)),
    ("frame: cut the stream", LOOP, ((FrameReader, "buffer"), (FrameReader, "add_received"))),
    (
        "account for it: budget, turn, pause or resume",
        LOOP,
        ((ClientSession, "_receive_frames"), (ClientSession, "consider_reading")),
    ),
    (
        "parse: header, request",
        LOOP,
        ((client_session, "peek_header"), (client_session, "read_request"), (k00_produce, "decode")),
    ),
    (
        "who may, quota",
        LOOP,
        ((k00_produce, "_find_topic"), (k00_produce, "_authorize_rows"), (ClientThrottle, "charge")),
    ),
    (
        "begin: slot, futures, the rest of the request",
        LOOP,
        ((ClientSession, "_begin_request"), (k00_produce, "_reserve_one")),
    ),
    ("check: batch header", LOOP, ((k00_produce, "_batch_error"), (batch_intake, "check_header"))),
    ("check: checksum, every record", LOOP, ((validator_pool, "check_records"),)),
    ("reserve: partition, ticket", LOOP, ((BatchIntake, "produce_nowait"), (ProducerQueue, "reserve"))),
    (
        "stage: rhythm of the objects",
        LOOP,
        ((BatchIntake, "_stage"), (L0Writer, "stage"), (L0Writer, "batch_answered")),
    ),
    ("seal: assemble the object, its first touch", LOOP, ((L0Writer, "_flush"), (L0Writer, "_on_timer"))),
    ("put: create, write, link, fdatasync", THREAD, ((local, "create_unpublished"),)),
    ("turn: uploaded, in line", LOOP, ((BatchIntake, "batch_uploaded"),)),
    ("decide: plan, apply, command", LOOP, ((leader, "plan_group"), (leader, "apply"), (leader, "encode_command"))),
    ("log append: client", LOOP, ((SqliteConsensus, "_flush"), (SequencerConnection, "buffer_updated"))),
    ("publish, wake readers", LOOP, ((PartitionLeader, "_publish_plan"),)),
    ("answer: gather, encode", LOOP, ((_ProduceAnswers, "set_answer"), (ClientSession, "_request_done"))),
    ("answer: send", LOOP, ((ClientSession, "_send_ready"),)),
)
"""Description, thread, and functions of each stage, less those of other stages that they call."""


class Stages:
    """Processor time by stage, and when each batch passed each point."""

    def __init__(self) -> None:
        self.cpu_s: Counter[str] = Counter()
        self.passed: dict[PendingBatch, dict[str, float]] = defaultdict(dict)
        self.done: list[dict[str, float]] = []
        self.objects = 0
        self.turns = 0
        self.on = False
        self._within = threading.local()

    def timed(self, owner: Any, name: str, stage: str) -> None:
        """Measure a plain call: its time less that of the timed calls within it."""
        inner: Callable[..., Any] = getattr(owner, name)
        within, cpu_s = self._within, self.cpu_s

        def wrapped(*args: Any, **more: Any) -> Any:
            outer, within.s = getattr(within, "s", 0.0), 0.0
            began = time.thread_time()
            try:
                return inner(*args, **more)
            finally:
                took = time.thread_time() - began
                if self.on:
                    cpu_s[stage] += took - within.s
                within.s = outer + took

        setattr(owner, name, wrapped)

    def before(self, owner: Any, name: str, then: Callable[..., None]) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **more: Any) -> Any:
            if self.on:
                then(*args)
            return inner(*args, **more)

        setattr(owner, name, wrapped)

    def wrap(self) -> None:
        put: list[float] = [0.0, 0.0]
        create = local.create_unpublished

        def created(*args: Any) -> None:
            put[0] = time.perf_counter()
            create(*args)
            put[1] = time.perf_counter()

        def started(_: L0Writer, items: list[PendingBatch]) -> None:
            self.objects += 1
            for item in items:
                self.passed[item]["gathered"] = time.perf_counter()

        def uploaded(_: BatchIntake, pending: PendingBatch) -> None:
            now = time.perf_counter()
            self.passed[pending] |= {"in the thread": put[0], "durable": put[1], "heard": now}

        def acknowledged(_: LiveBatches, pending: PendingBatch, *__: Any) -> None:
            points = self.passed.pop(pending, None)
            if points is not None and len(points) == len(POINTS) - 1:
                self.done.append({**points, "acknowledged": time.perf_counter()})

        local.create_unpublished = created  # type: ignore[assignment]
        self.before(L0Writer, "stage", lambda _, item: self.passed[item].update(staged=time.perf_counter()))
        self.before(L0Writer, "_start", started)
        self.before(BatchIntake, "batch_uploaded", uploaded)
        self.before(LiveBatches, "succeed", acknowledged)
        for stage, _, functions in STAGES:
            for owner, name in functions:
                self.timed(owner, name, stage)


async def measure(args: argparse.Namespace, directory: str) -> None:
    configure_logs()
    clock, rand, stages = SystemClock(), Rand(), Stages()
    url = f"sqlite://{directory}/consensus.db"
    sequencer = subprocess.Popen([sys.executable, __file__, "host", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sequencer.stdout is not None and sequencer.stdin is not None
    sequencer.stdout.readline()
    objects, consensus = (
        await open_objects(f"file://{directory}/objects", clock, rand),
        await open_consensus(url, clock, rand),
    )
    metastore = create_metastore(consensus, objects, clock, rand)
    catalogue = Catalogue(metastore, clock, rand)
    stages.wrap()
    topics = LocalTopics(
        consensus, objects, catalogue, clock=clock, rand=rand, assignment=SingleNodeAssignment("n1", 1)
    )
    await topics.start()
    server = KafkaServer(
        BrokerServices(
            topics=topics,
            catalogue=catalogue,
            consensus=consensus,
            nodes=None,
            clock=clock,
            rand=rand,
            name="n1",
            node_id=1,
        ),
        [Listener(DEFAULT, "127.0.0.1", 0)],
    )
    address = f"127.0.0.1:{await server.start()}"
    words = ["load", address, str(args.record_bytes), str(args.batch_bytes), str(args.megabytes)]
    load = await asyncio.create_subprocess_exec(sys.executable, __file__, *words, stdout=asyncio.subprocess.PIPE)
    assert load.stdout is not None
    await load.stdout.readline()
    stages.on = True
    sequencer_s = ran_s(sequencer.pid)
    began, before, loop_s = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), time.thread_time()
    await load.stdout.readline()
    stages.on = False
    took_s, loop_s = time.perf_counter() - began, time.thread_time() - loop_s
    sequencer_s = ran_s(sequencer.pid) - sequencer_s
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    await load.wait()
    report(stages, args, took_s, cpu_s, loop_s, sequencer_s)
    await server.aclose()
    for part in (topics, metastore, consensus, objects):
        await part.aclose()
    sequencer.stdin.close()
    sequencer.wait()


def ran_s(pid: int) -> float:
    """Processor time of a process, all its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def report(
    stages: Stages, args: argparse.Namespace, took_s: float, cpu_s: float, loop_s: float, sequencer_s: float
) -> None:
    count = len(stages.done)
    per, all_s = 1e6 / count, cpu_s + sequencer_s
    print(f"machine: {described()}")
    print(
        f"{count:,} batches in {stages.objects:,} objects, {args.megabytes * MB / took_s / MB:.0f} MB/s, "
        f"{all_s / (args.megabytes * MB / GB):.2f} CPU-s/GB\n"
    )
    rows = [(stage, where, stages.cpu_s[stage]) for stage, where, _ in STAGES]
    loop_known_s = sum(took for _, where, took in rows if where == LOOP)
    thread_known_s = sum(took for _, where, took in rows if where == THREAD)
    rows.append(("tasks, futures, turns of the loop, metrics", LOOP, loop_s - loop_known_s))
    rows.append(("sync of the directory, coming and going of threads", THREAD, cpu_s - loop_s - thread_known_s))
    rows.append(("log append: commit, fsync (a process of its own)", SEQUENCER, sequencer_s))
    rows.append(("all", "", all_s))
    shown = [[stage, where, f"{took * per:.0f}", f"{100 * took / all_s:.0f} %"] for stage, where, took in rows]
    show(("processor time", "where", "µs a batch", "share"), shown)
    print()
    latencies = [
        [name, f"{statistics.median(done[end] - done[begin] for done in stages.done) * 1000:.2f}"]
        for name, begin, end in zip(BETWEEN, POINTS, POINTS[1:], strict=False)
    ]
    latencies.append(["all", f"{statistics.median(d['acknowledged'] - d['staged'] for d in stages.done) * 1000:.2f}"])
    show(("latency from the last byte on", "median ms"), latencies)


async def host(url: str) -> None:
    consensus = await open_consensus(url, SystemClock(), Rand())
    print("serves", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await consensus.aclose()


def load(address: str, record_bytes: int, batch_bytes: int, megabytes: float) -> None:
    def begun() -> None:
        print("begun", flush=True)

    send(producer(address, batch_bytes), ["stages"], int(megabytes * MB / record_bytes), record_bytes, begun)
    print("ended", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["host"]:
        asyncio.run(host(sys.argv[2]))
        return
    if sys.argv[1:2] == ["load"]:
        load(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record-bytes", type=int, default=1024)
    parser.add_argument("--batch-bytes", type=int, default=65_536)
    parser.add_argument("--megabytes", type=float, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stages-") as directory:
        asyncio.run(measure(args, directory))


if __name__ == "__main__":
    main()
