"""Idle partitions: the cost of a node with thousands of them and no load, and the latency of other work.

    ./dev bench partitions [--lanes 10000x1,100x100,1x10000] [--seconds S] [--python PATH] [--json]

Method: a lane is TOPICSxPARTITIONS on a node as `tidemill up` runs it (a directory, SQLite), with retention of a week.
Processor time of the node is read from /proc over `--seconds`, in per cent of one core, after each step:

    empty       no topic                     unopened   all created, none requested
    led         each answered its end   written    each holds one record
    restarted   after SIGTERM and a start    consumer   one librdkafka consumer follows all of them
    sessions    one of kafka-python, with fetch sessions

Also measured: CreateTopics of all of them, of one (p50, p99), the first acknowledged record of a new topic, Metadata of
all and of one, how long it takes until every partition has answered (opened), also after the restart, and memory.
Written records are read back. `--python`: an interpreter of another checkout, for a before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

import paths  # noqa: F401
from harbour import machine, percentile
from support.ports import free_port

T = TypeVar("T")
DEADLINE_S = 120.0
CREATED_AT_ONCE = 1_000
ASKED_AT_ONCE = 2_000
ROUNDS = 30

CONFIG = """
[node]
name = "n1"
data = "{data}"
http = "127.0.0.1:{http}"
kafka = "127.0.0.1:{kafka}"
[kafka]
retention_ms = 604800000
partitions_max = 100000
connections_max = 8000
connections_per_address_max = 8000
"""


FOLLOWER = """
import sys
from kafka import KafkaConsumer, TopicPartition
address, topics, partitions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
consumer = KafkaConsumer(bootstrap_servers=address, enable_auto_commit=False, group_id=None, request_timeout_ms=60000)
places = [TopicPartition(f"t{topic:05d}", partition) for topic in range(topics) for partition in range(partitions)]
consumer.assign(places)
for place in places:
    consumer.seek(place, 1)
print("follows", flush=True)
while True:
    consumer.poll(1000)
