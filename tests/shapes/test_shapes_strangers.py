"""Bounds on unauthorized clients: memory, waiting and information. All are limited and counted, and reveal no foreign
data."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from starlette.applications import Starlette

from support.shapes.consumer import TABLE
from support.shapes.storage import INFO
from support.shapes.world import ShapeWorld
from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StatusTracker
from tidemill.capture.changes import Relation
from tidemill.capture.naming import topic_name
from tidemill.capture.tables.table_reasons import TableUnavailability
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.node.shape_routing import ShapeRouting
from tidemill.objects.memory import MemoryObjects
from tidemill.shapes import ShapeService, ShapeSettings, shape_routes
from tidemill.shapes.definition.compiler_thread import CompilerThread
from tidemill.shapes.definition.definition import SHAPE_BYTES, ShapeDefinition, Source, fixed_bytes
from tidemill.shapes.definition.plan_cache import RejectionCache
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.subset import SubsetRequest, SubsetScope, compile_subset
from tidemill.shapes.log.chunks import ResponseMemory, split_chunk
from tidemill.shapes.log.disk_log import LogRoom
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log import LogLimits, ShapeLog
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL, OP_INFINITY, LogOffset
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.saved_shape import SavedTableShape
from tidemill.shapes.log.sqlite_file import FileThreads, Flush, ShapeFile, ShapeWrite, StoredItem, StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.memory_budget import Budget, OverBudgetError, reserve_in_all
from tidemill.shapes.shards.subsets import SubsetRowReader, _HeldBytes
from tidemill.shapes.tables import table_search
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.table_search import NotCapturedError
from tidemill.shapes.tables.table_shapes import TableShapes
from tidemill.shapes.where import Type

DDL = "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT n, 'x' FROM generate_series(1, 50) n"


async def test_what_a_file_is_read_for_is_counted_until_the_last_reader_has_let_go_and_readers_share_it(
    tmp_path: Path,
) -> None:
    memory, disk = Budget(40_000), Budget(1 << 30)
    pool, writer = ThreadPoolExecutor(2), ThreadPoolExecutor(1)
    clock, limits = SystemClock(), LogLimits(chunk_bytes=3_900)
    file = ShapeFile(tmp_path / "s.db")
    threads, room = FileThreads(pool, writer), LogRoom(limits, memory, disk)
    store = ShapeStore(file, threads, clock, Rand(1), StatusTracker(), "disk", room)
    log = store.create_log()
    for n in range(4):
        log.add_base([b"%04d" % n * 999])
    log.seal_base()
    store.logs.save_record(log, "h", b"", "1:1:@1")
    for tx in range(1, 5):
        log.stage(LogItem(LogOffset(tx, 1), b"%04d" % tx * 999))
        log.publish()
    await store.flush()
    log.stage(LogItem(LogOffset(9, 1), b"{}"))
    log.publish()
    await store.flush()
    held, reads, read_base = memory.used_bytes, list[int](), file.read_base

    def base(key: int, chunk: int) -> bytes:
        reads.append(chunk)
        return read_base(key, chunk)

    file.read_base = base  # type: ignore[method-assign]
    first, again = await log.fetch(BEFORE_ALL), await log.fetch(BEFORE_ALL)
    assert first.items is again.items and reads == [0], "one copy for all, read once"
    assert memory.used_bytes == held + 3_996
    second = await log.fetch(first.end)
    assert memory.used_bytes == held + 2 * 3_996
    with pytest.raises(OverBudgetError, match="read from disk for readers"):
        await log.fetch(BASE_END)
    del second
    some = await log.fetch(BASE_END)
    assert memory.used_bytes == held + 2 * 3_996
    del first, some
    assert memory.used_bytes == held + 3_996, "one reader still has it"
    del again
    assert (memory.used_bytes, store.reader.lent.used_bytes) == (held, 0)
    await store.aclose()
    pool.shutdown()


def test_what_is_taken_of_all_or_of_none() -> None:
    wide, narrow = Budget(100), Budget(50)
    with pytest.raises(OverBudgetError):
        reserve_in_all(60, wide, narrow)
    assert (wide.used_bytes, narrow.used_bytes) == (0, 0)
    reserve_in_all(50, wide, narrow)
    assert (wide.used_bytes, narrow.used_bytes) == (50, 50)


@pytest.mark.parametrize(("asked", "changes"), [("rows", 0), ("poll", 1), ("events", 1), ("events", 2)])
async def test_a_reader_that_takes_nothing_is_counted_until_its_last_piece_has_gone_and_not_while_it_waits(
    tmp_path: Path, asked: str, changes: int
) -> None:
    """The shape is restored, so only the file has its rows and changes. At most one change at a time may be held."""
    waits = (asked, changes) == ("events", 1)
    big = b'{"key":"k","value":{"id":"%s"},"headers":{"operation":"insert"}}' % (b"1" * 300_000)
    kept = SavedTableShape(
        ShapeRequest("t", "id = 1"), ShapeDefinition(Source("table", "main", "public", "t"), "id = 1"),
        INFO.schema_json(()), TABLE, 1,
    ).encode()  # fmt: skip
    file = ShapeFile(tmp_path / "main.db")
    file.open()
    items = [StoredItem(5 + n, 1, big) for n in range(max(1, changes))]
    log_bytes = len(items) * len(big)
    saved = StoredShape(1, "h1", kept, "1:1:@1", 2, (items[-1].tx, 1), 2 * len(big), log_bytes)
    file.flush(Flush("owner", False, [ShapeWrite(1, [(0, big), (1, big)], items, log_bytes, saved)], ()))
    file.release()
    limits = LogLimits(chunk_bytes=100_000)
    settings = ShapeSettings(directory=tmp_path, limits=limits, memory_bytes=6 * len(big))
    service = ShapeService(SystemClock(), Rand(7), StatusTracker(), settings)
    sink = service.add_database("main", "host=/nowhere", lambda: [TABLE])
    service._tables._databases["main"].infos[TABLE] = INFO
    sink.begin_session(["owner"])
    sink.set_carried_relations([TABLE.oid])
    sink.begin_stream(SimpleNamespace(report_flushed=lambda *_: None), items[-1].tx)  # type: ignore[arg-type]
    await until(lambda: not sink.restoring)
    lent, memory = service._sources.database_stores["main"].reader.lent, service.budget.used_bytes
    app = Starlette(routes=list(shape_routes(service)))
    query = b"table=t&where=id+%3D+1&handle=h1&"
    query += {
        "rows": b"offset=0_0",
        "poll": b"offset=0_inf&live=true",
        "events": b"offset=0_inf&live=true&live_sse=true",
    }[asked]
    scope = {
        "type": "http", "method": "GET", "path": "/v1/shape", "raw_path": b"/v1/shape", "query_string": query,
        "headers": [(b"host", b"x")], "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1),
    }  # fmt: skip
    sent = list[bytes]()
    takes, gone = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            return
        sent.append(message["body"])
        await takes.wait()

    async with Tasks(print) as tasks:
        answering = tasks.spawn(app(scope, receive, send), name="answer")
        await until(lambda: len(sent) == 1)
        assert (lent.used_bytes, service.budget.used_bytes) == (len(big), memory + len(big))
        assert service.facts()["read_bytes"] == len(big)
        takes.set()
        await until(lambda: sum(map(len, sent)) > max(1, changes) * len(big))
        if not waits:
            await answering
        await until(lambda: (lent.used_bytes, service.budget.used_bytes) == (0, memory))
        assert answering.done() is not waits, "a stream that was not behind waits, and holds nothing meanwhile"
        gone.set()
    await service.aclose()


def test_rows_that_differ_in_the_last_of_many_keys_are_sorted_in_short_steps() -> None:
    names = tuple(f"c{n}" for n in range(32))
    rand = random.Random(3)
    values = [rand.randrange(10_000) for _ in range(5_000)]
    columns = {name: pa.array([7] * len(values) if name != "c31" else values, pa.int64()) for name in names}
    table = pa.table({**columns, "id": pa.array(range(len(values)), pa.int64())})
    writer = RowWriter("shard", "t", ("id",), ("id",))
    for limit in (None, 50):
        scope = SubsetScope("shard", "t", dict.fromkeys(names, Type("int8")), names, 0)
        subset = compile_subset(SubsetRequest(order_by=", ".join(names), limit=limit), scope)
        reading = SubsetRowReader((*names, "id"), writer, None, subset)
        asked, before, steps = 0, reading._compare, list[int]()

        def counted(a: Any, b: Any) -> int:
            nonlocal asked
            asked += 1
            return before(a, b)  # noqa: B023

        reading._compare = counted  # type: ignore[method-assign]
        budget = Budget(1 << 30)
        rows, held = ResponseMemory(budget, Budget(1 << 30), 1 << 30), _HeldBytes(budget)
        for _ in reading._read_ordered(table, rows, held):
            steps.append(asked)
        found = [int(json.loads(item)["value"]["id"]) for item in split_chunk(rows.pieces)]
        by_text = sorted(range(len(values)), key=lambda n: (values[n], f'"shard"."t"/"{n}"'))
        assert found == by_text[:limit]
        assert max(b - a for a, b in pairwise(steps)) <= 200, "comparisons of up to 32 keys each, between two yields"
        held.release_all()
        rows.release()
        assert budget.used_bytes == 0


def test_a_refusal_keeps_no_frames_of_what_failed_and_does_not_grow_with_who_asks() -> None:
    class Rows:
        """A stand-in for a shard's rows."""

    refusals, definition = RejectionCache(), ShapeDefinition(Source("table", "m", "s", "t"), "1 / id = 1")

    def fails() -> weakref.ref[Rows]:
        rows = Rows()
        try:
            raise InvalidError("division by zero.", fix="Write another clause.")
        except InvalidError as error:
            refusals.add(definition, error, 0.0)
        return weakref.ref(rows)

    kept = fails()
    gc.collect()
    assert kept() is None
    lengths = set[int]()
    for _ in range(3):
        with pytest.raises(InvalidError, match="division by zero") as caught:
            refusals.raise_if_rejected(definition, 1.0)
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1


