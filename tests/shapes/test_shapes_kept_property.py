"""Promises of shapes to a capture, over all interleavings of transactions, flushes, notices, created and ended shapes,
restarted sessions and killed processes, with the real taps, sink, store, file and flush tracker.

Oracle: a confirmed commit is in the file, or changed nothing that the file holds. Once no work is pending, the last
commit is confirmed. A log that continues has the table's rows, even if other processes had the capture in between.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import ChangePosition
from tidemill.base.status.status import StatusTracker
from tidemill.capture.changes import Change, Column, Fragment, Relation
from tidemill.capture.delivery.consumers import TapRegistry
from tidemill.capture.delivery.flush_tracker import FlushTracker
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log import sqlite_file as file_module
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.disk_log import DiskLog, LogRoom
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.log.log_offset import BEFORE_ALL
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.sqlite_file import FileThreads, ShapeFile
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.table_consumer import TableConsumer

TABLES = [
    Relation(oid, "public", f"t{oid}", (Column("id", 23, -1, "integer", 0), Column("v", 25, -1, "text", -1)))
    for oid in (1, 2, 3)
]  # fmt: skip
KEYS = 4


class Gate(Executor):
    """Executor whose work is done when the test asks."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future


class Inline(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Process:
    """One life: a sink on its store, and the part of a session that shapes see."""

    def __init__(self, machine: KeptMachine, path: Path, life: int, limits: BacklogLimits | None = None) -> None:
        self.gate = Gate()
        self.file = ShapeFile(path)
        clock = machine.clock
        self.store = machine.store_kind(
            self.file, FileThreads(Inline(), self.gate), clock, Rand(life), StatusTracker(), "disk",
            LogRoom(LogLimits(chunk_bytes=60), Budget(1 << 30), Budget(1 << 30)),
        )  # fmt: skip
        self.sink = machine.sink_kind(clock, LoopShare(clock), limits, store=self.store)
        self.taps = TapRegistry(clock)
        self.taps.add(self.sink)
        self.shapes: dict[str, tuple[LiveShape, TableConsumer]] = {}
        self.flush: asyncio.Task[None] | None = None


class Session:
    """Stream, for the tap: the collector's queue of notices, its tracker and its status."""

    def __init__(self, confirmed: int) -> None:
        self.tracker = FlushTracker()
        self.status = ReplicationStatus(confirmed)
        self.notices: deque[tuple[str, ChangePosition]] = deque()
        self.at = confirmed

    def report_flushed(self, consumer: str, position: ChangePosition) -> None:
        self.notices.append((consumer, position))

    async def store_tap_names(self) -> None:
        raise AssertionError("no disk fails for long here")

    def confirm(self, lsn: int | None) -> None:
        if lsn is not None:
            self.status.record_flush_notice(lsn)
        self.tracker.check_invariants()


class KeptMachine(RuleBasedStateMachine):
    store_kind = ShapeStore
    sink_kind = ShapeTap
    consumer_kind = TableConsumer

    def snapshot_of(self, saved: str) -> PgSnapshot:
        """The snapshot of a shape that is restored."""
        return PgSnapshot.parse(saved)

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.random, self.clock = random.Random(seed), ManualClock()
        self.row: tuple[str, ...] = ()
        self.confirmed = self.lsn = 0
        self.log: list[list[Fragment]] = []
        """Whole transactions, as fragments; the last may not have committed."""
        self.rows: dict[int, list[tuple[int, dict[str, str]]]] = {t.oid: [(0, {})] for t in TABLES}
        """oid → (commit LSN, contents from then on)"""
        self.lives = self.shape_count = 0
        self.process: Process | None = None
        self.start("a")
        for table in TABLES[:2]:
            self.add(table)
        self.flush_all()

    # -- lives -------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.lives += 1
        self.process = Process(self, Path(self.directory.name) / f"{name}.db", self.lives)
        self.connect()

    def connect(self) -> None:
        """Begin a session at the confirmed position; restored shapes follow it."""
        process = self.alive
        process.taps.begin_session(self.row)
        process.taps.set_carried_relations({table.oid for table in TABLES})
        self.row = process.taps.names
        self.session = Session(self.confirmed)
        process.taps.begin_stream(self.session, self.confirmed)
        self.delivered = 0
        """Fragments of the transaction at hand."""
        if process.sink.restoring:
            self.loop.run_until_complete(self.restore())

    async def restore(self) -> None:
        process = self.alive
        for saved in await process.store.read_saved():
            assert saved.handle not in process.shapes
            table = next(t for t in TABLES if t.oid == int(saved.record))
            log = process.store.restore_log(saved)
            self.take_in(saved.handle, table, log, self.snapshot_of(saved.snapshot), has_lsn=log.end.tx)
        process.sink.finish_restore()

    def take_in(self, handle: str, table: Relation, log: DiskLog, snapshot: PgSnapshot, *, has_lsn: int = 0) -> None:
        definition = ShapeDefinition(Source("table", "db", "public", table.table))
        shape = LiveShape(handle, definition, b"", log)
        writer = RowWriter("public", table.table, ("id", "v"), ("id",))
        consumer = self.consumer_kind(shape, table, None, writer, has_lsn=has_lsn)
        consumer.set_snapshot(snapshot)
        consumer.follow_immediately()
        self.alive.sink.router.add(consumer)
        self.alive.shapes[handle] = shape, consumer
        shape.mark_ready()

    @property
    def alive(self) -> Process:
        assert self.process is not None
        return self.process

    def turn(self, steps: int = 5) -> None:
        async def some() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some())

    @rule(name=st.sampled_from("aaab"), reported=st.booleans(), happens=st.booleans())
    def die_in_a_flush(self, name: str, reported: bool, happens: bool) -> None:
        """Die at the moment of the greatest possible loss: the last changes were just written, and all notices were
        handled."""
        self.stream()
        if self.alive.flush is None:
            self.begin_flush()
        self.handle(1_000)
        self.die(name, reported, happens)

    @rule(name=st.sampled_from("aaab"), reported=st.booleans(), happens=st.booleans())
    def die(self, name: str, reported: bool, happens: bool) -> None:
        """Die. A pending flush takes effect or not, and is reported or not."""
        process = self.alive
        if process.gate.waiting:
            future, work = process.gate.waiting.popleft()
            if happens:
                work()
                if reported:
                    future.set_result(None)
                    self.turn()
                    self.handle(1_000 if name == "a" else 0)
        if process.flush is not None:
            process.flush.cancel()
            self.turn()
        process.file.release()
        self.process = None
        self.check_files()
        self.start(name)

    @rule()
    def another_machine_captures_meanwhile(self) -> None:
        self.die(name="b", reported=False, happens=False)
        self.stream()
        self.flush_all()
        self.handle(1_000)
        self.die(name="a", reported=False, happens=False)

    @rule()
    def reconnect(self) -> None:
        """The session fails, and the process continues."""
        self.connect()

    # -- the stream --------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), fragments=st.integers(1, 2))
    def write(self, count: int, fragments: int) -> None:
        """A transaction of the application."""
        self.lsn += self.random.randint(1, 3)
        transaction: list[Fragment] = []
        ordinal = 0
        now = {oid: dict(versions[-1][1]) for oid, versions in self.rows.items()}
        for index in range(fragments):
            changes = []
            for _ in range(count):
                table, key = self.random.choice(TABLES), str(self.random.randrange(KEYS))
                position, text, contents = ChangePosition(self.lsn, ordinal), f"{self.lsn}.{ordinal}", now[table.oid]
                old = {"id": key, "v": contents[key]} if key in contents else None
                if old is not None and self.random.random() < 0.4:
                    del contents[key]
                    changes.append(Change(table, "delete", position, old=old))
                else:
                    contents[key] = text
                    kind = "insert" if old is None else "update"
                    changes.append(Change(table, kind, position, new={"id": key, "v": text}, old=old))
                ordinal += 2
            last, commits = changes[-1].position, index == fragments - 1
            transaction.append(Fragment(self.lsn, self.lsn, 0, index == 0, commits, tuple(changes), last))
        self.log.append(transaction)
        for oid, contents in now.items():
            self.rows[oid].append((self.lsn, contents))

    @property
    def next_one(self) -> list[Fragment] | None:
        return next((each for each in self.log if each[0].commit_lsn > self.session.at), None)

    @precondition(lambda self: self.process is not None and self.next_one is not None)
    @rule()
    def deliver(self) -> None:
        transaction = self.next_one
        assert transaction is not None
        fragment = transaction[self.delivered]
        owing = self.alive.taps.dispatch_fragment(fragment)
        self.owing = owing if self.delivered == 0 else self.owing | owing
        self.delivered += 1
        if fragment.commits:
            self.session.confirm(self.session.tracker.commit(fragment, self.owing, 0))
            self.session.status.record_commit(fragment.commit_lsn)
            self.session.at, self.delivered = fragment.commit_lsn, 0
        self.tell()

    @rule()
    def stream(self) -> None:
        """All there is, and what comes of it."""
        self.write(2, 1)
        while self.next_one is not None:
            self.deliver()
        self.evaluate()

    @rule()
    def evaluate(self) -> None:
        turn = Turn(self.clock, self.clock.monotonic_s() + 1.0)
        while self.alive.sink.run_slice(turn):
            pass

    @rule(count=st.integers(1, 3))
    def handle(self, count: int) -> None:
        for _ in range(min(count, len(self.session.notices))):
            consumer, position = self.session.notices.popleft()
            self.session.confirm(self.session.tracker.record_flush(consumer, position, 0))
        self.tell()

    def tell(self) -> None:
        if not self.delivered:
            self.confirmed = max(self.confirmed, self.session.status.flushed)

    # -- shapes ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.process is not None and not self.delivered)
    @rule(table=st.sampled_from(TABLES))
    def add(self, table: Relation) -> None:
        """Add a shape. Its snapshot sees everything delivered to this process (capture_tap.py, K3), by earlier sessions
        too."""
        self.evaluate()
        seen = max(self.session.at, self.alive.sink.taken)
        self.shape_count += 1
        handle, log = f"h{self.shape_count}", self.alive.store.create_log()
        writer = RowWriter("public", table.table, ("id", "v"), ("id",))
        for key, text in self.at(table.oid, seen).items():
            log.add_base([writer.render_base_row({"id": key, "v": text})])
        log.seal_base()
        next_xid = seen + 1  # a transaction's xid is its LSN here
        snapshot = PgSnapshot(next_xid, next_xid, frozenset(), lsn=seen + 1)
        self.take_in(handle, table, log, snapshot)
        self.alive.store.logs.save_record(log, handle, str(table.oid).encode(), str(snapshot))

    @precondition(lambda self: self.process is not None and self.process.shapes)
    @rule()
    def remove(self) -> None:
        handle = self.random.choice(sorted(self.alive.shapes))
        shape, consumer = self.alive.shapes.pop(handle)
        shape.drop("nobody reads it")
        self.alive.sink.remove_consumer(consumer)

    # -- the disk ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.process is not None and self.process.flush is None)
    @rule()
    def begin_flush(self) -> None:
        self.alive.flush = self.loop.create_task(self.alive.store.flush())
        self.turn()

    @precondition(lambda self: self.process is not None and self.process.flush is None)
    @rule()
    def flush_all(self) -> None:
        self.begin_flush()
        self.end_flush(True, True)

    @precondition(lambda self: self.process is not None and self.process.gate.waiting)
    @rule(happens=st.booleans(), reported=st.booleans())
    def end_flush(self, happens: bool, reported: bool) -> None:
        future, work = self.alive.gate.waiting.popleft()
        if happens or reported:
            work()
        if reported:
            future.set_result(None)
        else:
            future.set_exception(UnavailableError("the disk."))
        self.turn()
        flush, self.alive.flush = self.alive.flush, None
        assert flush is not None and flush.done()
        assert flush.exception() is None or isinstance(flush.exception(), UnavailableError)

    @rule()
    def commit_in_a_flush(self) -> None:
        """A commit during a flush is confirmed once no work is pending, even if it changes nothing."""
        if self.alive.flush is None:
            self.begin_flush()
        self.write(1, 1)
        while self.next_one is not None:
            self.deliver()
        self.evaluate()
        if self.alive.gate.waiting:
            self.end_flush(True, True)
        self.quiet()

    # -- what holds --------------------------------------------------------------------------------------------

    def at(self, oid: int, lsn: int) -> dict[str, str]:
        return next(contents for at, contents in reversed(self.rows[oid]) if at <= lsn)

    def folded(self, log: DiskLog) -> dict[str, str]:
        async def whole() -> list[bytes]:
            found, offset = list[bytes](), BEFORE_ALL
            while True:
                chunk = await log.fetch(offset)
                found += split_chunk(chunk.items)
                offset = chunk.end
                if chunk.complete:
                    return found

        rows: dict[str, str] = {}
        for item in map(json.loads, self.loop.run_until_complete(whole())):
            operation, value = item["headers"]["operation"], item["value"]
            assert (operation == "insert") == (value["id"] not in rows), item
            if operation == "delete":
                del rows[value["id"]]
            else:
                rows[value["id"]] = value["v"]
        return rows

    def check_files(self) -> None:
        """Check each file while no process has it open. Shapes that may be restored have all confirmed commits."""
        for path in sorted(Path(self.directory.name).glob("*.db")):
            file = ShapeFile(path)
            try:
                if file.open() not in self.row:
                    continue
                store = ShapeStore(
                    file, FileThreads(Inline(), Inline()), self.clock, Rand(1), StatusTracker(), "disk",
                    LogRoom(LogLimits(), Budget(1 << 30), Budget(1 << 30)),
                )  # fmt: skip
                for saved in file.read_shapes():
                    log = store.restore_log(saved)
                    seen = PgSnapshot.parse(saved.snapshot).xmax - 1
                    due = self.at(int(saved.record), max(self.confirmed, seen, log.end.tx))
                    assert self.folded(log) == due, f"confirmed and not kept: confirmed={self.confirmed} {saved}"
            finally:
                file.release()

    @invariant()
    def nothing_is_confirmed_inside_a_transaction(self) -> None:
        if self.process is not None:
            self.session.tracker.check_invariants()
            assert self.confirmed <= self.lsn

    def quiet(self) -> None:
        """Deliver, evaluate, write and report everything. Then nothing is pending, and every shape equals its table."""
        while self.next_one is not None:
            self.deliver()
        self.evaluate()
        if self.alive.flush is not None:
            self.end_flush(True, True)
        if not self.alive.store.clean:
            self.begin_flush()
            self.end_flush(True, True)
        self.handle(1_000)
        assert not self.session.tracker.pending_positions, "it sticks"
        assert self.confirmed == self.lsn
        for shape, consumer in self.alive.shapes.values():
            assert not shape.has_ended, shape.end_reason
            assert self.folded(shape.log) == self.at(consumer.oid, self.lsn)  # type: ignore[arg-type]

    @rule()
    def comes_to_rest(self) -> None:
        self.quiet()

    def teardown(self) -> None:
        if getattr(self, "process", None) is None:
            return
        try:
            self.quiet()
        finally:
            if self.alive.flush is not None:
                self.alive.flush.cancel()
                self.turn()
            self.alive.file.release()
            self.loop.close()
            self.directory.cleanup()


