"""Shape logs on disk against a model, through flushes that fail in any way and processes killed at any moment."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.shapes.storage import recorded, store_of, whole
from support.waiting import until
from tidemill.base.clock import ManualClock
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.shapes.log import log_set
from tidemill.shapes.log import store as store_module
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.items import LogItem, mark_last
from tidemill.shapes.log.log_offset import FIRST_OP, LogOffset
from tidemill.shapes.log.sqlite_file import ShapeFile
from tidemill.shapes.log.store import ABANDON_AFTER_S


class Model:
    """One shape as its readers see it: its base, and its transactions in order."""

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self.base: list[bytes] = []
        self.items: list[tuple[LogOffset, bytes]] = []
        self.recorded = False
        self.written = False
        """Set once it was recorded before a durable flush."""


@settings(max_examples=60, stateful_step_count=30, deadline=None)
class StoreMachine(RuleBasedStateMachine):
    """`row` is the capture's row: shapes under the name in it may be restored. `position` grows with each transaction,
    as the LSN."""

    @initialize()
    def begin(self) -> None:
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(log_set, "FLUSH_LOGS", 2)
        self.patched.setattr(log_set, "SORTED_LOGS", 3)
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.clock, self.rand = ManualClock(), random.Random(3)
        self.row: tuple[str, ...] = ()
        self.position, self.confirmed, self.lives = 0, 0, 0
        self.shapes: dict[DiskLog, Model] = {}
        self.gone: dict[str, Model] = {}
        """Shapes dropped since the last durable flush."""
        self.open()
        self.store.claim(())
        self.row = (self.store.owner,)

    def open(self) -> None:
        self.lives += 1
        self.store, self.file = store_of(Path(self.directory.name) / "db.db", self.clock, self.lives)
        self.memory, self.disk = self.store._room.memory, self.store._room.disk
        self.store.position = lambda: self.position
        self.store.durable = self.durable
        self.store.name = self.name

    async def name(self, name: str) -> None:
        self.row = (name,)

    def durable(self, position: int) -> None:
        self.confirmed = max(self.confirmed, position)
        self.gone = {}
        for model in self.shapes.values():
            model.written = model.recorded

    def go(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    # -- what shapes do ----------------------------------------------------------------------------------------

    @rule(rows=st.lists(st.integers(1, 30), max_size=8), record=st.booleans())
    def add(self, rows: list[int], record: bool) -> None:
        log = self.store.create_log()
        model = self.shapes[log] = Model(f"h{self.lives}-{log.key}")
        model.base = [b"%d" % n + b"b" * n for n in rows]
        for row in model.base:
            log.add_base([row])
        log.seal_base()
        if record:
            self.record(log)

    @precondition(lambda self: any(not model.recorded for model in self.shapes.values()))
    @rule()
    def record_one(self) -> None:
        self.record(next(log for log, model in self.shapes.items() if not model.recorded))

    def record(self, log: DiskLog) -> None:
        self.shapes[log].recorded = True
        self.store.logs.save_record(log, self.shapes[log].handle, b"record", "1:2:")

    @rule(sizes=st.lists(st.integers(1, 40), max_size=4), back=st.booleans())
    def transaction(self, sizes: list[int], back: bool) -> None:
        """Write the same transaction to every shape; undo it before its end, or publish it."""
        self.position += 1
        for log, model in self.shapes.items():
            items = [
                LogItem(LogOffset(self.position, FIRST_OP + 2 * op), b'{"headers":{%d}}' % (op * 7 + n))
                for op, n in enumerate(sizes)
            ]
            for item in items:
                log.stage(item)
            if back:
                log.unstage()
            elif items:
                assert log.publish(mark=True)
                shown = [(item.offset, item.json) for item in items]
                model.items += [*shown[:-1], (shown[-1][0], mark_last(shown[-1][1]))]

    @precondition(lambda self: self.shapes)
    @rule()
    def drop(self) -> None:
        log = self.rand.choice(list(self.shapes))
        model = self.shapes.pop(log)
        self.gone[model.handle] = model
        log.drop()

    # -- the disk ----------------------------------------------------------------------------------------------

    @rule(faults=st.sampled_from(((), (), ("lost",), ("untold",), ("", "lost"), ("", "untold"))))
    def flush(self, faults: tuple[str, ...]) -> None:
        """Flush. Each transaction of the file writes two logs."""
        self.file.faults = list(faults)
        try:
            self.go(self.store.flush())
        except UnavailableError:
            assert faults
        else:
            assert self.confirmed == self.position and self.store.clean

    @rule()
    def clear(self) -> None:
        self.go(self.store._sweep.run())

    @rule(claimed=st.booleans())
    def die_and_come_back(self, claimed: bool) -> None:
        """Restart. All data reported as durable is present, in whole transactions only; unreported data may be."""
        self.file.release()
        known = {model.handle: model for model in self.shapes.values()} | self.gone
        self.open()
        same = claimed and self.row == (self.store.owner,)
        assert self.store.claim(self.row if claimed else ("another",)) is same
        if not same:
            self.row = (self.store.owner,)
            assert self.go(self.store.read_saved()) == []
            self.shapes, self.gone, self.confirmed = {}, {}, self.position
            return
        self.shapes = {}
        for saved in self.go(self.store.read_saved()):
            assert saved.handle in known, "it was dropped, and something was confirmed since"
            model = known.pop(saved.handle)
            log = self.store.restore_log(saved)
            found = self.go(whole(log))
            end = log.end.tx
            assert found == model.base + [json for offset, json in model.items if offset.tx <= end], "whole, in order"
            assert not [1 for offset, _ in model.items if end < offset.tx <= self.confirmed], "confirmed and not there"
            model.items = [each for each in model.items if each[0].tx <= end]
            self.shapes[log] = model
        for model in (each for handle, each in known.items() if handle not in self.gone):
            assert not model.written or not self.was_confirmed(model), "recorded, confirmed and gone"
        self.gone = {}

    def was_confirmed(self, model: Model) -> bool:
        return any(offset.tx <= self.confirmed for offset, _ in model.items)

    # -- what holds at every step ------------------------------------------------------------------------------

    @invariant()
    def readers_get_everything_from_everywhere(self) -> None:
        if not hasattr(self, "store"):
            return
        for log, model in self.shapes.items():
            assert self.go(whole(log)) == model.base + [json for _, json in model.items]
            if model.items:
                at = self.rand.randrange(len(model.items))
                rest = [json for _, json in model.items[at + 1 :]]
                assert self.go(whole(log, model.items[at][0])) == rest
                tx = model.items[at][0].tx
                behind = [json for offset, json in model.items if offset.tx > tx]
                assert self.go(whole(log, LogOffset(tx, 0))) == behind, "the whole transaction was read"

    @invariant()
    def what_is_held_is_counted(self) -> None:
        if hasattr(self, "store"):
            assert self.memory.used_bytes == sum(log.held_bytes for log in self.shapes)
            assert self.disk.used_bytes == sum(log.base_bytes + log.log_bytes for log in self.shapes)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.file.release()
            self.loop.close()
            self.directory.cleanup()
            self.patched.undo()


TestStoreMachine = StoreMachine.TestCase


async def test_f119_a_disk_that_fails_for_long_is_given_up_before_anything_is_confirmed_without_it_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.0)
    monkeypatch.setattr(store_module, "FLUSH_S", 0.01)
    clock, row, confirmed = ManualClock(), list[str](), list[int]()
    store, file = store_of(tmp_path / "db.db", clock)
    position = 1
    store.position, store.durable = lambda: position, confirmed.append

    async def name(given: str) -> None:
        named.append((given, 5 in confirmed))
        row[:] = [given]

    named: list[tuple[str, bool]] = []
    store.name = name
    store.claim(())
    row[:] = [store.owner]
    async with Tasks(print) as tasks:
        tasks.spawn(store.run(), name="store")
        log = store.create_log()
        log.add_base([b"1"])
        log.seal_base()
        store.logs.save_record(log, "h", b"record", "1:2:")
        await until(lambda: 1 in confirmed)
        assert saved_under(tmp_path, row) == ["h"]
        file.faults = ["lost", "untold"] * 10_000
        position = 5
        log.stage(LogItem(LogOffset(5, 0), b"{}"))
        log.publish()
        await until(lambda: len(file.faults) < 19_990)
        assert 5 not in confirmed and store.waited_for, "patience"
        clock.advance(int(ABANDON_AFTER_S * 1000))
        await until(lambda: 5 in confirmed)
        for _ in range(100):
            await asyncio.sleep(0)
            assert saved_under(tmp_path, row) == [], "what the row names lacks nothing that was confirmed"
        file.faults = []
        await until(lambda: saved_under(tmp_path, row) == ["h"])
        assert store.waited_for and store.clean
        assert [after for _, after in named] == [False, True], "given up before it is confirmed, taken up once"


def saved_under(path: Path, row: list[str]) -> list[str]:
    """Return the handles that a process would restore after a kill, given the capture's row."""
    with sqlite3.connect(f"file:{path}/db.db?mode=ro", uri=True) as file:
        (owner,) = file.execute("SELECT name FROM owner").fetchone()
        return [handle for (handle,) in file.execute("SELECT handle FROM shapes")] if owner in row else []


