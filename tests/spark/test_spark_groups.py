"""Derived tables by group: what changed groups alone are computed from equals the whole, at every time."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support.spark.derived import FakeSpark, Frame
from tidemill.base.errors import InvalidError
from tidemill.shards.api import DIFF, TIME, Column, HistoryLostError, ShardSchema
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.spark import Pipeline
from tidemill.spark.definition import DerivedTable
from tidemill.spark.derived import group_mirror
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.merge.mirror import Mirror

CLICKS = ShardSchema((Column("id", "string"), Column("product", "int64")), ("id",))
LINES = ShardSchema((Column("order", "int64"), Column("no", "int32"), Column("item", "int32"), Column("n", "int64")),
                    ("order", "no"))  # fmt: skip
NAMES = ShardSchema((Column("code", "int64"), Column("name", "string")), ("code",))
Row = tuple[Any, ...]


class Table:
    """A shard and its contents as Python sees them."""

    def __init__(self, harbour: Any, name: str, schema: ShardSchema) -> None:
        self.harbour, self.schema = harbour, schema
        self.shard = harbour.portal.call(harbour.stores.shard(name, schema))
        self.rows: dict[Row, Row] = {}
        self.upper = 0

    def change(self, changes: dict[Row, Row | None], upper: int) -> None:
        """Key → row or None, all at upper - 1."""
        updates = []
        for key, row in changes.items():
            old = self.rows.get(key)
            if old == row:
                continue
            if old is not None:
                updates.append((*old, upper - 1, -1))
            if row is not None:
                updates.append((*row, upper - 1, 1))
                self.rows[key] = row
            else:
                self.rows.pop(key, None)
        names = [*(c.name for c in self.schema.columns), TIME, DIFF]
        call, shard = self.harbour.portal.call, self.shard
        parts = ()
        if updates:
            parts = (call(shard.write_part(pa.Table.from_pylist([dict(zip(names, u, strict=True)) for u in updates]))),)
        call(shard.compare_and_append(self.upper, upper, parts, f"{upper}"))
        self.upper = upper


class Shop:
    def __init__(self, harbour: Any) -> None:
        self.clicks, self.lines = Table(harbour, "clicks", CLICKS), Table(harbour, "lines", LINES)
        self.names = Table(harbour, "names", NAMES)

    def expected(self) -> dict[Any, tuple[int, int, str | None]]:
        seen = Counter(row[1] for row in self.clicks.rows.values())
        sold: Counter[Any] = Counter()
        for row in self.lines.rows.values():
            sold[row[2]] += row[3]
        names = {row[0]: row[1] for row in self.names.rows.values()}
        products = (seen.keys() | {row[2] for row in self.lines.rows.values()}) - {None}
        return {p: (seen[p], sold[p], names.get(p)) for p in products}


def by_product(_: Any, clicks: Frame, lines: Frame, names: Frame) -> Frame:
    seen = clicks.table.filter(pc.is_valid(clicks.table["product"]))
    seen = seen.group_by("product").aggregate([("id", "count")])
    sold = lines.table.filter(pc.is_valid(lines.table["item"]))
    sold = (
        sold.append_column("product", pc.cast(sold["item"], pa.int64())).group_by("product").aggregate([("n", "sum")])
    )
    joined = seen.join(sold, "product", join_type="full outer").join(names.table, "product", "code")
    return Frame(
        pa.table(
            {
                "product": joined["product"],
                "seen": pc.fill_null(joined["id_count"], 0),
                "sold": pc.fill_null(joined["n_sum"], 0),
                "name": joined["name"],
            }
        )
    )


def derived(harbour: Any, scratch: Path, function: Any = by_product, by: Any = None) -> Derivation:
    p = Pipeline("p")
    by = {"clicks": "product", "lines": "item"} if by is None else by
    p.derived("sums", key="product", inputs=("clicks", "lines", "names"), every_s=0.05, by=by)(function)
    table: DerivedTable = p.derived_tables["sums"]
    spark: Any = FakeSpark()
    return Derivation(harbour.portal, harbour.stores, spark, table, scratch / "mirrors" / "sums")


def held(harbour: Any, at: int | None = None) -> dict[Any, tuple[int, int, str | None]]:
    return {r["product"]: (r["seen"], r["sold"], r["name"]) for r in harbour.contents("sums", at)}


def some(rng: random.Random, table: Table, time: int) -> None:
    def product() -> int | None:
        return rng.choice([None, *range(12)])

    changes: dict[Row, Row | None] = {}
    for _ in range(rng.choice([0, 0, 1, 3, 10])):
        if table.schema is CLICKS:
            key: Row = (f"c{rng.randrange(40)}",)
            row: Row = (*key, product())
        elif table.schema is LINES:
            key = (rng.randrange(10), rng.randrange(4))
            row = (*key, product(), rng.randrange(5))
        else:
            key = (rng.randrange(12),)
            row = (*key, f"n{rng.randrange(9)}")
        changes[key] = row if rng.random() < 0.7 else None
    table.change(changes, time)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("few_groups", [False, True])
def test_by_group_equals_the_whole_at_every_time(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, few_groups: bool
) -> None:
    """Rows that change their group, groups that come and go, groups of null, inputs given whole, a peer, restarts, and
    groups that share their half of the hash."""
    if few_groups:
        bits = np.uint64(0x3 << 40)
        monkeypatch.setattr(group_mirror, "groups_of", lambda rows, by: hash_rows(rows, by) & bits)
        monkeypatch.setattr("tidemill.spark.derived.inputs.groups_of", group_mirror.groups_of)
        monkeypatch.setattr("tidemill.spark.derived.derivation.groups_of", group_mirror.groups_of)
    rng, shop = random.Random(seed), Shop(harbour)
    tables = [shop.clicks, shop.lines, shop.names]
    for table in tables:
        some(rng, table, 10)
    both = [derived(harbour, tmp_path / str(n)) for n in range(2)]
    for one in both:
        one.open()
    want, by_group = {}, 0
    for time in range(20, 150, 10):
        for table in tables if rng.random() < 0.3 else tables[:2]:
            some(rng, table, time)
        for table in tables:
            if table.upper < time:
                table.change({}, time)
        if rng.random() < 0.1:
            both[0] = derived(harbour, tmp_path / f"again{time}")
            both[0].open()
        for one in both if rng.random() < 0.5 else both[::-1]:
            one.recompute()
            by_group += one.groups is not None
        want[time - 1] = shop.expected()
        assert held(harbour) == want[time - 1]
    assert by_group, "no round was by group"
    for time, rows in want.items():
        assert held(harbour, time) == rows


def test_only_the_rows_of_changed_groups_are_given(harbour: Any, tmp_path: Path) -> None:
    shop, given = Shop(harbour), []

    def counted(spark: Any, *frames: Frame) -> Frame:
        given.append([frame.table.num_rows for frame in frames])
        return by_product(spark, *frames)

    shop.clicks.change({(f"c{n}",): (f"c{n}", n % 100) for n in range(1000)}, 10)
    shop.lines.change({(n, 1): (n, 1, n % 100, 1) for n in range(500)}, 10)
    shop.names.change({(1,): (1, "one")}, 10)
    one = derived(harbour, tmp_path, counted)
    one.open()
    one.recompute()
    shop.clicks.change({("c7",): ("c7", 8), ("c9",): None}, 20)
    for table in (shop.lines, shop.names):
        table.change({}, 20)
    one.recompute()
    assert (given[1:], one.groups) == ([[1000, 500, 1], [29, 15, 1]], 3)
    assert held(harbour) == shop.expected()


def test_an_input_by_group_is_read_a_range_of_keys_at_a_time(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges are read after a start, and again when the changes are no longer in the input's history."""
    monkeypatch.setattr("tidemill.shards.read.hash_ranges.RANGE_ROWS", 100)
    shop, inserted = Shop(harbour), []
    insert = Mirror.insert
    monkeypatch.setattr(Mirror, "insert", lambda self, rows: inserted.append(rows.num_rows) or insert(self, rows))
    one = derived(harbour, tmp_path)
    shop.clicks.change({(f"c{n}",): (f"c{n}", n % 100) for n in range(1500)}, 10)
    shop.clicks.change({(f"c{n}",): (f"c{n}", 7) for n in range(0, 1500, 30)}, 15)
    one.open()
    for upper in (20, 30, 40):
        shop.clicks.change({(f"c{upper}",): (f"c{upper}", 3), ("c1",): None}, upper)
        for table in (shop.lines, shop.names):
            table.change({}, upper)
        if upper == 30:
            monkeypatch.setattr(one._inputs[0], "_follow", lost)
        one.recompute()
        assert held(harbour) == shop.expected()
    assert len(inserted) >= 2 * 15 and max(inserted) < 300


