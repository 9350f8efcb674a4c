"""Replay of dead letters: afterwards the table is as if each record had been good when it was read, exactly once."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.spark.partial_shop import PartialShop
from support.spark.sinks import clicks_sink, shop_sink
from tidemill.base.errors import InvalidError
from tidemill.cli.main import app
from tidemill.console.dead_letter_read import read_letters
from tidemill.metastore.catalogue import PipelineRow, TopicRow
from tidemill.shards.api import HistoryLostError
from tidemill.spark.definition import Pipeline
from tidemill.spark.predicates.expectations import Expectation, Expectations
from tidemill.spark.replay import newer_records, table_replay
from tidemill.spark.replay.pipeline_replay import replay_pipeline
from tidemill.spark.replay.table_replay import Outcome
from tidemill.spark.stored_letters import StoredLetters

STRICT = Expectations((Expectation("small", "product_id BETWEEN 0 AND 4"),))


def pipeline(**more: Any) -> Pipeline:
    p = Pipeline("p")
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"), **more)
    return p


def replay(harbour: Any, declared: Pipeline, **more: Any) -> list[Outcome]:
    found = replay_pipeline(harbour.portal, harbour.stores, declared, **more)
    return [outcome for some in found for outcome in some]


def contents(harbour: Any) -> dict[str, int]:
    return {row["click_id"]: row["product_id"] for row in harbour.contents("clicks")}


class Clicks:
    """Random records of a few keys, the model of what the table holds under any rule, and their letters."""

    def __init__(self, harbour: Any, seed: int, partitions: int = 2) -> None:
        self.harbour, self.rand, self.time = harbour, random.Random(seed), 0
        self.topic = harbour.create_topic("clicks", partitions)
        self.partitions = partitions
        self.log: list[tuple[str, int | None, int, int]] = []
        """(key, value, partition, offset), in order."""

    def write(self, count: int) -> None:
        for _ in range(count):
            key, value = f"k{self.rand.randint(0, 7)}", self.rand.choice([None, -9, -1, 0, 3, 7, 9])
            self.one(key, value, int(key[1]) % self.partitions)

    def one(self, key: str, value: int | None, partition: int = 0) -> None:
        row = None if value is None else {"click_id": key, "product_id": value}
        offset = self.harbour.produce(self.topic, [(key.encode(), row)], partition) - 1
        self.log.append((key, value, partition, offset))

    def bind(self) -> None:
        self.time += 1000
        self.harbour.mint("topic/clicks", self.time, self.topic)

    def fold(self, low: int, high: int) -> tuple[dict[str, int], set[tuple[int, int]]]:
        """Return the contents if only values in [low, high] are good, and the places of the newest good records."""
        held: dict[str, int] = {}
        newest: dict[str, tuple[int, int]] = {}
        for key, value, partition, offset in self.log:
            if value is not None and not low <= value <= high:
                continue
            newest[key] = (partition, offset)
            held.pop(key, None)
            if value is not None:
                held[key] = value
        return held, set(newest.values())


@pytest.mark.parametrize("seed", range(3))
def test_the_table_is_what_it_were_if_the_records_had_been_good_and_letters_that_are_not_stay(
    harbour: Any, tmp_path: Path, seed: int
) -> None:
    clicks = Clicks(harbour, seed)
    sink = clicks_sink(harbour, tmp_path, expectations=STRICT)
    for _ in range(6):
        clicks.write(clicks.rand.randint(0, 12))
        clicks.bind()
        if clicks.rand.random() < 0.5:
            sink.process(sink.latest())
    sink.process(sink.latest())
    assert contents(harbour) == clicks.fold(0, 4)[0]
    letters = {(row["partition"], row["offset"]) for row in harbour.contents("p.dead_letters")}
    relaxed = pipeline(expect={"small": "product_id BETWEEN -1 AND 7"})
    tried = replay(harbour, relaxed, dry=True)
    assert contents(harbour) == clicks.fold(0, 4)[0] and len(harbour.contents("p.dead_letters")) == len(letters)
    found = replay(harbour, relaxed)
    assert found == tried, "a dry run reports the same"
    want, newest = clicks.fold(-1, 7)
    assert contents(harbour) == want
    bad = {(p, o) for _, value, p, o in clicks.log if value in (-9, 9)}
    by_outcome = {
        outcome: {(x.place.partition, x.place.offset) for x in found if x.outcome == outcome}
        for outcome in ("applied", "superseded", "invalid")
    }
    assert by_outcome == {
        "applied": (letters - bad) & newest, "superseded": letters - bad - newest, "invalid": bad
    }  # fmt: skip
    assert all(x.reason == "violates small: product_id BETWEEN -1 AND 7" for x in found if x.outcome == "invalid")
    assert {(row["partition"], row["offset"]) for row in harbour.contents("p.dead_letters")} == bad
    listed = harbour.portal.call(read_letters(harbour.shard("p.dead_letters"), 100))
    assert {(row["partition"], row["offset"]) for row in listed.letters} == bad and listed.total == len(bad)
    upper = harbour.upper("clicks")
    again = replay(harbour, relaxed)
    assert Counter(x.outcome for x in again) == Counter({"invalid": len(bad)} if bad else {})
    assert harbour.upper("clicks") == upper, "nothing is appended again"
    clicks.write(10)
    clicks.bind()
    sink.process(sink.latest())  # the driver follows the replay and continues
    assert not sink.seats.failed
    assert replay(harbour, pipeline()) and contents(harbour) == clicks.fold(-9, 9)[0]
    assert replay(harbour, pipeline()) == [] and harbour.contents("p.dead_letters") == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["before the append", "after the append", "after the removal"])
def test_a_replay_that_was_killed_and_is_repeated_has_the_effect_of_one(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    clicks = Clicks(harbour, 1)
    sink = clicks_sink(harbour, tmp_path, expectations=STRICT)
    for key, value in (("k0", 1), ("k0", 9), ("k1", 9), ("k1", 2), ("k2", 8)):
        clicks.one(key, value)
    clicks.bind()
    sink.process(sink.latest())
    with monkeypatch.context() as patched:
        remove = StoredLetters.remove

        def killed(letters: Any, places: Any) -> int:
            if where == "after the removal":
                remove(letters, places)
            raise Killed

        async def never(*_: Any) -> bool:
            raise Killed

        if where == "before the append":
            patched.setattr(table_replay, "is_quiet_at", never)
        else:
            patched.setattr(StoredLetters, "remove", killed)
        with pytest.raises(Killed):
            replay(harbour, pipeline())
    assert contents(harbour) == ({"k0": 1, "k1": 2} if where == "before the append" else {"k0": 9, "k1": 2, "k2": 8})
    found = replay(harbour, pipeline())
    assert [x.outcome for x in found] == ([] if "removal" in where else ["applied", "superseded", "applied"])
    assert contents(harbour) == {"k0": 9, "k1": 2, "k2": 8} and harbour.contents("p.dead_letters") == []
    shard = harbour.shard("clicks")
    rows = [harbour.portal.call(shard.read_batch(b, 0, 10**9)) for b in harbour.portal.call(shard.batches(1))]
    assert sum(each.num_rows for each in rows) == 2 + 3, "two insertions, then an update and an insertion, once"


def test_a_record_that_arrives_during_the_replay_is_not_overridden(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clicks = Clicks(harbour, 1)
    sink = clicks_sink(harbour, tmp_path, expectations=STRICT)
    for key in ("k0", "k1"):
        clicks.one(key, 9)
    clicks.bind()
    sink.process(sink.latest())
    quiet = table_replay.is_quiet_at

    async def busy(*args: Any) -> bool:
        monkeypatch.setattr(table_replay, "is_quiet_at", quiet)
        return False

    monkeypatch.setattr(table_replay, "is_quiet_at", busy)
    prepare = table_replay.TableReplay._prepare

    def prepared(*args: Any) -> Any:
        found = prepare(*args)
        clicks.one("k0", 3)  # after the letters' records were read
        clicks.bind()
        sink.process(sink.latest())
        return found

    monkeypatch.setattr(table_replay.TableReplay, "_prepare", prepared)
    found = replay(harbour, pipeline())
    assert [(x.outcome, x.reason) for x in found] == [
        ("superseded", "partition=0 offset=2 is newer"), ("applied", "")
    ]  # fmt: skip
    assert contents(harbour) == {"k0": 3, "k1": 9}


def test_without_bindings_of_that_time_only_one_partition_is_in_a_known_order(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clicks = Clicks(harbour, 1)
    sink = clicks_sink(harbour, tmp_path, expectations=STRICT)
    for key, value, partition in (("k0", 9, 0), ("k1", 9, 0), ("k2", 9, 0), ("k1", 1, 1), ("k2", 2, 0)):
        clicks.one(key, value, partition)
    clicks.bind()
    sink.process(sink.latest())

    async def lost(*_: Any) -> Any:
        raise HistoryLostError("bindings of this time were truncated.")

    with monkeypatch.context() as patched:
        patched.setattr(newer_records, "plan_interval", lost)
        found = {x.place.offset: x.outcome for x in replay(harbour, pipeline())}
    assert found == {0: "applied", 1: "unknown", 2: "superseded"}
    assert contents(harbour) == {"k0": 9, "k1": 1, "k2": 2}
    assert [row["offset"] for row in harbour.contents("p.dead_letters")] == [1]


def test_a_captured_row_and_the_update_that_needs_it_are_replayed_in_order(harbour: Any, tmp_path: Path) -> None:
    shop = PartialShop(harbour)
    strict = {"orders": Expectations((Expectation("positive", "total >= 0"),))}
    sink = shop_sink(harbour, tmp_path, ["orders"], strict)
    shop.write(1, -5, "from the rejected row")
    shop.write(2, -6, "stays rejected")
    shop.write(3, -7, "good again")
    shop.bind(1000)
    shop.write(1, 8)  # its note is unknown: its row before is absent
    shop.write(3, 1, "newer")
    shop.bind(2000)
    sink.process(sink.latest())
    assert [row["id"] for row in harbour.contents("orders")] == [3] and len(harbour.contents("p.dead_letters")) == 4
    p = Pipeline("p")
    p.table("orders", p.capture("shop").table("orders"), expect={"positive": "total >= -5 OR note = 'good again'"})
    found = {x.place.offset: x.outcome for x in replay(harbour, p)}
    assert found == {0: "superseded", 1: "invalid", 2: "superseded", 3: "applied"}
    assert [(row["id"], row["total"], row["note"]) for row in harbour.contents("orders")] == [
        (1, 8, "from the rejected row"),
        (3, 1, "newer"),
    ]
    (left,) = harbour.contents("p.dead_letters")
    assert left["offset"] == 1
    shop.write(1, 9)
    shop.bind(5000)
    sink.process(sink.latest())
    assert harbour.contents("orders")[0]["note"] == "from the rejected row"


def test_letters_wait_for_their_table_and_a_file_with_another_schema_is_refused(harbour: Any, tmp_path: Path) -> None:
    clicks = Clicks(harbour, 1)
    assert replay(harbour, pipeline()) == [], "there is no shard of dead letters"
    sink = clicks_sink(harbour, tmp_path, expectations=STRICT)
    clicks.one("k0", 9)
    clicks.bind()
    sink.process(sink.latest())
    other = Pipeline("p")
    other.table("clicks", other.topic("clicks", key="click_id", schema="click_id string, product_id long, more long"))
    with pytest.raises(InvalidError, match="under another schema"):
        replay(harbour, other)
    moved = Pipeline("p")
    moved.table("else", moved.topic("other", key="id", schema="id string"))
    assert [(x.outcome, x.reason[:15]) for x in replay(harbour, moved)] == [("waiting", "topic other doe")]
    harbour.drop_shard("clicks")
    assert [x.outcome for x in replay(harbour, pipeline())] == ["waiting"]


def test_a_declared_table_that_the_database_does_not_have_stops_no_replay(harbour: Any, tmp_path: Path) -> None:
    PartialShop(harbour)  # it captures public.orders, and no public.later
    clicks = Clicks(harbour, 1)
    sink = clicks_sink(harbour, tmp_path, expectations=STRICT)
    clicks.one("k0", 9)
    clicks.bind()
    sink.process(sink.latest())
    later = Pipeline("p")
    later.table("later", later.capture("shop").table("public.later"))
    assert [(x.outcome, "no such table" in x.reason) for x in replay(harbour, later)] == [("waiting", True)]
    both = pipeline()
    both.table("later", both.capture("shop").table("public.later"))
    assert [(x.table, x.outcome) for x in replay(harbour, both)] == [("clicks", "applied")]
    assert contents(harbour) == {"k0": 9} and harbour.contents("p.dead_letters") == []


def test_letters_of_a_topic_that_is_created_again_are_told_and_replayed_although_their_offsets_were_used_before(
    harbour: Any, tmp_path: Path
) -> None:
    old = Clicks(harbour, 1, 1)
    sink = clicks_sink(harbour, tmp_path / "s", expectations=STRICT)
    for value in (9, 1, 9, 9):
        old.one("a", value)
    old.bind()
    sink.process(sink.latest())
    harbour.portal.call(harbour.stores.catalogue.delete(TopicRow, "clicks"))
    new = Clicks(harbour, 1, 1)
    for key, value in (("k0", 7), ("k1", 8), ("k1", 3)):
        new.one(key, value)  # offset 2 had a letter in the old topic
    harbour.mint("topic/clicks", 2000, old.topic, new.topic)
    again = clicks_sink(harbour, tmp_path / "s", expectations=STRICT)
    again.process(again.latest())
    places = [(row["offset"], row["at"].timestamp()) for row in harbour.contents("p.dead_letters")]
    assert sorted(places) == [(0, 2), (1, 2), (2, 1), (3, 1)], "each letter of the new topic, once at its place"
    listed = harbour.portal.call(read_letters(harbour.shard("p.dead_letters"), 100))
    assert (sorted((row["offset"], row["at"].timestamp()) for row in listed.letters), listed.total) == (places, 4)
    found = {(x.place.offset, x.outcome, x.reason) for x in replay(harbour, pipeline())}
    assert found == {
        (0, "applied", ""),
        (1, "superseded", "partition=0 offset=2 is newer"),
        (2, "superseded", "the topic was created again since"),
        (3, "superseded", "the topic was created again since"),
    }
    assert contents(harbour) == {"k0": 7, "k1": 3} and harbour.contents("p.dead_letters") == []


def test_the_command_prints_what_became_of_each_record(harbour: Any, tmp_path: Path) -> None:
    clicks = Clicks(harbour, 1)
    sink = clicks_sink(harbour, tmp_path / "s", expectations=STRICT)
    for key, value in (("k0", 9), ("k1", 7), ("k1", 2), ("k2", 8)):
        clicks.one(key, value)
    clicks.bind()
    sink.process(sink.latest())
    (tmp_path / "p.py").write_text(
        "def build(p):\n"
        "    clicks = p.topic('clicks', key='click_id', schema='click_id string, product_id long')\n"
        "    p.table('clicks', clicks, expect={'small': 'product_id < 9'})\n"
    )
    config = tmp_path / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{tmp_path}"\n[pipeline.p]\nfile = "{tmp_path}/p.py"\n')
    arguments = ["dead-letters", "replay", "p", "--config", str(config)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, "a letter stays"
    assert done.stdout.splitlines()[0] == "1 applied, 1 superseded, 1 invalid"
    assert "partition=0 offset=2 is newer" in done.stdout and "violates small: product_id < 9" in done.stdout
    assert contents(harbour) == {"k1": 2, "k2": 8}
    row = PipelineRow("p", {"clicks": "topic:clicks"}, "p.dead_letters")
    harbour.portal.call(harbour.stores.catalogue.put(row))
    verified = CliRunner().invoke(app, ["verify", "clicks", "--config", str(config)])
    assert verified.exit_code == 0, "verify expects the rows that satisfy the expectations of the file"
    described = CliRunner().invoke(app, ["pipeline", "describe", "p", "--config", str(config)])
    assert "dead letters: 1 in p.dead_letters" in described.stdout, "removed letters do not count"
    listed = CliRunner().invoke(app, ["dead-letters", "list", "--config", str(config), "--json"])
    assert listed.exit_code == 0, listed.output
    (left,) = json.loads(listed.stdout)["records"]
    assert json.loads(left["bytes"]) == {"click_id": "k0", "product_id": 9}, "text, and no literal of Python"
