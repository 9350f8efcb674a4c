"""Columns that an UPDATE left as they were, under an identity that does not say the old row: from the row before, or an
error value with a key, and never NULL."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from support.spark.running import error_of, pipeline
from support.waiting import eventually
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.spark.merge.commands import (
    Commands,
    Truncate,
    filter_commands,
    join_commands,
    partial_command_schema,
    times_of,
)
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import resolve
from tidemill.topics.batch import Record, decode_columns, encode_batch

PROGRAM = Path(__file__).parents[1] / "support" / "capture" / "process.py"
SCHEMA = ShardSchema((Column("k", "int64"), Column("a", "int64"), Column("b", "string")), ("k",))
Row = dict[str, Any]
Step = tuple[int, int, int, Row | None, tuple[str, ...]]
"""(key, time, order, values or None, columns left as they were)"""


def commands(steps: Sequence[Step], truncates: Sequence[Truncate] = ()) -> Commands:
    rows = [
        {
            "k": key, "a": None, "b": None, **(values or {}), "_time": time, "_order": order, "_partition": 0,
            "_live": values is not None, "_tm.unchanged": json.dumps(left).encode() if left else None,
            "_tm.key": b'{"k":%d}' % key,
        }
        for key, time, order, values, left in steps
    ]  # fmt: skip
    return Commands(pa.Table.from_pylist(rows, schema=partial_command_schema(SCHEMA)), tuple(truncates))


def oracle(steps: Sequence[Step], truncates: Sequence[Truncate]) -> tuple[dict[int, Row], list[int]]:
    """A single reader that takes one record after another: what it holds in the end, and the orders of what it lost."""
    held: dict[int, Row] = {}
    lost: list[int] = []
    every = [(order, step) for step in steps for order in (step[2],)] + [(t.order, t) for t in truncates]
    for order, one in sorted(every, key=lambda pair: pair[0]):
        if isinstance(one, Truncate):
            held.clear()
            continue
        key, _, _, values, left = one
        before = held.pop(key, None)
        if values is not None and left and before is None:
            lost.append(order)
        elif values is not None:
            held[key] = {"a": None, "b": None, **values, **{name: (before or {})[name] for name in left}}
    return held, lost


def random_steps(rng: random.Random, count: int) -> tuple[list[Step], list[Truncate]]:
    steps: list[Step] = []
    truncates: list[Truncate] = []
    time = 1
    for order in range(count):
        time += rng.random() < 0.3
        key, roll = rng.randint(1, 6), rng.random()
        if roll < 0.02:
            truncates.append(Truncate(time, 0, order))
        elif roll < 0.15:
            steps.append((key, time, order, None, ()))
        else:
            left = tuple(name for name in ("a", "b") if rng.random() < 0.4)
            values = {"a": rng.choice([None, order]), "b": rng.choice([None, f"v{order}"])}
            steps.append((key, time, order, {n: v for n, v in values.items() if n not in left}, left))
    return steps, truncates


def few_hashes(rows: pa.Table, key: tuple[str, ...]) -> Any:
    return hash_rows(rows, key) % np.uint64(2)


@pytest.mark.parametrize("hasher", [hash_rows, few_hashes])
def test_a_step_comes_to_what_one_reader_of_all_records_holds_however_it_is_cut(hasher: Callable[..., Any]) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        steps, truncates = random_steps(rng, 60)
        want, lost = oracle(steps, truncates)
        shuffled = steps[:]
        rng.shuffle(shuffled)
        whole = commands(shuffled, truncates)
        end = max([s[1] for s in steps] + [t.time_ms for t in truncates]) + 1
        for cuts in ([end], sorted({*rng.sample(range(1, end), 3), end}), range(1, end + 1)):
            mirror, lower, found = Mirror(SCHEMA, hasher=hasher), 0, []
            for upper in cuts:
                times = times_of(whole)
                mine = filter_commands(whole, (times >= lower) & (times < upper))
                done = resolve(SCHEMA, mine, mirror, lower, upper, hasher)
                mirror.advance(done.changes, lower, upper)
                found += [each.order for each in done.lost]
                lower = upper
            held = {r["k"]: {"a": r["a"], "b": r["b"]} for r in mirror.live_rows().to_pylist()}
            assert (held, sorted(found)) == (want, lost), (seed, list(cuts))


def test_commands_with_and_without_such_columns_are_joined() -> None:
    plain = Commands(commands([(1, 1, 0, {"a": 1, "b": "x"}, ())]).rows.drop_columns(["_tm.unchanged", "_tm.key"]))
    joined = join_commands(SCHEMA, [plain, commands([(1, 1, 1, {"a": 2}, ("b",)), (2, 1, 2, {"b": "y"}, ("a",))])])
    done = resolve(SCHEMA, joined, Mirror(SCHEMA), 0, 2)
    assert [(r["k"], r["a"], r["b"]) for r in done.updates.to_pylist()] == [(1, 2, "x")]
    (lost,) = done.lost
    assert (lost.order, lost.key, lost.columns) == (2, b'{"k":2}', ("a",))


def record(at: int, value: Row | None, *more: tuple[str, bytes]) -> Record:
    headers = (("tm.pos", b"%d_0" % at), ("tm.op", b"update"), ("tm.xid", b"1"), *more)
    return Record(b'{"k":%d}' % at, None if value is None else json.dumps(value).encode(), headers, 0)


def decoded(records: Sequence[Record]) -> Any:
    _, columns = decode_columns(encode_batch(list(records)))
    return CapturedDecoder(SCHEMA, "public.t").decode(Records("t", 0, columns.offsets * 10, columns))


@pytest.mark.parametrize("count", [2, 200])
def test_records_that_lack_columns_are_read_with_what_they_lack(count: int) -> None:
    """A few are read one by one, many by columns: the same."""
    found = decoded(
        [record(n, {"k": n, "a": n}, ("tm.unchanged", b'["b"]')) for n in range(count)]
        + [record(1000 + n, {"k": 1000 + n, "a": n, "b": "x"}) for n in range(count)]
        + [record(2000, {"k": 2000}, ("tm.unchanged", b'["a","b"]')), record(2001, {"k": 2001, "a": 1, "b": "y"})]
        + [record(3000, {"k": 3000, "a": "no number"}, ("tm.unchanged", b'["b"]'))]
        + [record(3001, {"k": 3001, "a": 5}, ("tm.unchanged", b'["b"]'), ("tm.was", b'{"k":9}'))]
    )
    rows = {row["k"]: row for row in found.commands.rows.to_pylist()}
    assert len(rows) == 2 * count + 4 and found.stop is None
    left = {key: row["_tm.unchanged"] for key, row in rows.items() if row["_tm.unchanged"] is not None}
    assert left == {**dict.fromkeys(range(count), b'["b"]'), 2000: b'["a","b"]'}
    assert rows[1]["a"] == 1 and rows[1]["_tm.key"] == b'{"k":1}' and rows[2001]["b"] == "y"
    dead = found.dead.to_pylist()
    assert [(d["key"], rows[int(d["key"][5:-1])]["_live"]) for d in dead] == [
        ('{"k":3000}', False),
        ('{"k":3001}', False),
    ]
    assert "key changed" in dead[1]["reason"] and "b" in dead[1]["reason"]


@pytest.mark.parametrize(
    ("header", "value"),
    [(b'["k"]', {"a": 1, "b": "x"}), (b'["z"]', {"k": 1, "a": 1, "b": "x"}), (b'["b"]', {"k": 1, "a": 1, "b": "x"}),
     (b'["b"]', {"k": 1}), (b"no JSON", {"k": 1})],
)  # fmt: skip
def test_a_record_that_lacks_what_it_may_not_or_has_what_it_should_lack_stops_the_table(
    header: bytes, value: Row
) -> None:
    found = decoded([record(0, {"k": 0, "a": 0, "b": "x"}), record(1, value, ("tm.unchanged", header))])
    assert found.stop is not None and found.stop.offset == 1
    assert [r["k"] for r in found.commands.rows.to_pylist()] == [0]


class Load(threading.Thread):
    """Transactions on `wide` until `ending` is set: most of them leave its TOASTed columns unchanged."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._dsn = dsn
        self.ending = threading.Event()
        self.count = 0
        self.failed: BaseException | None = None

    def run(self) -> None:
        rng = random.Random(5)
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                while not self.ending.wait(0.002):
                    self.count += 1
                    n, new = rng.randint(1, 60), 1000 + self.count
                    with connection.transaction():
                        for statement in rng.choices(
                            [
                                f"UPDATE wide SET v = v + 1 WHERE id = {n}",
                                f"UPDATE wide SET v = v + 1, note = 'short' WHERE id = {n}",
                                f"UPDATE wide SET body = repeat('{n}_', 1500) WHERE id = {n}",
                                f"DELETE FROM wide WHERE id = {n}",
                                f"INSERT INTO wide VALUES ({n}, 0, repeat('b{new}', 900), repeat('n{new}', 900))"
                                " ON CONFLICT (id) DO UPDATE SET v = -1",
                            ],
                            k=rng.randint(1, 4),
                        ):
                            connection.execute(statement)
        except BaseException as error:
            self.failed = error


