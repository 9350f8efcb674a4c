"""Reading by ranges of the hash gives the same as the sum over all updates, at every time."""

from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards.histories import histories
from support.shards.world import SCHEMA, Row, contents_of, summed, updates
from tidemill.shards.api import Batch, Column, Part, SchemaEvolvedError, ShardSchema
from tidemill.shards.parts import parts
from tidemill.shards.parts.parts import encode_part
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema_evolution import convert_to_schema
from tidemill.shards.read import hash_ranges
from tidemill.shards.read.hash_ranges import HASH_MAX, HashRange, cut_ranges, read_range, streamed_parts

UNKEYED = ShardSchema(SCHEMA.columns, ())


def part_of(schema: ShardSchema, rows: list[Row]) -> Part:
    encoded = encode_part(schema, updates(rows))
    data = encoded.data.to_pybytes()
    return Part(encoded.rows, len(data), 0, "", data, encoded.min_hash, encoded.max_hash)


def read(schema: ShardSchema, batches: list[Batch], as_of: int, wanted: list[int] | None = None) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for chosen in cut_ranges([b for b in batches if b.lower <= as_of], wanted):
        for table in read_range(schema, chosen, as_of, lambda part: part.inline):
            found += contents_of(table)
    return found


def values(schema: ShardSchema, batches: list[Batch], as_of: int) -> Counter[Any]:
    """Return the contents of one column, read alone."""
    found: Counter[Any] = Counter()
    for chosen in cut_ranges([b for b in batches if b.lower <= as_of]):
        for table in read_range(schema, chosen, as_of, lambda part: io.BytesIO(part.inline), ["v"]):
            assert table.column_names == ["v"]
            found += Counter(table.column("v").to_pylist())
    return found


def values_of(rows: Counter[Any]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row, count in rows.items():
        found[row[1]] += count
    return found


@pytest.mark.parametrize("keyed", [True, False])
@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_ranges_give_what_one_sum_gives_at_every_time(
    keyed: bool, data: st.DataObject, rows_a_range: int, group_rows: int
) -> None:
    schema, history = (SCHEMA if keyed else UNKEYED), data.draw(histories(keyed))
    batches, lower, flat = [], 0, []
    for pieces in history:
        rows = [row for piece in pieces for row in piece]
        upper = max([lower + 1, *(row[2] + 1 for row in rows)])
        batches.append((lower, upper, pieces))
        flat += rows
        lower = upper
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "ROW_GROUP_ROWS", group_rows)
        patch.setattr(hash_ranges, "RANGE_ROWS", rows_a_range)
        stored = [Batch(a, b, tuple(part_of(schema, p) for p in pieces if p)) for a, b, pieces in batches]
        for as_of in range(lower):
            assert read(schema, stored, as_of) == summed(flat, as_of), as_of
            assert values(schema, stored, as_of) == values_of(summed(flat, as_of)), as_of
        for row in sorted({(k, v) for k, v, _, _ in flat}, key=repr)[:3]:
            names = [c.name for c in schema.columns] if not keyed else ["k"]
            hashes = hash_rows(updates([(*row, 0, 1)]), names).tolist()
            want = {r: n for r, n in summed(flat, lower - 1).items() if r == row or (keyed and r[0] == row[0])}
            assert read(schema, stored, lower - 1, hashes) == want


def test_keys_that_share_a_hash_are_told_apart_where_one_column_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "hash_rows", lambda rows, _: np.full(rows.num_rows, 7, dtype=np.uint64))
    rows = [(1, "a", 1, 1), (2, "a", 1, 1), (3, "b", 1, 1), (2, "a", 12, -1), (4, "c", 12, 1)]
    stored = [Batch(0, 10, (part_of(SCHEMA, rows[:3]),)), Batch(10, 20, (part_of(SCHEMA, rows[3:]),))]
    assert values(SCHEMA, stored, 9) == Counter("aab") and values(SCHEMA, stored, 19) == Counter("abc")


