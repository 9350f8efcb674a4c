"""Declarations: handles, and derived tables declared by their function's signature."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill.base.errors import InvalidError
from tidemill.spark import Pipeline
from tidemill.spark.definition import DerivedTable, Table


def with_clicks() -> tuple[Pipeline, Table]:
    p = Pipeline("p")
    return p, p.table("clicks", p.topic("clicks", key="id", schema="id string, product long"))


def test_handles_are_inputs_like_names() -> None:
    p, clicks = with_clicks()

    @p.derived("by_product", key="product", inputs=clicks)
    def counted(spark: Any, clicks: Any) -> Any:
        return clicks.groupBy("product").count()

    @p.derived("best", key="product", inputs=(counted, "names", clicks))
    def best(spark: Any, counts: Any, names: Any, clicks: Any) -> Any:
        return counts.join(names, "product")

    assert isinstance(clicks, Table) and isinstance(counted, DerivedTable)
    assert p.inputs() == {"by_product": {"clicks": ()}, "best": {"by_product": (), "names": (), "clicks": ()}}


def test_a_function_alone_names_its_table_and_its_inputs() -> None:
    p, _ = with_clicks()

    @p.derived(key="product", by={"clicks": "product"})
    def by_product(spark: Any, clicks: Any, names: Any) -> Any:
        return clicks, names

    @p.derived("other", key="product")
    def unnamed(_spark: Any, by_product: Any) -> Any:
        return by_product

    assert p.inputs() == {"by_product": {"clicks": ("product",), "names": ()}, "other": {"by_product": ()}}
    assert by_product(None, 1, 2) == (1, 2), "a handle is still the function"  # type: ignore[arg-type]


def test_a_signature_that_names_no_inputs_is_refused_with_a_remedy() -> None:
    p, _ = with_clicks()
    for function, named in (
        (lambda clicks: clicks, "first parameter is not the session: table=x parameter=clicks"),
        (lambda: None, "first parameter is not the session"),
        (lambda spark: spark, "needs inputs: table=x"),
        (lambda spark, *frames: frames, "do not name its inputs: table=x parameter=frames"),
        (lambda spark, *, clicks: clicks, "do not name its inputs: table=x parameter=clicks"),
    ):
        with pytest.raises(InvalidError, match=named) as refused:
            p.derived("x", key="k")(function)
        assert refused.value.fix
    with pytest.raises(InvalidError, match="declared twice: table=clicks"):
        p.derived(key="k")(clicks_function())
    assert not p.derived_tables


def clicks_function() -> Any:
    def clicks(spark: Any, other: Any) -> Any:
        return other

    return clicks


USER_PROGRAM = """
from pyspark.sql.types import StructType
import tidemill
from tidemill.spark import Pipeline

def build(p: Pipeline) -> None:
    shop = p.capture("shop")
    orders = p.table("orders", shop.table("public.orders"))
    clicks = p.table("clicks", p.topic("clicks", key=["id"], schema=StructType()))

    @p.derived(key="id", by={"clicks": "id"})
    def by_id(spark, clicks):
        return clicks

    reveal_type(orders.name)
    reveal_type(clicks)
    reveal_type(by_id)
    p.derived("d", key="id", inputs=[orders, by_id, "other"])
    p.derived("e", key="id", inputs=[7])
    p.table("f", orders)
    reveal_type(tidemill.connect().table("orders").count())
"""


def test_an_editor_knows_the_types_of_a_pipeline_file(tmp_path: Path) -> None:
    """Spark's types are skipped here, so that the check is quick."""
    file = tmp_path / "user.py"
    file.write_text(USER_PROGRAM)
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\n[mypy-pyspark.*,pyarrow.*]\nfollow_imports = skip\nignore_missing_imports = True\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if "user.py" in line]
    assert [line for line in found if line.startswith("note: Revealed")] == [
        f'note: Revealed type is "{name}"'
        for name in ("str", "tidemill.spark.definition.Table", "tidemill.spark.definition.DerivedTable", "int")
    ], done.stdout + done.stderr
    errors = [line for line in found if line.startswith("error")]
    assert len(errors) == 2 and "List item 0" in errors[0] and 'Argument 2 to "table"' in errors[1], errors
