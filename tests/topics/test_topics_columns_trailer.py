"""Columns behind the records of a batch: clients never see them; they move, are merged, and go with their batch."""

from __future__ import annotations

import pytest

from support.topics.l1_world import L1World
from support.topics.world import World, batch, fetch, read_all, values_of
from tidemill.base.errors import CorruptError, TidemillError
from tidemill.maintenance.check.contents import _check_batch
from tidemill.objects.store import Buffer
from tidemill.topics.api import BatchRef, BatchTooLargeError
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.batch.columns_trailer import encode_trailer, read_trailer, trailer_bytes, without_trailer
from tidemill.topics.batch.header import is_intact, split_batches
from tidemill.topics.batch_reads import read_batches
from tidemill.topics.compaction.clean import KeyHash, PassRules, collect_keys, compact_batches
from tidemill.topics.compaction.keymap import KeyMap
from tidemill.topics.l0.format import decode_footer
from tidemill.topics.partition_reader import LogPartitionReader

COLUMNS = b"the same rows as columns"


def trailer(count: int, columns: bytes = COLUMNS) -> bytes:
    return encode_trailer(columns, count, 99)


def columns_of(data: Buffer, count: int) -> memoryview | None:
    found = read_trailer(data, count)
    return found.columns if found is not None else None


async def stored(world: World, topic_id: str, end: int, partition: int = 0) -> list[memoryview | None]:
    """Return the columns of each stored batch, read from the bucket."""
    reader = LogPartitionReader(world.consensus, world.objects, world.l1 if isinstance(world, L1World) else None)
    refs = await reader.plan(topic_id, partition, 0, end)
    (found,) = await read_batches(world.objects, [refs])
    assert not isinstance(found, TidemillError)
    return [columns_of(data, ref.record_count) for ref, data in zip(refs, found, strict=True)]


def test_a_trailer_is_read_for_its_batch_only() -> None:
    data = batch("a", "b") + trailer(2)
    assert read_trailer(data, 2) == (COLUMNS, 99)
    assert bytes(without_trailer(data)) == batch("a", "b")
    assert (read_trailer(data, 3), read_trailer(batch("a"), 1), read_trailer(data[:-1], 2)) == (None, None, None)
    assert trailer_bytes(data, len(batch("a", "b"))) == len(trailer(2))
    assert without_trailer(batch("a")) == batch("a") and trailer_bytes(batch("a"), 0) == 0


@pytest.mark.parametrize("at", range(-len(trailer(2)), 0))
def test_no_flipped_bit_of_a_trailer_is_read(at: int) -> None:
    data = bytearray(batch("a", "b") + trailer(2))
    data[at] ^= 4
    assert read_trailer(data, 2) is None
    assert is_intact(without_trailer(data)), "the records stay readable"


@pytest.mark.parametrize("damaged", [b"", b"abc", bytes(12), batch("a")[:11], b"\xff" * 40])
def test_damaged_bytes_are_no_trailer(damaged: bytes) -> None:
    assert read_trailer(damaged, 1) is None
    assert len(without_trailer(damaged)) <= len(damaged)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_clients_get_the_records_alone(cache_bytes: int) -> None:
    """A fetch returns the bytes that were sent, from the cache and from the store."""
    async with World(cache_bytes=cache_bytes) as world:
        row = await world.topic()
        node = world.node()
        first = await node.produce_nowait(row.topic_id, 0, batch("a", "b"), trailer=trailer(2))
        second = await node.produce_nowait(row.topic_id, 0, batch("c"))
        third = await node.produce_nowait(row.topic_id, 0, batch("d", "e", compression="zstd"), trailer=trailer(2))
        assert [each.base_offset for each in (first, second, third)] == [0, 2, 3]
        found = await fetch(node, row.topic_id, 0, 0)
        assert [is_intact(each) for each in found.batches] == [True] * 3
        assert values_of(list(split_batches(b"".join(found.batches)))) == [*zip(range(5), "abcde", strict=True)]
        assert await read_all(world, row.topic_id) == [*zip(range(5), "abcde", strict=True)]
        assert await stored(world, row.topic_id, 5) == [COLUMNS, None, COLUMNS]