def test_of_a_shard_with_a_key_only_the_wanted_columns_and_the_key_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    real = hash_ranges.convert_to_schema
    monkeypatch.setattr(
        hash_ranges, "convert_to_schema", lambda s, rows, t: decoded.extend(rows.column_names) or real(s, rows, t)
    )
    stored = [Batch(0, 10, (part_of(SCHEMA, [(1, "a", 1, 1)]),))]
    (table,) = read_range(SCHEMA, cut_ranges(stored)[0], 9, lambda part: part.inline, ["k"])
    assert table.to_pylist() == [{"k": 1}] and "v" not in decoded


def test_a_batch_shows_only_what_is_within_its_bounds() -> None:
    part = part_of(SCHEMA, [(1, "early", 1, 1), (2, "in", 5, 1), (3, "late", 9, 1)])
    assert read(SCHEMA, [Batch(4, 8, (part,))], 100) == Counter({(2, "in"): 1})


def test_what_was_stored_before_a_column_was_added_reads_under_the_newer_schema() -> None:
    wider = ShardSchema((*SCHEMA.columns, Column("w", "int64", "3", 2)), SCHEMA.key, version=2)
    (chosen,) = cut_ranges([Batch(0, 10, (part_of(SCHEMA, [(1, "a", 1, 1)]),))])
    (table,) = read_range(wider, chosen, 9, lambda part: part.inline)
    assert table.to_pylist() == [{"k": 1, "v": "a", "w": 3}]


def test_ranges_begin_where_large_parts_do_and_cover_every_hash() -> None:
    bounds = [i << 62 for i in range(5)]
    large = [Part(490_000, 1, 0, str(i), b"", a + 5, b - 1) for i, (a, b) in enumerate(pairwise(bounds))]
    recent = Part(10, 1, 0, "recent", b"", 3, HASH_MAX - 3)
    batches = [Batch(0, 10, tuple(large)), Batch(10, 20, (recent,))]
    found = cut_ranges(batches)
    assert len(found) == 4 and found[0].low == 0 and found[-1].high == HASH_MAX
    assert all(a.high + 1 == b.low for a, b in pairwise(found))
    assert all(any(p.object_key == "recent" for b in chosen.batches for p in b.parts) for chosen in found)
    assert {p.object_key for _, p in streamed_parts(batches)} == set("0123")
    assert sum(chosen.low == part.min_hash for chosen in found for part in large) == 3


def test_a_reader_for_one_key_decodes_one_row_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 100)
    part = part_of(SCHEMA, [(k, "v", 1, 1) for k in range(5_000)])
    decoded = []
    monkeypatch.setattr(
        hash_ranges,
        "convert_to_schema",
        lambda schema, rows, target: decoded.append(rows.num_rows) or convert_to_schema(schema, rows, target),
    )
    wanted = hash_rows(updates([(77, "", 0, 1)]), ["k"]).tolist()
    assert read(SCHEMA, [Batch(0, 10, (part,))], 9, wanted) == Counter({(77, "v"): 1})
    assert decoded == [100]
    assert cut_ranges([Batch(0, 10, (part,))], []) == []


def test_what_one_reader_holds_does_not_grow_with_what_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 1_000)
    base = part_of(SCHEMA, [(k, "v", 1, 1) for k in range(20_000)])
    recent = part_of(SCHEMA, [(7, "v", 12, -1), (7, "w", 12, 1)])
    summed_rows = []
    real = hash_ranges.newest_contents

    def noted(schema: ShardSchema, rows: pa.Table) -> pa.Table | None:
        summed_rows.append(rows.num_rows)
        return real(schema, rows)

    monkeypatch.setattr(hash_ranges, "newest_contents", noted)
    chosen = HashRange(0, HASH_MAX, [Batch(0, 10, (base,)), Batch(10, 20, (recent,))])
    tables = list(read_range(SCHEMA, chosen, 19, lambda part: part.inline))
    assert sum(t.num_rows for t in tables) == 20_000 and max(t.num_rows for t in tables) <= 1_000
    assert summed_rows == [3], "one old row and its two updates"
    assert len(set(pa.concat_tables(tables).column("k").to_pylist())) == 20_000


def test_a_range_with_rows_of_a_newer_schema_is_refused_before_any_is_shown() -> None:
    batch = Batch(0, 5, (part_of(SCHEMA, [(1, "a", 1, 1)]),), schema_version=2)
    with pytest.raises(SchemaEvolvedError, match="version=2 known=1"):
        read(SCHEMA, [batch], 4)