def lost(end: int) -> None:
    raise HistoryLostError("history is lost.")


def test_a_function_that_leaves_its_groups_is_refused(harbour: Any, tmp_path: Path) -> None:
    shop = Shop(harbour)

    def shares(_: Any, clicks: Frame, *rest: Frame) -> Frame:
        """Name the next product in place of each product."""
        found = by_product(_, clicks, *rest).table
        return Frame(found.set_column(0, "product", pc.add(found["product"], 1)))

    one = derived(harbour, tmp_path, shares)
    shop.clicks.change({("c1",): ("c1", 1), ("c2",): ("c2", 5)}, 10)
    for table in (shop.lines, shop.names):
        table.change({}, 10)
    one.open()
    one.recompute()
    shop.clicks.change({("c2",): ("c2", 7)}, 20)
    for table in (shop.lines, shop.names):
        table.change({}, 20)
    with pytest.raises(InvalidError, match="groups that it was given no rows of"):
        one.recompute()


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("product", "input=lines column=product"),
        ({"clicks": "id"}, "two types"),
        ({"clicks": ("product", "id")}, "groups do not match"),
        ({"nobody": "product"}, "groups do not match"),
    ],
)
def test_groups_that_cannot_be_are_refused(harbour: Any, tmp_path: Path, by: Any, says: str) -> None:
    Shop(harbour)
    with pytest.raises(InvalidError, match=says):
        derived(harbour, tmp_path, by=by).open()