"""


class Node:
    """`tidemill up` in a separate process; the node is its child."""

    def __init__(self, directory: Path, python: str) -> None:
        self._directory = directory
        self._python = python
        self._http, self._kafka = free_port(), free_port()
        self.address = f"127.0.0.1:{self._kafka}"
        text = CONFIG.format(data=directory / "data", http=self._http, kafka=self._kafka)
        (directory / "tidemill.toml").write_text(text)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Seconds until it served."""
        began_s = time.monotonic()
        with (self._directory / "up.log").open("ab") as log:
            command = [self._python, "-m", "tidemill", "up", "--config", str(self._directory / "tidemill.toml")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory)
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        until(lambda: metadata(admin) is not None)
        return time.monotonic() - began_s

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
            self._process = None

    @property
    def pids(self) -> list[int]:
        assert self._process is not None
        found = [self._process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                found += [int(child) for child in children]
        return found

    def cpu_s(self) -> float:
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def mib(self) -> int:
        """Return the resident memory of the node itself."""
        sizes = []
        for pid in self.pids:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            sizes.append(next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS")), 0))
        return max(sizes)

    def idle(self, seconds: float, settle: float) -> dict[str, float]:
        time.sleep(settle)
        before_s, began_s = self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (self.cpu_s() - before_s) / (time.monotonic() - began_s)
        return {"percent": round(percent, 2), "mib": self.mib()}


def metadata(admin: AdminClient, topic: str | None = None) -> Any:
    with contextlib.suppress(ck.KafkaException):
        return admin.list_topics(topic, timeout=30) if topic else admin.list_topics(timeout=30)
    return None


def until(done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not done():
        if time.monotonic() > until_s:
            raise SystemExit("partitions: it did not come to be in time")
        time.sleep(0.05)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    began_s = time.monotonic()
    found = work()
    return time.monotonic() - began_s, found


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def create(admin: AdminClient, names: Sequence[str], partitions: int) -> None:
    asked = [NewTopic(name, num_partitions=partitions) for name in names]
    for future in admin.create_topics(asked, request_timeout=DEADLINE_S).values():
        future.result()


def ends(admin: AdminClient, places: Sequence[ck.TopicPartition]) -> dict[tuple[str, int], int]:
    """Return each partition's end: the request waits until it is opened. Refused partitions are requested again."""
    found: dict[tuple[str, int], int] = {}
    until_s = time.monotonic() + DEADLINE_S
    while len(found) < len(places):
        left = [place for place in places if (place.topic, place.partition) not in found]
        for some in slices(left, ASKED_AT_ONCE):
            asked = {ck.TopicPartition(p.topic, p.partition): OffsetSpec.latest() for p in some}
            for place, future in admin.list_offsets(asked, request_timeout=60).items():
                with contextlib.suppress(ck.KafkaException):
                    found[place.topic, place.partition] = future.result().offset
        if time.monotonic() > until_s:
            raise SystemExit(f"partitions: {len(places) - len(found)} have not answered")
    return found


def produce(address: str, places: Sequence[ck.TopicPartition]) -> None:
    failed: list[Any] = []
    producer = ck.Producer({"bootstrap.servers": address, "log_level": 0, "queue.buffering.max.messages": 1_000_000})
    for place in places:
        producer.produce(
            place.topic, b"x", partition=place.partition, on_delivery=lambda e, _: failed.append(e) if e else None
        )
        producer.poll(0)
    if producer.flush(DEADLINE_S) or failed:
        raise SystemExit(f"partitions: not acknowledged: {failed[:3]}")


@contextlib.contextmanager
def following(address: str, topics: int, partitions: int) -> Iterator[None]:
    """Run kafka-python's consumer in a separate process."""
    command = [sys.executable, "-c", FOLLOWER, address, str(topics), str(partitions)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def milliseconds(samples: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(percentile(samples, q / 100) * 1e3, 1) for q in (50, 99)}


def measure_neighbour(node: Node, admin: AdminClient, a_topic: str) -> dict[str, Any]:
    """Measure other work on a node with these partitions."""
    made, first, one, every = [], [], [], []
    for number in range(ROUNDS):
        name = f"beside-{number}"
        took_s, _ = timed(lambda name=name: create(admin, [name], 1))
        made.append(took_s)
        one.append(timed(lambda: metadata(admin, a_topic))[0])
    for number in range(5):
        producer = ck.Producer({"bootstrap.servers": node.address, "log_level": 0, "linger.ms": 0})
        producer.list_topics(a_topic, timeout=30)
        create(admin, [f"first-{number}"], 1)

        def acknowledged(producer: ck.Producer = producer, number: int = number) -> None:
            producer.produce(f"first-{number}", b"x")
            if producer.flush(DEADLINE_S):
                raise SystemExit("partitions: the first record was not acknowledged")

        first.append(timed(acknowledged)[0])
        every.append(timed(lambda: metadata(admin))[0])
    return {
        "create_one_ms": milliseconds(made),
        "metadata_one_ms": milliseconds(one),
        "metadata_all_ms": milliseconds(every),
        "first_record_ms": milliseconds(first),
    }


def lane(name: str, args: argparse.Namespace) -> dict[str, Any]:
    topics, partitions = map(int, name.split("x"))
    names = [f"t{number:05d}" for number in range(topics)]
    places = [ck.TopicPartition(topic, partition) for topic in names for partition in range(partitions)]
    found: dict[str, Any] = {"partitions": len(places)}
    with tempfile.TemporaryDirectory(prefix="partitions-") as directory:
        node = Node(Path(directory), args.python)
        node.start()
        try:
            admin = AdminClient({"bootstrap.servers": node.address, "log_level": 0})
            found["empty"] = node.idle(args.seconds, args.settle)
            began_s = time.monotonic()
            for some in slices(names, CREATED_AT_ONCE):
                create(admin, some, partitions)
            found["create_all_s"] = round(time.monotonic() - began_s, 2)
            found["unopened"] = node.idle(args.seconds, args.settle)
            found["open_all_s"] = round(timed(lambda: ends(admin, places))[0], 2)
            found["led"] = node.idle(args.seconds, args.settle)
            found["produce_all_s"] = round(timed(lambda: produce(node.address, places))[0], 2)
            found["written"] = node.idle(args.seconds, args.settle)
            found["beside"] = measure_neighbour(node, admin, names[0])
            node.stop()
            found["restart_s"] = round(node.start(), 2)
            admin = AdminClient({"bootstrap.servers": node.address, "log_level": 0})
            took_s, there = timed(lambda: ends(admin, places))
            found["reopen_all_s"] = round(took_s, 2)
            found["verified"] = sum(end == 1 for end in there.values())
            if found["verified"] != len(places):
                raise SystemExit(f"partitions: {len(places) - found['verified']} have lost their record")
            found["restarted"] = node.idle(args.seconds, args.settle)
            config = {"bootstrap.servers": node.address, "group.id": "idle", "log_level": 0}
            consumer = ck.Consumer({**config, "enable.auto.commit": False})
            consumer.assign([ck.TopicPartition(place.topic, place.partition, 1) for place in places])
            consumer.poll(1.0)
            found["consumer"] = node.idle(args.seconds, args.settle)
            consumer.close()
            with following(node.address, topics, partitions):
                found["sessions"] = node.idle(args.seconds, 2 * args.settle)
        finally:
            node.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lanes", default="10000x1,100x100,1x10000")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=15.0, help="before each measurement, in seconds")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {}
    for name in args.lanes.split(","):
        found[name] = lane(name, args)
        if not args.json:
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    if args.json:
        print(json.dumps({"machine": machine(), "lanes": found}))


if __name__ == "__main__":
    main()
