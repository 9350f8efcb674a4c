"""Histories: the versions of a table equal those of a window query over its change log, in steps of any length."""

from __future__ import annotations

import datetime
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from time import sleep
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from support.spark.harbour import Harbour
from support.spark.running import error_of, mark, pipeline
from support.spark.sinks import clicks_sink
from support.waiting import eventually
from tidemill.base.errors import InvalidError
from tidemill.base.status.status import StatusReport
from tidemill.console.views.pipelines import PipelineView, pipeline_views
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.api import DIFF, TIME, Column, SchemaEvolvedError, ShardSchema
from tidemill.shards.parts.schema import check_schema, update_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.registry import open_shard, read_shards
from tidemill.shards.state.restore import restore_shard
from tidemill.spark.definition import HistoryTable, Pipeline
from tidemill.spark.derived import history, version_changes
from tidemill.spark.derived.history import History
from tidemill.spark.pipeline.status_report import StatusReporter
from tidemill.spark.settings import StoreUrls

SCHEMA = ShardSchema((Column("k", "string"), Column("a", "int64"), Column("b", "float64")), ("k",))
Version = tuple[str, int | None, float | None, int, int | None, bool]
"""(k, a, b, valid_from in ms, valid_to, is_current)."""

WINDOW = """
WITH changes AS (   -- one row for each key and time: the row then, if there is one
    SELECT *, lag(live) OVER keys AS was_live, lag(a) OVER keys AS was_a, lag(b) OVER keys AS was_b
    FROM log WINDOW keys AS (PARTITION BY k ORDER BY t)
), marked AS (
    SELECT *, live AND (was_live IS NOT TRUE OR {differs}) AS opens, was_live AND (NOT live OR {differs}) AS closes
    FROM changes
), numbered AS (
    SELECT *, sum(opens::int) OVER (PARTITION BY k ORDER BY t) AS number FROM marked
), ends AS (
    SELECT k, t, row_number() OVER (PARTITION BY k ORDER BY t) AS number FROM marked WHERE closes
)
SELECT v.k, arg_max({{'a': v.a, 'b': v.b}}, v.t) AS newest, min(v.t) AS valid_from, min(ends.t) AS valid_to
FROM numbered v LEFT JOIN ends ON ends.k = v.k AND ends.number = v.number
WHERE v.live GROUP BY v.k, v.number
"""
DIFFERS = {
    ("a",): "a IS DISTINCT FROM was_a",
    ("b",): "b IS DISTINCT FROM was_b",
    (): "(a IS DISTINCT FROM was_a OR b IS DISTINCT FROM was_b)",
}


def window_query(log: list[dict[str, Any]], track: tuple[str, ...]) -> list[Version]:
    types = [("k", pa.string()), ("t", pa.int64()), ("live", pa.bool_()), ("a", pa.int64()), ("b", pa.float64())]
    with duckdb.connect() as db:
        db.register("log", pa.Table.from_pylist(log, pa.schema(types)))
        rows = db.execute(WINDOW.format(differs=DIFFERS[track])).fetchall()
    return in_order((k, v["a"], v["b"], start, end, end is None) for k, v, start, end in rows)


def in_order(versions: Iterable[Version]) -> list[Version]:
    return sorted(versions, key=lambda version: (version[0], version[3]))


