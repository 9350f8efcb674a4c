"""Rows ST2, ST4, ST8 and ST9 of docs/internals/capture-scenarios.md: the disk of a shape at every step of a flush, over
any number of restarts, and a client's view of a row that is deleted and inserted again."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.shapes.consumer import COLUMNS, ENDLESS, TABLE, Bench, row
from support.shapes.storage import recorded, store_of, whole
from support.shapes.world import Answer, Client, ShapeWorld
from tidemill.base.clock import ManualClock
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes import ShapeSettings
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log import log_set
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL, LogOffset
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.sqlite_file import StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.where import Type, compile_where


def dump(path: Path, log: DiskLog | None = None) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of this log in the file, or of all logs."""
    of = "true" if log is None else f"id = {log.key}"
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as file:
        sql = "SELECT * FROM {} WHERE {} ORDER BY 1, 2, 3"
        return {name: file.execute(sql.format(name, of)).fetchall() for name in ("shapes", "base", "items")}


def newest(path: Path) -> list[tuple[int, int]]:
    """Return the end of each shape's log from its row."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as file:
        return file.execute("SELECT tx, op FROM shapes ORDER BY id").fetchall()


def stage(log: DiskLog, tx: int, ops: Sequence[int]) -> list[bytes]:
    items = [LogItem(LogOffset(tx, op), b"%d/%02d" % (tx, op)) for op in ops]
    for item in items:
        log.stage(item)
    return [item.json for item in items]


def commit(log: DiskLog, tx: int, count: int) -> list[bytes]:
    made = stage(log, tx, range(1, count + 1))
    log.publish()
    return made


async def restored(path: Path, owner: str) -> tuple[ShapeStore, list[tuple[StoredShape, DiskLog]]]:
    """Return the shapes that a new process restores if the capture's row names `owner`."""
    store, _ = store_of(path, ManualClock(), seed=9)
    store.claim([owner])
    return store, [(saved, store.restore_log(saved)) for saved in await store.read_saved()]


async def test_st2_nothing_of_a_transaction_is_on_disk_before_its_commit_and_its_flush_moves_the_end_to_it(
    tmp_path: Path,
) -> None:
    """Flushes in the middle of it write all earlier transactions, and only these."""
    path = tmp_path / "db.db"
    store, file = store_of(path, ManualClock())
    store.claim(())
    log, other = recorded(store, b"1"), recorded(store, b"2")
    commit(log, 5, 1)
    shown = await whole(log)
    made = stage(log, 7, (1, 2))
    await store.flush()
    before = dump(path, log)
    assert [(tx, op) for _, tx, op, *_ in before["items"]] == newest(path)[:1] == [(5, 1)]
    for part in (1, 2):
        made += stage(log, 7, range(1 + 2 * part, 3 + 2 * part))
        assert store.clean, "there is nothing to write"
        commit(other, 6 + part, 1)
        await store.flush()
        assert dump(path, log) == before
        assert newest(path)[1] == (6 + part, 1)
    log.publish()
    assert newest(path)[0] == (5, 1), "shown, and not durable yet"
    await store.flush()
    assert newest(path)[0] == (7, 6)
    file.release()
    again, ((_, log), (_, other)) = await restored(path, store.owner)
    assert await whole(log) == shown + made
    assert log.end == LogOffset(7, 6) and other.end == LogOffset(8, 1)
    assert await whole(log, LogOffset(5, 1)) == made
    again.file.release()


def died_at(path: Path, to: Path, wal: bytes) -> Path:
    """Return the disk of a process that died when SQLite's write-ahead log had this content."""
    to.mkdir()
    shutil.copy(path, to / path.name)
    (to / f"{path.name}-wal").write_bytes(wal)
    return to / path.name


FRAME_BYTES, FRAME_HEADER_BYTES, WAL_HEADER_BYTES = 4096 + 24, 24, 32


def cuts(before: int, after: int) -> list[int]:
    """Return sizes of a write-ahead log without its last writes: at each page, in its header and in its middle."""
    starts = range(max(before, WAL_HEADER_BYTES), after, FRAME_BYTES)
    inside = (0, FRAME_HEADER_BYTES, FRAME_HEADER_BYTES + 1000)
    return [before, *(start + more for start in starts for more in inside), after]


async def check_chain(log: DiskLog, expected: list[bytes]) -> int:
    """Check that each end of a chunk is followed by the rest, once and in order. Return the number of chunks."""
    ends, read, offset = [BEFORE_ALL], [0], BEFORE_ALL
    while not (chunk := await log.fetch(offset)).complete:
        assert chunk.end > offset
        offset = chunk.end
        ends.append(offset)
        read.append(read[-1] + len(list(split_chunk(chunk.items))))
    for at, count in zip(ends, read, strict=True):
        assert await whole(log, at) == expected[count:], at
    bases = [end for end in ends[1:] if end <= BASE_END]
    assert bases == [LogOffset(0, n) for n in range(len(bases))]
    return len(ends)