def test_another_process_may_not_open_the_file_and_one_that_cannot_be_read_is_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "db.db"
    path.write_bytes(b"no database" * 1000)
    file = ShapeFile(path)
    assert file.open() == "" and file.read_shapes() == []
    with pytest.raises(UnavailableError, match="another process uses this file of shape logs"):
        ShapeFile(path)
    file.release()
    again = ShapeFile(path)
    assert again.open() == ""
    again.release()


async def test_st3_a_transaction_that_was_not_shown_is_not_there_after_a_crash(tmp_path: Path) -> None:
    store, file = store_of(tmp_path / "db.db", ManualClock())
    store.claim(())
    log = recorded(store, b"1")
    for tx in (5, 6):
        log.stage(LogItem(LogOffset(tx, 0), b"%d" % tx))
        log.publish()
    for op in range(3):
        log.stage(LogItem(LogOffset(7, op), b"half"))
    await store.flush()
    file.release()
    again, file = store_of(tmp_path / "db.db", ManualClock())
    assert again.claim([store.owner])
    (saved,) = await again.read_saved()
    assert await whole(again.restore_log(saved)) == [b"1", b"5", b"6"]
    file.release()


async def test_st10_a_base_that_was_cut_off_is_not_restored_and_leaves_the_disk(tmp_path: Path) -> None:
    store, file = store_of(tmp_path / "db.db", ManualClock())
    store.claim(())
    recorded(store, b"whole")
    half = store.create_log()
    half.add_base([b"x" * 50 for _ in range(20)])
    await store.flush()
    file.release()
    again, file = store_of(tmp_path / "db.db", ManualClock(), seed=2)
    assert again.claim([store.owner])
    assert [saved.handle for saved in await again.read_saved()] == ["h1"]
    assert file.find_leftovers() == [half.key]
    assert again.create_log().key > half.key, "an id is not used again while anything of it is left"
    await again._sweep.run()
    assert file.find_leftovers() == []
    file.release()


