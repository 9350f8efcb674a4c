"""The catalogue over domains: one winner per race, and no loss or duplication after unknown outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from msgspec.structs import replace

from support.metastore.memory_rows import Shared, opener
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    MissingError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import (
    CaptureRow,
    CaptureTableRow,
    Catalogue,
    PipelineRow,
    TopicRow,
)
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import NAMES, TOPIC_IDS, TOPICS
from tidemill.metastore.rows.catalogue import NameRow

CAPTURE = CaptureRow("shop", "7", "slot", "publication", 2, True, history=((1, 0),))


@dataclass
class World:
    """Three domains and their processes. `process()` is the catalogue of one more process."""

    consensus: MemoryConsensus
    clock: ManualClock
    shared: list[Shared]
    processes: int = 0

    def metastore(self) -> Metastore:
        self.processes += 1
        return Metastore(self.consensus, opener(self.shared), self.clock, Rand(self.processes), domains=3)

    def process(self) -> Catalogue:
        return Catalogue(self.metastore(), self.clock, Rand(100 + self.processes))


@pytest.fixture
def world() -> World:
    clock = ManualClock()
    return World(MemoryConsensus(clock), clock, [Shared(), Shared(), Shared()])


async def both_rows(world: World) -> tuple[list[str], list[str]]:
    """Return the names in the rows by name and in the rows by id, which must always be equal."""
    metastore = world.metastore()
    by_name = [row.name for row in await metastore.rows(TOPICS)]
    by_id = sorted(row.name for row in await metastore.rows(TOPIC_IDS))
    return by_name, by_id


# rows ---------------------------------------------------------------------------------------------


async def test_every_kind_of_row_is_put_got_listed_by_name_and_deleted(world: World) -> None:
    one, other = world.process(), world.process()
    pipeline = PipelineRow("p", {"orders": "capture:shop:public.orders"}, "p.dead")
    for row in (CAPTURE, pipeline):
        await one.put(row)
        assert await other.get(type(row), row.name) == row
        assert await other.list(type(row)) == [row]
        await other.delete(type(row), row.name)
        assert await one.get(type(row), row.name) is None
        assert await one.list(type(row)) == []
        with pytest.raises(MissingError, match=f"name={row.name}"):
            await one.delete(type(row), row.name)


async def test_a_put_replaces_and_an_equal_one_writes_nothing(world: World) -> None:
    catalogue = world.process()
    await catalogue.put(PipelineRow("p", {"a": "derived"}))
    commits = world.shared[0].commits
    await catalogue.put(PipelineRow("p", {"a": "derived"}))
    assert world.shared[0].commits == commits
    await catalogue.put(PipelineRow("p"))
    assert await catalogue.get(PipelineRow, "p") == PipelineRow("p")


async def test_the_tables_of_captures_are_one_list_until_one_of_them_is_written_by_whomever(world: World) -> None:
    def row(capture: str, table: str, topic: str = "") -> CaptureTableRow:
        return CaptureTableRow(capture, table, topic)

    async def written(capture: str, table: str, topic: str = "") -> None:
        await other.change_table(capture, table, lambda _: row(capture, table, topic))

    one, other = world.process(), world.process()
    await written("shop", "public.orders")
    await written("yard", "public.a")
    await written("shop", "public.z")
    tables = await one.all_tables()
    assert [(t.capture, t.table) for t in tables] == [
        ("shop", "public.orders"), ("shop", "public.z"), ("yard", "public.a"),
    ]  # fmt: skip
    assert await one.all_tables() is tables
    assert [t.table for t in await one.tables("shop")] == ["public.orders", "public.z"]
    assert await one.tables("another") == []
    await written("yard", "public.a", "changed")
    assert [t.topic for t in await one.tables("yard")] == ["changed"]
    await other.change_table("shop", "public.orders", lambda _: None)
    assert [t.table for t in await one.tables("shop")] == ["public.z"]
    await other.change_table("shop", "public.z", lambda _: None)
    assert await one.all_tables() == [row("yard", "public.a", "changed")]


async def test_topics_are_listed_by_name(world: World) -> None:
    catalogue = world.process()
    rows = {name: await catalogue.create_topic(name, 2, kind="capture", config={"k": "v"}) for name in ("b", "a")}
    assert await catalogue.list(TopicRow) == [rows["a"], rows["b"]]
    assert rows["a"].kind == "capture"
    assert rows["a"].created_ms == world.clock.now_ms()


async def test_of_a_topic_that_is_gone_nothing_is_deleted_though_a_later_one_has_its_name(world: World) -> None:
    catalogue = world.process()
    first = await catalogue.create_topic("t", 1)
    await catalogue.delete_topic(await catalogue.grow_topic("t", 2))
    later = await world.process().create_topic("t", 1, kind="capture")
    for gone in (first, replace(later, name="u")):
        with pytest.raises(MissingError):
            await catalogue.delete_topic(gone)
    assert await both_rows(world) == (["t"], ["t"])
    await catalogue.delete_topic(later)
    assert await both_rows(world) == ([], [])


async def test_a_topics_rows_by_name_and_by_id_come_and_go_together(world: World) -> None:
    catalogue = world.process()
    first = await catalogue.create_topic("t", 1)
    assert await both_rows(world) == (["t"], ["t"])
    await catalogue.delete(TopicRow, "t")
    assert await both_rows(world) == ([], [])
    second = await catalogue.create_topic("t", 1)
    assert second.topic_id != first.topic_id
    await catalogue.put(msgspec.structs.replace(second, topic_id="by-hand"))
    assert await both_rows(world) == (["t"], ["t"])


@pytest.mark.parametrize(
    ("name", "partitions"), [("", 1), ("a/b", 1), (".", 1), ("x" * 250, 1), ("t", 0), ("t", 10_001)]
)
async def test_a_bad_name_or_count_is_invalid(name: str, partitions: int, world: World) -> None:
    with pytest.raises(InvalidError):
        await world.process().create_topic(name, partitions)
    assert await world.process().list(TopicRow) == []


# races and unknown outcomes -----------------------------------------------------------------------


async def test_of_processes_that_create_one_topic_exactly_one_wins_and_the_others_get_its_row(world: World) -> None:
    catalogues = [world.process() for _ in range(6)]
    found = await asyncio.gather(*(c.create_topic("t", 3) for c in catalogues), return_exceptions=True)
    won = [row for row in found if isinstance(row, TopicRow)]
    lost = [error for error in found if isinstance(error, ConflictError)]
    assert (len(won), len(lost)) == (1, 5)
    assert [error.current for error in lost] == won * 5
    assert await both_rows(world) == (["t"], ["t"])


async def test_racing_puts_all_return_and_the_last_one_stands(world: World) -> None:
    rows = [PipelineRow("p", {"n": str(n)}) for n in range(6)]
    await asyncio.gather(*(world.process().put(row) for row in rows))
    assert await world.process().get(PipelineRow, "p") in rows


def unknown(
    landed: bool, error: type[UnknownOutcomeError] | type[FencedError] = UnknownOutcomeError
) -> Callable[[Callable[[], int]], int]:
    def fault(write: Callable[[], int]) -> int:
        if landed:
            write()
        raise error("the leader went away")

    return fault


@pytest.mark.parametrize(
    ("landed", "error"), [(True, UnknownOutcomeError), (False, UnknownOutcomeError), (False, FencedError)]
)
async def test_a_creation_whose_outcome_is_unknown_returns_the_topic_that_stands(
    landed: bool, error: type[UnknownOutcomeError] | type[FencedError], world: World
) -> None:
    catalogue = world.process()
    await catalogue.list(TopicRow)
    world.shared[0].fault = unknown(landed, error)
    row = await catalogue.create_topic("t", 1)
    assert await world.process().list(TopicRow) == [row]
    assert await both_rows(world) == (["t"], ["t"])


async def test_a_creation_that_lands_after_its_retry_began_is_still_ours(world: World) -> None:
    """The first attempt waits in a queue, and takes effect while the second is on its way."""
    catalogue = world.process()
    await catalogue.list(TopicRow)
    late: list[Callable[[], int]] = []

    def first(write: Callable[[], int]) -> int:
        late.append(write)
        world.shared[0].fault = second
        raise UnknownOutcomeError("lost")

    def second(write: Callable[[], int]) -> int:
        late[0]()
        return write()

    world.shared[0].fault = first
    row = await catalogue.create_topic("t", 1)
    assert await world.process().list(TopicRow) == [row]


@pytest.mark.parametrize("landed", [True, False])
async def test_a_topic_grows_once_whatever_is_known_of_its_write(landed: bool, world: World) -> None:
    catalogue = world.process()
    row = await catalogue.create_topic("t", 2)
    world.shared[0].fault = unknown(landed)
    grown = await catalogue.grow_topic("t", 5)
    assert (grown.partitions, grown.topic_id) == (5, row.topic_id)
    assert await world.process().list(TopicRow) == [grown]
    assert await both_rows(world) == (["t"], ["t"])


async def test_of_changes_of_one_topic_that_race_none_is_lost(world: World) -> None:
    await world.process().create_topic("t", 1)

    def one_more(row: TopicRow) -> TopicRow:
        return replace(row, partitions=row.partitions + 1)

    await asyncio.gather(*(world.process().change_topic("t", one_more) for _ in range(6)))
    (row,) = await world.process().list(TopicRow)
    assert row.partitions == 7


async def test_a_growth_that_may_not_be_changes_nothing(world: World) -> None:
    catalogue = world.process()
    await catalogue.create_topic("t", 4)
    await catalogue.create_topic("captured", 4, kind="capture")
    for name, count in (("t", 4), ("t", 3), ("t", 0), ("t", 10_001), ("captured", 8)):
        with pytest.raises(InvalidError):
            await catalogue.grow_topic(name, count)
    with pytest.raises(MissingError):
        await catalogue.grow_topic("none", 8)
    assert [row.partitions for row in await catalogue.list(TopicRow)] == [4, 4]


async def test_a_put_that_lands_late_does_not_undo_what_was_put_after_it(world: World) -> None:
    catalogue = world.process()
    await catalogue.put(PipelineRow("p", {"n": "0"}))
    late: list[Callable[[], int]] = []

    def lost(write: Callable[[], int]) -> int:
        late.append(write)
        raise UnknownOutcomeError("lost")

    world.shared[0].fault = lost
    await catalogue.put(PipelineRow("p", {"n": "1"}))
    await catalogue.put(PipelineRow("p", {"n": "2"}))
    with pytest.raises(ConflictError):
        late[0]()
    assert await world.process().get(PipelineRow, "p") == PipelineRow("p", {"n": "2"})


@pytest.mark.parametrize("landed", [True, False])
async def test_a_deletion_whose_outcome_is_unknown_ends_with_the_row_gone(landed: bool, world: World) -> None:
    catalogue = world.process()
    await catalogue.create_topic("t", 1)
    world.shared[0].fault = unknown(landed)
    await catalogue.delete(TopicRow, "t")
    assert await both_rows(world) == ([], [])
    row = await catalogue.create_topic("t", 1)
    world.shared[0].fault = unknown(landed)
    await catalogue.delete_topic(row)
    assert await both_rows(world) == ([], [])


async def test_a_write_nobody_can_tell_the_outcome_of_is_unknown_after_its_budget(world: World) -> None:
    catalogue = world.process()
    await catalogue.list(TopicRow)

    def lost(write: Callable[[], int]) -> int:
        world.clock.advance(7_000)
        world.shared[0].fault = lost
        raise UnknownOutcomeError("lost")

    world.shared[0].fault = lost
    with pytest.raises(UnknownOutcomeError, match="Check it before"):
        await catalogue.create_topic("t", 1)


async def test_a_creation_that_lands_after_its_topic_was_deleted_does_not_bring_it_back(world: World) -> None:
    catalogue = world.process()
    await catalogue.list(TopicRow)
    late: list[Callable[[], int]] = []

    def lost(write: Callable[[], int]) -> int:
        late.append(write)
        raise UnknownOutcomeError("lost")

    world.shared[0].fault = lost
    await catalogue.create_topic("t", 1)
    await catalogue.delete(TopicRow, "t")
    with pytest.raises(ConflictError):
        late[0]()
    assert await both_rows(world) == ([], [])


@pytest.mark.parametrize("back", [True, False])
async def test_an_outcome_that_a_later_change_hides_is_told_as_unknown(back: bool, world: World) -> None:
    """Our creation took effect. The topic was deleted, and perhaps re-created, before we could check."""
    catalogue = world.process()
    await catalogue.list(TopicRow)
    theirs = TOPICS.encode(TopicRow("t", "theirs", 1))[1] if back else b""

    def hidden(write: Callable[[], int]) -> int:
        write()
        changed = NAMES.encode(NameRow("topic", "t", "another"))
        world.shared[0].write([(TOPICS.key("t"), theirs), changed], {})
        raise UnknownOutcomeError("lost")

    world.shared[0].fault = hidden
    with pytest.raises(UnknownOutcomeError, match="a later change hides"):
        await catalogue.create_topic("t", 1)


async def test_a_refusal_after_an_unknown_outcome_is_no_promise_that_nothing_happened(world: World) -> None:
    catalogue = world.process()
    await catalogue.list(TopicRow)

    def down(write: Callable[[], int]) -> int:
        world.clock.advance(7_000)
        world.shared[0].fault = down
        raise UnavailableError("no engine")

    def lost(write: Callable[[], int]) -> int:
        world.shared[0].fault = down
        raise UnknownOutcomeError("lost")

    world.shared[0].fault = lost
    with pytest.raises(UnknownOutcomeError, match="may have been written"):
        await catalogue.create_topic("t", 1)


async def test_what_certainly_did_not_happen_is_told_at_once(world: World) -> None:
    catalogue = world.process()
    await catalogue.list(TopicRow)

    def down(write: Callable[[], int]) -> int:
        raise UnavailableError("no engine")

    world.shared[0].fault = down
    with pytest.raises(UnavailableError):
        await catalogue.create_topic("t", 1)
    assert (await catalogue.create_topic("t", 1)).partitions == 1
