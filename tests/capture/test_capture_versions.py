"""Plans of schema versions without database or stream: the changes that a description can follow, and those that pause
the table.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tidemill.capture.catalog.columns import ColumnAttributes, TableAttributes
from tidemill.capture.catalog.schema_versions import (
    NUMERIC,
    TEXT,
    VARCHAR,
    SchemaStep,
    classify_type_change,
    columns_at_version,
    find_version,
    plan_next_version,
    targets_of_attributes,
)
from tidemill.capture.postgres.pgoutput import RelationMessage, WireColumn
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow

INT2, INT8, INT4, FLOAT4, FLOAT8 = 21, 20, 23, 700, 701


def numeric(precision: int, scale: int) -> tuple[int, int]:
    return NUMERIC, (precision << 16 | scale) + 4


@pytest.mark.parametrize(
    ("old", "new", "how"),
    [
        ((INT2, -1), (INT4, -1), (True, True)),
        ((INT2, -1), (INT8, -1), (True, True)),
        ((INT4, -1), (INT8, -1), (True, True)),
        ((FLOAT4, -1), (FLOAT8, -1), (True, True)),
        (numeric(6, 2), numeric(8, 2), (True, False)),
        ((VARCHAR, 8), (VARCHAR, 12), (True, False)),
        ((VARCHAR, 8), (VARCHAR, -1), (True, False)),
        ((VARCHAR, 8), (TEXT, -1), (True, False)),
    ],
)
def test_a_wider_type_holds_every_value_and_says_whether_rows_are_written_anew(
    old: tuple[int, int], new: tuple[int, int], how: tuple[bool, bool]
) -> None:
    assert classify_type_change(old, new) == how
    assert not classify_type_change(new, old)[0], "the other way round it is narrower"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((INT4, -1), numeric(20, 0)), ((INT4, -1), (FLOAT8, -1)), ((INT8, -1), (FLOAT8, -1)), ((INT4, -1), (TEXT, -1)),
        (numeric(6, 2), numeric(8, 3)), (numeric(6, 2), (NUMERIC, -1)), ((NUMERIC, -1), numeric(6, 2)),
        (numeric(6, 2), numeric(6, 2)), ((TEXT, -1), (VARCHAR, 9)), ((VARCHAR, -1), (VARCHAR, 9)),
        ((1042, 8), (TEXT, -1)), ((1114, -1), (1184, -1)),
    ],
)  # fmt: skip
def test_no_other_type_is_wider(old: tuple[int, int], new: tuple[int, int]) -> None:
    assert not classify_type_change(old, new)[0]


NAMES = {INT4: "integer", INT8: "bigint", TEXT: "text", FLOAT8: "double precision"}


def column(name: str, number: int, kind: int = INT4, key: int = -1) -> CapturedColumn:
    return CapturedColumn(name, NAMES[kind], key, kind, -1, number)


ROW = CaptureTableRow(
    "c", "public.t", attributes=3, storage="files",
    columns=(column("id", 1, key=0), column("v", 2), column("w", 3, TEXT)),
)  # fmt: skip


def seen(*columns: CapturedColumn, missing: dict[str, str] | None = None, **others: object) -> TableAttributes:
    found = tuple(
        ColumnAttributes(
            c.name, c.attnum, c.type_oid, c.type_mod, c.type_name, c.key_index, (missing or {}).get(c.name)
        )
        for c in columns
    )
    facts: dict[str, object] = {"count": max(c.attnum for c in columns), "dropped": 0, "storage": "files"} | others
    return TableAttributes(found, **facts)  # type: ignore[arg-type]


def message(columns: tuple[CapturedColumn, ...]) -> RelationMessage:
    reported = tuple(WireColumn(c.name, c.type_oid, c.type_mod, False) for c in columns)
    return RelationMessage(1, "public", "t", "f", reported)


X = column("x", 4)


def grown(row: CaptureTableRow, found: TableAttributes, lsn: int) -> CaptureTableRow:
    step = plan_next_version(row, targets_of_attributes(found), found)
    assert isinstance(step, SchemaStep), step
    return replace(
        row, columns=step.columns, evolved=(*row.evolved, lsn), attributes=step.attributes, storage=step.storage
    )


def test_a_new_column_has_what_older_rows_read_as() -> None:
    assert grown(ROW, seen(*ROW.columns, X), 9).columns[-1].default is None
    assert grown(ROW, seen(*ROW.columns, X, missing={"x": "5"}), 9).columns[-1].default == "5"
    rewritten = seen(*ROW.columns, X, missing={"x": "5"}, storage="others")
    assert grown(ROW, rewritten, 9).columns[-1].default == "5", "a constant that is kept says that x was not written"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (seen(*ROW.columns, X, storage="others"), "were rewritten"),
        (seen(*ROW.columns, X, missing={"x": "5"}, storage="others", partitioned=True), "were rewritten"),
        (seen(*ROW.columns, column("x", 5), dropped=4), "added and dropped"),
        (seen(ROW.columns[0], column("v", 4), ROW.columns[2]), ""),
        (seen(*ROW.columns[:2], column("w", 3, INT8)), ""),
        (seen(ROW.columns[0], ROW.columns[2]), ""),
        (seen(*ROW.columns, column("x", 2)), "under another name"),
        (seen(*ROW.columns, X, missing={"x": "no number"}), "default"),
        (seen(replace(ROW.columns[0], key_index=-1), replace(ROW.columns[1], key_index=0), ROW.columns[2], X), ""),
        (None, "dropped"),
    ],
)
def test_in_doubt_there_is_no_next_version(found: TableAttributes | None, words: str) -> None:
    target = targets_of_attributes(found) if found is not None else []
    why = plan_next_version(ROW, target, found)
    assert isinstance(why, str) and words in why


@pytest.mark.parametrize(("wider", "fits"), [(numeric(16, 3), True), (numeric(16, 4), False), (numeric(9, 3), False)])
def test_a_column_that_was_added_and_altered_is_known_when_the_stream_comes_to_its_first_type(
    wider: tuple[int, int], fits: bool
) -> None:
    """The catalogue is ahead of a stream that was behind (oracle, seed 6003)."""
    first = replace(X, type_name="numeric(12,3)", type_oid=NUMERIC, type_mod=numeric(12, 3)[1])
    precision, scale = divmod(wider[1] - 4, 1 << 16)
    now = replace(first, type_name=f"numeric({precision},{scale})", type_mod=wider[1])
    found = seen(*ROW.columns, now, missing={"x": "1.500"})
    step = plan_next_version(ROW, targets_of_attributes(seen(*ROW.columns, first)), found)
    if not fits:
        assert isinstance(step, str) and "another type" in step
        return
    assert isinstance(step, SchemaStep)
    assert (step.columns[-1].type_mod, step.columns[-1].default) == (first.type_mod, "1.500")
    row = replace(ROW, columns=step.columns, evolved=(9,), attributes=step.attributes, storage=step.storage)
    assert grown(row, found, 12).columns[-1].was[0].type_mod == first.type_mod


def test_what_an_older_tidemill_described_has_no_next_version_before_it_is_completed() -> None:
    old = replace(ROW, columns=tuple(replace(c, attnum=0) for c in ROW.columns))
    assert "older tidemill" in str(
        plan_next_version(old, targets_of_attributes(seen(*ROW.columns, X)), seen(*ROW.columns, X))
    )
    assert find_version(old, message(tuple(reversed(ROW.columns))), 5) == 1
    assert find_version(old, message(ROW.columns[:2]), 5) == 0


def test_each_transaction_has_the_description_of_its_time_also_when_it_is_told_again() -> None:
    wide = column("v", 2, INT8)
    second = grown(ROW, seen(*ROW.columns, X), 100)
    third = grown(second, seen(ROW.columns[0], wide, ROW.columns[2], X, storage="others"), 200)
    reported = [message(tuple(columns_at_version(third.columns, version))) for version in (1, 2, 3)]
    for lsn, there in ((50, {1}), (100, {1, 2}), (150, {2}), (200, {2, 3}), (250, {3})):
        found = {find_version(third, one, lsn) for one in reported} - {0}
        assert found == there, lsn
    both = replace(third, evolved=(100, 100))
    assert [find_version(both, one, 100) for one in reported] == [1, 2, 3], "two changes and rows in one transaction"