@pytest.fixture(autouse=True)
def no_power_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "SYNCHRONOUS", "OFF")


BUDGET = settings(max_examples=15, stateful_step_count=25, deadline=None)
KeptMachine.TestCase.settings = BUDGET
TestKeptMachine = KeptMachine.TestCase


class HastyStore(ShapeStore):
    async def flush(self) -> None:
        self.durable(self.position())
        await super().flush()


class UnsettledSink(ShapeTap):
    """A planted fault: a flush without changes reports nothing about commits that arrived during it."""

    def __init__(self, *args: Any, store: ShapeStore, **named: Any) -> None:
        super().__init__(*args, store=store, **named)
        store.durable = self._owed.report_durable


class DeafSink(ShapeTap):
    """A planted fault: a commit that arrives while nothing is to write is not held."""

    @property
    def _must_hold_commit(self) -> bool:
        assert self.store is not None
        return super()._must_hold_commit and not self.store.clean


class Untrimmed(TableConsumer):
    def __init__(self, *args: Any, has_lsn: int = 0) -> None:
        super().__init__(*args)


@pytest.mark.parametrize(
    "planted",
    [{"store_kind": HastyStore}, {"sink_kind": UnsettledSink}, {"sink_kind": DeafSink},
     {"consumer_kind": Untrimmed}, {"snapshot_of": lambda self, text: PgSnapshot(1, 1, frozenset(), lsn=1)}],
    ids=["confirm-before-flush", "unsettled-flush", "nothing-owed", "untrimmed-restore", "restored-as-passed"],
)  # fmt: skip
def test_the_property_finds_planted_faults(planted: dict[str, Any]) -> None:
    machine = seed(0)(type("Planted", (KeptMachine,), planted))  # any will do; with this one it takes a second
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine, settings=settings(BUDGET, max_examples=500, phases=[Phase.generate], database=None)
        )


