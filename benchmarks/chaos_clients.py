"""All clients on the cluster of the chaos lane: producers, transactions, a copier, a reader, and groups.

Their records are compared with the final contents.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, NewTopic

from chaos_groups import Groups, Seat
from chaos_judge import (
    ANYBODY,
    Place,
    Stall,
    Stored,
    judge_coverage,
    judge_group,
    judge_producer,
    judge_transactions,
    stalls_by_producer,
)
from chaos_load import DELIVERY_S, AioKafka, Confluent, KafkaPython, Sender
from chaos_reading import CommittedReader, read_with_kafka_python, read_with_librdkafka
from chaos_thread import Worker, end_all
from chaos_transactions import ConfluentTransactional, Copier, KafkaPythonTransactional, Transactional

PARTITIONS = 6
DRAIN_S = 120.0
ONCE, PLAIN, WHOLE, COPY = "once", "plain", "whole", "copy"

During = Callable[[str], contextlib.AbstractContextManager[None]]


def until(reached: Callable[[], object], limit_s: float, *, every_s: float = 0.05) -> None:
    """Raises TimeoutError."""
    until_s = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not in {limit_s:.0f} s")
        time.sleep(every_s)


class Clients:
    """Clients of the nodes at `addresses`. `transactions`: with transactional producers."""

    def __init__(self, addresses: str, directory: Path, seed: int, *, transactions: bool) -> None:
        self.addresses = addresses
        self.directory = directory
        self.admin = AdminClient({"bootstrap.servers": addresses, "log_level": 0})
        topics = [ONCE, PLAIN, *([WHOLE, COPY] if transactions else [])]
        for future in self.admin.create_topics([NewTopic(topic, PARTITIONS) for topic in topics]).values():
            future.result(60)
        self.places: list[Place] = [(topic, partition) for topic in topics for partition in range(PARTITIONS)]
        self.contents: dict[Place, list[Stored]] = {}
        self.standing: dict[str, dict[Place, int]] = {}
        self.senders: list[Sender] = [
            Confluent("librdkafka", addresses, ONCE, PARTITIONS),
            KafkaPython("kafka-python", addresses, ONCE, PARTITIONS),
            AioKafka("aiokafka", addresses, ONCE, PARTITIONS),
            Confluent("librdkafka-plain", addresses, PLAIN, PARTITIONS, once=False),
            KafkaPython("kafka-python-plain", addresses, PLAIN, PARTITIONS, once=False),
            AioKafka("aiokafka-plain", addresses, PLAIN, PARTITIONS, once=False),
        ]
        self.transactional: list[Transactional] = []
        self.copying: list[Copier] = []
        self.reading: list[CommittedReader] = []
        if transactions:
            self.transactional = [
                ConfluentTransactional("librdkafka-t", addresses, WHOLE, PARTITIONS),
                KafkaPythonTransactional("kafka-python-t", addresses, WHOLE, PARTITIONS),
            ]
            self.copying = [Copier("copier", addresses, ONCE, COPY, PARTITIONS)]
            self.reading = [CommittedReader(addresses, WHOLE, PARTITIONS)]
        seats = [
            *(Seat("eager", client, "range", (ONCE, PLAIN)) for client in ("confluent", "kafka-python", "aiokafka")),
            *(Seat("sticky", "confluent", "cooperative-sticky", (ONCE,)) for _ in range(2)),
            *(Seat("assigned", "confluent", "consumer", (ONCE,)) for _ in range(2)),
        ]
        self.groups = Groups(seats, addresses, random.Random(seed), directory / "members.log")

    @property
    def workers(self) -> list[Worker]:
        return [*self.senders, *self.transactional, *self.copying, *self.reading]

    def start(self) -> None:
        self.groups.sit()
        for worker in self.workers:
            worker.start()

    def progress(self) -> str:
        groups = ", ".join(f"{group} {len(reported)}" for group, reported in self.groups.reported.items())
        return f"{'; '.join(f'{w.name} {w.progress()}' for w in self.workers)}; offsets told: {groups}"

    def silent(self, since_s: float) -> list[str]:
        """Return the clients without an acknowledgement since then, and their partitions."""
        acked = {f"{s.name}/{p}": each for s in self.senders for p, each in enumerate(s.acked)}
        quiet = [whose for whose, each in acked.items() if not each or each[-1].at_s < since_s]
        busy = [worker for worker in (*self.transactional, *self.copying) if worker.goes_on]
        return quiet + [t.name for t in busy if not t.committed_s or t.committed_s[-1] < since_s]

    def stalls(self, began_s: float, ended_s: float, away: Sequence[tuple[float, float]]) -> dict[str, Stall]:
        """Return the longest stall by producer, and over all."""
        acked = {
            (sender.name, (sender.topic, partition)): [a.at_s for a in list(each) if began_s <= a.at_s <= ended_s]
            for sender in self.senders
            for partition, each in enumerate(sender.acked)
        }
        return stalls_by_producer(acked, began_s, ended_s, away)

    @property
    def judged_stalls(self) -> set[str]:
        """Return the producers whose stalls are judged.

        A producer that waits for a silent node is excluded. So is a producer with one request in flight: requests
        queued behind an abandoned one are late by a time limit.
        """
        return {ANYBODY, *(sender.name for sender in self.senders if sender.gives_up and sender.once)}

    def leaders(self) -> set[int]:
        """Raises KafkaException."""
        topics = self.admin.list_topics(timeout=10).topics
        return {p.leader for topic, _ in self.places for p in topics[topic].partitions.values()} - {-1}

    # ending ---------------------------------------------------------------------------------------
    def drain(self, during: During) -> None:
        """End each phase, with its result or by an error; `contents` is empty if no reader could read it."""
        working = (*self.senders, *self.transactional)
        with during("the members of groups come back"):
            self.groups.settle()
        with during("producers end"):
            end_all(working, DELIVERY_S)
        ends: dict[Place, int] = {}
        with during("librdkafka reads"):
            contents = read_with_librdkafka(self.addresses, self.places)
            ends = {place: (records[-1].offset + 1 if records else 0) for place, records in contents.items()}
        grouped = {place: end for place, end in ends.items() if place[0] in (ONCE, PLAIN)}
        with during("groups come to the end"):
            self.standing = self.groups.drain(grouped, DRAIN_S)
            if behind := self.groups.behind(self.standing, grouped):
                raise TimeoutError("; ".join(self._behind(*each, grouped) for each in behind))
        with during("groups end"):
            self.groups.end()
        if self.copying:
            with during("the copier comes to the end"):
                until(lambda: self._copied() == {p: e for p, e in ends.items() if p[0] == ONCE}, DRAIN_S, every_s=0.5)
        end_all(self.copying, DRAIN_S)
        with during("librdkafka reads again"):
            self.contents = read_with_librdkafka(self.addresses, self.places)
        for reader in self.reading:
            whole = sum(len(self.contents.get(place, ())) for place in reader.seen)
            with during("the reader comes to the end"):
                until(lambda reader=reader, whole=whole: reader.count >= whole, DRAIN_S)
        end_all(self.reading, DRAIN_S)
        with during("kafka-python reads"):
            if read_with_kafka_python(self.addresses, self.places) != self.contents:
                raise ValueError("librdkafka and kafka-python read different records")

    def _behind(self, group: str, place: Place, ends: dict[Place, int]) -> str:
        stands = self.standing.get(group, {}).get(place, -1)
        holder = self.groups.holders(group).get(place, "nobody")
        return f"group {group} stands at {stands} of {ends[place]} in {place[0]}/{place[1]}, which {holder} has"

    def _copied(self) -> dict[Place, int]:
        """Return the offsets that the copier committed in the same transactions."""
        with contextlib.suppress(ck.KafkaException, TimeoutError):  # asked again
            return self.groups.committed(self.copying[0].name)
        return {}

    # judging --------------------------------------------------------------------------------------
    def keep(self) -> None:
        """Store the judged data for inspection."""
        acked = {f"{s.name} {s.topic}/{p}": each for s in self.senders for p, each in enumerate(s.acked)}
        for name, what in (
            ("contents", {f"{t}/{p}": each for (t, p), each in self.contents.items()}),
            ("acked", acked),
        ):
            (self.directory / f"{name}.json").write_text(json.dumps(what))

    def judge(self) -> Iterator[str]:
        """Yield the failures, those of records only if all were read."""
        for worker in self.workers:
            yield from (f"{worker.name}: {reason}" for reason in worker.failed[:3])
        yield from self.groups.failed[:3]
        for group, reported in self.groups.reported.items():
            yield from judge_group(group, reported)
        if self.contents:
            yield from self._of_producers()
            yield from self._of_transactions()
            yield from self._of_groups()

    def _of_producers(self) -> Iterator[str]:
        for sender in self.senders:
            for partition, acked in enumerate(sender.acked):
                place = (sender.topic, partition)
                yield from judge_producer(
                    sender.name,
                    place,
                    self.contents[place],
                    sender.sent[partition],
                    acked,
                    once=sender.once,
                    ordered=sender.once or sender.ordered_without_id,
                )

    def _of_transactions(self) -> Iterator[str]:
        whole = {place: records for place, records in self.contents.items() if place[0] == WHOLE}
        for found in (whole, *(reader.seen for reader in self.reading)):
            for producer in self.transactional:
                yield from judge_transactions(producer.name, found, PARTITIONS, producer.committed, producer.aborted)
        for copier in self.copying:
            for partition in range(PARTITIONS):
                source, copy = ([r.value for r in self.contents[topic, partition]] for topic in (ONCE, COPY))
                if source != copy:
                    same = next((n for n, (a, b) in enumerate(zip(source, copy, strict=False)) if a != b), len(copy))
                    yield f"{copier.name}: {len(copy)} of {len(source)} in {COPY}/{partition}, equal up to {same}"

    def _of_groups(self) -> Iterator[str]:
        for group, handed in self.groups.got.items():
            for place, got in handed.items():
                offsets = [record.offset for record in self.contents[place]]
                committed = self.standing.get(group, {}).get(place, 0)
                yield from judge_coverage(group, place, offsets, got, committed)

    def figures(self) -> dict[str, Any]:
        verified: Counter[str] = Counter()
        for (topic, _), records in self.contents.items():
            verified[topic] += len(records)
        return {
            "acknowledged": {s.name: sum(map(len, s.acked)) for s in self.senders},
            "transactions": {
                t.name: {"committed": len(t.committed), "aborted": len(t.aborted), "begun": t.begun, "lives": t.lives}
                for t in self.transactional
            },
            "copied": sum(copier.copied for copier in self.copying),
            "verified": verified,
            "members": {"killed": self.groups.killed, "left": self.groups.left},
            "offsets_told": {group: len(reported) for group, reported in self.groups.reported.items()},
            "ended": {t.name: t.ended for t in (*self.transactional, *self.copying) if t.ended},
        }
