"""A topic of one partition next to the shard: records that are produced, compacted and bound to times.

Topics and captures have their own simulated rooms. Here a topic is a list that all readers see alike, except for
compaction: of a key's records all but the newest may disappear at any moment, in one replica before the other, so two
readers of one time may see different records. Bindings are real: two minters race for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from sim.clock import EPOCH_MS
from sim.oracles.shards import Command
from sim.scenarios.shard_nodes import Node
from sim.world import World
from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.shards.api import Binding
from tidemill.shards.bindings.minter import BindingMinter
from tidemill.shards.bindings.remap import LogRemap
from tidemill.shards.registry import open_remap
from tidemill.spark.decode.records import cut_slices

SOURCE = "topic/t"
TOPIC = "t"


class WorldTime:
    """Clock in milliseconds since the beginning of the world, from which times of the shard can be drawn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now_ms(self) -> int:
        return self._clock.now_ms() - EPOCH_MS

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    def boot_s(self) -> float:
        return self._clock.boot_s()


class Topic:
    def __init__(self, world: World) -> None:
        self.world = world
        self.records: list[tuple[str, str | None]] = []
        self.replicas: tuple[set[int], set[int]] = set(), set()
        """Offsets that compaction removed, per replica; each replica is compacted independently."""
        self.done = False
        self._compacts = world.source.random() < 0.6
        self._keys = world.source.randint(1, 3)

    async def feed(self) -> None:
        """Produce for a while: few keys, repeated values, deletions, also of missing keys. Compaction continues for a
        while after that."""
        source = self.world.source
        for _ in range(source.randint(3, 30)):
            for _ in range(source.choice((1, 1, 2, 5))):
                value = source.choice((None, "a", "b", "c", f"v{len(self.records)}", self.world.filler))
                self.records.append((f"k{source.randrange(self._keys)}", value))
            await self._pause()
        self.done = True
        for _ in range(8):
            await self._pause()

    async def _pause(self) -> None:
        source = self.world.source
        await asyncio.sleep(source.uniform(0, 0.2) if source.random() < 0.7 else 0)
        if not self._compacts or source.random() < 0.3:
            return
        newest = {key: offset for offset, (key, _) in enumerate(self.records)}
        old = [offset for offset, (key, _) in enumerate(self.records) if newest[key] != offset]
        gone = source.choice(self.replicas)
        gone |= {offset for offset in old if source.random() < 0.5}
        self.world.trace(f"topic compacted: {len(gone)} of {len(self.records)} are gone from one replica")

    @property
    def gone(self) -> set[int]:
        """Return the offsets that a reader may not have seen."""
        return self.replicas[0] | self.replicas[1]

    def read(self, base: Binding | None, bindings: Sequence[Binding], start: int = 0) -> list[Command]:
        """Return one replica's records that the bindings cover beyond `base`, with their times, from `start` on."""
        return self._without(self.world.source.choice(self.replicas), base, bindings, start)

    def kept(self, bindings: Sequence[Binding]) -> list[Command]:
        """Return the records that every reader has seen."""
        return self._without(self.gone, None, bindings, 0)

    def _without(self, gone: set[int], base: Binding | None, bindings: Sequence[Binding], start: int) -> list[Command]:
        out: list[Command] = []
        for each in cut_slices(base, bindings, TOPIC, TOPIC):
            offsets = np.arange(each.start, each.end)
            for offset, time in zip(offsets.tolist(), each.times_of(offsets).tolist(), strict=True):
                if offset not in gone and offset >= start:
                    out.append((offset, *self.records[offset], time))
        return out

    async def mint(self, node: Node) -> None:
        """Bind the existing records to the current time, as one of several nodes."""
        source = self.world.source
        minter = BindingMinter(await bindings(node), WorldTime(node.actor.clock), interval_ms=0)
        while True:
            try:
                if minter.latest is None:
                    await minter.open()
                if self.records:
                    await minter.mint_missing({TOPIC: (len(self.records),)}, 0)
            except (UnavailableError, UnknownOutcomeError):
                pass  # of the read; minting resolves its own errors
            await asyncio.sleep(source.uniform(0, 0.1))

    async def bound(self) -> list[Binding]:
        """Return every binding, read without faults."""
        remap = await open_remap(self.world.consensus, self.world.clock, self.world.rand(), SOURCE)
        return await remap.after(-1)


async def bindings(node: Node) -> LogRemap:
    return await open_remap(node.consensus, node.actor.clock, node.rand, SOURCE)
