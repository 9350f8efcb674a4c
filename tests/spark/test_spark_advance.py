"""An idle source is advanced when a reader needs its time, and only then."""

from __future__ import annotations

from typing import Any, NamedTuple

from tidemill.base.clock import ManualClock, Rand
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.api import Binding, ShardSchema
from tidemill.shards.bindings.remap import LogRemap
from tidemill.shards.state.state import ShardState
from tidemill.spark.derived.idle_advance import advance_idle, sources_of

ROWS = [
    PipelineRow("p", {"clicks": "topic:clicks", "orders": "capture:shop:public.orders", "joined": "derived"}),
    PipelineRow("q", {"other": "topic:other"}),
]


class Named(NamedTuple):
    name: str
    state: ShardState = ShardState("", "", ShardSchema((), ()))

    def part_time_ms(self) -> int:
        return 0


class Catalogue:
    async def list(self, kind: type, *, fresh: bool = True) -> list[PipelineRow]:
        return ROWS


async def test_only_the_sources_of_a_shard_that_has_everything_are_advanced() -> None:
    clock = ManualClock()
    consensus = MemoryConsensus(clock)
    catalogue: Any = Catalogue()

    async def remap(name: str) -> LogRemap:
        return LogRemap(consensus, name, clock, Rand(1))

    async def times() -> list[int]:
        found = [await (await remap(name)).latest() for name in ("topic/clicks", "capture/shop", "topic/other")]
        return [latest.time_ms if latest is not None else -1 for latest in found]

    assert not await advance_idle(catalogue, remap, Named("clicks"), 0, 5000)
    for name in ("topic/clicks", "topic/other"):
        await (await remap(name)).mint(Binding(1000, {"t": (1,)}))
    await (await remap("capture/shop")).mint(Binding(2000, {"t": (1,)}))
    # A shard below its newest binding catches up without help; one of no pipeline has no source.
    assert not await advance_idle(catalogue, remap, Named("clicks"), 1000, 5000)
    assert not await advance_idle(catalogue, remap, Named("unknown"), 1001, 5000)
    assert not await advance_idle(catalogue, remap, Named("clicks"), 1001, 1000)
    assert await times() == [1000, 2000, 1000]
    assert await advance_idle(catalogue, remap, Named("clicks"), 1001, 5000)
    assert await times() == [5000, 2000, 1000]
    # Of a derived shard of an older driver, which named no inputs: all that its pipeline reads.
    assert await advance_idle(catalogue, remap, Named("joined"), 2001, 6000)
    assert await times() == [5000, 6000, 1000]


def test_a_derived_shard_is_made_of_the_sources_of_its_inputs_alone_whoever_keeps_them() -> None:
    made = {
        "joined": {"clicks": (), "sums": ("id",)},  # of the same pipeline, and of another one
        "again": {"joined": (), "again": (), "kept by nobody": ()},
    }
    rows = [
        PipelineRow("p", {"clicks": "topic:clicks", "idle": "topic:idle"} | dict.fromkeys(made, "derived"), "", made),
        PipelineRow("q", {"other": "capture:shop:public.orders", "sums": "derived"}, "", {"sums": {"other": ()}}),
    ]
    assert sources_of(rows, "again") == sources_of(rows, "joined") == {"topic/clicks", "capture/shop"}
    assert sources_of(rows, "sums") == {"capture/shop"}
    assert sources_of(rows, "kept by nobody") == set()