class World:
    """A table that is written directly, its change log, and its history."""

    def __init__(self, harbour: Any, scratch: Path, track: tuple[str, ...] = ()) -> None:
        self.harbour, self.scratch, self.track = harbour, scratch, track
        s = harbour.stores
        opening = open_shard(s.consensus, s.objects, s.clock, s.rand, "orders", SCHEMA)
        self.table = harbour.portal.call(opening)
        self.held: dict[str, dict[str, Any]] = {}
        self.log: list[dict[str, Any]] = []
        self.upper = 0

    def write(self, rand: random.Random, times: int) -> None:
        """Append some times in one batch, each with changes of some keys."""
        updates: list[dict[str, Any]] = []
        lower = self.upper
        for _ in range(times):
            at = self.upper = self.upper + rand.randint(1, 3)
            for key in rand.sample("pqrs", rand.randint(0, 3)):
                row = rand.choice([None, {"a": rand.randint(0, 1), "b": rand.choice([None, 0.5, 1.5])}])
                before = self.held.pop(key, None)
                if row is not None:
                    self.held[key] = row
                if row == before:
                    continue
                self.log.append({"k": key, "t": at, "live": row is not None, **(row or {})})
                for some, diff in ((before, -1), (row, 1)):
                    if some is not None:
                        updates.append({"k": key, **some, TIME: at, DIFF: diff})
        self.upper += 1
        rows = pa.Table.from_pylist(updates, update_schema(SCHEMA))

        async def run() -> None:
            parts = [await self.table.write_part(rows)] if rows.num_rows else []
            await self.table.compare_and_append(lower, self.upper, parts, f"t{self.upper}")

        self.harbour.portal.call(run())

    def history(self, name: str = "1") -> History:
        declared = HistoryTable("h", "orders", self.track)
        made = History(self.harbour.portal, self.harbour.stores, declared, self.scratch / name)
        made.open()
        return made

    def versions(self, as_of: int | None = None) -> list[Version]:
        def ms(at: datetime.datetime | None) -> int | None:
            return None if at is None else round(at.timestamp() * 1000)

        rows = self.harbour.contents("h", as_of)
        return in_order((r["k"], r["a"], r["b"], ms(r["valid_from"]), ms(r["valid_to"]), r["is_current"]) for r in rows)  # type: ignore[misc]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("track", list(DIFFERS))
def test_versions_are_those_of_a_window_query_in_steps_of_any_length_and_after_kills_at_any_point(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, track: tuple[str, ...]
) -> None:
    rand = random.Random(len(track))
    monkeypatch.setattr(history, "IDLE_MOVE_S", 0.0)
    world = World(harbour, tmp_path, track)
    drivers = [world.history("1"), world.history("2")]
    for _ in range(14):
        world.write(rand, rand.randint(1, 5))
        driver = rand.choice(drivers)
        monkeypatch.setattr(history, "STEP_RECORDS", rand.choice([1, 1000]))
        roll = rand.random()
        if roll < 0.3:  # killed before or after its append; the next process has the former mirror, or none
            at = rand.choice(["write_part", "compare_and_append", "after"])
            with monkeypatch.context() as patched:
                if at == "after":
                    patched.setattr(driver._current, "apply", _kill)
                else:
                    patched.setattr(driver._output, at, _kill)
                try:
                    driver.advance()
                except Killed:
                    name = rand.choice(["1", "2", f"new-{rand.random()}"])
                    drivers[drivers.index(driver)] = world.history(name)
        elif roll < 0.5:  # stopped in order, which saves the mirror
            driver.close()
            driver.open()
        elif roll < 0.9:
            driver.advance()
    while any(driver.advance() for driver in drivers):
        pass
    assert harbour.upper("h") == world.upper
    assert world.versions() == window_query(world.log, track)
    for time in rand.sample(range(1, world.upper), 8):
        then = [each for each in world.log if each["t"] <= time]
        assert world.versions(time) == window_query(then, track), "the history is exact at every time"
        tracked = track or ("a", "b")
        valid = {v[0]: v[1:3] for v in world.versions() if v[3] <= time and (v[4] is None or time < v[4])}
        rows = {row["k"]: (row["a"], row["b"]) for row in harbour.contents("orders", time)}
        assert valid.keys() == rows.keys()
        assert all(valid[k]["ab".index(n)] == rows[k]["ab".index(n)] for k in rows for n in tracked)
    assert drivers[0].won + drivers[1].won > 0


def _kill(*_: Any, **__: Any) -> Any:
    raise Killed


def test_a_history_of_a_table_whose_past_is_merged_begins_with_what_is_there(harbour: Any, tmp_path: Path) -> None:
    world, rand = World(harbour, tmp_path), random.Random(3)
    world.write(rand, 9)
    since = world.upper - 1
    harbour.portal.call(world.table.downgrade_since("keeper", 1, since))
    held = {key: (row["a"], row["b"]) for key, row in world.held.items()}
    made = world.history()
    assert made.advance()
    assert world.versions() == in_order((k, a, b, since, None, True) for k, (a, b) in held.items())
    world.write(rand, 5)
    while made.advance():
        pass
    current = {v[0]: v[1:3] for v in world.versions() if v[5]}
    assert current == {key: (row["a"], row["b"]) for key, row in world.held.items()}