@pytest.mark.postgres
def test_f320_wide_rows_under_load_with_kills_of_capture_end_in_a_shard_that_equals_select(
    postgres_dsn: str, harbour: Any, tmp_path: Path
) -> None:
    """One pipeline runs through all of it, a second one begins at the end. A row whose key changed lacks the values
    that the stream omitted: it is a dead letter of both until it is written whole."""
    name = postgres_dsn.rpartition("/")[2]
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE wide (id int PRIMARY KEY, v int, body text, note text)")
        connection.execute("ALTER TABLE wide ALTER body SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL")
        connection.execute(
            "INSERT INTO wide SELECT g, g, repeat('b' || g, 1500), repeat('n' || g, 1500) FROM generate_series(1, 60) g"
        )

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROGRAM), postgres_dsn, name, str(tmp_path), "as-is"]
        return subprocess.Popen(command, stdout=(tmp_path / "capture.log").open("ab"), stderr=subprocess.STDOUT)

    def selected() -> list[Row]:
        with psycopg.connect(postgres_dsn, row_factory=psycopg.rows.dict_row) as connection:
            return sorted(connection.execute("SELECT * FROM wide").fetchall(), key=lambda row: str(row["id"]))

    text = 'def build(p):\n    p.table("{}", p.capture("' + name + '").table("wide"))\n'
    process, load = start(), Load(postgres_dsn)
    try:
        with pipeline(harbour, tmp_path / "one", text.format("one")):
            eventually(lambda: harbour.upper("one") > 0 and len(harbour.contents("one")) == 60)
            load.start()
            for _ in range(2):
                seen, upper = load.count, harbour.upper("one")
                eventually(lambda seen=seen, upper=upper: load.count > seen + 60 and harbour.upper("one") > upper)
                process.kill()
                process.wait()
                process = start()
            load.ending.set()
            load.join()
            assert load.failed is None
            with psycopg.connect(postgres_dsn, autocommit=True) as connection:
                connection.execute("INSERT INTO wide VALUES (500, 0, repeat('x', 3000), repeat('y', 3000))")
                connection.execute("UPDATE wide SET id = 501 WHERE id = 500")
            lacking = [row for row in selected() if row["id"] != 501]
            eventually(lambda: harbour.contents("one") == lacking)
            assert [letter["key"] for letter in harbour.contents("p.dead_letters")] == ['{"id":501}']
            with psycopg.connect(postgres_dsn, autocommit=True) as connection:
                connection.execute("UPDATE wide SET body = body || '!', note = note || '!' WHERE id = 501")
            want = selected()
            eventually(lambda: harbour.contents("one") == want)
            assert not error_of(harbour, "shard:one")
        with pipeline(harbour, tmp_path / "two", text.format("two")):
            eventually(lambda: harbour.upper("two") > 0 and harbour.contents("two") == want)
    finally:
        load.ending.set()
        process.kill()
        process.wait()
