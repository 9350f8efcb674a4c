"""L1's rows on a real metastore: found by offset and by time, committed once even if the answer is lost."""

from __future__ import annotations

import asyncio

import pytest

from support.topics.l1_store import Commit, add_of, added, opened
from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.rows import L1_OBJECTS, PARTITIONS
from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.topics.l1 import row_transitions
from tidemill.topics.l1.extent_store import COMMIT_TRIES


async def test_extents_are_found_by_offset_from_anywhere() -> None:
    async with opened() as rows:
        for i in range(20):
            await added(rows, add_of(f"o{i}", (10 * i, 10 * i + 9, 5)))
        await added(rows, add_of("other", (0, 500, 5), partition=1))
        for offset in (0, 9, 10, 99, 100, 199):
            found = [extent.base_offset async for extent in rows.extents("t", 0, offset)]
            assert found == list(range(offset // 10 * 10, 200, 10))
        assert [extent async for extent in rows.extents("t", 0, 200)] == []
        assert [extent async for extent in rows.extents("t", 2)] == []


async def test_extents_are_found_by_time_though_their_times_go_back() -> None:
    async with opened() as rows:
        times = [5, 3, 9, 9, 2, 20, 1, 7, 30, 4]
        await added(rows, add_of("o", *[(10 * i, 10 * i + 9, 5) for i in range(10)], max_ms=times))
        for start in (0, 30, 55, 90):
            await rows.set_start("t", 0, start)
            left = [(10 * i, ms) for i, ms in enumerate(times) if 10 * i + 9 >= start]
            for wanted in range(35):
                found = await rows.extent_for_time("t", 0, wanted)
                first = next((base for base, ms in left if ms >= wanted), None)
                assert (found.base_offset if found else None) == first, (start, wanted)
        assert await rows.extent_for_time("t", 1, 0) is None


@pytest.mark.parametrize("landed", [True, False], ids=["it landed", "it did not"])
async def test_an_add_whose_answer_was_lost_takes_place_once(landed: bool) -> None:
    async with opened() as rows:
        await added(rows, add_of("o", (0, 9, 5)))
        await rows.register("t", "p")

        async def lose(real: Commit) -> int:
            rows.fault = None
            if landed:
                await real()
            raise UnknownOutcomeError("the answer was lost.")

        rows.fault = lose
        assert await rows.add(add_of("p", (10, 19, 5))) == {0: 20}
        row = await rows.partition("t", 0)
        assert row is not None and (row.next, row.extent_count) == (20, 2)


async def test_an_add_of_which_nobody_knows_is_unknown_and_the_rows_tell_later() -> None:
    async with opened() as rows:
        await rows.register("t", "o")

        async def silent(real: Commit) -> int:
            raise UnknownOutcomeError("nobody answers.")

        rows.fault = silent
        with pytest.raises(UnknownOutcomeError):
            await rows.add(add_of("o", (0, 9, 5)))
        rows.fault = None
        assert await rows.partition("t", 0) is None
        assert await rows.add(add_of("o", (0, 9, 5))) == {0: 10}


async def test_an_add_that_did_not_happen_says_so() -> None:
    async with opened() as rows:
        await rows.register("t", "o")

        async def away(real: Commit) -> int:
            raise UnavailableError("consensus is away.")

        rows.fault = away
        with pytest.raises(UnavailableError):
            await rows.add(add_of("o", (0, 9, 5)))


async def test_two_that_add_to_one_partition_at_once_leave_one_of_them_corrected() -> None:
    async with opened() as rows:
        await rows.register("t", "a")
        await rows.register("t", "b")
        nexts = await asyncio.gather(rows.add(add_of("a", (0, 9, 5))), rows.add(add_of("b", (0, 4, 5))))
        row = await rows.partition("t", 0)
        assert row is not None and row.extent_count == 1
        assert list(nexts) == [{0: row.next}, {0: row.next}]


async def test_a_registration_that_expires_under_an_add_refuses_it() -> None:
    async with opened() as rows:
        await rows.register("t", "o")
        key = L1_OBJECTS.key("t", "o")

        async def expire_first(real: Commit) -> int:
            rows.fault = None
            expired = row_transitions.expire_registration(row_transitions.new_object_row("t", "o", 1), 2)
            assert expired is not None
            await rows._metastore.commit([L1_OBJECTS.encode(expired)])
            return await real()

        rows.fault = expire_first
        with pytest.raises(InvalidError, match="expired=True"):
            await rows.add(add_of("o", (0, 9, 5)))
        found = await rows._metastore.get_row(key)
        assert found is not None and row_transitions.is_garbage(L1_OBJECTS.decode(key, found.value))


async def test_a_start_removes_any_number_of_extents_and_goes_on_after_a_lost_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill.topics.l1.extent_store.TRIM_EXTENTS_MAX", 3)
    async with opened() as rows:
        await added(rows, add_of("o", *[(i, i, 5) for i in range(10)]))

        async def lose(real: Commit) -> int:
            rows.fault = None
            await real()
            raise UnknownOutcomeError("the answer was lost.")

        rows.fault = lose
        with pytest.raises(UnknownOutcomeError):
            await rows.set_start("t", 0, 9)
        commits = rows.commits
        await rows.set_start("t", 0, 9)
        assert rows.commits - commits == 2, "three went before, six are left: three by three"
        assert [extent.base_offset async for extent in rows.extents("t", 0)] == [9]
        await rows.set_start("t", 0, 9)
        assert rows.commits - commits == 2, "made again it changes nothing"
        await rows.set_start("t", 5, 9)  # a partition without a row


async def test_rows_that_keep_changing_end_as_unavailable() -> None:
    async with opened() as rows:
        await rows.register("t", "o")
        turn = 0

        async def interfere(real: Commit) -> int:
            nonlocal turn
            turn, rows.fault = turn + 1, None
            await added(rows, add_of(f"x{turn}", (turn, turn, 5)))
            rows.fault = interfere
            return await real()

        rows.fault = interfere
        with pytest.raises(UnavailableError, match="change too often"):
            await rows.add(add_of("o", (0, 9, 5)))
        assert turn == COMMIT_TRIES


async def test_places_hold_both_rows_of_each_partition() -> None:
    async with opened() as rows:
        await added(rows, add_of("o", (0, 9, 5), partition=1))
        await rows._metastore.commit([PARTITIONS.encode(PartitionRow("t", 0, 0, 7))])
        found = await rows.partition_rows("t", [0, 1])
        assert found[0].l1 is None and found[0].checkpoint == PartitionRow("t", 0, 0, 7)
        assert found[1].l1 is not None and found[1].checkpoint is None
        assert await rows.partition_rows("t", []) == {}


async def test_an_extent_that_is_added_while_the_start_moves_is_not_left_behind() -> None:
    """Extents are read after the row that guarantees their completeness."""
    async with opened() as rows:
        await added(rows, add_of("o", (0, 9, 5)))
        real = rows.first_extents

        async def oldest(
            topic_id: str, partition: int, offset: int, count: int, *, fresh: bool = True
        ) -> list[L1ExtentRow]:
            rows.first_extents = real  # type: ignore[method-assign]
            found = await real(topic_id, partition, offset, count, fresh=fresh)
            await added(rows, add_of("p", (10, 14, 5)))
            return found

        rows.first_extents = oldest  # type: ignore[method-assign]
        await rows.set_start("t", 0, 20)
        assert [extent async for extent in rows.extents("t", 0)] == []
        row = await rows.partition("t", 0)
        assert row is not None and (row.start, row.next, row.extent_count) == (20, 20, 0)
