"""Derived tables without Spark: a frame that is an Arrow table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from support.spark.sinks import clicks_sink
from tidemill.shards.api import Column
from tidemill.spark.definition import DerivedTable
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.types import spark_schema


class Frame:
    """The part of a DataFrame that a derivation uses."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @property
    def schema(self) -> Any:

        return spark_schema([Column(f.name, str(f.type).replace("decimal128", "decimal")) for f in self.table.schema])

    def toArrow(self) -> pa.Table:
        return self.table


class FakeSpark:
    sparkContext = SimpleNamespace(master="local[1]")

    def createDataFrame(self, data: Any, schema: Any) -> Frame:
        if isinstance(data, pa.Table):
            return Frame(data)
        from pyspark.sql.pandas.types import to_arrow_schema

        return Frame(to_arrow_schema(schema, timezone="UTC").empty_table())


def count_by_product(_: Any, clicks: Frame) -> Frame:
    grouped = clicks.table.group_by("product_id").aggregate([("click_id", "count")])
    return Frame(pa.table({"product_id": grouped["product_id"], "n": pc.cast(grouped["click_id_count"], pa.int64())}))


def derivation(
    harbour: Any, scratch: Path, function: Callable[..., Any], key: str = "product_id", *, by_group: bool = False
) -> Derivation:
    by = ({"clicks": (key,)}, (key,)) if by_group else ()
    table = DerivedTable("counts", (key,), ("clicks",), 0.05, function, *by)
    return Derivation(harbour.portal, harbour.stores, FakeSpark(), table, scratch / "counts")  # type: ignore[arg-type]


class Clicks:
    def __init__(self, harbour: Any, tmp_path: Path) -> None:
        self.harbour = harbour
        self.topic = harbour.create_topic("clicks")
        self.sink = clicks_sink(harbour, tmp_path / "sink")
        self.time = 0

    def say(self, *rows: tuple[str, int | None]) -> None:
        found = [(k.encode(), None if p is None else {"click_id": k, "product_id": p}) for k, p in rows]
        if found:
            self.harbour.produce(self.topic, found)
        self.time += 10
        self.harbour.mint("topic/clicks", self.time, self.topic)
        self.sink.process(self.sink.latest())


def counts(harbour: Any, at: int | None = None) -> dict[int, int]:
    return {r["product_id"]: r["n"] for r in harbour.contents("counts", at)}