async def test_st4_whenever_a_process_dies_in_a_flush_that_closes_chunks_they_chain_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transaction of the file for each log. The disk is that of a process that died after any of its writes."""
    monkeypatch.setattr(log_set, "FLUSH_LOGS", 1)
    path = tmp_path / "db.db"
    store, file = store_of(path, ManualClock())
    store.claim(())
    wal, deaths = Path(f"{path}-wal"), 0
    first, second = store.create_log(), store.create_log()
    shown: dict[str, list[bytes]] = {"first": [], "second": []}
    durable: dict[str, list[list[bytes]]] = {"first": [[]], "second": [[]]}
    """Each log is written in a separate transaction of the file. The disk is that of a process killed after any of its
    writes."""

    async def flush_and_die_in_it() -> None:
        nonlocal deaths
        before = wal.read_bytes()
        await store.flush()
        after = wal.read_bytes()
        assert after.startswith(before) and len(after) > len(before), "SQLite did not begin its log anew"
        for name, log in (("first", first), ("second", second)):
            if log in recorded_logs:
                durable[name].append(list(shown[name]))
        for cut in cuts(len(before), len(after)):
            deaths += 1
            await check_death(died_at(path, tmp_path / f"d{deaths}", after[:cut]), whole_flush=cut == len(after))

    async def check_death(died: Path, *, whole_flush: bool) -> None:
        again, found = await restored(died, store.owner)
        names = {saved.handle: log for saved, log in found}
        for name, states in durable.items():
            possible = states[-1:] if whole_flush else states[-2:]
            log = names.get(name)
            contents = await whole(log) if log is not None else []
            assert contents in possible, (name, died)
            if log is None:
                continue
            await check_chain(log, contents)
            await bring_again(log, name, shown[name])
            await check_chain(log, shown[name])
        await again.flush()
        for name, log in names.items():
            await check_chain(log, shown[name])
        fresh = again.create_log()
        assert fresh.key > max((log.key for log in names.values()), default=0)
        assert fresh.key not in again.file.find_leftovers()
        again.file.release()

    async def bring_again(log: DiskLog, name: str, items: list[bytes]) -> None:
        """Deliver items that were not durable again from the stream, at the same offsets."""
        for tx, count in transactions[name]:
            if tx > log.end.tx:
                commit(log, tx, count)

    recorded_logs: set[DiskLog] = set()
    transactions: dict[str, list[tuple[int, int]]] = {"first": [], "second": []}

    def base(log: DiskLog, name: str, start: int, end: int) -> None:
        rows = [b"%020d" % n for n in range(start, end)]
        log.add_base(rows)
        shown[name] += rows

    def transaction(log: DiskLog, name: str, tx: int, count: int) -> None:
        shown[name] += commit(log, tx, count)
        transactions[name].append((tx, count))

    base(first, "first", 0, 5)  # two chunks, and half of one
    await flush_and_die_in_it()
    base(first, "first", 5, 8)
    base(second, "second", 0, 4)
    for log, name in ((first, "first"), (second, "second")):
        log.seal_base()
        store.logs.save_record(log, name, b"record", "1:2:")
        recorded_logs.add(log)
    await flush_and_die_in_it()
    transaction(first, "first", 10, 9)  # one chunk, all but one item
    await flush_and_die_in_it()
    for tx in (11, 12):
        transaction(first, "first", tx, 1)  # its end, and the beginning of the next one
        transaction(second, "second", tx, 30)
        await flush_and_die_in_it()
    for name, log in (("first", first), ("second", second)):
        assert await check_chain(log, shown[name]) > 4
    assert deaths > 60
    file.release()


BEHIND = 5
"""Number of changes after which a client reads again: of a row that was deleted and inserted again in between."""


class Watched(Client):
    """A client that notes its rows whenever it was up to date, and its log items since each refetch."""

    def __init__(self, world: ShapeWorld, params: dict[str, str]) -> None:
        super().__init__(world, params)
        self.states: list[dict[str, Any]] = []
        self.runs: list[list[tuple[str, Any]]] = [[]]

    async def step(self, live: bool = False) -> Answer:
        answer = await super().step(live)
        if answer.status == 409:
            self.runs.append([])
        else:
            log_items = [item for item in answer.items if "lsn" in item["headers"]]
            self.runs[-1] += [(item["headers"]["operation"], item["value"]) for item in log_items]
            if "up-to-date" in answer.controls:
                self.states += list(self.rows.values()) or [{}]
        return answer


def in_order(seen: list[Any], history: list[Any]) -> bool:
    """Return whether the observed states are a subsequence of history."""
    rest = iter(history)
    return all(any(state == other for other in rest) for state in seen)


@pytest.mark.postgres
async def test_st8_a_row_that_goes_and_comes_again_is_never_merged_in_a_log_that_outgrows_its_limit_and_begins_anew(
    postgres_dsn: str,
) -> None:
    """A log is not compacted: it has every change, or ends. One client follows it, others stop at each change."""
    written: list[tuple[str, Any]] = []
    history: list[dict[str, str]] = [{}]
    settings = ShapeSettings(long_poll_s=0.3, limits=LogLimits(log_bytes=2_500))
    async with ShapeWorld(postgres_dsn, "CREATE TABLE t (id int PRIMARY KEY, a text, b text)", settings) as world:
        clients: list[Watched] = []

        async def one_more() -> Watched:
            client = Watched(world, {"table": "t"})
            await client.catch_up()
            return client

        async def change(sql: str, item: tuple[str, Any], after: dict[str, str]) -> None:
            await world.db.execute(sql)  # type: ignore[arg-type]
            written.append(item)
            history.append(after)
            clients.append(await one_more())
            behind, rows = clients[-min(len(clients), BEHIND)], [after] if after else []
            await behind.follow_until(lambda: list(behind.rows.values()) == rows)

        follower = await one_more()
        following = asyncio.ensure_future(follower.follow_until(lambda: follower.rows == last))
        last = {'"public"."t"/"1"': {"id": "1", "a": "end", "b": "end"}}
        for n in range(8):
            new = {"id": "1", "a": f"a{n}", "b": f"b{n}"}
            await change(f"INSERT INTO t VALUES (1, 'a{n}', 'b{n}')", ("insert", new), new)
            moved = {"id": "1", "a": f"c{n}"}
            await change(f"UPDATE t SET a = 'c{n}'", ("update", moved), new | moved)
            await change("DELETE FROM t", ("delete", {"id": "1"}), {})
        new = {"id": "1", "a": "end", "b": "end"}
        await change("INSERT INTO t VALUES (1, 'end', 'end')", ("insert", new), new)
        await following
        for client in (follower, *clients):
            await client.follow_until(lambda client=client: client.rows == last)  # type: ignore[misc]
            assert in_order([s for n, s in enumerate(client.states) if s != client.states[n - 1] or not n], history)
            for run_of in client.runs:
                found = [written[n : n + len(run_of)] for n in range(len(written) - len(run_of) + 1)]
                assert run_of in found, "each change by itself, with none left out"
        assert len({client.handle for client in (follower, *clients)}) == 1
        assert follower.refetches >= 2, "the log ended more than once"
        assert any(not client.refetches and client.runs != [[]] for client in clients), "and others went on"


async def test_st9_however_often_a_log_is_restored_and_the_stream_brings_all_of_it_again_its_file_stays_as_it_is(
    tmp_path: Path,
) -> None:
    """One log outgrew its limit: it is gone after the first restart, and its remains are deleted once."""
    path = tmp_path / "db.db"
    bench = Bench()
    fragments = [
        *bench.fragments(5, ("insert", None, row(1, "old"))),
        *bench.fragments(6, ("update", row(1, "old"), row(1, "older")), ("delete", row(1, "older"), None), size=1),
        *bench.fragments(7, ("insert", None, row(1, "new"))),
        *[f for xid in range(8, 28) for f in bench.fragments(xid, ("insert", None, row(xid)))],
    ]

    def consumer_of(saved: StoredShape, log: DiskLog) -> TableConsumer:
        where = "id = 1" if saved.handle == "h1" else "id > 1"
        definition = ShapeDefinition(Source("table", "main", "public", "t"), where)
        shape = LiveShape(saved.handle, definition, b"{}", log)
        writer = RowWriter("public", "t", [c.name for c in COLUMNS], ["id"], ["open"])
        compiled = compile_where(where, (), {"id": Type("int4"), "name": Type("text"), "open": Type("bool")})
        consumer = TableConsumer(shape, TABLE, compiled, writer, has_lsn=log.end.tx)
        consumer.set_snapshot(PgSnapshot(1, 1, frozenset()))
        consumer.follow_immediately()
        shape.mark_ready()
        return consumer

    async def life(number: int, *owner: str) -> tuple[str, list[list[bytes]], dict[str, list[tuple[Any, ...]]]]:
        clock = ManualClock()
        store, file = store_of(path, clock, number, LogLimits(chunk_bytes=40, log_bytes=4_000))
        assert store.claim(owner) is (number > 0)
        if number == 0:
            recorded(store)
            recorded(store)
            await store.flush()
        sink = ShapeTap(clock, LoopShare(clock))
        logs = []
        for saved in await store.read_saved():
            logs.append(store.restore_log(saved) if number else store.logs._known[saved.id])
            sink.router.add(consumer_of(saved, logs[-1]))
        for fragment in fragments:
            sink.process_fragment(fragment)
            while sink.run_slice(ENDLESS):
                pass
            await store.flush()
        await store._sweep.run()
        found = [await whole(log) for log in logs if log.key in store.logs]
        if number:
            assert not file.clear_leftovers(2), "nothing is left of the one that ended"
        file.release()
        return store.owner, found, dump(path)

    owner, items, held = await life(0)
    (mine,) = items
    operations = [json.loads(item)["headers"]["operation"] for item in mine]
    assert operations == ["insert", "update", "delete", "insert"]
    assert [(r[0], r[1]) for r in held["shapes"]] == [(1, "h1")], "the other one outgrew its limit"
    assert {r[0] for r in held["items"]} == {1}
    for number in (1, 2, 3):
        assert await life(number, owner) == (owner, items, held)
