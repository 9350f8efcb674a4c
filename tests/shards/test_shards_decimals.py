"""Conversion of decimals to another scale: exact or refused, with DuckDB as the reference."""

from __future__ import annotations

from decimal import Decimal

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.key_hash import key_hashes
from tidemill.shards.parts.numbers import decimal_texts_to_arrow, decimals_to_arrow, rescale_decimals
from tidemill.shards.parts.pg_columns import parse_column
from tidemill.shards.parts.schema import conform_rows
from tidemill.shards.parts.schema_evolution import canonical_default

FORMS = ((38, 0), (38, 18), (38, 37), (38, 38), (20, 19), (8, 2), (1, 0))
WRAPS = ("400000000000000000000", "-400000000000000000000.5", "340282366920938463463.374607431768211457")
"""Values each of which as decimal(38,18) equals one modulo 2^128."""
engine = duckdb.connect()
texts = st.builds(
    lambda sign, whole, part: f"{sign}{whole or '0'}{'.' if part else ''}{part}",
    st.sampled_from(["", "-"]),
    st.text("0123456789", max_size=40),
    st.text("0123456789", max_size=40),
)


@given(st.lists(texts | st.sampled_from(WRAPS), min_size=1, max_size=5), st.sampled_from(FORMS))
@settings(max_examples=200, deadline=None)
def test_texts_by_columns_are_the_decimals_that_another_engine_reads(given: list[str], form: tuple[int, int]) -> None:
    kind = pa.decimal128(*form)
    for text in given:
        column = Column("v", f"decimal({form[0]},{form[1]})")
        try:
            (found,) = parse_column([text], column).to_pylist()
        except InvalidError:
            with pytest.raises(ValueError):
                decimals_to_arrow([Decimal(text)], kind)
            with pytest.raises(pa.ArrowInvalid):
                decimal_texts_to_arrow(pa.array([text]), kind)
            continue
        # DuckDB rounds what is not exact, and refuses what is too large.
        (theirs,) = engine.execute(f"SELECT TRY_CAST(? AS DECIMAL({form[0]},{form[1]}))", [text]).fetchall()[0]
        assert found == theirs == Decimal(text) == decimals_to_arrow([Decimal(text)], kind)[0].as_py()


@pytest.mark.parametrize("text", [*WRAPS, "1e-2000000000", "1e2000000000", "NaN", "-Infinity", "", "1_0", "٣"])
def test_what_no_decimal_holds_is_refused_and_named(text: str) -> None:
    with pytest.raises(InvalidError, match="column=v"):
        parse_column(["1", text], Column("v", "decimal(38,18)"))
    with pytest.raises(InvalidError, match="column=v"):
        canonical_default(Column("v", "decimal(38,18)", text))


@pytest.mark.parametrize("before", [pa.decimal128(38, 0), pa.decimal256(70, 10)])
def test_rows_of_another_scale_fit_exactly_or_are_refused(before: pa.DataType) -> None:
    for digits in ("99999999999999999999", "-99999999999999999999", "100000000000000000000", "400000000000000000000"):
        table, target = pa.table({"v": pa.array([Decimal(digits)], before)}), pa.schema([("v", pa.decimal128(38, 18))])
        if len(digits.lstrip("-")) > 20:
            with pytest.raises(InvalidError, match="column=v"):
                conform_rows(table, target)
        else:
            assert conform_rows(table, target).column("v").to_pylist() == [Decimal(digits)]
    cents = pa.array([Decimal("1.25"), None], pa.decimal128(38, 18))
    assert rescale_decimals(cents, pa.decimal128(6, 2)).to_pylist() == [Decimal("1.25"), None]
    with pytest.raises(pa.ArrowInvalid):
        rescale_decimals(cents, pa.decimal128(6, 1))


def test_a_key_that_no_decimal_holds_is_left_to_the_engine() -> None:
    schema = ShardSchema((Column("k", "decimal(38,18)"),), ("k",))
    assert key_hashes(schema, {"k": [Decimal("4e20")]}) is None
    assert key_hashes(schema, {"k": [Decimal("1e-2000000000")]}) is None
    assert key_hashes(schema, {"k": [Decimal("1.5"), 2]}) is not None
