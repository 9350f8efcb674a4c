"""Arrays of a captured database in the tables of a pipeline: added with a default, unchanged by an update, as text in
existing tables and where it is declared; and what becomes of them in histories and derived tables.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import duckdb
import pytest

import tidemill
from support.spark.captured_under_ddl import Ground
from support.spark.pipelines import running, until
from support.spark.running import error_of, pipeline
from support.waiting import eventually
from tidemill.base.errors import InvalidError, MissingError
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark import Pipeline, read, register

SHOP = 'def build(p):\n    p.table("grid", p.capture("shop").table("grid"{}){})\n'
COLUMNS = [("id", "integer", 0), ("cells", "integer[]", -1), ("at", "timestamp without time zone[]", -1)]


def row(key: int, cells: str | None, at: str | None = None) -> tuple[Any, Any]:
    return {"id": key}, {"id": key, "cells": cells, "at": at}


@pytest.mark.postgres
def test_arrays_are_what_select_returns_through_updates_ddl_and_a_type_that_changes(
    postgres_dsn: str, harbour: Any, tmp_path: Path
) -> None:
    large = random.Random(1).sample(range(1 << 31), 4000)  # does not compress, so it is stored out of line
    with Ground(postgres_dsn, harbour, tmp_path) as ground:
        ground.sql(
            "CREATE TABLE t (id int PRIMARY KEY, n int, tags text[], big int[], old int[])",
            f"INSERT INTO t SELECT n, n, ARRAY['a', NULL, n::text], ARRAY{large}, '{{1,NULL}}'"
            " FROM generate_series(1, 120) n",
        )
        with pipeline(harbour, tmp_path / "one", ground.pipeline("one")):
            eventually(lambda: ground.contents("one") == ground.selected() and len(ground.contents("one")) == 120)
            kinds = {c.name: c.type for c in harbour.shard("one").schema.columns}
            assert (kinds["tags"], kinds["big"]) == ("array<string>", "array<int32>")
            ground.sql("UPDATE t SET n = n + 1 WHERE id < 90", "UPDATE t SET tags[1] = 'b,c' WHERE id = 2")
            eventually(lambda: ground.contents("one") == ground.selected())
            ground.sql(
                "ALTER TABLE t ADD more text[] NOT NULL DEFAULT '{}', ADD days date[] DEFAULT '{2026-01-02,NULL}'",
                "UPDATE t SET more = '{x,\"y z\"}' WHERE id = 3",
                "INSERT INTO t (id) VALUES (500)",
            )
            eventually(lambda: ground.contents("one") == ground.selected())
            assert ground.contents("one")[0]["more"] == [] and ground.row().version == 2
            code, said = ground.command("verify", "one", "--json")
            assert code == 0 and said["one"]["rows"] == 121 and not said["one"]["columns"]
            # An array of two dimensions is a dead letter, and its key is absent until it has one.
            ground.sql("UPDATE t SET old = '{{1},{2}}' WHERE id = 5")
            eventually(lambda: len(ground.contents("one")) == 120)
            code, said = ground.command("verify", "one", "--json")
            assert code == 1 and (said["one"]["poisoned"], said["one"]["missing"]) == (1, 0)
            assert "as_text='old'" in said["one"]["examples"][0]
            ground.sql("UPDATE t SET old = '[0:1]={1,2}' WHERE id = 5")
            eventually(lambda: ground.contents("one") == ground.selected())
            # Another type of element pauses the table, and is accepted as any other type.
            shard_id = harbour.shard("one").shard_id
            ground.sql("ALTER TABLE t ALTER old TYPE text[]", "UPDATE t SET old = '{z}' WHERE id = 4")
            assert "capture accept 'public.t'" in ground.parked().fix
            code, said = ground.command("capture", "accept", "t", "--json", "--yes")
            assert code == 0
            assert said["shards"] == [{"shard": "one", "becomes": "anew", "changes": "old array<int32>→array<string>"}]

            def is_copied() -> bool:
                try:
                    return ground.contents("one") == ground.selected()
                except MissingError:
                    return False  # the former table was dropped after it had been opened

            eventually(is_copied)
            assert harbour.shard("one").shard_id != shard_id


def test_an_existing_table_keeps_the_text_and_goes_on(harbour: Any, tmp_path: Path) -> None:
    had = ShardSchema((Column("id", "int32"), Column("cells", "string"), Column("at", "string")), ("id",))
    harbour.portal.call(harbour.stores.shard("grid", had))
    topic = harbour.capture("shop", {"public.grid": COLUMNS})["public.grid"]
    with pipeline(harbour, tmp_path / "1", SHOP.format("", ', expect={"any": "cells <> \'{}\'"}')):
        harbour.produce(topic, [row(1, "{1,NULL}"), row(2, "{{1},{2}}", '{"2026-01-01 00:00:00"}')])
        harbour.mint("capture/shop", 1000, topic)
        eventually(lambda: harbour.upper("grid") == 1001)
    assert harbour.contents("grid") == [
        {"id": 1, "cells": "{1,NULL}", "at": None},
        {"id": 2, "cells": "{{1},{2}}", "at": '{"2026-01-01 00:00:00"}'},
    ]
    assert harbour.shard("grid").schema.columns == had.columns


def test_a_column_that_is_declared_as_text_takes_any_array(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.capture("shop", {"public.grid": COLUMNS})["public.grid"]
    with pipeline(harbour, tmp_path / "1", SHOP.format(', as_text="cells"', "")):
        harbour.produce(topic, [row(1, "{{1},{2}}", '{"2026-01-02 03:04:05"}'), row(2, "[0:0]={1}", "{{infinity}}")])
        harbour.mint("capture/shop", 1000, topic)
        eventually(lambda: harbour.upper("grid") == 1001)
        assert [(r["id"], r["cells"]) for r in harbour.contents("grid")] == [(1, "{{1},{2}}")]
        letter = harbour.contents("p.dead_letters")[0]
        assert letter["key"] == '{"id": 2}' and "column=at: an array of more than one dimension" in letter["reason"]
        assert "as_text='at'" in letter["reason"]
    # The declaration changes: the table's type does not.
    with pipeline(harbour, tmp_path / "1", SHOP.format(', as_text=["cells", "at"]', "")):
        eventually(lambda: "at array<timestamp_ntz>→string" in error_of(harbour, "shard:grid"))
        assert "Remove the column from as_text, or re-create the table: tidemill table drop grid --force" in error_of(
            harbour, "shard:grid"
        )
    with pipeline(harbour, tmp_path / "1", SHOP.format("", "")):
        harbour.produce(topic, [row(2, "{1}", "{}")])
        harbour.mint("capture/shop", 2000, topic)
        eventually(lambda: harbour.upper("grid") == 2001)
        assert [(r["id"], r["cells"], len(r["at"])) for r in harbour.contents("grid")][1] == (2, "{1}", 0)


@pytest.mark.parametrize("name", ["id", "nothing"])
def test_text_of_a_column_that_is_no_array_is_refused_by_name(harbour: Any, tmp_path: Path, name: str) -> None:
    harbour.capture("shop", {"public.grid": COLUMNS})
    with pipeline(harbour, tmp_path / "1", SHOP.format(f', as_text="{name}"', "")):
        eventually(lambda: f"no such array: table=public.grid as_text={name}" in error_of(harbour, "shard:grid"))
        assert "array type: cells, at." in error_of(harbour, "shard:grid")
    with pytest.raises(InvalidError, match="as_text names no column"):
        Pipeline("p").capture("shop").table("grid", as_text="cells,")


def test_a_key_of_an_array_is_text(harbour: Any, tmp_path: Path) -> None:
    columns = [("path", "integer[]", 0), ("tags", "text[]", -1)]
    topic = harbour.capture("shop", {"public.grid": columns})["public.grid"]
    with pipeline(harbour, tmp_path / "1", SHOP.format("", "")):
        rows = [
            ({"path": "{1,2}"}, {"path": "{1,2}", "tags": "{a}"}),
            ({"path": "{{1}}"}, {"path": "{{1}}", "tags": None}),
        ]
        harbour.produce(topic, rows)
        harbour.mint("capture/shop", 1000, topic)
        eventually(lambda: harbour.upper("grid") == 1001)
    assert harbour.contents("grid") == [{"path": "{1,2}", "tags": ["a"]}, {"path": "{{1}}", "tags": None}]


def test_an_expectation_over_an_array_is_refused_by_name(harbour: Any, tmp_path: Path) -> None:
    harbour.capture("shop", {"public.grid": COLUMNS})
    with pipeline(harbour, tmp_path / "1", SHOP.format("", ', expect={"any": "cells <> \'{}\'"}')):
        eventually(lambda: "cells" in error_of(harbour, "shard:grid") and "array" in error_of(harbour, "shard:grid"))


DERIVED = SHOP.format("", "") + (
    '    p.history("versions", of="grid", track="cells")\n'
    '    @p.derived(key="cell")\n'
    "    def cells(spark, grid):\n"
    '        return grid.selectExpr("explode(cells) AS cell").where("cell IS NOT NULL").groupBy("cell").count()\n'
)


@pytest.mark.spark
def test_spark_and_duckdb_have_lists_and_histories_and_derived_tables_follow_them(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    topic = harbour.capture("shop", {"public.grid": COLUMNS})["public.grid"]
    file = tmp_path / "pipeline.py"
    file.write_text(DERIVED)
    with running(harbour, spark, tmp_path / "a", file):
        first = [row(1, "{1,2}"), row(2, "{2,NULL}", '{"2026-01-02 03:04:05"}'), row(3, "{}"), row(4, None)]
        harbour.produce(topic, first)
        harbour.mint("capture/shop", 1000, topic)
        until(lambda: counts(harbour) == {1: 1, 2: 2}, "derived")
        harbour.produce(topic, [row(1, "{1,2}", "{infinity}"), row(3, "{7}")])
        harbour.mint("capture/shop", 2000, topic)
        until(lambda: counts(harbour) == {1: 1, 2: 2, 7: 1}, "derived again")
        until(lambda: len(contents(harbour, "versions")) == 5, "history")
    cells = {(r["id"], r["is_current"]): r["cells"] for r in contents(harbour, "versions")}
    assert cells == {(1, True): [1, 2], (2, True): [2, None], (3, False): [], (3, True): [7], (4, True): None}
    where = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    register(spark, **where)
    for frame in (read(spark, "grid", **where), spark.read.format("tidemill").options(table="grid", **where).load()):
        assert frame.schema["cells"].dataType.simpleString() == "array<int>"
        assert frame.schema["at"].dataType.simpleString() == "array<timestamp_ntz>"
        assert [r.id for r in frame.where("array_contains(cells, 2)").select("id").orderBy("id").collect()] == [1, 2]
    with tidemill.connect(**where) as cluster, duckdb.connect() as connection:
        cluster.table("grid").to_duckdb(connection, "grid")
        relation = connection.sql('SELECT id, cells, "at" FROM grid')
        assert [str(kind) for kind in relation.types] == ["INTEGER", "INTEGER[]", "TIMESTAMP[]"]
        assert connection.sql("SELECT id FROM grid WHERE list_contains(cells, 2) ORDER BY 1").fetchall() == [(1,), (2,)]
    # A stream of the captured table's records has their text.
    stream = spark.readStream.format("tidemill").options(source="capture/shop", table="public.grid", **where).load()
    assert stream.schema["cells"].dataType.simpleString() == "string"


def counts(harbour: Any) -> dict[int, int]:
    return {row["cell"]: row["count"] for row in contents(harbour, "cells")}


def contents(harbour: Any, name: str) -> list[dict[str, Any]]:
    if not harbour.upper(name):
        return []
    shard = harbour.shard(name)
    table = harbour.portal.call(shard.snapshot(harbour.upper(name) - 1, 10))
    return table.drop_columns([c for c in ("at",) if c in table.column_names]).to_pylist()  # infinity is no datetime
