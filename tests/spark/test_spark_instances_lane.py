"""Checks of `./dev bench instances`: they detect a missing, an additional, a changed or a doubled row."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from instances_lone import CONVERSION, _with, differences
from instances_pipeline import LONE
from tidemill.spark.definition import load_pipeline

ROWS = pa.table({"id": [1, 2, 3], "v": ["a", None, "c"]})


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (pa.table({"v": ["c", "a", None], "id": [3, 1, 2]}), []),
        (ROWS.slice(1), ["t: of 2 rows missing 1, extra 0"]),
        (pa.concat_tables([ROWS, ROWS.slice(2)]), ["t: of 4 rows missing 0, extra 1"]),
        (pa.table({"id": [1, 2, 3], "v": ["a", "", "c"]}), ["t: of 3 rows missing 1, extra 1"]),
        (ROWS.slice(0, 0), ["t: of 0 rows missing 3, extra 0"]),
    ],
)
def test_two_writers_contents_are_compared_as_multisets_of_whole_rows(theirs: pa.Table, said: list[str]) -> None:
    assert differences("t", theirs, ROWS) == said


def test_the_other_engine_keeps_products_that_were_only_seen_and_only_sold() -> None:
    clicks = pa.table({"product_id": [1, 1, 2]})
    amounts = pa.array([Decimal("1.10"), Decimal("2.00")], pa.decimal128(12, 2))
    lines = pa.table({"product_id": [1, 3], "quantity": pa.array([2, 3], pa.int32()), "amount": amounts})
    found = _with({"clicks": clicks, "order_line": lines}).execute(f"{CONVERSION} ORDER BY 1").fetchall()
    assert found == [(1, 2, 2, Decimal("1.10")), (2, 1, 0, Decimal(0)), (3, 0, 3, Decimal("2.00"))]


def test_the_lone_writer_keeps_the_same_tables_under_names_of_its_own() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "instances_pipeline.py"
    many, lone = load_pipeline(file, "shop"), load_pipeline(file, "lone")
    assert lone.fed_by() == {LONE + name: fed_by for name, fed_by in many.fed_by().items()}
    assert lone.inputs() == {
        LONE + name: {LONE + one: by for one, by in inputs.items()} for name, inputs in many.inputs().items()
    }
