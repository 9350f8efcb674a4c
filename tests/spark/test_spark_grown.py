"""A captured table gains columns and wider types under load, while capture is killed: its shard equals SELECT."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from support.spark.running import error_of, pipeline
from support.waiting import eventually
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.topics.batch import Record, decode_columns, encode_batch

PROGRAM = Path(__file__).parents[1] / "support" / "capture" / "process.py"
KNOWN = (
    (Column("id", "int32"), Column("f", "float32"), Column("n", "decimal(6,2)")),
    (Column("id", "int64"), Column("f", "float32"), Column("n", "decimal(6,2)"), Column("x", "int32", "5")),
    (Column("id", "int64"), Column("f", "float64"), Column("n", "decimal(9,2)"), Column("x", "int32", "5"),
     Column("w", "float64", "0.10000000149011612"), Column("z", "string")),
)  # fmt: skip
SCHEMA = ShardSchema(tuple(Column(c.name, c.type) for c in KNOWN[-1]), ("id",))


def record(at: int, version: int, value: dict[str, Any] | None) -> Record:
    headers: tuple[tuple[str, bytes | None], ...] = (("tm.pos", b"%d_0" % at), ("tm.op", b"x"), ("tm.xid", b"1"))
    if version > 1:
        headers = (*headers, ("tm.version", b"%d" % version))
    key = json.dumps({"id": at}, separators=(",", ":")).encode()
    return Record(key, json.dumps(value, separators=(",", ":")).encode() if value is not None else None, headers, 0)


@pytest.mark.parametrize("count", [1, 100])
def test_records_of_every_version_are_rows_of_the_newest(count: int) -> None:
    """A few are read one by one, many by blocks: the same."""
    first = [record(n, 1, {"id": n, "f": 0.1, "n": "1.50"}) for n in range(count)]
    second = [record(1000 + n, 2, {"id": 1000 + n, "f": 0.1, "n": None, "x": None}) for n in range(count)]
    third = [record(2000 + n, 3, {"id": 2000 + n, "f": 0.1, "n": "123456.25", "x": 7, "w": 1.5, "z": "a"})
             for n in range(count)]  # fmt: skip
    gone = [record(3000, 3, None)]
    _, columns = decode_columns(encode_batch([*first, *second, *third, *gone]))
    records = Records("t", 0, columns.offsets * 10, columns)
    found = CapturedDecoder(SCHEMA, "public.t", KNOWN).decode(records)
    assert found.stop is None and not found.dead.num_rows
    rows = found.commands.rows.sort_by("_order").to_pylist()
    narrow, default = float(np.float32(0.1)), 0.10000000149011612
    plain = [{k: r[k] for k in ("id", "f", "n", "x", "w", "z")} for r in rows]
    assert plain[0] == {"id": 0, "f": narrow, "n": Decimal("1.50"), "x": 5, "w": default, "z": None}
    assert plain[count] == {"id": 1000, "f": narrow, "n": None, "x": None, "w": default, "z": None}
    assert plain[2 * count] == {"id": 2000, "f": 0.1, "n": Decimal("123456.25"), "x": 7, "w": 1.5, "z": "a"}
    assert (len(plain), rows[-1]["_live"]) == (3 * count + 1, False)
    for version in (1, 2):
        schema = ShardSchema(tuple(Column(c.name, c.type) for c in KNOWN[version - 1]), ("id",))
        early = CapturedDecoder(schema, "public.t", KNOWN[:version] if version > 1 else ()).decode(records)
        assert early.stop is not None and early.stop.grown and early.stop.offset == version * count
        assert not early.dead.num_rows
        assert len(early.commands.rows) == version * count, "all before the version that is not known, nothing else"


CHANGES = (
    "ALTER TABLE t ADD a int DEFAULT 5, ADD b text, ALTER n TYPE numeric(12,2)",
    "ALTER TABLE t ALTER v TYPE bigint, ALTER f TYPE double precision",
    "ALTER TABLE t ADD c timestamptz DEFAULT '2026-01-02 03:04:05+00', ALTER w TYPE text",
)
PIPELINE = 'def build(p):\n    p.table("{}", p.capture("{}").table("t"))\n'


class Load(threading.Thread):
    """Transactions on t until `ending` is set, some of them with a DDL between their rows."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._dsn = dsn
        self._random = random.Random(3)
        self.ddl: list[str] = []
        self.ending = threading.Event()
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                n = 1000
                while not self.ending.wait(0.005):
                    n += 1
                    with connection.transaction():
                        connection.execute(f"INSERT INTO t (id, v, f, n, w) VALUES ({n}, {n}, {n} / 7.0, 1.5, 'x')")
                        if self.ddl:
                            connection.execute(self.ddl.pop())
                        connection.execute(f"UPDATE t SET v = v + 1 WHERE id = {self._random.randint(1, 300)}")
                        connection.execute(f"DELETE FROM t WHERE id = {self._random.randint(300, n)}")
        except BaseException as error:
            self.failed = error


def selected(dsn: str) -> list[dict[str, Any]]:
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        rows = connection.execute("SELECT * FROM t").fetchall()
    return sorted(rows, key=lambda row: str(row["id"]))


@pytest.mark.postgres
def test_ddl_under_load_with_kills_of_capture_ends_in_a_shard_that_equals_select(
    postgres_dsn: str, harbour: Any, tmp_path: Path
) -> None:
    """One pipeline runs through all of it, a second one begins when all is done and reads every version."""
    name = postgres_dsn.rpartition("/")[2]
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v int, f real, n numeric(6,2), w varchar(9))")
        connection.execute("INSERT INTO t SELECT g, g, g / 3.0, g, 'old' FROM generate_series(1, 300) g")

    def start() -> subprocess.Popen[bytes]:
        log = (tmp_path / "capture.log").open("ab")
        return subprocess.Popen([sys.executable, str(PROGRAM), postgres_dsn, name, str(tmp_path)], stdout=log,
                                stderr=log)  # fmt: skip

    def described() -> Any:
        return harbour.portal.call(harbour.stores.catalogue.table(name, "public.t"))

    rng, process, load = random.Random(9), start(), Load(postgres_dsn)
    wait = threading.Event()
    try:
        with pipeline(harbour, tmp_path / "one", PIPELINE.format("one", name)):
            eventually(lambda: harbour.upper("one") > 0 and len(harbour.contents("one")) == 300)
            load.start()
            for number, change in enumerate(CHANGES):
                load.ddl.append(change)
                eventually(lambda: not load.ddl or load.failed)
                wait.wait(rng.random() * 0.4)
                process.kill()
                process.wait()
                process = start()
                # Two changes together, one of which rewrites the rows, could not be distinguished.
                eventually(lambda version=number + 2: described().version == version)
            load.ending.set()
            load.join()
            assert load.failed is None
            with psycopg.connect(postgres_dsn, autocommit=True) as connection:
                connection.execute("ALTER TABLE t ADD d int DEFAULT 9")  # no row shows this change
            want = selected(postgres_dsn)
            eventually(lambda: harbour.upper("one") > 0 and harbour.contents("one") == want)
            assert not error_of(harbour, "shard:one")
        with pipeline(harbour, tmp_path / "two", PIPELINE.format("two", name)):
            eventually(lambda: harbour.upper("two") > 0 and harbour.contents("two") == want)
        assert described().is_streaming and described().version == len(CHANGES) + 2
    finally:
        load.ending.set()
        process.kill()
        process.wait()