async def test_q3_a_shape_that_was_dropped_before_a_flush_is_not_there_after_it_and_what_a_failed_flush_held_is(
    tmp_path: Path,
) -> None:
    store, file = store_of(tmp_path / "db.db", ManualClock())
    store.claim(())
    dropped, stays, quiet = recorded(store, b"1"), recorded(store, b"2"), recorded(store, b"3")
    await store.flush()
    dropped.drop()
    quiet.stage(LogItem(LogOffset(5, 0), b"once"))
    quiet.publish()
    for tx, fault in ((5, "lost"), (6, "untold"), (7, "")):
        file.faults = [fault] if fault else []
        stays.stage(LogItem(LogOffset(tx, 0), b"%d" % tx))
        stays.publish()
        if fault:
            with pytest.raises(UnavailableError):
                await store.flush()
            assert not store.clean
    await store.flush()
    file.release()
    again, file = store_of(tmp_path / "db.db", ManualClock())
    assert again.claim([store.owner])
    found = [await whole(again.restore_log(saved)) for saved in await again.read_saved()]
    assert found == [[b"2", b"5", b"6", b"7"], [b"3", b"once"]]
    file.release()


async def test_a_flush_writes_logs_in_the_order_of_their_ids_whoever_changed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_set, "FLUSH_LOGS", 2)
    monkeypatch.setattr(log_set, "SORTED_LOGS", 4)
    store, file = store_of(tmp_path / "db.db", ManualClock())
    store.claim(())
    logs = [recorded(store, b"1") for _ in range(7)]
    await store.flush()
    for log in reversed(logs):
        log.stage(LogItem(LogOffset(5, 0), b"{}"))
        log.publish()
    written: list[list[int]] = []
    flush = file.flush
    monkeypatch.setattr(file, "flush", lambda part: (written.append([w.id for w in part.written]), flush(part)))
    await store.flush()
    assert written == [[4, 5], [6, 7], [1, 2], [3]], "of those that are ordered together"
    assert [saved.end for saved in file.read_shapes()] == [(5, 0)] * 7
    await store.aclose()


async def test_q3_what_one_part_of_a_flush_wrote_stays_when_a_later_part_of_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_set, "FLUSH_LOGS", 1)
    store, file = store_of(tmp_path / "db.db", ManualClock())
    store.claim(())
    for row in (b"1", b"2", b"3"):
        recorded(store, row)
    file.faults = ["", "lost"]
    with pytest.raises(UnavailableError):
        await store.flush()
    assert not store.clean
    await store.flush()
    file.release()
    again, file = store_of(tmp_path / "db.db", ManualClock())
    assert again.claim([store.owner])
    assert [saved.handle for saved in await again.read_saved()] == ["h1", "h2", "h3"]
    file.release()