def test_a_history_does_not_continue_another_table_of_the_same_name(harbour: Any, tmp_path: Path) -> None:
    world, rand = World(harbour, tmp_path), random.Random(3)
    world.write(rand, 9)
    made = world.history()
    while made.advance():
        pass
    made.close()
    world.history("new").close()
    harbour.drop_shard("orders")
    again = World(harbour, tmp_path)
    again.write(rand, 9)
    with pytest.raises(InvalidError, match=r"was dropped and created again: table=h.*table drop h --force\Z"):
        again.history()


def test_a_history_continues_after_a_restore_which_gives_its_input_a_new_id(harbour: Any, tmp_path: Path) -> None:
    world, rand = World(harbour, tmp_path), random.Random(3)
    world.write(rand, 9)
    made = world.history()
    while made.advance():
        pass
    made.close()
    former, expected = harbour, world.versions()
    for attempt in ("first", "second"):  # the second one follows before any driver has run
        urls = StoreUrls(harbour.urls.objects, f"sqlite://{tmp_path}/{attempt}.db")
        restored = Harbour(tmp_path, urls)
        for state in former.portal.call(read_shards(former.stores.consensus)):
            restored.portal.call(restore_shard(restored.stores.consensus, restored.stores.rand, state, attempt))
        if former is not harbour:
            former.close()
        former = restored
    continued = History(restored.portal, restored.stores, HistoryTable("h", "orders"), tmp_path / "restored")
    continued.open()
    assert restored.contents("h") == harbour.contents("h")
    x = {"k": "x", "a": 1, "b": None}
    append_rows(restored, restored.shard("orders"), world.upper, world.upper + 9, {**x, DIFF: 1})
    while continued.advance():
        pass
    assert len(restored.contents("h")) == len(expected) + 1
    continued.close()
    restored.drop_shard("orders")
    s = restored.stores
    again = restored.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, "orders", SCHEMA))
    append_rows(restored, again, 0, world.upper + 20, {**x, DIFF: 1})
    with pytest.raises(InvalidError, match=r"was dropped and created again: table=h.*table drop h --force\Z"):
        continued.open()
    restored.close()


def test_changes_that_are_gone_stop_the_history_rather_than_omit_a_version(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, rand = World(harbour, tmp_path), random.Random(3)
    world.write(rand, 3)
    made = world.history()
    while made.advance():
        pass
    assert [hold.reader for hold in world.table.state.holds] in ([], ["history/h"])
    harbour.portal.call(world.table.frontiers())
    assert [hold.reader for hold in world.table.state.holds] == ["history/h"], "its input is held from its position on"
    for renewed in (True, False):  # an idle input, too: by a driver that runs on, and by one that starts
        harbour.portal.call(world.table.release_hold("history/h"))
        if renewed:
            monkeypatch.setattr(history, "HOLD_RENEW_S", 0.0)
        else:
            made.close()
            made = world.history()
        assert not made.advance()
        harbour.portal.call(world.table.frontiers())
        assert [hold.reader for hold in world.table.state.holds] == ["history/h"]
    world.write(rand, 5)
    harbour.portal.call(world.table.release_hold("history/h"))
    harbour.portal.call(world.table.downgrade_since("keeper", 1, world.upper - 1))
    with pytest.raises(
        InvalidError, match=r"changes of the input are no longer stored: table=h.*table drop h --force\Z"
    ):
        made.advance()


def test_a_history_follows_a_table_of_a_pipeline_and_its_new_columns(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    sink = clicks_sink(harbour, tmp_path / "s")
    harbour.produce(topic, [(b"a", {"click_id": "a", "product_id": 1})])
    harbour.mint("topic/clicks", 1000, topic)
    sink.process(sink.latest())
    made = History(harbour.portal, harbour.stores, HistoryTable("h", "clicks"), tmp_path / "h")
    made.open()
    while made.advance():
        pass
    wider = ShardSchema((*sink.seats.tables[0].schema.columns, Column("more", "string")), ("click_id",))
    s = harbour.stores
    evolved = harbour.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, "clicks", wider))
    old = {"click_id": "a", "product_id": 1, "more": None}
    rows = [{**old, TIME: 2000, DIFF: -1}, {**old, "more": "x", TIME: 2000, DIFF: 1}]

    write_at = harbour.upper("clicks")

    async def write_now() -> None:
        part = await evolved.write_part(pa.Table.from_pylist(rows, update_schema(evolved.schema)))
        await evolved.compare_and_append(write_at, 2001, (part,), "t")

    harbour.portal.call(write_now())
    with pytest.raises(Exception, match="schema"):
        made.advance()
    made.close()
    made.open()
    while made.advance():
        pass
    assert [(r["more"], r["is_current"], r["valid_from"].timestamp()) for r in harbour.contents("h")] == [
        (None, False, 1.0), ("x", True, 2.0)
    ]  # fmt: skip


