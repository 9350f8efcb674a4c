"""The rows of docs/internals/capture-scenarios.md about PostgreSQL: the state that a session interrupted midway leaves
to its successor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.capture.world import World, positions
from support.waiting import until
from tidemill.base.errors import UnavailableError
from tidemill.capture.catalog import relations
from tidemill.capture.changes import Fragment
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.tables.table_states import TableStates
from tidemill.metastore.catalogue import PipelineRow

pytestmark = pytest.mark.postgres

TABLE = "CREATE TABLE a (id int PRIMARY KEY, v int)"


class DyingSink:
    """A sink that flushes only on request. Once `ripe`, it dies while it is handed a fragment that begins with this
    row.
    """

    def __init__(self, ripe: Callable[[], Awaitable[None]] | None = None) -> None:
        self.got: list[Fragment] = []
        self.dies_at = ""
        self.ripe = ripe
        self.died = 0
        self.notices: FlushNotices | None = None

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        if self.dies_at and rows([fragment])[:1] == [self.dies_at]:
            self.dies_at = ""
            if self.ripe is not None:
                await self.ripe()
            self.died += 1
            raise RuntimeError("the sink died")
        self.notices = notices
        self.got.append(fragment)
        return ["dying"] if fragment.changes else []

    def flush(self) -> None:
        assert self.notices is not None
        self.notices.report_flushed("dying", max(f.last for f in self.got))

    async def aclose(self) -> None: ...


class WaitingSink:
    """A sink that stores nothing. It waits for `ripe` while it receives a fragment that ends with this row and does not
    commit.
    """

    def __init__(self, row: str, ripe: Callable[[], Awaitable[None]]) -> None:
        self.row = row
        self.ripe = ripe
        self.met = 0

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        if rows([fragment])[-1:] == [self.row] and not fragment.commits:
            self.met = fragment.commit_lsn
            await self.ripe()
        return []

    async def aclose(self) -> None: ...


def rows(fragments: list[Fragment]) -> list[str]:
    return [change.new["id"] or "" for f in fragments for change in f.changes if change.new is not None]


async def test_slc6_a_sink_that_dies_with_work_pending_ends_the_session_and_the_next_one_hands_it_out_again(
    postgres_dsn: str,
) -> None:
    """The dead sink no longer pins the slot: its entry ends with the session, and the transaction is
    delivered again.
    """
    async with World(postgres_dsn) as world:
        sink = DyingSink()
        await world.sql(TABLE)
        async with world.capture(sinks=[sink]) as capture:
            await world.sql("INSERT INTO a VALUES (1, 1)")
            await world.caught_up()
            assert capture.facts()["pending"] != {} and rows(sink.got) == ["1"]
            commit = next(f for f in sink.got if f.changes).commit_lsn
            sink.got, sink.dies_at = [], "2"
            await world.sql("INSERT INTO a VALUES (2, 2), (3, 3)")
            await until(lambda: rows(sink.got) == ["1", "2", "3"], "all of it is handed out again")
            assert sink.died == 1
            await world.caught_up()
            assert await world.confirmed() <= commit
            sink.flush()

            async def confirmed() -> bool:
                return await world.confirmed() > commit

            await until(confirmed, "the slot moves on")
        assert len(await world.records("a")) == 3


async def test_slc10_a_table_that_cannot_be_looked_up_just_now_ends_the_session_and_nothing_is_confirmed(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe, refused = relations.describe_tables, 0

    async def failing(*args: Any, **more: Any) -> Any:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise UnavailableError("the catalogue does not answer.")
        return await describe(*args, **more)

    async with World(postgres_dsn) as world:
        await world.sql(TABLE)
        async with world.capture():
            await world.caught_up()
            monkeypatch.setattr(relations, "describe_tables", failing)
            confirmed = await world.confirmed()
            await world.sql("INSERT INTO a VALUES (1, 1)")
            commit = await world.wal_end()

            async def failed() -> bool:
                reported = await world.confirmed()
                assert refused == 2 or reported < commit, (confirmed, reported, commit)
                return refused == 2

            await until(failed, "two sessions ended with it")
            await world.caught_up()
            assert await world.folded("a") == {'{"id":1}': {"id": 1, "v": 1}}
            assert len(await world.records("a")) == 1


async def test_slc11_rows_of_a_table_that_is_dropped_before_they_are_read_keep_their_key(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(TABLE, "CREATE TABLE b (id int PRIMARY KEY)")
        # a reader retains the topic
        await world.catalogue.put(PipelineRow("p", {"a": f"capture:{world.name}:public.a"}))
        async with world.capture():
            await world.caught_up()
        await world.sql("INSERT INTO a VALUES (1, 1)", "INSERT INTO a VALUES (2, 2)", "DELETE FROM a WHERE id = 1")
        await world.sql("DROP TABLE a", "INSERT INTO b VALUES (7)")
        async with world.capture():
            row = await world.paused("a", "dropped from the database")
            assert row.state == "dropped"
            await world.caught_up()
            assert await world.folded("a") == {'{"id":2}': {"id": 2, "v": 2}}
            assert len(await world.records("b")) == 1


async def test_slc13_a_description_whose_consequence_was_not_stored_is_seen_again_by_the_next_session(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session dies after it detects the row and before it pauses the table. Nothing of that transaction was
    written before.
    """
    change, died = TableStates.update_row, 0

    async def dying(self: TableStates, name: str, *args: Any) -> Any:
        nonlocal died
        if not died:
            died += 1
            raise UnavailableError("cut off here.")
        return await change(self, name, *args)

    async with World(postgres_dsn) as world:
        await world.sql(TABLE, "CREATE TABLE b (id int PRIMARY KEY)", "INSERT INTO a VALUES (1, 1)")
        async with world.capture(table_poll_s=60):
            await world.caught_up()
            monkeypatch.setattr(TableStates, "update_row", dying)
            await world.sql("ALTER TABLE a DROP CONSTRAINT a_pkey")
            await world.transaction("INSERT INTO a VALUES (1, 2)", "INSERT INTO b VALUES (7)")
            row = await world.paused("a")
            assert died == 1 and row.paused_lsn
            await world.caught_up()
            assert await world.folded("a") == {'{"id":1}': {"id": 1, "v": 1}}
            assert len(await world.records("b")) == 1


