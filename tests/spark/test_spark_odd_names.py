"""Columns with names that are special in JSON, SQL or Spark, through a running pipeline."""

from __future__ import annotations

from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.spark.running import error_of, pipeline
from support.waiting import eventually
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.schema import contents_schema, update_schema
from tidemill.spark import Pipeline
from tidemill.spark.derived.derivation import Derivation

NAMES = ['quote"in"it', "back\\slash", "it's", "tab\there", "line\nbreak", "größe 😀", "%s {x}", "tick`", "a.b", "$1"]
KEYS = ('key "one"', "k.`2`")


def test_columns_of_any_name_are_written_updated_and_deleted_by_their_keys(harbour: Any, tmp_path: Path) -> None:
    columns = [(KEYS[0], "integer", 0), (KEYS[1], "text", 1)]
    columns += [(name, kind, -1) for name, kind in zip(NAMES, ["text", "integer"] * 5, strict=True)]
    topic = harbour.capture("shop", {"public.odd": columns})["public.odd"]

    def row(key: int, value: int) -> dict[str, Any]:
        values = [f"{value}", value] * 5
        return {KEYS[0]: key, KEYS[1]: f"k{key}", **dict(zip(NAMES, values, strict=True))}

    def keyed(key: int, value: int | None) -> tuple[Any, Any]:
        return {KEYS[0]: key, KEYS[1]: f"k{key}"}, row(key, value) if value is not None else None

    def commit(time_ms: int, *changes: tuple[Any, Any]) -> list[dict[str, Any]]:
        harbour.produce(topic, list(changes))
        harbour.mint("capture/shop", time_ms, topic)
        eventually(lambda: harbour.upper("odd") == time_ms + 1 or bool(error_of(harbour, "shard:odd")))
        assert not error_of(harbour, "shard:odd")
        found: list[dict[str, Any]] = harbour.contents("odd")
        return sorted(found, key=lambda r: r[KEYS[0]])

    with pipeline(harbour, tmp_path, 'def build(p):\n    p.table("odd", p.capture("shop").table("odd"))\n'):
        assert commit(1000, keyed(1, 10), keyed(2, 20), keyed(3, 30)) == [row(1, 10), row(2, 20), row(3, 30)]
        assert commit(2000, keyed(1, 11), keyed(2, None)) == [row(1, 11), row(3, 30)]
        many = [keyed(key, key) for key in range(100, 300)]
        assert commit(3000, *many) == [row(1, 11), row(3, 30), *(row(key, key) for key in range(100, 300))]
    assert harbour.upper("p.dead_letters") == 0


@pytest.mark.spark
def test_columns_of_any_name_are_derived_from_and_read_by_spark(harbour: Any, spark: Any, tmp_path: Path) -> None:
    call, s = harbour.portal.call, harbour.stores
    columns = [Column(KEYS[0], "int32"), Column(KEYS[1], "string")]
    schema = ShardSchema((*columns, *(Column(name, "string") for name in NAMES)), KEYS)
    shard = call(s.shard("odd", schema))
    made = [{KEYS[0]: n, KEYS[1]: f"k{n}", **{name: f"{name}{n}" for name in NAMES}} for n in range(6)]
    updates = pa.Table.from_pylist(made, contents_schema(schema))
    for name, value in ((TIME, 0), (DIFF, 1)):
        updates = updates.append_column(name, pa.array([value] * len(made), pa.int64()))
    call(shard.compare_and_append(0, 1, (call(shard.write_part(updates.cast(update_schema(schema)))),), "one"))
    p = Pipeline("p")

    @p.derived("by_group", key=KEYS, inputs=("odd",), by=KEYS)
    def by_group(spark: Any, odd: Any) -> Any:
        return odd

    for name, table in p.derived_tables.items():
        one = Derivation(harbour.portal, s, spark, table, tmp_path / "mirrors" / name)
        one.open()
        assert one.recompute() and one.writer is not None
        found = call(one.writer.shard.snapshot(0)).to_pylist()
        assert sorted(found, key=lambda r: r[KEYS[0]]) == made, name
    file = tmp_path / "tidemill.toml"
    file.write_text(f"[objects]\nurl = '{harbour.urls.objects}'\n[consensus]\nurl = '{harbour.urls.consensus}'\n")
    frame = spark.read.format("tidemill").option("config", str(file)).load("odd")
    assert sorted((row.asDict() for row in frame.collect()), key=lambda r: r[KEYS[0]]) == made
    asked = [frame["`" + name.replace("`", "``") + "`"] == made[4][name] for name in [KEYS[1], *NAMES]]
    assert [row.asDict() for row in frame.where(reduce(and_, asked)).collect()] == [made[4]]
