"""Member of the consumer protocol in the scenario `groups`; it behaves like a client of KIP-848.

A member uses the partitions that it is assigned, releases the others immediately, and names both in its next heartbeat.
A request without an answer may be executed at any later time. The member then continues under a new id, and its
partitions are free when the session of the former id has ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sim.scenarios.groups import AGAIN, GROUP, TOPIC, Shared, Topics, call, led, read
from sim.world import Actor, Violated
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import HeartbeatAnswer
from tidemill.kafka.groups.consumer.state import EPOCH_LEAVE, HeartbeatRequest
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow

if TYPE_CHECKING:
    from sim.scenarios.groups import Node

REBALANCE_MS = 2_000


class Modern:
    def __init__(self, shared: Shared, name: str) -> None:
        self._shared = shared
        self._world = shared.world
        self._source = shared.world.source
        self._topics = Topics(shared.partitions)
        self.name = name
        self._lives = 0
        self._coordinator: Actor[Node] | None = None
        self._at: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        """Begin again as a new member."""
        self._lives += 1
        self._member = f"{self.name}.{self._lives}"
        self._forget()

    def _forget(self) -> None:
        self._epoch = 0
        self._reported: frozenset[int] = frozenset()
        self.partitions: frozenset[int] = frozenset()

    async def work(self) -> None:
        while not (self._shared.stopping or self._shared.has_retired):
            await self._beat()
            await self._take_up()
            await asyncio.sleep(self._source.uniform(0.02, self._shared.session_ms / 3_000))
            end = self._source.random()
            if not self._world.faults.healed and end < 0.05:
                if end < 0.02:
                    await self._ask(EPOCH_LEAVE)
                self._begin()  # dead, or gone
            elif self.partitions and end < 0.6:
                await self._commit()
        if self._shared.has_retired and self._source.random() < 0.7:
            await self._ask(EPOCH_LEAVE)
        self._forget()

    async def _ask(self, epoch: int) -> HeartbeatAnswer | int | None:
        ask = HeartbeatRequest(
            self._member, epoch, rebalance_ms=REBALANCE_MS, topics=frozenset({TOPIC}),
            owned={TOPIC: self.partitions} if self.partitions else {},
        )  # fmt: skip

        async def beat(node: Node) -> HeartbeatAnswer | int:
            found = await led(node)
            return found if isinstance(found, int) else await found.consumer_heartbeat(ask, self._topics)

        if self._coordinator is None or not self._coordinator.ready:
            self._coordinator = self._shared.pick()
        answer = await call(self._shared, self._coordinator, beat)
        if answer is None or getattr(answer, "error", answer) in AGAIN:
            self._coordinator = None
        return answer

    async def _beat(self) -> None:
        answer = await self._ask(self._epoch)
        if answer is None:
            self._begin()
            return
        if isinstance(answer, int) or answer.error in AGAIN:
            return
        if answer.error:
            self._forget()
            return
        if answer.epoch < self._epoch:
            raise Violated(f"an epoch went back: member={self._member} {self._epoch} to {answer.epoch}")
        self._epoch = answer.epoch
        if answer.assignment is not None:
            self._reported = frozenset(answer.assignment.get(TOPIC, frozenset()))
            self.partitions &= self._reported
            self._shared.reported(self._member, self._epoch, self._reported)
            self._world.trace(f"{self._member} has {sorted(self._reported)} of {self._epoch}")

    async def _take_up(self) -> None:
        new = self._reported - self.partitions
        found = await read(self._shared, new)
        if found is not None and new:
            self._at |= found
            self.partitions |= new

    async def _commit(self) -> None:
        for partition in self.partitions:
            self._at[partition] += self._source.randint(0, 3)
        committed = {partition: self._at[partition] for partition in self.partitions}
        rows = [GROUP_OFFSETS.encode(GroupOffsetRow(GROUP, TOPIC, p, offset)) for p, offset in committed.items()]
        since = self._shared.telling

        async def commit(node: Node) -> int:
            found = await led(node)
            if isinstance(found, int):
                return found
            return found.commit_error(self._member, None, self._epoch) or await found.write(rows)

        if self._coordinator is None or not self._coordinator.ready:
            self._coordinator = self._shared.pick()
        code = await call(self._shared, self._coordinator, commit)
        self._world.trace(f"{self._member} commits {committed}: {code}")
        if code is None:
            self._begin()
        elif code == 0:
            self._shared.committed(self._member, committed, since)
        elif code in AGAIN:
            self._coordinator = None
        elif code != error_codes.STALE_MEMBER_EPOCH:
            self._forget()
