"""The groups of the chaos lane: members of three libraries in separate processes, which are killed, stopped and
restarted. The offsets that each received are recorded.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

from chaos_judge import Committed, Place
from chaos_thread import Worker, end_all

MEMBER = Path(__file__).with_name("chaos_member.py")
EVERY_S = (2.0, 6.0)
ABSENT_S = (0.5, 3.0)
LEAVE_S = 30.0


class Seat(NamedTuple):
    group: str
    client: str
    assignor: str
    topics: tuple[str, ...]


class Groups(Worker):
    """`sit`, then `start` sends members away and back until `settle`, which brings everybody back; `end` once all is
    read."""

    def __init__(self, seats: list[Seat], addresses: str, rand: random.Random, log: Path) -> None:
        super().__init__("groups")
        self.seats = seats
        self.reported: dict[str, list[Committed]] = {seat.group: [] for seat in seats}
        self.got: dict[str, dict[Place, list[tuple[int, int]]]] = {seat.group: {} for seat in seats}
        self.killed = self.left = 0
        self._addresses = addresses
        self._admin = AdminClient({"bootstrap.servers": addresses, "log_level": 0, "socket.timeout.ms": 10_000})
        self._rand = rand
        self._log = log
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []

    def sit(self) -> None:
        for number in range(len(self.seats)):
            self._sit(number)

    def progress(self) -> str:
        return f"{self.killed} killed, {self.left} left"

    def _sit(self, number: int) -> None:
        seat = self.seats[number]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable, str(MEMBER), seat.client, seat.assignor, self._addresses, seat.group,
                    ",".join(seat.topics),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
            )  # fmt: skip
        self._members[number] = process
        reader = threading.Thread(target=self._hear, args=(seat.group, process), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _hear(self, group: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # truncated by SIGKILL
            if "got" in said:
                topic, partition, first, last = said["got"]
                self.got[group].setdefault((topic, partition), []).append((first, last))
            else:
                began_s, ended_s, topic, partition, offset, found = said["reported"]
                self.reported[group].append(Committed(began_s, ended_s, (topic, partition), offset, found))

    def _run(self) -> None:
        while not self._stop.wait(self._rand.uniform(*EVERY_S)):
            number = self._rand.randrange(len(self.seats))
            if self._ended_by_itself(number):
                return
            kills = self._rand.random() < 0.5
            self._members[number].send_signal(signal.SIGKILL if kills else signal.SIGTERM)
            self.killed += kills
            self.left += not kills
            self._gone(number, time.monotonic() + LEAVE_S)
            self._stop.wait(self._rand.uniform(*ABSENT_S))
            self._sit(number)

    def _ended_by_itself(self, number: int) -> bool:
        code = self._members[number].poll()
        if code is not None:
            self.failed.append(f"a member of {self.seats[number].group} ended by itself: {code}")
        return code is not None

    def _gone(self, number: int, until_s: float) -> None:
        """Wait until the member has ended, at most until then."""
        process = self._members[number]
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def settle(self) -> None:
        """Stop no more members, and restart the ended ones."""
        end_all([self], 2 * LEAVE_S)
        for number in range(len(self.seats)):
            if self._ended_by_itself(number):
                self._sit(number)

    def committed(self, group: str) -> dict[Place, int]:
        """Return the offsets that the cluster reports now. Raises KafkaException, TimeoutError."""
        answer = self._admin.list_consumer_group_offsets([ck.ConsumerGroupTopicPartitions(group)])[group].result(15)
        return {(p.topic, p.partition): p.offset for p in answer.topic_partitions}

    def drain(self, ends: dict[Place, int], limit_s: float) -> dict[str, dict[Place, int]]:
        """Wait until every group is at the end of its partitions, or time is up; return the offsets that it has."""
        until_s = time.monotonic() + limit_s
        found: dict[str, dict[Place, int]] = {}
        while time.monotonic() < until_s:
            with contextlib.suppress(ck.KafkaException, TimeoutError):
                found = {group: self.committed(group) for group in self.reported}
                if not self.behind(found, ends):
                    break
            time.sleep(0.5)
        return found

    def behind(self, found: dict[str, dict[Place, int]], ends: dict[Place, int]) -> list[tuple[str, Place]]:
        """(group, place) that is not at its end."""
        topics = {seat.group: seat.topics for seat in self.seats}
        return [
            (group, place)
            for group in self.reported
            for place, end in ends.items()
            if place[0] in topics[group] and found.get(group, {}).get(place, -1) < end
        ]

    def holders(self, group: str) -> dict[Place, str]:
        """Return the owner of each partition, by the name that its member's process chose. Raises KafkaException."""
        reported = self._admin.describe_consumer_groups([group])[group].result(15)
        return {
            (p.topic, p.partition): member.client_id
            for member in reported.members
            if member.assignment is not None
            for p in member.assignment.topic_partitions
        }

    def end(self) -> None:
        """Every member leaves, and what it said is heard."""
        self.stop()
        for process in self._members.values():
            process.terminate()
        until_s = time.monotonic() + LEAVE_S
        for number in self._members:
            self._gone(number, until_s)
        for reader in self._readers:
            reader.join(LEAVE_S)