def test_versions_of_a_column_with_a_default_are_those_of_the_table(harbour: Any, tmp_path: Path) -> None:
    world = World(harbour, tmp_path)
    append_rows(harbour, world.table, 0, 11, {"k": "x", "a": 1, DIFF: 1}, {"k": "y", "a": 1, DIFF: 1})
    made = world.history()
    while made.advance():
        pass
    harbour.portal.call(world.table.evolve(SchemaChanges(add=(Column("c", "string", "default"),))))
    x, changed = {"k": "x", "a": 1, "c": "default"}, {"k": "x", "a": 2, "c": "default"}
    append_rows(harbour, harbour.shard("orders"), 11, 21, {**x, DIFF: -1}, {**changed, DIFF: 1})
    with pytest.raises(SchemaEvolvedError):
        made.advance()
    made.close()
    made.open()
    while made.advance():
        pass

    assert [row["c"] for row in harbour.contents("orders")] == ["default"] * 2
    assert [(row["k"], row["c"]) for row in harbour.contents("h")] == [(key, "default") for key in ("x", "x", "y")]
    shard = harbour.shard("h")
    assert next(column.default for column in shard.schema.columns if column.name == "c") == "default"

    async def updates() -> list[dict[str, Any]]:
        return [row for b in shard.state.batches for row in (await shard.read_batch(b, b.lower, b.upper)).to_pylist()]

    # Each retraction is of a row that was inserted, in all columns: merges and published tables sum them.
    summed: Counter[tuple[Any, ...]] = Counter()
    for row in harbour.portal.call(updates()):
        summed[row["k"], row["a"], row["c"], row["valid_from"], row["valid_to"]] += row[DIFF]
    assert sorted(summed.values()) == [0, 1, 1, 1]


def test_a_history_that_an_earlier_release_evolved_without_the_default_of_a_column_stops(
    harbour: Any, tmp_path: Path
) -> None:
    world = World(harbour, tmp_path)
    append_rows(harbour, world.table, 0, 11, {"k": "x", "a": 1, DIFF: 1})
    made = world.history()
    while made.advance():
        pass
    made.close()
    columns = Column("c", "string"), Column("d", "string", "default")
    harbour.portal.call(world.table.evolve(SchemaChanges(add=columns)))
    plain = check_schema(version_changes.history_schema("orders", harbour.shard("orders").schema))  # without defaults
    s = harbour.stores
    shard = harbour.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, "h", plain))
    harbour.portal.call(shard.aclose())
    with pytest.raises(InvalidError, match=r"lacks defaults of its input: table=h input=orders columns=d\.") as stopped:
        world.history()
    assert stopped.value.fix.endswith("without its earlier versions: tidemill table drop h --force")
    harbour.drop_shard("h")
    made = world.history()
    while made.advance():
        pass
    assert [row["d"] for row in harbour.contents("h")] == ["default"]


def append_rows(harbour: Any, table: Any, lower: int, upper: int, *rows: dict[str, Any]) -> None:
    """Append updates at the last time below `upper`."""

    async def run() -> None:
        found = pa.Table.from_pylist([{TIME: upper - 1, **row} for row in rows], update_schema(table.schema))
        await table.compare_and_append(lower, upper, [await table.write_part(found)], f"t{upper}")

    harbour.portal.call(run())


def test_declarations_are_checked(tmp_path: Path) -> None:
    p = Pipeline("p")
    orders = p.table("orders", p.topic("orders", key="id", schema="id string, status string"))
    made = p.history("orders_history", of=orders, track="status")
    assert made == HistoryTable("orders_history", "orders", ("status",))
    p.derived("d", key="id", inputs=(made,))(lambda spark, h: h)
    p.check()
    assert p.fed_by()["orders_history"] == "derived" and p.inputs()["orders_history"] == {"orders": ()}
    for wrong in ({"of": "x, y"}, {"of": "again"}, {"of": ""}, {"of": "orders", "track": ","}):
        with pytest.raises(InvalidError):
            p.history("again", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="declared twice"):
        p.history("orders", of="d")
    p.history("loop", of="loop2")
    p.history("loop2", of="loop")
    with pytest.raises(InvalidError, match="depend on each other"):
        p.check()
    for track, said in ((("id",), "is in the key"), (("nope",), "does not exist")):
        with pytest.raises(InvalidError, match=said):
            version_changes.tracked_columns("orders", SCHEMA if track == ("nope",) else _KEYED, track)
    with pytest.raises(InvalidError, match="has a column valid_to"):
        version_changes.history_schema("t", ShardSchema((*SCHEMA.columns, Column("valid_to", "date")), ("k",)))


