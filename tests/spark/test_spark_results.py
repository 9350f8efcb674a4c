"""Results of a derived function are stored whole or refused, and a row without a key fails only its table."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from support.spark.derived import Clicks, FakeSpark, Frame, count_by_product, counts, derivation
from support.spark.known_clicks import Clicks as Numbers
from support.spark.running import mark, started
from support.waiting import eventually
from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.limits import STATUS_PUBLISH_INTERVAL_S
from tidemill.base.runtime.tasks import run_unit_thread
from tidemill.base.status.freshness import verdict_of
from tidemill.base.status.status import StatusTracker, derive_statuses
from tidemill.cli.verify.derived import RecomputedTable
from tidemill.consensus.status.board import StatusBoard
from tidemill.shards.api import ShardSchema
from tidemill.spark.definition import DerivedTable
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.derived.function_result import OMITTED
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.pipeline.streaming_query import StreamingQuery
from tidemill.spark.source import register

pytestmark = pytest.mark.spark


def exit_code(harbour: Any, name: str) -> int:
    """Return the exit code of `tidemill why`."""
    reports = harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports())
    return verdict_of(derive_statuses(reports, harbour.stores.clock.now_ms()), name).exit_code


def test_every_column_of_real_spark_is_stored_or_refused(harbour: Any, spark: Any, tmp_path: Path) -> None:
    register(spark, harbour.urls.objects, harbour.urls.consensus)
    numbers = Numbers(harbour)
    numbers.change(range(6), 1)

    def derived(function: Callable[..., Any], name: str = "counts") -> Derivation:
        table = DerivedTable(name, ("product",), ("clicks",), 0.05, function)
        return Derivation(harbour.portal, harbour.stores, spark, table, tmp_path / name)

    def by_data(_: Any, clicks: Any) -> Any:
        return clicks.groupBy("product").pivot("id").count()

    found = derived(by_data, "by_data")
    found.open()
    with pytest.raises(InvalidError, match=r"more columns than for empty inputs: table=by_data more=0,1,2,3,4,5\."):
        found.recompute()
    assert harbour.upper("by_data") == 0, "not even the columns that it had for empty inputs"
    writer = found.writer
    assert writer is not None
    with pytest.raises(InvalidError, match="more columns than for empty inputs"):
        RecomputedTable(spark, found.table, writer.shard, [numbers.shard])._compute(
            [harbour.portal.call(numbers.shard.snapshot(numbers.upper - 1))]
        )

    named = derived(lambda _, clicks: clicks.groupBy("product").pivot("id", [0, 5]).count())
    named.open()
    assert named.recompute()
    asked = "SELECT product, any_value(1) FILTER (id = 0), any_value(1) FILTER (id = 5) FROM t GROUP BY product"
    con = duckdb.connect()
    con.execute("CREATE TABLE t (id BIGINT, product BIGINT)")
    con.executemany("INSERT INTO t VALUES (?, ?)", list(numbers.rows.items()))
    rows = [(row["product"], row["0"], row["5"]) for row in harbour.contents("counts")]
    assert sorted(rows) == sorted(con.execute(asked).fetchall())

    for value, kind in ((None, "NoneType"), (duckdb.sql("SELECT 1 AS product").df(), "DataFrame"), ([1], "list")):
        with pytest.raises(InvalidError, match=rf"returned no DataFrame: table=other returned=\S+\.{kind}\."):
            derived(lambda *_, value=value: value, "other").open()
    late = derived(lambda _, clicks: clicks.select("product").distinct() if clicks.isEmpty() else None, "late")
    late.open()
    with pytest.raises(InvalidError, match="returned no DataFrame"):
        late.recompute()


@pytest.mark.parametrize("by_group", [False, True])
def test_f322_a_group_without_a_key_ends_no_other_and_is_told_until_it_is_gone(
    harbour: Any, tmp_path: Path, by_group: bool
) -> None:
    clicks = Clicks(harbour, tmp_path)
    derived = derivation(harbour, tmp_path, count_by_product, by_group=by_group)
    clicks.say(("a", 1), ("b", 2))
    derived.open()
    assert derived.recompute() and derived.omitted_rows_error == ""
    clicks.sink.process(0)
    clicks.harbour.produce(clicks.topic, [(b"c", {"click_id": "c"}), (b"d", {"click_id": "d", "product_id": 2})])
    clicks.say()
    assert derived.recompute()
    assert counts(harbour) == {1: 1, 2: 2}, "the other groups go on"
    assert derived.omitted_rows_error == f"{OMITTED}: table=counts null=1 twice=0"
    clicks.say(("e", 2))
    assert derived.recompute() and counts(harbour) == {1: 1, 2: 3}
    assert derived.omitted_rows_error == f"{OMITTED}: table=counts null=1 twice=0", (
        "a change of another group does not heal it"
    )
    clicks.say(("e", 1), ("c", 3))
    assert derived.recompute() and derived.omitted_rows_error == "" and counts(harbour) == {1: 2, 2: 2, 3: 1}


def test_a_key_that_comes_twice_is_absent_and_the_other_rows_are_there(harbour: Any, tmp_path: Path) -> None:
    clicks = Clicks(harbour, tmp_path)

    def function(_: Any, frame: Frame) -> Frame:
        rows = frame.table.select(["product_id"]).append_column("n", pa.array([1] * frame.table.num_rows, pa.int64()))
        return Frame(rows)

    derived = derivation(harbour, tmp_path, function)
    clicks.say(("a", 1), ("b", 2))
    derived.open()
    assert derived.recompute() and counts(harbour) == {1: 1, 2: 1}
    clicks.say(("c", 2), ("d", 3))
    assert derived.recompute() and counts(harbour) == {1: 1, 3: 1}, "no old row stays as if it were current"
    assert derived.omitted_rows_error == f"{OMITTED}: table=counts null=0 twice=2 product_id=2"


DERIVED = """
def build(p):
    from support.spark.derived import count_by_product
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))
    p.derived("counts", key="product_id", inputs=("clicks",), every_s=0.05)(count_by_product)
