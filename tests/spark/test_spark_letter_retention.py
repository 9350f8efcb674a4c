"""Dead letters expire, their number stays, and a writer needs little memory for them."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.spark.running import started
from support.waiting import eventually
from tidemill.base.clock import ManualClock
from tidemill.base.errors import CorruptError
from tidemill.cli.pipeline import view
from tidemill.cli.verify.tables import poisoned_keys
from tidemill.console.dead_letter_read import LettersRead, read_letters
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.compaction.compaction import FAN_IN, compact_once
from tidemill.spark import stored_letters
from tidemill.spark.decode.dead_letter_rows import DEAD_BYTES_MAX, DEAD_LETTERS, DeadLetter, Place, dead_letter_table
from tidemill.spark.ingest import dead_letters
from tidemill.spark.ingest.dead_letters import DeadLetterWriter
from tidemill.spark.pipeline import runner
from tidemill.spark.stored_letters import StoredLetters

NAME = "p.dead_letters"
UNIT = "dead-letters"
"""Thread of a driver that removes old letters."""
DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
ROWS = ShardSchema((Column("id", "int64"),), ("id",))


class Keeper:
    """A writer of dead letters whose clock is set by hand. Letters expire after eight days."""

    def __init__(self, harbour: Any, clock: ManualClock) -> None:
        s = harbour.stores
        self.harbour, self.clock = harbour, clock
        self.writer = DeadLetterWriter(
            harbour.portal, lambda: harbour.portal.call(s.shard(NAME, DEAD_LETTERS)), s.rand, clock, 8 * DAY_MS
        )
        self.writer.open()

    def put(self, *offsets: int, topic: str = "t", at_ms: int | None = None, key: str = "", data: bytes = b"") -> None:
        at_ms = self.clock.now_ms() if at_ms is None else at_ms
        table = "public.orders" if key else ""
        found = [DeadLetter(topic, 0, n, n, at_ms, f"broken {n}", data, table, key) for n in offsets]
        self.writer.put(dead_letter_table(found))

    def after(self, ms: int) -> int:
        self.clock.advance(ms)
        return self.writer.expire(threading.Event()) or 0

    def stored(self) -> list[int]:
        return sorted(row["offset"] for row in self.harbour.contents(NAME) if row["offset"] >= 0)

    def stated(self) -> list[str]:
        return [row["reason"] for row in self.harbour.contents(NAME) if row["offset"] < 0]

    def read(self) -> LettersRead:
        return self.harbour.portal.call(read_letters(self.harbour.shard(NAME), 100))  # type: ignore[no-any-return]

    def version(self) -> int:
        shard = self.harbour.shard(NAME)
        self.harbour.portal.call(shard.frontiers())
        return int(shard.state.version)


@pytest.fixture
def keeper(harbour: Any) -> Keeper:
    return Keeper(harbour, ManualClock(START_MS))


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """Measure the most memory that Arrow, and Python, have in the body."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())
    found: list[int] = []
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield found
        found.append(pool.max_memory() + tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def test_a_writer_that_starts_reads_the_positions_of_large_letters_and_not_their_bytes(
    harbour: Any, keeper: Keeper
) -> None:
    """32 MB of letters in one batch."""
    random = np.random.default_rng(1)
    for batch in range(FAN_IN):
        found = [
            DeadLetter("t", batch, n, n, START_MS, "broken", random.bytes(DEAD_BYTES_MAX)) for n in range(512 // FAN_IN)
        ]
        keeper.writer.put(dead_letter_table(found))
    shard, s = harbour.shard(NAME), harbour.stores
    assert harbour.portal.call(compact_once(shard, s.objects, s.rand))
    [batch] = harbour.portal.call(shard.batches(0))
    assert sum(part.size_bytes for part in batch.parts) > 32 << 20
    starting = Keeper(harbour, keeper.clock)
    starting.put(7)  # imports of Arrow's compute functions are not measured
    starting = Keeper(harbour, keeper.clock)
    with peak_bytes() as peak:
        starting.put(5, 7, topic="u")
    assert starting.writer.total == 2
    assert peak[0] < 4 << 20
    with peak_bytes() as peak:
        assert len(StoredLetters(harbour.portal, shard, s.rand).read()) == 514
    assert peak[0] < 4 << 20


def test_letters_expire_and_their_number_does_not(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "EXPIRED_ROWS", 2)
    keeper.put(*range(5))
    for day in range(1, 10):
        keeper.clock.advance(DAY_MS)
        keeper.put(100 + day)
    assert keeper.after(0) == 0, "the first check only finds them"
    before = keeper.version()
    assert keeper.after(60_000) == 0 and keeper.version() == before, "a call between two checks costs nothing"
    keeper.put(0, 1, 2, 3, 4, at_ms=START_MS)  # a slower peer stores the letters of its interval again
    assert keeper.after(3_600_000) == 5
    assert keeper.version() == before + 3, "in pieces"
    assert keeper.stored() == list(range(101, 110))
    assert keeper.stated() == ["5 dead letters of records until 2024-10-04T00:00:00+00:00 expired"]
    found = keeper.read()
    assert (found.total, found.expired, found.examined) == (9, 5, 9)
    assert [letter["offset"] for letter in found.letters] == list(range(101, 110))
    stored = StoredLetters(keeper.harbour.portal, keeper.harbour.shard(NAME), keeper.harbour.stores.rand)
    assert [letter.place.offset for letter in stored.read()] == list(range(101, 110)), "a replay skips the number"

    # Fewer sweeps than letters: each reads all of them.
    before = keeper.version()
    for _ in range(20):
        assert keeper.after(3_600_000) == 0
    assert keeper.version() == before
    other = Keeper(keeper.harbour, keeper.clock)  # another driver, which knows nothing
    assert other.after(3_600_000) == 0
    assert other.after(7_200_000) == 1
    assert keeper.read().expired == 6 and len(keeper.stated()) == 1
    assert keeper.after(3_600_000) == 0, "they are gone for every driver"
    keeper.put(102, at_ms=START_MS + 2 * DAY_MS)
    assert keeper.stored() == list(range(102, 110))
    s, shard = keeper.harbour.stores, keeper.harbour.shard(NAME)
    keeper.harbour.portal.call(shard.downgrade_since("test", 1, keeper.harbour.upper(NAME) - 1))
    while keeper.harbour.portal.call(compact_once(shard, s.objects, s.rand)):
        pass
    assert keeper.stored() == list(range(102, 110)) and keeper.read().expired == 6


def test_a_letter_that_explains_a_missing_row_does_not_expire(harbour: Any, keeper: Keeper) -> None:
    """`verify` reports such a row as poisoned, and not as lost."""
    keeper.put(1, key='{"id": 1}')
    keeper.clock.advance(1)
    keeper.put(2, key='{"id": 1}')
    keeper.put(3, key='{"id": 2}')
    keeper.put(4)
    keeper.clock.advance(20 * DAY_MS)
    keeper.after(0)
    assert keeper.after(3_600_000) == 2
    assert keeper.stored() == [2, 3]
    poisoned = harbour.portal.call(poisoned_keys(harbour.shard(NAME), "public.orders", ROWS))
    assert poisoned == {(1,): "broken 2", (2,): "broken 3"}
    reads: list[int] = []
    keeper.writer._sweep = lambda *_: reads.append(1) or 0  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        keeper.after(3_600_000)
    assert reads == [], "they are not read again and again"


def test_letters_that_a_replay_removes_during_a_sweep_are_not_removed_twice(
    harbour: Any, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.put(1, 2, 3)
    keeper.clock.advance(20 * DAY_MS)
    keeper.after(0)
    read, stores = stored_letters.read_letter_pieces, harbour.stores

    def reading(*arguments: Any) -> Iterator[pa.Table]:
        for number, rows in enumerate(read(*arguments)):
            if len(arguments) == 2 and not number:
                replayed = StoredLetters(harbour.portal, harbour.shard(NAME), stores.rand)
                assert replayed.remove({Place("t", 0, 1), Place("t", 0, 2)}) == 2
                again = [DeadLetter("t", 0, 2, 2, START_MS, "another reason")]
                Keeper(harbour, keeper.clock).writer.put(dead_letter_table(again))  # its record failed again
            yield rows

    monkeypatch.setattr(dead_letters, "read_letter_pieces", reading)
    assert keeper.after(3_600_000) == 1
    monkeypatch.undo()
    assert [(row["offset"], row["reason"]) for row in harbour.contents(NAME)][1:] == [(2, "another reason")]
    assert keeper.read().expired == 1
    assert keeper.after(3_600_000) == 1 and keeper.stored() == [] and keeper.read().expired == 2


def test_a_check_creates_nothing_and_appends_nothing_while_there_is_no_letter(harbour: Any) -> None:
    opened: list[int] = []
    writer = DeadLetterWriter(harbour.portal, lambda: opened.append(1), harbour.stores.rand)  # type: ignore[func-returns-value,arg-type,return-value]
    assert writer.expire(threading.Event()) == 0 and writer.expire(threading.Event()) is None and opened == []
    keeper = Keeper(harbour, ManualClock(START_MS))
    assert keeper.after(0) == keeper.after(3_600_000) == 0
    assert harbour.upper(NAME) == 0


def test_the_row_with_the_number_of_expired_letters_is_no_letter_of_a_list_of_pipelines(
    harbour: Any, keeper: Keeper
) -> None:
    keeper.put(1, 2, 3)
    keeper.clock.advance(20 * DAY_MS)
    keeper.put(4)
    for _ in range(2):
        keeper.after(3_600_000)
    opened: Any = SimpleNamespace(portal=harbour.portal, shard=harbour.shard)
    state = harbour.shard(NAME).state
    assert keeper.read().expired == 3 and view._count_letters(opened, state) == len(keeper.stored()) == 1


def test_a_check_that_fails_is_repeated_after_a_minute(
    harbour: Any, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was repeated after an hour, and calls in between cleared its error."""
    keeper.put(1)
    keeper.clock.advance(20 * DAY_MS)
    assert keeper.after(0) == 0

    def damaged(*_: Any) -> Any:
        raise CorruptError("a part is damaged.")

    monkeypatch.setattr(dead_letters, "read_letter_pieces", damaged)
    with pytest.raises(CorruptError):
        keeper.after(3_600_000)
    assert keeper.writer.expire(threading.Event()) is None
    with pytest.raises(CorruptError):
        keeper.after(60_000)
    monkeypatch.undo()
    assert keeper.after(60_000) == 1 and keeper.stored() == []


def test_a_driver_removes_old_letters(harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "EXPIRY_INTERVAL_S", 0.02)
    topic = harbour.create_topic("clicks")
    harbour.produce(topic, [(b"a", b"bad"), (b"b", {"click_id": "b"})])
    harbour.mint("topic/clicks", 1000, topic)
    text = 'def build(p):\n    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string"))\n'
    run, stopping, thread = started(harbour, tmp_path, text, dead_letters_ms=800)
    try:
        eventually(lambda: hasattr(run, "dead_letters") and run.dead_letters.expired == 1)
        assert [row["reason"][:30] for row in harbour.contents(NAME)] == ["1 dead letter of a record unti"]
        assert UNIT in {thread.name for thread in threading.enumerate()}
        assert run.dead_letters.total == 1 and len(harbour.contents("clicks")) == 1
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_run_without_an_age_removes_no_letters(harbour: Any, tmp_path: Path) -> None:
    """A run in the user's own session does not know the retention of the cluster."""
    harbour.create_topic("clicks")
    text = 'def build(p):\n    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string"))\n'
    run, stopping, thread = started(harbour, tmp_path, text, dead_letters_ms=0)
    try:
        eventually(lambda: any(each.name.startswith("feed-") for each in threading.enumerate()))
        assert UNIT not in {each.name for each in threading.enumerate()} and run.settings.dead_letters_ms == 0
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_drivers_that_sweep_at_once_remove_and_count_each_letter_once(harbour: Any, keeper: Keeper) -> None:
    keeper.put(*range(50))
    keeper.clock.advance(20 * DAY_MS)
    both = [keeper, Keeper(harbour, keeper.clock)]
    for each in both:
        each.after(0)
    keeper.clock.advance(3_600_000)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda each=each: counts.append(each.after(0))) for each in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(counts) == 50 and keeper.read().expired == 50 and keeper.stored() == []
