"""Compaction by key, from the records of a producer to those of a consumer, through the real reconciler and job."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from support.maintenance.l1_world import L1World
from tidemill.base.errors import CorruptError, TidemillError, UnknownOutcomeError
from tidemill.maintenance.scheduler import Retention, StepBudget
from tidemill.maintenance.topics.compaction import TopicCompaction
from tidemill.metastore.catalogue import TopicRow
from tidemill.metastore.rows import ABORTED, L1_CLEANED, L1_EXTENTS, PARTITIONS
from tidemill.topics.api import FetchRead, InvalidRecordsError, Marker, ProduceTransaction
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.batch.control_batch import as_transactional, is_commit_marker
from tidemill.topics.batch.header import CONTROL, HEADER_BYTES, parse_header
from tidemill.topics.lifecycle.checkpoint import PartitionsStage
from tidemill.topics.lifecycle.retention import no_retention_holds

COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
Row = tuple[int, bytes | None, bytes | None]


class World(L1World):
    def __init__(self, **config: str) -> None:
        super().__init__()
        self.config = COMPACT | {name.replace("_", "."): value for name, value in config.items()}
        self.job = self.compactor()
        self.topics.set_coordinator(self._confirm)
        self.sent: list[Row] = []
        self.sequences: dict[int, int] = {}
        """Next sequence of each producer with transactions."""

    async def _confirm(self, *_: object) -> None:
        """Every transaction is open."""

    async def transaction(self, producer: int, key: str, value: str, *, commit: bool) -> Row:
        record = Record(key.encode(), value.encode(), timestamp_ms=1_000)
        sequence = self.sequences.get(producer, 0)
        data = as_transactional(encode_batch([record], producer_id=producer, producer_epoch=0, base_sequence=sequence))
        self.sequences[producer] = sequence + 1
        topic_id = self.topic.topic_id
        done = await self.topics.produce_nowait(topic_id, 0, bytearray(data), within=ProduceTransaction("t", 0))
        await self.topics.mark(topic_id, 0, Marker(producer, 0, commit=commit, coordinator_epoch=0))
        return done.base_offset, record.key, record.value

    def compactor(self, room: int = 1 << 20, target_bytes: int = 1 << 20) -> TopicCompaction:
        return TopicCompaction(self.levels._g, self.holds, room=room, target_bytes=target_bytes)

    async def holds(self, topic: TopicRow) -> Mapping[int, int] | None:
        return await no_retention_holds(topic)

    async def __aenter__(self) -> World:
        self.topic = await self.catalogue.create_topic("t", 2, config=self.config)
        return self

    async def send(self, *rows: tuple[str, str | None], partition: int = 0, at_ms: int = 1_000, **how: Any) -> None:
        records = [Record(k.encode(), v.encode() if v is not None else None, timestamp_ms=at_ms) for k, v in rows]
        data = encode_batch(records, **how)
        result = await self.topics.produce_nowait(self.topic.topic_id, partition, bytearray(data))
        if partition == 0:
            self.sent += [(result.base_offset + i, r.key, r.value) for i, r in enumerate(records)]

    async def move(self) -> None:
        """Move all records into L1, one extent per call."""
        stage = PartitionsStage(self.consensus, self.objects, self.metastore, self.clock)
        await stage.load()
        for unit in (await stage.gather()).values():
            for group in unit:
                await self.metastore.commit(group)
        done = await self.reconciler.run_round(self.topic.topic_id, range(2))
        assert done.failed is None
        await self.topics._commits.drain(30)

    async def compact(self, job: TopicCompaction | None = None) -> None:
        while await (job or self.job).run(StepBudget(self.clock, 1)):
            pass

    async def read(self, start: int = 0, *, partition: int = 0, committed: bool = False) -> list[Row]:
        """Read as a client does: fetch after fetch, each from the end of the last batch, without aborted records if
        `committed`.
        """
        found: list[Row] = []
        while True:
            read = FetchRead(self.topic.topic_id, partition, start, 100, committed=committed)
            [answer] = await self.topics.fetch([read], max_wait_s=0, min_bytes=1, max_bytes=100)
            assert answer.error is None, answer.error
            aborted = {producer for producer, _ in answer.aborted}
            for batch in answer.batches:
                header, columns = decode_columns(batch)
                if header.attributes & 0x20:
                    aborted.discard(header.producer_id)
                elif not (committed and header.attributes & 0x10 and header.producer_id in aborted):
                    rows = zip(columns.offsets.tolist(), columns.keys, columns.values, strict=True)
                    found += [row for row in rows if row[0] >= start]
                following = header.next_offset
            if not answer.batches:
                assert start == answer.high_watermark, "who reads on arrives at the end"
                return found
            start = following

    async def abort_markers(self) -> list[int]:
        """Return the offsets of the abort markers that a client can still fetch."""
        found, start = list[int](), 0
        while True:
            [answer] = await self.topics.fetch(
                [FetchRead(self.topic.topic_id, 0, start, 1 << 20)], max_wait_s=0, min_bytes=1, max_bytes=1 << 20
            )
            for batch in answer.batches:
                header = parse_header(batch)
                if header.attributes & CONTROL and not is_commit_marker(batch[HEADER_BYTES:]):
                    found.append(header.base_offset)
                start = header.next_offset
            if not answer.batches:
                return found

    def newest(self, rows: list[Row] | None = None) -> list[Row]:
        """Return the newest record of each key. The last batch is exempt from compaction."""
        rows = self.sent if rows is None else rows
        return sorted({key: (offset, key, value) for offset, key, value in rows}.values())


async def fill(world: World, rounds: int = 6) -> None:
    """Write recurring keys in extents of two batches each, then a last batch in its own extent, which stays."""
    codecs = ["none", "gzip", "snappy", "lz4", "zstd"]
    for number in range(rounds):
        for part in range(2):
            await world.send(
                *((f"k{(number + i * part) % 5}", f"{number}.{part}.{i}" * 9) for i in range(5)),
                compression=codecs[number % 5],
            )
        await world.move()
    await world.send(("last", "x"))
    await world.move()


async def test_of_each_key_the_newest_record_stays_and_what_was_replaced_is_collected() -> None:
    async with World() as world:
        await fill(world)
        await world.compact()
        assert await world.read() == world.newest()
        for start in range(len(world.sent) + 1):
            assert await world.read(start) == [row for row in world.newest() if row[0] >= start]
        assert await world.problems() == []
        before = len(await world.stored())
        await world.collect()
        assert len(await world.stored()) < before and await world.read() == world.newest()
        assert world.job.facts()["removed_bytes"] > 0  # type: ignore[operator]
        while await world.levels.run(StepBudget(world.clock, 1)):
            pass
        assert await world.read() == world.newest() and await world.problems() == []


async def test_what_is_clean_is_not_rewritten_and_what_comes_later_is_compacted_again() -> None:
    async with World() as world:
        await fill(world)
        await world.compact()
        passes = world.job.facts()["passes"]
        await world.compact()
        await world.compact(world.compactor())
        assert world.job.facts()["passes"] == passes == 1
        await fill(world)
        await world.compact()
        rows = [row for row in world.newest() if row[1] != b"last"]
        assert [row for row in await world.read() if row[1] != b"last"] == rows
        assert (world.job.facts()["passes"], await world.problems()) == (2, [])


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_more_keys_than_the_map_holds_take_several_passes(room: int) -> None:
    async with World() as world:
        await fill(world)
        job = world.compactor(room, target_bytes=300)
        await world.compact(job)
        assert await world.read() == world.newest() and await world.problems() == []
        assert job.facts()["passes"] > 1  # type: ignore[operator]


async def test_a_tombstone_outlives_what_it_deletes_by_its_delay() -> None:
    async with World() as world:
        await world.send(("a", "1"), ("b", "1"))
        await world.move()
        await world.send(("a", None))
        await world.send(("c", "1"))
        await world.move()
        await world.compact()
        assert await world.read() == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1")]
        [row] = await world.metastore.rows(L1_CLEANED)
        assert row.cleaned == 3 and [(below, count) for below, _, count in row.tombstones] == [(3, 1)]
        await world.compact()
        assert len(await world.read()) == 3
        config = world.config | {"delete.retention.ms": "0"}
        await world.catalogue.change_topic("t", lambda row: msgspec.structs.replace(row, config=config))
        await world.compact()
        assert await world.read() == [(1, b"b", b"1"), (3, b"c", b"1")]
        assert [row.tombstones for row in await world.metastore.rows(L1_CLEANED)] == [()]


async def test_what_is_young_or_not_read_yet_stays() -> None:
    async with World(min_compaction_lag_ms="3600000") as world:
        now_ms = world.clock.now_ms()
        for at_ms in (1_000, 1_001, now_ms, 1_002):
            await world.send(("a", str(at_ms)), at_ms=at_ms)
            await world.move()
        held: Mapping[int, int] | None = None

        async def holds(topic: TopicRow) -> Mapping[int, int] | None:
            return held

        world.job._holds = holds
        await world.compact()
        assert len(await world.read()) == 4, "a pipeline without a table reads from the beginning"
        held = {0: 1}
        await world.compact(again(world))
        assert len(await world.read()) == 4, "a pipeline has read one"
        held = {0: 4}
        await world.compact(again(world))
        assert [row[0] for row in await world.read()] == [1, 2, 3], (
            "what is younger than an hour stays, and what follows"
        )


def again(world: World) -> TopicCompaction:
    """Return the job as another node would start it."""
    job = world.compactor()
    job._holds = world.job._holds
    return job


@pytest.mark.parametrize(
    ("config", "compacted"),
    [({}, False), ({"min.cleanable.dirty.ratio": "0.4"}, True), ({"max.compaction.lag.ms": "1"}, True)],
)
async def test_a_partition_is_compacted_when_enough_is_dirty_or_something_is_old(
    config: dict[str, str], compacted: bool
) -> None:
    async with World() as world:
        await fill(world)
        await world.compact()
        full = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.9", **config}
        await world.catalogue.change_topic("t", lambda row: msgspec.structs.replace(row, config=full))
        await world.send(*((f"k{i}", "v" * 100) for i in range(5)))
        await world.send(("end", "x"))
        await world.move()
        await world.compact()
        assert world.job.facts()["passes"] == 1 + compacted


async def test_a_topic_that_only_forgets_is_not_compacted_and_one_that_only_compacts_does_not_forget() -> None:
    async with World(cleanup_policy="delete") as world:
        for policy, kept in (("delete", 5), ("compact", 5)):
            config = {"cleanup.policy": policy, "retention.bytes": "1" if policy == "compact" else "-1"}
            await world.catalogue.change_topic(
                "t", lambda row, config=config: msgspec.structs.replace(row, config=config)
            )
            if policy == "delete":
                for i in range(5):
                    await world.send(("a", str(i)))
                    await world.move()
                await world.compact()
            await world.topics.refresh()
            await world.topics.retainer.run_round(world.topics._rows.topics)
            await world.topics._commits.drain(30)
            assert len(await world.read()) == kept


@pytest.mark.parametrize("policy", ["compact,delete", "delete, compact"])
async def test_a_topic_may_do_both(policy: str) -> None:
    async with World(cleanup_policy=policy, retention_bytes="1") as world:
        await fill(world)
        await world.compact()
        await world.topics.refresh()
        await world.topics.retainer.run_round(world.topics._rows.topics)
        await world.topics._commits.drain(30)
        state = world.topics._led[world.topic.topic_id, 0].state
        assert state.log_start > 0
        assert await world.read(state.log_start) == [row for row in world.newest() if row[0] >= state.log_start]
        await world.send(("k0", "after"))
        await world.send(("end", "after"))
        await world.move()
        await world.compact()
        assert await world.problems() == []


async def test_aborted_records_and_markers_of_commits_go_and_readers_of_what_is_committed_see_the_rest() -> None:
    async with World() as world:
        kept = [await world.transaction(7, "a", "1", commit=True)]
        await world.transaction(7, "a", "aborted", commit=False)
        await world.transaction(8, "b", "aborted", commit=False)
        kept.append(await world.transaction(7, "c", "1", commit=True))
        kept.append(await world.transaction(8, "b", "1", commit=True))
        await world.move()
        await world.send(("end", "x"))
        await world.move()
        await world.compact()
        expected = [*kept, (10, b"end", b"x")]
        assert await world.read(committed=True) == await world.read() == expected
        for start in range(12):
            assert await world.read(start, committed=True) == [row for row in expected if row[0] >= start]
        assert await world.problems() == []


@pytest.mark.parametrize("collect_after_s", [0, 3600])
async def test_what_was_aborted_is_forgotten_once_compaction_took_it_and_nobody_reads_what_was_there(
    collect_after_s: int,
) -> None:
    async with World() as world:
        context = msgspec.structs.replace(world.levels._g, retention=Retention(collect_after_s=collect_after_s))
        job = TopicCompaction(context, world.holds)
        kept: dict[str, Row] = {}
        remembered: list[int] = []
        state = None
        for number in range(12):
            for key in "ab":
                kept[key] = await world.transaction(7, key, str(number), commit=True)
                await world.transaction(8, key, f"aborted {number}", commit=False)
            if state is None:
                state = world.topics._led[world.topic.topic_id, 0].state
            await world.topics.refresh()
            await world.move()
            await world.compact(job)
            shown = [row for row in await world.read(committed=True) if (row[1] or b"").decode() in kept]
            assert shown[-2:] == sorted(kept.values())
            assert not any((value or b"").startswith(b"aborted") for _, _, value in shown)
            remembered.append(len(state.aborted))
            restored = await world.metastore.get(PARTITIONS, world.topic.topic_id, 0)
            rows = await world.metastore.rows(ABORTED, world.topic.topic_id, 0)
            named = {row.last_offset for row in rows if restored and row.last_offset >= restored.aborted_start}
            assert named <= set(await world.abort_markers()), "what a restore would name has its marker"
        await world.move()
        rows = await world.metastore.rows(ABORTED, world.topic.topic_id, 0)
        assert [row.last_offset for row in rows] == list(state.aborted.lasts)
        markers = await world.abort_markers()
        if collect_after_s:
            assert len(markers) == 24
            assert remembered == list(range(2, 26, 2)) and not state.aborted_start
        else:
            assert max(remembered) <= 8 and state.aborted_start > 60, "of the last passes alone"
            assert len(markers) <= 8 and set(state.aborted.lasts) <= set(markers), "so are the markers"
        for start in range(0, state.high_watermark, 5):
            assert all(not (value or b"").startswith(b"ab") for _, _, value in await world.read(start, committed=True))
        assert await world.problems() == []


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_a_record_without_a_key_is_refused_also_while_its_partition_opens(compression: str) -> None:
    async with World() as world:
        good = encode_batch([Record(b"k", b"v", timestamp_ms=1)] * 3, compression=compression)
        bad = encode_batch([Record(b"k", b"v"), Record(None, b"v")], compression=compression)
        for _ in range(2):
            sent = [world.topics.produce_nowait(world.topic.topic_id, 0, bytearray(data)) for data in (good, bad, good)]
            results = await asyncio.gather(*sent, return_exceptions=True)
            assert isinstance(results[1], InvalidRecordsError) and [at for at, _ in results[1].record_errors] == [1]
            assert not isinstance(results[0], BaseException) and not isinstance(results[2], BaseException)
        assert len(await world.read()) == 12


async def test_two_nodes_that_compact_at_once_and_one_that_levels_harm_nothing() -> None:
    async with World() as world:
        for _ in range(3):
            await fill(world, 4)

            async def keep_at_it(job: TopicCompaction) -> None:
                for _ in range(8):
                    await job.run(StepBudget(world.clock, 1, step_bytes=300))

            async def level() -> None:
                for _ in range(8):
                    await world.levels.run(StepBudget(world.clock, 1))

            jobs = [keep_at_it(world.compactor(2, 300)), keep_at_it(world.compactor(3, 600)), level()]
            for outcome in await asyncio.gather(*jobs, return_exceptions=True):
                assert outcome is None or isinstance(outcome, TidemillError), outcome
            await world.compact(world.compactor())
            assert [row for row in await world.read() if row[1] != b"last"] == [
                row for row in world.newest() if row[1] != b"last"
            ]
            assert await world.problems() == []


async def test_retention_in_the_middle_of_a_pass_takes_its_extents_from_it() -> None:
    async with World() as world:
        await fill(world)
        job, real = world.compactor(target_bytes=500), world.rows.register
        assert job is not None

        async def register(topic_id: str, object_id: str) -> None:
            job._rows.register = real  # type: ignore[method-assign]
            await world.rows.set_start(topic_id, 0, 15)
            await real(topic_id, object_id)

        job._rows.register = register  # type: ignore[method-assign]
        world.topics._led[world.topic.topic_id, 0].advance_log_start(15)
        await world.topics._commits.drain(30)
        await world.compact(job)
        assert await world.read(15) == [row for row in world.newest() if row[0] >= 15]


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("landed", [True, False])
async def test_a_pass_cut_off_at_any_commit_is_made_again(nth: int, landed: bool) -> None:
    async with World() as world:
        await fill(world, 3)
        real, seen = world.metastore.commit, 0

        async def commit(rows: Any, *, expects: Any = ()) -> int:
            nonlocal seen
            seen += 1
            if seen == nth:
                if landed:
                    await real(rows, expects=dict(expects))
                raise UnknownOutcomeError("the answer was lost.")
            return await real(rows, expects=dict(expects))

        world.metastore.commit = commit  # type: ignore[method-assign]
        for _ in range(3):
            try:
                await world.compact(world.compactor(3, 300))
            except TidemillError:
                continue
        assert await world.read() == world.newest() and await world.problems() == []
        await world.collect()
        assert await world.read() == world.newest()


async def test_a_partition_whose_object_is_gone_is_told_and_keeps_no_other_waiting() -> None:
    async with World() as world:
        for i in range(4):
            await world.send(("a", str(i)), partition=0)
            await world.move()
            await world.send(("a", str(i)), partition=1)
            await world.move()
        [first, *_] = [row for row in await world.metastore.rows(L1_EXTENTS) if row.partition == 0]
        await world.objects.delete(first.object_key)
        for _ in range(2):
            with pytest.raises(CorruptError, match=first.object_key):
                await world.compact()
        assert [row[0] for row in await world.read(partition=1)] == [2, 3]


async def test_t8_a_truncate_of_a_captured_table_takes_what_was_before_it_and_goes_as_a_tombstone_does() -> None:
    async def truncate(world: World) -> None:
        record = Record(None, None, (("tm.op", b"truncate"),), timestamp_ms=1_000)
        result = await world.topics.produce_nowait(world.topic.topic_id, 0, bytearray(encode_batch([record])))
        world.sent.append((result.base_offset, None, None))

    async with World() as world:
        world.topic = await world.catalogue.create_topic("shop.t", 2, kind="capture", config=world.config)
        await world.send(("a", "1"), ("b", "1"))
        await world.move()
        await world.compact()
        await truncate(world)
        await world.send(("c", "1"), ("a", "2"))
        await world.move()
        await world.send(("last", "x"))
        await world.move()
        await world.compact()
        assert await world.read() == [(2, None, None), (3, b"c", b"1"), (4, b"a", b"2"), (5, b"last", b"x")]
        config = world.config | {"delete.retention.ms": "0"}
        await world.catalogue.change_topic("shop.t", lambda row: msgspec.structs.replace(row, config=config))
        await world.compact()
        assert await world.read() == [(3, b"c", b"1"), (4, b"a", b"2"), (5, b"last", b"x")]
        assert await world.problems() == []
