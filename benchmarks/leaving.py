"""Leaving: for how long no record of a partition is acknowledged while nodes leave, die and come.

    ./dev bench leaving [--nodes 3] [--partitions 12] [--json]

Method: nodes as `tidemill up` runs them, over one directory and one SQLite database. One idempotent librdkafka producer
sends a record to every partition each 10 ms; the longest pause between two acknowledgements of one partition is taken
over each step: `steady` (nothing happens), `leave` (SIGTERM to a node), `join` (it comes back), `kill` (SIGKILL to the
node and its supervisor), and the sequencer's node last, since every other one waits for its successor. Then everything
is read back: every acknowledged record is present once, in its partition's order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, NewTopic

from harbour import machine
from nodes import Node

EVERY_S = 0.01
STEP_S = 12.0
DEADLINE_S = 120.0
TOPIC = "t"


class Load:
    """`acked[partition]`: numbers in the order of their acknowledgements, with their times."""

    def __init__(self, addresses: str, partitions: int) -> None:
        self.acked: list[list[tuple[float, int]]] = [[] for _ in range(partitions)]
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._producer = ck.Producer(
            {
                "bootstrap.servers": addresses,
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.timeout.ms": 60_000,
                "reconnect.backoff.max.ms": 200,
                "retry.backoff.ms": 20,
                "retry.backoff.max.ms": 100,
                "topic.metadata.refresh.fast.interval.ms": 20,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        due_s = time.monotonic()
        while not self._stop.is_set():
            for partition in range(len(self.acked)):
                self._producer.produce(
                    TOPIC, str(number), partition=partition, on_delivery=self._reported(partition, number)
                )
            number += 1
            due_s += EVERY_S
            self._producer.poll(max(0.0, due_s - time.monotonic()))
        if self._producer.flush(60):
            self.failed.append("not flushed")

    def _reported(self, partition: int, number: int) -> Any:
        def reported(error: Any, _: Any) -> None:
            if error is not None:
                self.failed.append(str(error))
            else:
                self.acked[partition].append((time.monotonic(), number))

        return reported

    def longest_pause_s(self, since_s: float) -> float:
        """Return the longest pause of any partition, until now."""
        now_s = time.monotonic()
        longest = 0.0
        for acked in self.acked:
            times = [since_s, *(at_s for at_s, _ in list(acked) if at_s >= since_s), now_s]
            longest = max(longest, *(later - earlier for earlier, later in itertools.pairwise(times)))
        return longest

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def verified(addresses: str, load: Load) -> int:
    """Raises SystemExit unless what was acknowledged is there, once and in order."""
    consumer = ck.Consumer(
        {"bootstrap.servers": addresses, "group.id": "g", "enable.auto.commit": False, "log_level": 0}
    )
    consumer.assign([ck.TopicPartition(TOPIC, partition, 0) for partition in range(len(load.acked))])
    found: list[list[int]] = [[] for _ in load.acked]
    until_s = time.monotonic() + DEADLINE_S
    while any(len(found[p]) < len(load.acked[p]) for p in range(len(found))) and time.monotonic() < until_s:
        for message in consumer.consume(1_000, 0.5):
            if message.error() is None:
                found[message.partition()].append(int(message.value()))
    consumer.close()
    for partition, numbers in enumerate(found):
        acked = sorted(number for _, number in load.acked[partition])
        if numbers != sorted(set(numbers)) or not set(acked) <= set(numbers):
            raise SystemExit(f"leaving: partition {partition} has lost, doubled or disordered records")
    return sum(map(len, found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=12)
    parser.add_argument("--step", type=float, default=STEP_S, help="seconds a step is watched for")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="leaving-") as directory:
        stores = {"objects": f"file://{directory}/objects", "consensus": f"sqlite://{directory}/consensus.db"}
        nodes = [Node(Path(directory), f"n{number}", python=args.python, **stores) for number in range(args.nodes)]
        addresses = ",".join(node.address for node in nodes)
        try:
            for node in nodes:
                node.start()
            admin = AdminClient({"bootstrap.servers": addresses, "log_level": 0})
            for future in admin.create_topics([NewTopic(TOPIC, args.partitions)]).values():
                future.result()
            load = Load(addresses, args.partitions)
            time.sleep(3)

            def step(name: str, work: Any) -> None:
                since_s = time.monotonic()
                work()
                time.sleep(max(0.0, since_s + args.step - time.monotonic()))
                found[name] = round(load.longest_pause_s(since_s), 3)
                if not args.json:
                    print(f"{name}: {found[name]} s", flush=True)

            last, first = nodes[-1], nodes[0]
            step("steady", lambda: None)
            step("leave", lambda: last.end(signal.SIGTERM))
            step("join", last.start)
            step("kill", lambda: last.end(signal.SIGKILL))
            step("join again", last.start)
            step("leave of the sequencer's", lambda: first.end(signal.SIGTERM))
            step("join of it", first.start)
            load.stop()
            if load.failed:
                raise SystemExit(f"leaving: not acknowledged: {load.failed[:3]} and {len(load.failed)} in all")
            found["verified"] = verified(addresses, load)
        finally:
            for node in nodes:
                node.end(signal.SIGTERM)
    print(json.dumps({"machine": machine(), **found}) if args.json else f"verified: {found['verified']} records")


if __name__ == "__main__":
    main()
