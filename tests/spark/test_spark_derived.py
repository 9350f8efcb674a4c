"""Derived tables without a JVM: a frame is an Arrow table, a function turns tables into one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from support.spark.derived import Clicks, FakeSpark, Frame, count_by_product, counts, derivation
from support.spark.sinks import dead_letters
from support.spark.upsert_world import SCHEMA
from support.waiting import eventually
from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.runtime.tasks import run_unit_thread
from tidemill.base.status.status import StatusTracker
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.api import DIFF, TIME, Column
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.spark import Pipeline
from tidemill.spark.definition import DerivedTable
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.merge.diff import diff_commands
from tidemill.spark.merge.mirror import Mirror


def test_a_derived_table_follows_its_inputs_and_keeps_its_history(harbour: Any, tmp_path: Path) -> None:
    clicks = Clicks(harbour, tmp_path)
    derived = derivation(harbour, tmp_path, count_by_product)
    derived.open()
    clicks.say(("a", 1), ("b", 1), ("c", 2))
    assert derived.recompute()
    clicks.say(("a", 2), ("b", None))
    assert derived.recompute()
    assert counts(harbour, 10) == {1: 2, 2: 1}
    assert counts(harbour, 20) == {2: 2}
    assert harbour.upper("counts") == 21


def test_time_moves_on_without_recomputing_what_did_not_change(harbour: Any, tmp_path: Path) -> None:
    clicks = Clicks(harbour, tmp_path)
    derived = derivation(harbour, tmp_path, count_by_product)
    derived.open()
    clicks.say(("a", 1))
    derived.recompute()
    clicks.say()
    derived.recompute()
    assert (derived.recomputed, harbour.upper("counts")) == (1, 21)
    assert not derived.recompute(), "nothing new: nothing to append"


def test_a_change_read_before_storage_went_away_is_not_forgotten(harbour: Any, tmp_path: Path) -> None:
    """The input advances by one batch, and the next one cannot be read: the first batch must still count."""
    clicks = Clicks(harbour, tmp_path)
    derived = derivation(harbour, tmp_path, count_by_product, by_group=True)
    derived.open()
    clicks.say(("a", 1))
    derived.recompute()
    clicks.say(("b", 2))
    clicks.say()
    shard = derived._inputs[0].shard
    read, calls = shard.read_batch, 0

    async def second_is_away(*given: Any) -> pa.Table:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise UnavailableError("storage is away.")
        return await read(*given)

    shard.read_batch = second_is_away  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        derived.recompute()
    assert derived.recompute()
    assert counts(harbour) == {1: 1, 2: 1}


@pytest.mark.parametrize("small_enough_to_look", [True, False])
def test_a_merge_across_the_time_in_question_does_not_hide_or_invent_a_change(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_enough_to_look: bool
) -> None:
    """One input is ahead, and all of it was merged into one batch, so changes between two times of the other are
    hidden."""
    if not small_enough_to_look:
        monkeypatch.setattr("tidemill.spark.derived.inputs.INSPECT_BYTES_MAX", 0)
    clicks, call, stores = Clicks(harbour, tmp_path), harbour.portal.call, harbour.stores
    for number in range(8):
        clicks.say((f"k{number}", 1)) if number != 4 else clicks.say()
    shard = call(stores.shard("clicks"))
    slow = call(stores.shard("slow", shard.schema))

    def both(_: Any, found: Frame, __: Frame) -> Frame:
        return count_by_product(_, found)

    table = DerivedTable("counts", ("product_id",), ("clicks", "slow"), 0.05, both)
    derived = Derivation(harbour.portal, stores, FakeSpark(), table, tmp_path / "counts")  # type: ignore[arg-type]
    derived.open()
    recomputed = []
    for lower, upper in ((0, 41), (41, 51), (51, 61)):
        call(slow.compare_and_append(lower, upper, [], ""))
        derived.recompute()
        recomputed.append(derived.recomputed)
        if not lower:
            call(shard.downgrade_since("keeper", 1, 30))
            done = call(compact_once(shard, stores.objects, Rand()))
            assert done is not None and done.shown
    assert recomputed == ([1, 1, 2] if small_enough_to_look else [1, 2, 3])
    assert [counts(harbour, at) for at in (40, 50, 60)] == [{1: 4}, {1: 4}, {1: 5}]


def test_two_derivations_race_and_a_restart_goes_on(harbour: Any, tmp_path: Path) -> None:
    clicks = Clicks(harbour, tmp_path)
    both = [derivation(harbour, tmp_path / str(n), count_by_product) for n in range(2)]
    for derived in both:
        derived.open()
    for n in range(1, 7):
        clicks.say((f"k{n}", n % 2), ("same", n))
        for derived in both if n % 3 else both[::-1]:
            derived.recompute()
    again = derivation(harbour, tmp_path / "again", count_by_product)
    again.open()
    clicks.say(("last", 0))
    assert again.recompute()
    expected: dict[int, int] = {}
    for product in [n % 2 for n in range(1, 7)] + [6, 0]:
        expected[product] = expected.get(product, 0) + 1
    assert counts(harbour) == expected


def test_the_interval_counts_from_demand(harbour: Any, tmp_path: Path) -> None:
    """The first change after a pause is computed immediately. The second one waits for the interval."""
    clicks, ending = Clicks(harbour, tmp_path), threading.Event()
    derived = derivation(harbour, tmp_path, count_by_product)
    derived.table = msgspec.structs.replace(derived.table, every_s=3600.0)
    clicks.say(("a", 1))
    derived.open()
    assert derived.recompute()
    thread = threading.Thread(target=derived.run, args=(ending,))
    thread.start()
    try:
        eventually(lambda: derived.rounds == 1)
        clicks.say(("b", 1))
        eventually(lambda: derived.rounds == 2)
        assert counts(harbour) == {1: 2}
        clicks.say(("c", 1))
        harbour.portal.call(derived.writer.shard.wait_upper(clicks.time, 0.3))
        assert derived.rounds == 2
    finally:
        ending.set()
        thread.join(30)
    assert not thread.is_alive()
    assert counts(harbour) == {1: 2}


@pytest.mark.parametrize("raised", [ZeroDivisionError("division by zero"), SystemExit("leaving"), KeyError("x")])
def test_f306_a_derived_function_that_raises_is_told_and_tried_again(
    harbour: Any, tmp_path: Path, raised: BaseException
) -> None:
    clicks = Clicks(harbour, tmp_path)
    broken = threading.Event()
    broken.set()

    def function(spark: Any, frame: Frame) -> Frame:
        if broken.is_set() and frame.table.num_rows:
            raise raised
        return count_by_product(spark, frame)

    derived = derivation(harbour, tmp_path, function)
    clicks.say(("a", 1))
    ending, tracker = threading.Event(), StatusTracker()

    def body() -> None:
        derived.run(ending, lambda: tracker.clear_failure("shard:counts"))

    supervised = {"tracker": tracker, "clock": harbour.stores.clock, "ending": ending}
    thread = threading.Thread(target=run_unit_thread, args=("shard:counts", body), kwargs=supervised)
    thread.start()
    try:
        eventually(lambda: (f := tracker.failure("shard:counts")) is not None and f.tries > 1)
        failure = tracker.failure("shard:counts")
        assert failure is not None
        assert "table=counts" in failure.error and type(raised).__name__ in failure.error
        assert not failure.parked
        broken.clear()
        eventually(lambda: derived.recomputed == 1 and tracker.failure("shard:counts") is None)
    finally:
        ending.set()
        thread.join(10)
    assert counts(harbour) == {1: 1}


def test_an_input_that_does_not_exist_yet_is_waited_for_by_name(harbour: Any, tmp_path: Path) -> None:
    derived = derivation(harbour, tmp_path, count_by_product)
    stopping = threading.Event()
    thread = threading.Thread(target=derived.run, args=(stopping,))
    thread.start()
    try:
        eventually(lambda: "no such table" in derived.error)
        assert derived.waits_for == "shard:clicks"
        clicks = Clicks(harbour, tmp_path)
        clicks.say(("a", 1))
        eventually(lambda: derived.recomputed == 1)
    finally:
        stopping.set()
        thread.join(10)


def test_a_result_whose_key_repeats_or_is_null_is_refused(tmp_path: Path) -> None:
    mirror = Mirror(SCHEMA)
    with pytest.raises(InvalidError, match="a key occurs twice: k=1"):
        diff_commands(SCHEMA, pa.table({"k": [1, 1], "v": [1, 2]}), mirror, 5)
    with pytest.raises(InvalidError, match="null"):
        diff_commands(SCHEMA, pa.table({"k": pa.array([None], pa.int64()), "v": [1]}), mirror, 5)


def test_an_idle_input_does_not_hold_a_derived_table_back(harbour: Any, tmp_path: Path) -> None:
    """No binding is minted for an idle source, so the derivation asks it for its time; its history is held until
    then."""
    clicks, call = Clicks(harbour, tmp_path), harbour.portal.call
    clicks.say(("c1", 7))
    stores = harbour.stores
    schema = call(stores.shard("clicks")).schema
    busy = call(stores.shard("busy", schema))
    call(busy.compare_and_append(0, clicks.time + 60_000, [], "t"))
    call(stores.catalogue.put(PipelineRow("p", {"clicks": "topic:clicks"})))

    def both(_: Any, found: Frame, other: Frame) -> Frame:
        return count_by_product(_, Frame(pa.concat_tables([found.table, other.table])))

    table = DerivedTable("counts", ("product_id",), ("clicks", "busy"), 0.05, both)
    derived = Derivation(harbour.portal, stores, FakeSpark(), table, tmp_path / "counts")  # type: ignore[arg-type]
    derived.open()
    assert derived.recompute()
    call(busy.frontiers())
    assert [hold.reader.partition("/")[0] for hold in busy.state.holds] == ["derived"]
    remap = call(stores.remap("topic/clicks"))
    assert call(remap.latest()).time_ms == clicks.time + 60_000 - 1
    clicks.sink.process(clicks.sink.latest())
    assert derived.recompute()
    assert derived.upper == clicks.time + 60_000


def test_a_table_is_derived_from_dead_letters_though_there_are_none(harbour: Any, tmp_path: Path) -> None:
    """The shard of dead letters has no source whose time could advance, and stays at 0 until the first letter."""
    clicks, call = Clicks(harbour, tmp_path), harbour.portal.call
    call(harbour.stores.catalogue.put(PipelineRow("p", {"clicks": "topic:clicks"}, "p.dead_letters")))
    dead_letters(harbour).open()

    def with_letters(_: Any, found: Frame, letters: Frame) -> Frame:
        count = pa.array([letters.table.num_rows], pa.int64())
        return Frame(pa.table({"rows": pa.array([found.table.num_rows], pa.int64()), "letters": count}))

    table = DerivedTable("counts", ("rows",), ("clicks", "p.dead_letters"), 0.05, with_letters)
    derived = Derivation(harbour.portal, harbour.stores, FakeSpark(), table, tmp_path / "counts")  # type: ignore[arg-type]
    clicks.time = 10_000
    clicks.say(("c1", 7))
    derived.open()
    assert not derived.recompute()
    assert derived.recompute(), "it had the letters' shard go to the time of the others"
    assert harbour.contents("counts") == [{"rows": 1, "letters": 0}]
    harbour.produce(clicks.topic, [(b"c2", b"not JSON")])
    clicks.say(("c3", 1))
    clicks.time += 5_000
    clicks.say(("c4", 1))
    derived.recompute()
    assert derived.recompute()
    assert harbour.contents("counts") == [{"rows": 3, "letters": 1}]


def test_an_input_that_gets_a_column_is_read_with_it_and_the_derived_table_gets_it_too(
    harbour: Any, tmp_path: Path
) -> None:
    clicks = Clicks(harbour, tmp_path)
    clicks.say(("a", 1), ("b", 2))
    copy = derivation(harbour, tmp_path, lambda _, found: found, key="click_id")
    tracker, stopping = StatusTracker(1000), threading.Event()
    clock = harbour.stores.clock
    failed: list[Any] = []
    thread = threading.Thread(
        target=run_unit_thread,
        args=("shard:counts", lambda: copy.run(stopping)),
        kwargs={"tracker": tracker, "clock": clock, "ending": stopping},
    )
    thread.start()
    try:
        eventually(lambda: harbour.upper("counts") == harbour.upper("clicks"))
        harbour.portal.call(harbour.shard("clicks").evolve(SchemaChanges((Column("note", "string", "old"),))))
        writer, upper = harbour.shard("clicks"), harbour.upper("clicks")
        row = {"click_id": "c", "product_id": 3, "note": "new", TIME: upper, DIFF: 1}
        rows = pa.Table.from_pylist([row])

        async def append() -> None:
            await writer.compare_and_append(upper, upper + 10, [await writer.write_part(rows)], "")

        harbour.portal.call(append())
        eventually(lambda: harbour.upper("counts") == upper + 10)
        failed.append(tracker.failure("shard:counts"))
    finally:
        stopping.set()
        thread.join(30)
    assert failed == [None], "it opened its inputs again, and nobody was bothered"
    assert [(r["click_id"], r["note"]) for r in harbour.contents("counts")] == [
        ("a", "old"),
        ("b", "old"),
        ("c", "new"),
    ]
    assert [r["note"] for r in harbour.contents("counts", upper - 1)] == [None, None], "as it was made: without it"


@pytest.mark.parametrize(
    ("tables", "circle"), [({"a": ("a",)}, "a ← a"), ({"a": ("b", "x"), "b": ("c",), "c": ("a",)}, "a ← ")]
)
def test_derived_tables_that_would_wait_for_each_other_are_refused(tables: dict[str, Any], circle: str) -> None:
    p = Pipeline("p")
    for name, inputs in tables.items():
        p.derived(name, key="k", inputs=inputs)(count_by_product)
    with pytest.raises(InvalidError, match="derived tables depend on each other") as refused:
        p.check()
    assert circle in str(refused.value)


@pytest.mark.parametrize(("inputs", "meant"), [("clicks", ("clicks",)), ("a, b", ("a", "b")), (["a", "b"], ("a", "b"))])
def test_inputs_are_named_as_keys_are(inputs: Any, meant: tuple[str, ...]) -> None:
    """`("clicks")` is a text, not a tuple: it must not become six inputs of one letter each."""
    p = Pipeline("p")
    p.derived("t", key="k", inputs=inputs)(count_by_product)
    assert p.inputs() == {"t": dict.fromkeys(meant, ())}
    with pytest.raises(InvalidError, match="needs inputs"):
        p.derived("u", key="k", inputs="")
