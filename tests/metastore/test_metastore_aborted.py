"""Aborted transactions as rows: repeated restores never show an uncommitted record and hide nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.metastore.checkpoint_world import Rows, family_rows
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.coop import CoopBudget
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.backup.checkpoint import Unit
from tidemill.metastore.rows import ABORTED, EXTENTS, PARTITIONS
from tidemill.metastore.rows.partitions import AbortedRow
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.lifecycle.checkpoint import PartitionFollower
from tidemill.topics.lifecycle.restore import restore_partition
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.codec import encode_command
from tidemill.topics.partition.state_machine.commands import PlaceBatches, Placeholder
from tidemill.topics.partition.state_machine.row_codec import rebuild_state
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.state_machine.transactions import ABORT, PLAIN, TRANSACTIONAL

LOG = partition_log("t", 0)


class World:
    """One partition's log, and its rows in a bucket that outlives the log."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.objects = MemoryObjects(self.clock)
        self.rows: Rows = {}
        self.consensus = MemoryConsensus(self.clock)
        self.end = 0
        self.attempts = 0

    async def place(self, *batches: tuple[int, int]) -> None:
        """Batches of one record: (producer id, kind)."""
        head = await self.consensus.log_head(LOG)
        placed = tuple(
            Placeholder(0, at * 100, 100, at, 1, producer, 0, -1 if kind == ABORT else at, 1, kind)
            for at, (producer, kind) in enumerate(batches, self.end)
        )
        command = PlaceBatches(1, (f"l0/{self.attempts}/w-{head.next:012d}",), placed)
        await self.consensus.append(LOG, head.term, head.next, [encode_command(command)], f"nonce-{head.next}")
        self.end += len(batches)

    async def scan(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        for key in sorted((key for key in self.rows if key.startswith(prefix)), reverse=reverse):
            yield [key], [self.rows[key]]

    async def gathered(self) -> Unit:
        """Return the rows that the maintenance job would write after taking over."""
        [row] = family_rows(PARTITIONS, self.rows) or [None]
        follower = PartitionFollower(self.consensus, self.objects, "t", 0, row, CoopBudget(self.clock))
        return await follower.gather(self.scan)

    def write(self, unit: Unit) -> None:
        for key, value in (pair for group in unit for pair in group):
            self.rows.pop(key, None)
            if value:
                self.rows[key] = value

    async def restore(self) -> PartitionState:
        """Restore into empty consensus. Return the state of the restored log."""
        self.attempts += 1
        self.consensus = MemoryConsensus(self.clock)
        state = restored(self.rows)
        self.end = state.high_watermark
        await restore_partition(
            self.consensus, self.objects, Rand(self.attempts), "t", 0, state, f"attempt-{self.attempts}"
        )
        return (await catch_up(self.consensus, self.objects, LOG, PartitionState()))[0]


def restored(rows: Rows) -> PartitionState:
    [row] = family_rows(PARTITIONS, rows)
    return rebuild_state(row, family_rows(EXTENTS, rows), family_rows(ABORTED, rows))


def hidden(state: PartitionState) -> list[tuple[int, ...]]:
    """Return, for each batch, the producers whose records in it count as aborted."""
    return [state.committed_batch_ref(index).aborted for index in range(len(state))]


def ended(state: PartitionState) -> list[int]:
    return sorted(state.aborted[at].producer_id for at in range(len(state.aborted)))


@pytest.mark.parametrize("cut", [0, 1, 2, None])
async def test_what_one_restore_aborted_the_next_one_aborts_too(cut: int | None) -> None:
    """`cut`: number of groups of the first checkpoint after the first restore that the second restore finds; None:
    all."""
    world = World()
    await world.place((7, TRANSACTIONAL), (8, TRANSACTIONAL), (9, TRANSACTIONAL), (9, ABORT))
    world.write(await world.gathered())
    first = await world.restore()
    assert hidden(first) == [(7,), (7, 8), (7, 8, 9), (7, 8, 9)], "of 7 and 8 that they ended where 9 did"
    await world.place((1, PLAIN))
    world.write((await world.gathered())[:cut])
    again = await world.restore()
    assert (hidden(again)[:4], ended(again)) == (hidden(first), [7, 8, 9])
    assert again.last_stable == again.high_watermark
    world.write(await world.gathered())
    assert restored(world.rows).aborted == again.aborted


async def test_what_a_lost_life_aborted_past_the_rows_does_not_hide_what_the_restored_one_writes() -> None:
    """A manifest held the aborted transaction of a large unit, but not the partition row that counts it."""
    world = World()
    await world.place((1, PLAIN))
    world.write(await world.gathered())
    await world.place((7, TRANSACTIONAL), (7, TRANSACTIONAL), (7, ABORT))
    world.write((await world.gathered())[:-1])
    assert [row.last_offset for row in family_rows(ABORTED, world.rows)] == [3]
    await world.restore()
    await world.place(*[(7, PLAIN)] * 3)
    world.write(await world.gathered())
    assert hidden(restored(world.rows)) == [()] * 4
    assert family_rows(ABORTED, world.rows) == []


def test_a_row_that_was_written_before_several_ended_at_one_offset_is_read() -> None:
    key, value = ABORTED.encode(AbortedRow("t", 0, 4, 7, 0, 5))
    assert ABORTED.decode(key, b"\x01\x93" + value[2:-1]) == AbortedRow("t", 0, 4, 7, 0, 5)