@pytest.mark.parametrize("base", [True, False])
def test_a_log_that_was_dropped_to_make_room_for_itself_takes_nothing(base: bool) -> None:
    budget = Budget(1_000, lambda _: log.drop())
    log = ShapeLog(budget=budget)
    if base:
        log.add_base([b"x" * 600])
        log.add_base([b"x" * 600])
    else:
        log.add_base([b"x" * 600])
        log.seal_base()
        log.stage(LogItem(LogOffset(1, 1), b"x" * 600))
    assert budget.used_bytes == 0


@pytest.mark.parametrize("text", [f"1_{OP_INFINITY + 1}", f"{OP_INFINITY + 1}_1", "1_" + "9" * 20])
def test_an_offset_that_no_log_can_have_is_refused_as_none(text: str) -> None:
    with pytest.raises(InvalidError, match="invalid offset"):
        LogOffset.parse(text)


async def test_a_large_clause_is_counted_and_other_spellings_of_a_table_keep_no_plan_of_theirs(
    postgres_dsn: str,
) -> None:
    where = " OR ".join(f"id + 1 = {n}" for n in range(600))
    assert fixed_bytes(ShapeDefinition(Source("table", "m", "s", "t"), where)) > 1 << 20
    assert fixed_bytes(ShapeDefinition(Source("table", "m", "s", "t"), "id = 5")) == SHAPE_BYTES
    values = "{" + ",".join(map(str, range(100_000, 102_000))) + "}"
    assert fixed_bytes(ShapeDefinition(Source("table", "m", "s", "t"), "id = ANY($1)", (values,))) > 1 << 20
    async with ShapeWorld(postgres_dsn, DDL) as world:
        for clause, most in ((where, 1), ("id = 5", 4)):
            for table in ("t", "T", "public.t", '"t"', "PUBLIC.T", 'public."t"'):
                for _ in range(2):
                    answer = await world.get(table=table, where=clause, offset="-1")
                    assert answer.status == 200, answer.body
            kept = [request for request in world.service._live.plans._plans if request.where == clause]
            assert len(kept) == most