async def test_st2_a_commit_after_all_of_a_topics_records_are_durable_moves_the_boundary_and_writes_nothing(
    postgres_dsn: str,
) -> None:
    """The committing fragment has another table's row; it is delivered once the rounds before it have ended."""
    async with World(postgres_dsn) as world:

        async def durable() -> bool:
            return len(await world.records("a")) == 30

        async def bound() -> set[int]:
            return {b.offsets[await world.topic_id("a")][0] for b in await world.remap().after(0)}

        async def look() -> None:
            await until(durable, "all records of the table are in its topic")
            seen.append((await bound(), await world.records("a"), await world.confirmed()))

        seen: list[tuple[set[int], list[Any], int]] = []
        await world.sql(TABLE, "CREATE TABLE b (id int PRIMARY KEY)")
        sink = WaitingSink("30", look)
        async with world.capture(sinks=[sink], fragment_changes=10):
            await world.caught_up()
            rows_of_a = "INSERT INTO a SELECT g, g FROM generate_series(1, 30) g"
            await world.transaction(rows_of_a, "INSERT INTO b VALUES (7)")
            await world.caught_up()
            ((bound_before, records, confirmed),) = seen
            assert bound_before == {0} and confirmed < sink.met, "durable, and not shown or acknowledged"
            assert await bound() == {0, 30}, "the boundary moves in one step"
            assert await world.records("a") == records

            async def acknowledged() -> bool:
                return await world.confirmed() >= sink.met

            await until(acknowledged, "the slot moves on")


async def test_st3_half_a_transaction_that_a_dead_session_wrote_is_not_bound_and_not_written_again(
    postgres_dsn: str,
) -> None:
    """The topic is not trimmed: readers follow bindings, and the replay counts the records that are already there."""
    async with World(postgres_dsn) as world:

        async def half() -> bool:
            return len(await world.records("a")) == 30

        sink = DyingSink(lambda: until(half, "three fragments are in the topic"))
        await world.sql(TABLE)
        async with world.capture(sinks=[sink], fragment_changes=10):
            await world.caught_up()
            sink.dies_at = "21"
            await world.sql("INSERT INTO a SELECT g, g FROM generate_series(1, 57) g")
            await until(lambda: sink.died == 1, "the session dies before the commit is handed on")
            await world.caught_up()
            records = await world.records("a")
            assert len(records) == len(set(positions(records))) == 57
            topic = await world.topic_id("a")
            offsets = {b.offsets[topic][0] for b in await world.remap().after(0)}
            assert offsets == {0, 57}, "no binding shows a part of it"
            sink.flush()
