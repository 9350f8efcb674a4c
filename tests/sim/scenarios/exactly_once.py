"""Workers of one group that read, write and commit in transactions, on the real coordinators of both.

Faults: those of `transactions`; workers die at any step, leave their transactions open, and come back with a new
identity; some sleep longer than their session at any step and then continue; each life uses version 1 or 2 of
transactions.
Oracle: committed readers see every offset below the group's committed offset once, in order, and none beyond. After
healing every partition makes progress, and no client is asked to retry forever.
Replay: ./dev sim --room transactions --seed K --trace
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sim.scenarios.group_plants import planted, store_offsets_checked_once
from sim.scenarios.topic_transactions import batch_of
from sim.scenarios.transactions import (
    AGAIN,
    GROUP,
    Broker,
    Cluster,
    committed,
    ended,
    nemesis,
    shown_of,
)
from sim.world import Crew, Down, Link, Violated, World
from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import JoinAnswer, JoinRequest, SyncAnswer, SyncRequest
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.transactions.group_offsets import store_offsets
from tidemill.kafka.transactions.state import GroupOffset, Offsets
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.topics.api import (
    InvalidProducerEpochError,
    InvalidTransactionError,
    OutOfOrderSequenceError,
    ProduceTransaction,
)
from tidemill.topics.batch import Record

SOURCE = "source"
"""Source topic, which is never written: record N of a partition is N."""
FAULTS = ("untold-offsets", "checked-once", "unfenced-offset", "stays-replaced")
LATER = (*AGAIN, error_codes.CONCURRENT_TRANSACTIONS, error_codes.UNSTABLE_OFFSET_COMMIT)

T = TypeVar("T")


class Aborted(Exception):
    """Raised when the transaction must be aborted: another member may have its partitions."""


class Died(Exception):
    """Raised when a worker ends by choice, or because the outcome of its request is unknown."""


class Worker:
    def __init__(self, cluster: Cluster, name: str, partitions: int) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._source = cluster.world.source
        self._name = name
        self._partitions = partitions
        self._lives = self._joins = 0
        self.done_healed: set[int] = set()
        """Partitions on which the worker made progress after healing."""

    async def work(self) -> None:
        while not self._cluster.stopping:
            self._lives += 1
            self._id = f"{self._name}.{self._lives}"
            self._bumps = self._source.random() < 0.5
            self._member, self._generation, self._held = "", -1, frozenset[int]()
            self._world.trace(f"{self._id} lives")
            try:
                await self._live()
            except Died as died:
                self._world.trace(f"{self._id} died: {died}")
            await asyncio.sleep(self._source.uniform(0.01, 0.2))

    async def _live(self) -> None:
        await self._init()
        while not self._cluster.stopping:
            await self._join()
            at = await self._positions()
            while not self._cluster.stopping:
                try:
                    await self._transaction(at)
                except Aborted as why:
                    self._world.trace(f"{self._id} aborts: {why}")
                    await self._end(commit=False)
                    break
                await self._slow()
                if await self._group(self._beat):
                    break

    # asking ---------------------------------------------------------------------------------------
    async def _ask(self, work: Callable[[Broker], Coroutine[Any, Any, T]], owner: Callable[[Broker], str]) -> T:
        """Ask until a node answers. Raises Aborted, Died; TidemillError only if the request certainly had no effect."""
        for _ in range(60):
            broker = self._cluster.pick(owner)
            if broker is not None:
                link = Link(broker, delay_s=self._source.choice((0.0, 0.001, 0.05)))
                try:
                    async with asyncio.timeout(self._source.choice((1.0, 5.0))):
                        return await link.request(work)
                except (InvalidTransactionError, InvalidProducerEpochError, OutOfOrderSequenceError) as error:
                    raise Died(type(error).__name__) from error
                except (TimeoutError, Down, TidemillError) as error:
                    self._world.trace(f"{self._id}: {type(error).__name__}")
                finally:
                    link.close()
            await asyncio.sleep(self._source.uniform(0.01, 0.2))
        raise Died("no node answers")

    async def _coded(self, work: Callable[[Broker], Coroutine[Any, Any, int]], owner: Callable[[Broker], str]) -> int:
        """Repeat the request while its code says to retry. In a healed world that must end."""
        tries = {False: 0, True: 0}
        while max(tries.values()) < 200:
            tries[self._world.faults.healed] += 1
            code = await self._ask(work, owner)
            if code not in LATER:
                return code
            await asyncio.sleep(0.05)
        if tries[True] == 200:
            raise Violated(f"a wait does not end: worker={self._id} code={code}")
        raise Died("no node coordinates")

    def _owner(self, node: Broker) -> str:
        return node.owner(self._id)

    async def _group(self, work: Callable[[Broker], Coroutine[Any, Any, int]]) -> int:
        return await self._coded(work, lambda node: node.group_owner(GROUP))

    async def _slow(self) -> None:
        if not self._world.faults.healed:
            if self._source.random() < 0.03:
                raise Died("by choice")
            if self._source.random() < 0.05:
                await asyncio.sleep(self._cluster.session_ms / 1000 * self._source.uniform(0.5, 3.0))

    # the group ------------------------------------------------------------------------------------
    async def _join(self) -> None:
        """Join the group until the worker has partitions."""
        while not self._cluster.stopping:
            answer = await self._joined()
            if answer is not None and await self._synced(answer) and self._held:
                return
            await asyncio.sleep(0.05)

    async def _joined(self) -> JoinAnswer | None:
        # No heartbeat is sent within a transaction, so in a healed world the session must outlast one.
        session_ms = max(self._cluster.session_ms, self._healed_ms(5_000))
        found: list[JoinAnswer] = []

        async def join(node: Broker) -> int:
            self._joins += 1
            new_id = f"{self._id}.{self._joins}"  # unique, so that no request replaces one that waits
            ask = JoinRequest(
                self._member, new_id, None, "c", "/h", session_ms, session_ms, "consumer", (("range", b""),)
            )
            try:
                answer = await (await node.groups.get(GROUP)).join(ask)
            except GroupUnavailableError as refused:
                return refused.code
            found.append(answer)
            return answer.error

        code = await self._group(join)
        if code:
            self._member = "" if code == error_codes.UNKNOWN_MEMBER_ID else self._member
            return None
        answer = found[-1]
        self._member, self._generation = answer.member_id, answer.generation
        return answer

    async def _synced(self, joined: JoinAnswer) -> bool:
        members = [member for member, _, _ in joined.members]
        self._source.shuffle(members)
        shares: dict[str, list[str]] = {member: [] for member in members}
        for partition in range(self._partitions if members else 0):
            shares[members[partition % len(members)]].append(str(partition))
        assignments = tuple((member, ",".join(mine).encode()) for member, mine in shares.items())
        ask = SyncRequest(self._member, None, self._generation, assignments=assignments)
        found: list[SyncAnswer] = []

        async def sync(node: Broker) -> int:
            try:
                answer = await (await node.groups.get(GROUP)).sync(ask)
            except GroupUnavailableError as refused:
                return refused.code
            found.append(answer)
            return answer.error

        code = await self._group(sync)
        if code:
            self._member = "" if code == error_codes.UNKNOWN_MEMBER_ID else self._member
            return False
        data = found[-1].assignment
        self._held = frozenset(map(int, data.decode().split(","))) if data else frozenset()
        self._world.trace(f"{self._id} has {sorted(self._held)} of {self._generation}")
        return True

    async def _beat(self, node: Broker) -> int:
        try:
            return (await node.groups.get(GROUP)).heartbeat(self._member, None, self._generation)
        except GroupUnavailableError as refused:
            return refused.code

    async def _positions(self) -> dict[int, int]:
        """Return the committed offsets, once none of them is undecided."""
        found: dict[int, int] = {}

        async def read(node: Broker) -> int:
            undecided = await node.transactions.undecided(GROUP)
            if any((SOURCE, partition) in undecided for partition in self._held):
                return error_codes.UNSTABLE_OFFSET_COMMIT
            rows = await node.groups.rows.offsets_of(GROUP, [(SOURCE, partition) for partition in sorted(self._held)])
            found.update({p: rows[SOURCE, p].offset if (SOURCE, p) in rows else 0 for p in self._held})
            return 0

        await self._group(read)
        return found

    # the transaction ------------------------------------------------------------------------------
    def _healed_ms(self, healed_ms: int) -> int:
        """Return a timeout for a healed world; long if two nodes lead, so that it does not hide an endless wait."""
        long_ms = 60_000 if self._cluster.two_minds else healed_ms
        return long_ms if self._world.faults.healed else 0

    async def _init(self) -> None:
        timeout_ms = max(1_500, self._healed_ms(0))
        while True:
            answer = await self._ask(lambda node: node.transactions.init(self._id, timeout_ms=timeout_ms), self._owner)
            if answer[0] == 0:
                self._identity, self._sequences = (answer[1], answer[2]), dict[int, int]()
                return
            if answer[0] not in LATER:
                raise Died(f"init code={answer[0]}")
            await asyncio.sleep(0.05)

    async def _transaction(self, at: dict[int, int]) -> None:
        """Run one transaction from the positions `at`, which advance with its commit. Raises Aborted, Died."""
        some = self._source.sample(sorted(self._held), self._source.randint(1, len(self._held)))
        to = dict(at)
        places = {self._cluster.topic.topic_id: tuple(sorted(some))}
        if not self._bumps:

            async def add(node: Broker) -> int:
                return await node.transactions.add(self._id, *self._identity, partitions=places)

            self._reported(await self._coded(add, self._owner))
        for partition in some:
            await self._slow()
            to[partition] += self._source.randint(1, 3)
            await self._produce(partition, range(at[partition], to[partition]))
        await self._slow()
        offsets: Offsets = {SOURCE: {partition: GroupOffset(to[partition]) for partition in some}}
        await self._commit_offsets(offsets)
        await self._slow()
        await self._end(commit=True)
        self._world.trace(f"{self._id} did {to}")
        at.update(to)
        if self._world.faults.healed:
            self.done_healed |= set(some)

    def _reported(self, code: int) -> None:
        if code in (error_codes.PRODUCER_FENCED, error_codes.INVALID_PRODUCER_ID_MAPPING):
            raise Died(f"code={code}")
        if code:
            raise Aborted(f"code={code}")

    async def _produce(self, partition: int, numbers: range) -> None:
        sequence = self._sequences.get(partition, 0)
        values = [f"{partition}/{number}".encode() for number in numbers]
        records = [Record(None, value, timestamp_ms=self._world.clock.now_ms()) for value in values]
        batch = batch_of(records, self._identity, sequence)
        self._sequences[partition] = sequence + len(values)
        topic_id, within = self._cluster.topic.topic_id, ProduceTransaction(self._id, adds=self._bumps)

        async def produce(node: Broker) -> None:
            await node.topics.produce_nowait(topic_id, partition, batch, sender=self._id, within=within)

        await self._ask(produce, lambda node: node.topics.leader_of(topic_id, partition))

    async def _commit_offsets(self, offsets: Offsets) -> None:
        identity, member = (self._id, *self._identity), (self._member, None, self._generation)
        if not self._bumps:

            async def add(node: Broker) -> int:
                return await node.transactions.add_group(*identity, GROUP)

            self._reported(await self._coded(add, self._owner))

        async def commit(node: Broker) -> int:
            if self._cluster.two_minds:
                await self._beat(node)  # as clients do concurrently; else the session may end
            store = store_offsets_checked_once if self._cluster.fault == "checked-once" else store_offsets
            return await store(
                node.groups, node.transactions, identity, GROUP, member, offsets, adds=self._bumps
            )  # fmt: skip

        self._reported(await self._group(commit))

    async def _end(self, *, commit: bool) -> None:
        """End the transaction. Raises Died if it came too late."""

        async def end(node: Broker) -> int:
            if not self._bumps:
                return await node.transactions.end(self._id, *self._identity, commit=commit)
            code, *given = await node.transactions.end_bumping(self._id, *self._identity, commit=commit)
            reported[:] = given
            return code

        reported: list[int] = []
        code = await self._coded(end, self._owner)
        if code:
            raise Died(f"end code={code}")
        if self._bumps:
            self._identity, self._sequences = (reported[0], reported[1]), {}


async def run(world: World, fault: str = "") -> None:
    with planted(fault):
        await _run(world, fault)


async def _run(world: World, fault: str) -> None:
    source = world.source
    cluster = Cluster(world, fault)
    partitions = source.randint(1, 3)
    metastore = create_metastore(world.consensus, world.objects, world.clock, world.rand(), holder="scenario")
    cluster.topic = await Catalogue(metastore, world.clock, world.rand()).create_topic("t", partitions)
    await metastore.aclose()
    for broker in cluster.brokers[: source.randint(1, 2)]:
        await broker.start()
    least = 2 if fault == "checked-once" else 1
    workers = [Worker(cluster, f"w{i}", partitions) for i in range(source.randint(least, 3))]
    everything = set(range(partitions))
    async with Crew() as crew:
        working = [crew.spawn(worker.work()) for worker in workers]
        await crew.spawn(nemesis(cluster))
        await asyncio.sleep(source.choice((1.0, 5.0)))
        await world.heal()
        await world.until(lambda: {p for worker in workers for p in worker.done_healed} == everything)
        cluster.stopping = True
        await asyncio.wait(working)
        await ended(cluster, partitions)
        await world.answered()
    for actor in world.actors:
        actor.crash()
    shown = await shown_of(cluster, partitions)
    offsets = await committed(world)
    for partition in range(partitions):
        values = [value for (p, _), value in sorted(shown.items()) if p == partition]
        wanted = [f"{partition}/{number}".encode() for number in range(offsets.get((SOURCE, partition), 0))]
        if values != wanted:
            raise Violated(
                f"not each record once: partition={partition} committed={len(wanted)} shown={len(values)} "
                f"first={next(((i, a) for i, a in enumerate(values) if a not in wanted[i : i + 1]), None)}"
            )