class Reported:
    """A capture that confirms a table, denies it, or fails to answer."""

    def __init__(self, says: bool | TidemillError | None) -> None:
        self.says = says

    async def wait_for_table(self, schema: str, table: str, timeout_s: float) -> bool:
        if self.says is None:
            await asyncio.sleep(3_600)
        if isinstance(self.says, TidemillError):
            raise self.says
        return bool(self.says)

    def check_tables_soon(self) -> None: ...

    def unavailability(self, schema: str, table: str) -> None: ...

    knows_tables = False


def tables_of(*reported: Reported) -> TableShapes:
    """Return tables whose compiler is closed, because nothing is compiled."""
    clock, compiler = SystemClock(), CompilerThread()
    tables = TableShapes(clock, LoopShare(clock), BacklogLimits(), compiler)
    compiler.close()
    for n, each in enumerate(reported):
        tables.add(f"c{n}", "", lambda: [], None, each)
    return tables


async def test_a_capture_that_cannot_say_keeps_nobody_waiting_for_a_table_that_another_has() -> None:
    async with asyncio.timeout(DEADLINE_S):
        assert await tables_of(Reported(None), Reported(True)).search._wait_for_capture(["c0", "c1"], "public", "t")
        assert not await tables_of(Reported(False), Reported(False)).search._wait_for_capture(
            ["c0", "c1"], "public", "t"
        )
        with pytest.raises(UnavailableError, match="held"):
            await tables_of(Reported(UnavailableError("held.")), Reported(False)).search._wait_for_capture(
                ["c0", "c1"], "public", "t"
            )