"""


def test_f323_newest_records_that_are_all_dead_letters_and_rows_left_out_are_no_healthy_table(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor after a restart of the driver, which reads none of them again."""
    monkeypatch.setattr(StreamingQuery, "run", lambda _: None)  # FakeSpark has no queries
    topic = harbour.create_topic("clicks")
    now_ms = harbour.stores.clock.now_ms()

    def say(*values: bytes) -> None:
        nonlocal now_ms
        harbour.produce(topic, [(b"", value) for value in values])
        now_ms += 1
        harbour.mint("topic/clicks", now_ms, topic)

    def reported(name: str, text: str) -> Any:
        return eventually(lambda: (m := mark(harbour, f"shard:{name}")) and text in m.error and m)

    def well(name: str) -> bool:
        def healthy() -> bool:
            m = mark(harbour, f"shard:{name}")
            return m is not None and m.position == now_ms + 1 and not m.error

        return bool(eventually(healthy))

    def opened_again(runner: PipelineRunner) -> None:
        """Let the table fail, leave its seat and be opened again, without a record in between."""
        (unit,) = runner.feeds[0].units
        before = unit.writer
        unit._on_failure(UnavailableError("The store is away."), True)
        eventually(lambda: unit.writer is not before and unit.seated)
        opened_ms = harbour.stores.clock.now_ms()
        eventually(lambda: reported_ms() > opened_ms + 1000 * STATUS_PUBLISH_INTERVAL_S)  # a whole look later
        found = mark(harbour, "shard:clicks")
        assert found is not None and "count=10" in found.error and "away" not in found.error

    def reported_ms() -> int:
        return max(r.at_ms for r in harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports()))

    runner, stopping, thread = started(harbour, tmp_path, DERIVED)
    runner.spark = FakeSpark()
    runner.session_ready.set()
    try:
        say(b"malformed")
        dead = reported("clicks", "its newest records are all dead letters: count=1 topic=clicks partition=0 offset=0")
        assert dead.position == now_ms + 1 and exit_code(harbour, "shard:clicks") > 0, "it holds nothing"
        say(b'{"click_id":"a","product_id":1}', *([b'{"click_id":"b","product_id":"x"}'] * 9))
        assert well("clicks") and well("counts") and exit_code(harbour, "shard:clicks") == 0
        say(b'{"click_id":"b","product_id":"x"}')
        reported("clicks", "count=10 topic=clicks partition=0 offset=11 reason=[Expected `int")
        opened_again(runner)
    finally:
        stopping.set()
        thread.join(30)
    (tmp_path / "pipeline.py").unlink()
    runner, stopping, thread = started(harbour, tmp_path, DERIVED)
    runner.spark = FakeSpark()
    runner.session_ready.set()
    try:
        eventually(lambda: runner.tables())
        reported("clicks", "count=10")
        assert exit_code(harbour, "shard:clicks") > 0
        opened_again(runner)
        say(b'{"click_id":"c"}')
        reported("counts", OMITTED)
        assert well("clicks") and exit_code(harbour, "shard:counts") > 0 and counts(harbour) == {1: 1}
        say(b'{"click_id":"c","product_id":1}')
        assert well("clicks") and well("counts") and exit_code(harbour, "shard:counts") == 0
        assert counts(harbour) == {1: 2}
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_f324_inputs_without_a_time_in_common_are_waited_for_and_park_nothing(harbour: Any, tmp_path: Path) -> None:
    clicks = Clicks(harbour, tmp_path)
    clicks.say(("a", 1))
    ahead = Numbers(harbour, "ahead")
    for at in range(3):
        ahead.change([at], at)
    ahead.merge(20)

    def function(spark: Any, frame: Frame, _: Frame) -> Frame:
        return count_by_product(spark, frame)

    table = DerivedTable("counts", ("product_id",), ("clicks", "ahead"), 0.05, function)
    derived = Derivation(harbour.portal, harbour.stores, FakeSpark(), table, tmp_path / "counts")  # type: ignore[arg-type]
    ending, tracker = threading.Event(), StatusTracker()
    supervised: Any = {"tracker": tracker, "clock": harbour.stores.clock, "ending": ending}
    body = (lambda: derived.run(ending),)
    thread = threading.Thread(target=run_unit_thread, args=("shard:counts", *body), kwargs=supervised)
    thread.start()
    try:
        eventually(lambda: "no time in common that is still readable" in derived.error)
        assert derived.waits and derived.waits_for == "shard:clicks" and tracker.failure("shard:counts") is None
        for _ in range(2):
            clicks.say(("b", 1))
        eventually(lambda: derived.recomputed == 1)
        eventually(lambda: not derived.waits and derived.error == "")
    finally:
        ending.set()
        thread.join(30)
    assert counts(harbour) == {1: 2} and isinstance(derived.writer.schema if derived.writer else None, ShardSchema)
