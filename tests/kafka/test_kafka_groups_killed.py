"""SIGKILL of the node that coordinates groups of both protocols, while clients read and commit."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from support.kafka.groups.members import PARTITIONS, Member, committed, produce, shared
from support.kafka.processes import Process
from support.ports import free_port
from support.waiting import DEADLINE_S, eventually
from tidemill.topics.membership import rendezvous_leader

NODES = ("n1", "n2")
SETTINGS = (
    "kafka.group_initial_rebalance_delay_ms=0",
    "kafka.group_min_session_timeout_ms=1000",
    "kafka.group_consumer_heartbeat_interval_ms=300",
    "kafka.group_consumer_session_timeout_ms=5000",
)


def coordinated_by(node: str, prefix: str) -> str:
    return next(f"{prefix}{n}" for n in range(100) if rendezvous_leader(list(NODES), f"{prefix}{n}", 0) == node)


def test_groups_of_both_protocols_outlive_a_sigkill_of_their_coordinator(tmp_path: Path) -> None:
    nodes = {name: Process(tmp_path, f'node.name="{name}"', *SETTINGS, port=free_port()) for name in NODES}
    addresses = ",".join(node.address for node in nodes.values())
    groups = {strategy: coordinated_by("n1", strategy) for strategy in ("cooperative", "consumer")}
    members: dict[str, list[Member]] = {}
    try:
        admin = AdminClient({"bootstrap.servers": addresses})
        eventually(lambda: len(admin.list_topics(timeout=DEADLINE_S).brokers) == len(NODES))
        admin.create_topics([NewTopic("t", PARTITIONS)])["t"].result(DEADLINE_S)
        for strategy, group in groups.items():
            members[strategy] = [Member("confluent", strategy, addresses, group, "t") for _ in range(2)]
        eventually(lambda: all(shared(*two) for two in members.values()))
        produce(addresses, "t", 0, 80)
        places = {(n % PARTITIONS, n // PARTITIONS) for n in range(160)}

        def reported(two: list[Member]) -> list[tuple[int, int]]:
            return [place for member in two for place in member.got]

        def read(two: list[Member]) -> set[tuple[int, int]]:
            """Return the places read, including commits whose answer was lost with the node."""
            return {place for member in two for place in (*member.got, *member.unsure)}

        eventually(lambda: all(len(reported(two)) >= 40 for two in members.values()))
        nodes["n1"].kill()  # while they commit
        produce(addresses, "t", 80, 80)
        eventually(lambda: all(read(two) == places for two in members.values()))
        for strategy, two in members.items():
            eventually(lambda two=two: shared(*two))
            # Members report only committed records, and no record is read a second time.
            assert len(reported(two)) == len(set(reported(two))), strategy
            assert committed(addresses, groups[strategy], "t") == [160 // PARTITIONS] * PARTITIONS
        nodes["n1"].start()
        eventually(lambda: all(shared(*two) for two in members.values()))
        produce(addresses, "t", 160, 40)
        eventually(lambda: all(len(read(two)) == 200 for two in members.values()))
    finally:
        for two in members.values():
            for member in two:
                member.end()
        for node in nodes.values():
            if node.alive:
                node.kill()