def test_a_round_says_why_it_computed_everything(harbour: Any, tmp_path: Path) -> None:
    shop, reported = Shop(harbour), []
    one, plain = derived(harbour, tmp_path / "a"), derived(harbour, tmp_path / "b", by=())
    one.open()

    def round_at(time: int) -> None:
        for table in (shop.clicks, shop.lines, shop.names):
            if table.upper < time:
                table.change({}, time)
        one.recompute()
        reported.append(one.whole_because)

    shop.clicks.change({("c1",): ("c1", 1)}, 10)
    round_at(10)
    shop.clicks.change({("c2",): ("c2", 2)}, 20)
    round_at(20)
    shop.names.change({(1,): (1, "one")}, 30)
    round_at(30)
    shop.clicks.change({("c1",): None}, 40)
    plain.open()
    for table in (shop.lines, shop.names):
        table.change({}, 40)
    plain.recompute()
    round_at(50)  # the other was first; its rows are there
    assert reported[:3] == [
        "it is the first round since the table was opened",
        "",
        "names, which is given whole, changed",
    ]
    assert plain.whole_because == "no by=… says which columns group it"
    assert held(harbour) == shop.expected()


def test_a_column_of_json_groups_a_table_whose_column_is_a_string(harbour: Any, tmp_path: Path) -> None:
    """Spark has no type for JSON, so no cast in the function could make the two one."""
    table = Table(harbour, "docs", ShardSchema((Column("id", "int64"), Column("doc", "json")), ("id",)))

    def counted(_: Any, docs: Frame) -> Frame:
        found = docs.table.group_by("doc").aggregate([("id", "count")])
        return Frame(pa.table({"doc": found["doc"], "n": found["id_count"]}))

    p = Pipeline("p")
    p.derived("sums", key="doc", inputs=("docs",), by="doc")(counted)
    spark: Any = FakeSpark()
    one = Derivation(harbour.portal, harbour.stores, spark, p.derived_tables["sums"], tmp_path / "mirrors" / "sums")
    table.change({(1,): (1, "{}"), (2,): (2, "{}"), (3,): (3, "null")}, 10)
    one.open()
    one.recompute()
    table.change({(2,): (2, "null")}, 20)
    one.recompute()
    assert one.groups == 2
    assert harbour.contents("sums") == [{"doc": "null", "n": 2}, {"doc": "{}", "n": 1}]