def test_what_is_given_up_while_logs_are_restored_is_confirmed_with_their_ends_and_not_before() -> None:
    """The file still holds them, under the name that the capture's row has: a process that dies now resumes them."""
    machine = KeptMachine()
    machine.begin(seed=1)
    machine.stream()
    machine.flush_all()
    machine.handle(1_000)
    confirmed = machine.confirmed
    assert confirmed == machine.lsn
    machine.alive.file.release()
    process = Process(machine, Path(machine.directory.name) / "a.db", 9, BacklogLimits(size_bytes=3_000))
    machine.process = process
    process.taps.begin_session(machine.row)
    process.taps.set_carried_relations({table.oid for table in TABLES})
    machine.session = Session(confirmed)
    process.taps.begin_stream(machine.session, confirmed)
    for _ in range(20):
        machine.write(3, 1)
    while machine.next_one is not None:
        machine.deliver()
    machine.evaluate()
    assert process.sink.resumable == frozenset(), "more than may wait arrived: the logs cannot go on"
    machine.flush_all()
    machine.handle(1_000)
    assert (machine.session.notices, machine.confirmed) == (deque(), confirmed)
    for saved in machine.loop.run_until_complete(process.store.read_saved()):
        process.store.delete_saved(saved)
    process.sink.finish_restore()
    machine.flush_all()
    machine.handle(1_000)
    assert machine.confirmed == machine.lsn
    machine.teardown()