class Flips(Reported):
    """A capture that reports the table as parked. At the next check its copy has begun, and finally it is there."""

    def __init__(self, times: int) -> None:
        super().__init__(True)
        self.left = times

    async def wait_for_table(self, schema: str, table: str, timeout_s: float) -> bool:
        self.left -= 1
        return True

    def unavailability(self, schema: str, table: str) -> TableUnavailability:
        return TableUnavailability("the table is being taken in.", 1, passing=True)

    knows_tables = True

    def relations(self) -> list[Relation]:
        return [] if self.left else [Relation(7, "public", "t", ())]


async def test_a_table_whose_copy_begins_between_the_capture_s_answer_and_the_look_is_not_one_that_does_not_exist() -> (
    None
):
    flips = Flips(3)
    tables = tables_of()
    tables.add("c", "", flips.relations, None, flips)
    async with asyncio.timeout(DEADLINE_S):
        assert (await tables.search.wait_for_relation("t", waits=True))[1].oid == 7
    none = Reported(False)
    none.knows_tables = True
    with pytest.raises(NotCapturedError):
        await tables_of(none).search.wait_for_relation("t", waits=True)


async def test_requests_for_unknown_tables_leave_others_their_places_while_a_capture_is_down() -> None:
    tables = tables_of(Reported(None))
    asking = [
        asyncio.ensure_future(tables.search._wait_for_capture(["c0"], "public", f"t{n}"))
        for n in range(table_search.MAX_TABLE_WAITS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="too many requests wait for new tables"):
        await tables.search._wait_for_capture(["c0"], "public", "more")
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    with pytest.raises((NotCapturedError, UnavailableError)):
        tables.search.find_relation("t1")
    assert tables.search._seeking == 0


async def test_a_right_to_a_table_that_is_not_there_yet_is_one_to_each_topic_that_it_may_get() -> None:
    """Rows are served once the table exists. A right to a topic of just that name does not suffice."""
    clock = SystemClock()
    consensus = MemoryConsensus(clock)
    catalogue = Catalogue(create_metastore(consensus, MemoryObjects(clock), clock, Rand(1)), clock, Rand(1))
    await catalogue.put(CaptureRow("main", "1", "s", "p", 1, True))
    known = CaptureTableRow("main", "public.known", "main.public.known")
    await catalogue.change_table("main", "public.known", lambda _: known)
    await consensus.acquire("capture/main", "a/1", 60_000, b"http://a")
    await consensus.acquire("capture/young", "b/1", 60_000, b"http://b")

    async def nobody(*_: Any) -> None:
        raise AssertionError

    routing = ShapeRouting(nobody, catalogue, consensus, "a/1", clock)
    both = [topic_name(each, "public", "orders") for each in ("main", "young")]
    assert await routing.topics_of("orders") == both
    assert await routing.topics_of("young:orders") == both[1:]
    for table in ("tidemill.t", "shard.t", "shard:t", 'tidemill."t"'):
        assert await routing.topics_of(table) == ["shard.t"], "one resource in access rules, for every spelling"
    assert await routing.topics_of("main:tidemill.t") == [topic_name("main", "tidemill", "t")]
    assert await routing.topics_of("known") == [topic_name("main", "public", "known")]


def test_a_name_without_its_quotes_is_answered_with_the_quoted_one() -> None:
    captured = [("public", "Orders"), ("other", "oRders"), ("public", "orders_2")]
    assert 'Did you mean "public"."Orders", with the quotes? Check' in str(
        NotCapturedError("public", "orders", captured)
    )
    assert "Did you mean" not in str(NotCapturedError("public", "order", captured))
