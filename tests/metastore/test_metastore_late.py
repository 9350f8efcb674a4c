"""An unreadable log delays its own rows and those of everything derived from it, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.metastore.checkpoint_world import Restored, Rows, World, family_rows, rows_of
from support.waiting import until
from tidemill.base.errors import CorruptError, InvalidError, TidemillError, UnavailableError
from tidemill.base.limits import METASTORE_VALUE_BYTES
from tidemill.metastore.backup import checkpoint
from tidemill.metastore.backup.checkpoint import Checkpointer, Unit
from tidemill.metastore.catalogue import PipelineRow
from tidemill.metastore.rows import CHECKPOINTS, PARTITIONS
from tidemill.shards.bindings.remap import remap_log_name
from tidemill.shards.state.state_machine import shard_log_name
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition.state_machine.producer_state import ProducerState, RememberedBatch
from tidemill.topics.partition.state_machine.row_codec import build_partition_row, decode_producers
from tidemill.topics.partition.state_machine.state import PartitionState


class Unreadable:
    """Consensus in which reads of the chosen logs raise `error`."""

    def __init__(self, world: World, error: type[TidemillError] = CorruptError) -> None:
        self.logs: set[str] = set()
        read = world.consensus.read

        async def poisoned(log: str, *args: Any, **kwargs: Any) -> Any:
            if log in self.logs:
                raise error(f"The log is unreadable: log={log}.")
            return await read(log, *args, **kwargs)

        world.consensus.read = poisoned


def stages(world: World) -> dict[str, int]:
    rows: Rows = rows_of(world.shared[0])
    back = Restored(rows)
    back.check()
    found = {f"partition {number}": state.high_watermark for (_, number), state in back.partitions.items()}
    found["bindings"] = len(back.bindings.get("topic/clicks", []))
    found |= {name: state.upper for name, state in back.shards.items()}
    return found


async def everything_moves(world: World) -> None:
    await world.step()
    await world.produce(partition=0)
    await world.produce(partition=1)


@pytest.mark.parametrize("error", [CorruptError, UnavailableError])
@pytest.mark.parametrize(
    ("what", "late"),
    [
        ("partition", {"partition 0", "bindings", "table", "derived"}),
        ("bindings", {"bindings", "table", "derived"}),
        ("table", {"table", "derived"}),
        ("derived", {"derived"}),
    ],
)
async def test_an_unreadable_log_holds_back_what_is_made_from_it_and_nothing_else(
    what: str, late: set[str], error: type[TidemillError]
) -> None:
    async with World() as world:
        logs = {
            "partition": partition_log(world.topic.topic_id, 0),
            "bindings": remap_log_name("topic/clicks"),
            "table": shard_log_name(world.table.state.shard_id),
            "derived": shard_log_name(world.derived.state.shard_id),
        }
        unreadable = Unreadable(world, error)
        checkpointer = world.checkpointer()
        await everything_moves(world)
        await checkpointer.round()
        before = stages(world)
        for _ in range(2):
            await everything_moves(world)
            unreadable.logs = {logs[what]}
            with pytest.raises(error):
                await checkpointer.round()
            unreadable.logs = set()
            after = stages(world)
            assert {name for name in after if after[name] == before[name]} == late
            before |= {name: after[name] for name in after.keys() - late}
        await checkpointer.round()
        after = stages(world)
        assert not {name for name in late if after[name] <= before[name]}, "it is made good once it can be read"
        assert await checkpointer.round() == 0


async def test_a_topic_that_feeds_nothing_holds_back_nothing() -> None:
    async with World() as world:
        other = await world.catalogue.create_topic("other", 1)
        unreadable = Unreadable(world)
        checkpointer = world.checkpointer()
        await everything_moves(world)
        await checkpointer.round()
        before = stages(world)
        await everything_moves(world)
        await world.topics.produce_nowait(other.topic_id, 0, encode_batch([Record(None, b"v", (), 1)]))
        unreadable.logs = {partition_log(other.topic_id, 0)}
        with pytest.raises(CorruptError):
            await checkpointer.round()
        after = stages(world)
        assert not {name for name in after if after[name] <= before.get(name, -1) and name != "partition 0"}, after


async def test_a_shard_of_no_pipeline_waits_since_it_may_be_made_from_anything() -> None:
    async with World() as world:
        await world.catalogue.put(PipelineRow("p", {"table": "topic:clicks"}))
        unreadable = Unreadable(world)
        checkpointer = world.checkpointer()
        await everything_moves(world)
        await checkpointer.round()
        before = stages(world)
        await everything_moves(world)
        unreadable.logs = {shard_log_name(world.table.state.shard_id)}
        with pytest.raises(CorruptError):
            await checkpointer.round()
        assert stages(world)["derived"] == before["derived"]


async def test_a_register_of_nodes_that_cannot_be_read_holds_back_the_nodes_alone() -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        await everything_moves(world)
        found = await world.consensus.head("cluster/nodes")
        await world.consensus.cas("cluster/nodes", found.seq if found else 0, b"\xc1", "n")
        with pytest.raises(CorruptError, match="cluster/nodes"):
            await checkpointer.round()
        assert stages(world)["partition 0"] > 0
        seqno = world.shared[0].seqno
        with pytest.raises(CorruptError):
            await checkpointer.round()
        assert world.shared[0].seqno == seqno, "what was written is not written again"


async def test_an_incomplete_round_makes_the_checkpoint_no_younger_and_names_what_is_late() -> None:
    async with World() as world:
        checkpointer: Checkpointer = world.checkpointer()
        await everything_moves(world)
        await checkpointer.round()
        [row] = family_rows(CHECKPOINTS, rows_of(world.shared[0]))
        assert row.complete and row.gathered_ms > 0
        unreadable = Unreadable(world)
        await everything_moves(world)
        unreadable.logs = {remap_log_name("topic/clicks")}
        running = asyncio.ensure_future(checkpointer.run())
        late = await until(lambda: checkpointer.facts()["checkpoint_late"])  # the next round names none at first
        await asyncio.sleep(0)
        [mark] = [m for m in world.tracker.report("p", 0).marks if m.name == checkpoint.STAGE_NAME]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert late == ["table derived", "table table", "topic/clicks"]
        assert mark.position == row.gathered_ms
        [after] = family_rows(CHECKPOINTS, rows_of(world.shared[0]))
        assert after.gathered_ms == row.gathered_ms


async def test_taking_over_makes_the_checkpoint_no_younger() -> None:
    """The next leader dies before it has gathered anything: a restore must not take its rows for new ones."""
    async with World() as world:
        await everything_moves(world)
        await world.checkpointer("n1").round()
        [row] = family_rows(CHECKPOINTS, rows_of(world.shared[0]))
        await until(lambda: world.clock.now_ms() > row.gathered_ms)
        await world.checkpointer("n2")._claim_rows()
        [after] = family_rows(CHECKPOINTS, rows_of(world.shared[0]))
        assert (after.holder, after.gathered_ms) == ("n2", row.gathered_ms)


async def test_a_row_too_large_for_a_commit_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        await everything_moves(world)
        await checkpointer.round()
        before = stages(world)
        await everything_moves(world)
        registers = checkpointer._stages[3]
        gather = registers.gather

        async def huge() -> dict[str, Unit]:
            await gather()
            return {"nodes": [[(b"k", b"x" * (METASTORE_VALUE_BYTES + 1))]]}

        monkeypatch.setattr(registers, "gather", huge)
        with pytest.raises(InvalidError, match="too large: thing=nodes"):
            await checkpointer.round()
        after = stages(world)
        assert not {name for name in after if after[name] == before[name]}
        monkeypatch.setattr(registers, "gather", gather)
        await checkpointer.round()


def test_of_more_producers_than_a_row_takes_the_newest_are_kept() -> None:
    state = PartitionState()
    state.last_at_ms = 1_000_000
    for producer_id in range(20_000):
        batch = RememberedBatch(2**31 - 9, 2**31 - 1, 2**60 + producer_id, 9)
        state.producers[producer_id] = ProducerState(3, (batch,) * 5, 500_000 + producer_id)
    row = build_partition_row(state, "t", 0)
    assert len(PARTITIONS.encode(row)[1]) < METASTORE_VALUE_BYTES
    kept = decode_producers(row)
    assert len(kept) > 1_000 and min(kept) == 20_000 - len(kept)
    assert all(kept[producer_id] == state.producers[producer_id] for producer_id in kept)