async def test_a_retry_and_append_times_leave_the_columns_alone() -> None:
    async with World() as world:
        row = await world.catalogue.create_topic("t", 1, config={"message.timestamp.type": "LogAppendTime"})
        node = world.node()
        sent = batch("a", "b", pid=9)
        for _ in range(2):
            done = await node.produce_nowait(row.topic_id, 0, bytearray(sent), trailer=trailer(2))
            assert done.base_offset == 0
        assert await stored(world, row.topic_id, 2) == [COLUMNS]
        assert [is_intact(each) for each in (await fetch(node, row.topic_id, 0, 0)).batches] == [True]


async def test_the_limit_of_a_message_counts_the_records_alone() -> None:
    async with World() as world:
        row = await world.catalogue.create_topic("t", 1, config={"max.message.bytes": "2000"})
        node = world.node()
        await node.produce_nowait(row.topic_id, 0, batch("a"), trailer=trailer(1, bytes(5000)))
        with pytest.raises(BatchTooLargeError, match=f"bytes={len(batch('a' * 2000))} limit=2000"):
            await node.produce_nowait(row.topic_id, 0, batch("a" * 2000), trailer=trailer(1))


async def test_columns_move_to_l1_with_their_batch() -> None:
    async with L1World(cache_bytes=0) as world:
        row = await world.topic()
        node = world.node()
        for n in range(9):
            added = trailer(1, b"%d" % n) if n % 2 else b""
            await node.produce_nowait(row.topic_id, 0, batch(str(n)), trailer=added)
        before = await stored(world, row.topic_id, 9)
        assert before == [b"%d" % n if n % 2 else None for n in range(9)]
        done = await world.move(node, row.topic_id)
        assert done.failed is None and world.state(node, row.topic_id).reconciled == 9
        await world.forget_l0(node)
        assert await stored(world, row.topic_id, 9) == before
        found = await fetch(node, row.topic_id, 0, 0)
        assert [is_intact(each) for each in found.batches] == [True] * 9
        assert values_of(found.batches) == [(n, str(n)) for n in range(9)]


def keyed(base: int, *keys: bytes) -> bytes:
    return encode_batch([Record(key, b"v", (), 1_000) for key in keys], base_offset=base)


def test_compaction_drops_the_columns_of_a_batch_that_it_rewrites_and_of_no_other() -> None:
    parts = [(0, keyed(0, b"a", b"b"), 2), (2, keyed(2, b"b", b"c"), 2), (4, keyed(4, b"d"), 1)]
    batches: list[tuple[BatchRef, bytes]] = []
    for base, data, count in parts:
        whole = data + trailer(count)
        batches.append((BatchRef("o", 0, len(whole), base, count, 1_000), whole))
    key_hash, keys = KeyHash(b"secret"), KeyMap(1 << 20)
    collect_keys(batches, key_hash, keys)
    found = compact_batches(batches, PassRules(keys, key_hash, 5, 0, 0, captured=False))
    kept = [columns_of(each.data, each.next_offset - each.base_offset) for each in found.batches]
    assert found.changed and kept == [None, COLUMNS, COLUMNS]
    assert [is_intact(without_trailer(each.data)) for each in found.batches] == [True] * 3


async def test_the_deep_check_reads_columns_and_names_damaged_ones() -> None:
    async with World() as world:
        row = await world.topic()
        node = world.node()
        await node.produce_nowait(row.topic_id, 0, batch("a", "b"), trailer=trailer(2))
        await node.produce_nowait(row.topic_id, 0, batch("c"))
        (key, *_) = [meta.key async for meta in world.objects.list("l0/")]
        data = memoryview(bytearray(await world.objects.get(key)))
        (region,) = decode_footer(data)
        end = region.position + region.length
        assert _check_batch(data[:end], "partition=t/0", 0) == end
        data[end - 1] ^= 1
        with pytest.raises(CorruptError, match="the columns of a record batch are damaged; its records are not"):
            _check_batch(data[:end], "partition=t/0", 0)