_KEYED = ShardSchema((Column("id", "string"), Column("status", "string")), ("id",))


PIPELINE = """
def build(p):
    schema = "click_id string, product_id long"
    clicks = p.topic("clicks", key="click_id", schema=schema)
    strict = p.table("strict", clicks, expect={"positive": "product_id >= 0"}, on_violation="ON_VIOLATION")
    p.table("clicks", clicks, expect={"small": "product_id < 5"}, on_violation="drop")
    p.history("h", of="clicks")
    p.history("strict_history", of=strict)
"""


def driver_view(tables: Any) -> PipelineView:
    report = StatusReport("pipeline:p", 1, (), facts={"tables": tables})
    row = PipelineRow("p", {"h": "derived"}, "", {"h": {"clicks": ()}})
    return pipeline_views({}, {"p": row}, {}, [report], 1, {})["p"]


def test_a_driver_maintains_histories_without_spark_beside_a_table_that_an_expectation_stops(
    harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("clicks")
    for time, values in ((1000, [1]), (2000, [-1, 7]), (3000, [3])):
        rows = [{"click_id": "a", "product_id": value} for value in values]
        harbour.produce(topic, [(b"a", row) for row in rows])
        harbour.mint("topic/clicks", time, topic)
    with pipeline(harbour, tmp_path / "1", PIPELINE.replace("ON_VIOLATION", "fail")) as runner:
        eventually(lambda: harbour.upper("h") == 3001 and "positive" in error_of(harbour, "shard:strict"))
        said = error_of(harbour, "shard:strict")
        assert "expectation=positive expression=[product_id >= 0] topic=clicks partition=0 offset=1" in said
        eventually(lambda: (found := mark(harbour, "shard:h")) is not None and found.position == 3001)
        found = mark(harbour, "shard:strict")
        assert found is not None and found.parked and found.position == 2000
        facts = StatusReporter(runner).facts()["tables"]
        (row,) = [x for x in driver_view(facts).tables if x["table"] == "h"]
        assert (row["maintained"], row["inputs"]) == ("by change", {"clicks": []})
        assert facts["clicks"]["violations"] == {"small": 1} and facts["h"]["won"] >= 1  # type: ignore[index]
    versions = [(r["product_id"], r["valid_from"].timestamp(), r["is_current"]) for r in harbour.contents("h")]
    assert versions == [(1, 1.0, False), (-1, 2.0, False), (3, 3.0, True)]
    with pipeline(harbour, tmp_path / "2", PIPELINE.replace("ON_VIOLATION", "dead_letter")):
        eventually(lambda: harbour.upper("strict_history") == 3001)
        eventually(lambda: not error_of(harbour, "shard:strict"))
    found_values = [(r["product_id"], r["valid_from"].timestamp()) for r in harbour.contents("strict_history")]
    assert found_values == [(1, 1.0), (7, 2.0), (3, 3.0)]


CHILD = Path(__file__).parents[1] / "support/spark/programs/history_child.py"


@pytest.mark.processes
def test_a_process_that_is_killed_while_it_writes_a_history_leaves_it_exact(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process continues with the mirror on disk that the killed one left."""
    rand = random.Random(3)
    world = World(harbour, tmp_path, ("a",))
    urls = harbour.urls
    for _ in range(5):
        command = [sys.executable, CHILD, urls.objects, urls.consensus, tmp_path / "mirror"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(30):
                world.write(rand, 1)
            child.stdout.readline()  # it has made a step
            sleep(rand.uniform(0.0, 0.3))  # any moment will do
            child.kill()
        assert child.returncode == -signal.SIGKILL
        if upper := harbour.upper("h"):
            known = [change for change in world.log if change["t"] < upper]
            assert world.versions() == window_query(known, ("a",))
    monkeypatch.setattr(history, "IDLE_MOVE_S", 0.0)
    last = world.history("mirror")
    while last.upper < world.upper:
        last.advance()
    last.close()
    assert world.versions() == window_query(world.log, ("a",))
