"""OffsetCommit: how long a consumer's commit takes until it is durable and acknowledged, at a fixed rate.

    ./dev bench group_commits [--seconds S] [--rounds N] [--rate R] [--brokers directory,memory,mock]
                                       [--protocols classic,consumer] [--json]

Method: ten groups of one librdkafka consumer each, in one process; each commits four partitions, synchronously and when
its turn is due, so that all together commit R times a second. Latency counts from when a commit was due, so one that
is late because the one before it took long counts as that. Brokers run concurrently and take turns, round by round; a
directory means acknowledged = safe from power loss. The limit is librdkafka's mock cluster, which writes nothing.

Afterwards every group is asked for its offsets, which must be those that were acknowledged last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import confluent_kafka as ck

from kafka_broker import NAMES, Broker, running

TOPIC = "commits"
PARTITIONS = 4
GROUPS = 10
DEADLINE_S = 60.0


class Member:
    """One consumer that is alone in its group."""

    def __init__(self, address: str, protocol: str, number: int) -> None:
        self.group = f"{protocol}-{number}"
        self._client = ck.Consumer(
            {
                "bootstrap.servers": address,
                "group.id": self.group,
                "group.protocol": protocol,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._client.subscribe([TOPIC])
        self._offset = 0

    def join(self) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while len(self._client.assignment()) < PARTITIONS:
            self._client.poll(0.1)
            if time.monotonic() > until_s:
                raise SystemExit(f"group_commits: no assignment: group={self.group}")

    def commit(self, seconds: float, every_s: float, start_s: float) -> list[float]:
        """Latencies in seconds."""
        latencies: list[float] = []
        due_s, end_s = start_s, start_s + seconds
        while due_s < end_s:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            offsets = [ck.TopicPartition(TOPIC, p, self._offset + 1) for p in range(PARTITIONS)]
            self._client.commit(offsets=offsets, asynchronous=False)
            self._offset += 1
            latencies.append(time.perf_counter() - due_s)
            due_s += every_s
        self._client.poll(0)
        return latencies

    def verified(self) -> int:
        """Commits that are there. Raises SystemExit unless they are those that were acknowledged."""
        found = self._client.committed([ck.TopicPartition(TOPIC, p) for p in range(PARTITIONS)], timeout=DEADLINE_S)
        if [place.offset for place in found] != [self._offset] * PARTITIONS:
            raise SystemExit(f"group_commits: other offsets than acknowledged: group={self.group} found={found}")
        return self._offset

    def close(self) -> None:
        self._client.close()


def measure(members: list[Member], seconds: float, rate: float) -> list[float]:
    every_s = len(members) / rate
    found: list[list[float]] = [[] for _ in members]
    start_s = time.perf_counter() + 0.2

    def work(index: int) -> None:
        # Their turns are spread over the interval.
        found[index] = members[index].commit(seconds, every_s, start_s + every_s * index / len(members))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(found):
        raise SystemExit("group_commits: a member ended early")
    return sorted(latency for each in found for latency in each)


def at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--brokers", default="directory,memory,mock")
    parser.add_argument("--protocols", default="classic,consumer")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = [name for name in args.brokers.split(",") if name in NAMES]
    runs: dict[tuple[str, str], list[list[float]]] = {}
    verified: dict[tuple[str, str], int] = {}
    with running(names) as brokers:
        members = {place: _join(brokers[place[0]], place[1]) for place in _places(brokers, args.protocols.split(","))}
        for _ in range(args.rounds):
            for place, some in members.items():
                runs.setdefault(place, []).append(measure(some, args.seconds, args.rate))
        for place, some in members.items():
            verified[place] = sum(member.verified() for member in some)
            for member in some:
                member.close()
    rows = [_row(place, rounds, verified[place]) for place, rounds in runs.items()]
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))


def _places(brokers: dict[str, Broker], protocols: list[str]) -> list[tuple[str, str]]:
    return [(name, protocol) for name in brokers for protocol in protocols if name != "mock" or protocol == "classic"]


def _join(broker: Broker, protocol: str) -> list[Member]:
    # The first client that asks for the topic creates it, with four partitions: the mock cluster serves no
    # CreateTopics.
    client = ck.Producer({"bootstrap.servers": broker.address, "log_level": 0})
    until_s = time.monotonic() + DEADLINE_S
    while len(client.list_topics(TOPIC, timeout=DEADLINE_S).topics[TOPIC].partitions) < PARTITIONS:
        if time.monotonic() > until_s:
            raise SystemExit(f"group_commits: no topic: broker={broker.name}")
        time.sleep(0.05)
    members = [Member(broker.address, protocol, number) for number in range(GROUPS)]
    for member in members:  # side by side: each waits for others to join for some seconds
        member.join()
    return members


def _row(place: tuple[str, str], rounds: list[list[float]], verified: int) -> dict[str, Any]:
    p50 = [at(latencies, 0.5) for latencies in rounds]
    p99 = [at(latencies, 0.99) for latencies in rounds]
    return {
        "broker": place[0],
        "protocol": place[1],
        "commits": verified,
        "p50_ms": round(statistics.median(p50), 2),
        "p50_spread": f"{min(p50):.2f}-{max(p50):.2f}",
        "p99_ms": round(statistics.median(p99), 2),
        "p99_spread": f"{min(p99):.2f}-{max(p99):.2f}",
    }


if __name__ == "__main__":
    main()
