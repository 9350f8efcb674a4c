"""A planned read returns the contents: settled parts without the rows of their deletion vectors, and the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards.histories import histories
from support.shards.world import SCHEMA, Row, contents_of, summed, updates
from tidemill.base.errors import CorruptError
from tidemill.shards.api import DIFF, HASH, TIME, Part
from tidemill.shards.parts import parts as part_encoder
from tidemill.shards.parts.consolidate import merge_updates
from tidemill.shards.parts.parts import encode_part
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.read.deletion_vectors import deletion_vectors
from tidemill.shards.read.planned_rows import read_planned
from tidemill.shards.read.read_plan import ReadPlan, last_states


class Files:
    """Encoded parts by object key. `read` lists the columns of every row group that was read."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytes] = {}

    def write(self, rows: pa.Table) -> Part:
        encoded, key = encode_part(SCHEMA, rows), f"part-{len(self._bytes)}"
        self._bytes[key] = encoded.data.to_pybytes()
        return encoded.to_part(object_key=key)

    def damage(self, part: Part) -> None:
        data = bytearray(self._bytes[part.object_key])
        data[40] ^= 1
        self._bytes[part.object_key] = bytes(data)

    def fetch(self, part: Part) -> bytes:
        return self._bytes[part.object_key]


def plan_of(files: Files, settled: Sequence[pa.Table], difference: Sequence[pa.Table]) -> ReadPlan:
    rest = pa.concat_tables([updates([]), *difference])
    hashed = rest.append_column(HASH, pa.array(hash_rows(rest, SCHEMA.key)))
    found = last_states(SCHEMA, hashed)
    assert found is not None
    return found._replace(settled=[files.write(rows) for rows in settled])


def contents(plan: ReadPlan, files: Files, columns: Sequence[str] = ("k", "v")) -> list[pa.Table]:
    return list(read_planned(plan, deletion_vectors(plan, SCHEMA, files.fetch), files.fetch, columns))


@pytest.fixture(scope="module", autouse=True)
def small_row_groups() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_encoder, "ROW_GROUP_ROWS", 3)
        yield


@settings(max_examples=100, deadline=None)
@given(histories(True), st.integers(0, 3), st.integers(1, 4), st.integers(0, 30))
def test_the_rows_of_a_plan_are_the_contents_at_every_time(
    history: list[list[list[Row]]], start: int, end: int, since: int
) -> None:
    flat = [row for pieces in history for piece in pieces for row in piece]
    run = [row for pieces in history[start:end] for piece in pieces for row in piece]
    moved_to = min(since, max((row[2] for row in run), default=0))
    parts = [merge_updates(SCHEMA, updates(run), moved_to).drop_columns([HASH])]
    parts += [updates(piece) for pieces in [*history[:start], *history[max(start, end) :]] for piece in pieces]
    for as_of in range(moved_to, max((row[2] for row in flat), default=0) + 1):
        within = [part.filter(pc.less_equal(part.column(TIME), as_of)) for part in parts]
        settled = [part for part in within if set(part.column(DIFF).to_pylist()) == {1}]
        files = Files()
        plan = plan_of(files, settled, [part for part in within if part not in settled])
        found = contents(plan, files)
        assert sum((contents_of(rows) for rows in found), Counter()) == summed(flat, as_of), as_of
        # Without the key among the columns, the same rows are left out.
        values = [value for rows in contents(plan, files, ["v"]) for value in rows.column("v").to_pylist()]
        assert Counter(values) == Counter(value for rows in found for value in rows.column("v").to_pylist())


@pytest.mark.parametrize("apart", [False, True], ids=["one part", "two parts"])
def test_another_key_of_the_same_hash_stays(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_of_remainder(rows: pa.Table, columns: Sequence[str]) -> Any:
        return np.array([k % 8 for k in rows.column("k").to_pylist()], dtype=np.uint64)

    monkeypatch.setattr(part_encoder, "hash_rows", hash_of_remainder)
    files, rows = Files(), [(k, "a", 1, 1) for k in range(12)]
    settled = [updates(rows[:8]), updates(rows[8:])] if apart else [updates(rows)]
    rest = updates([(10, "a", 5, -1), (1, "a", 5, -1), (1, "b", 5, 1)])
    plan = last_states(SCHEMA, rest.append_column(HASH, pa.array(hash_of_remainder(rest, ()))))
    assert plan is not None
    found = contents(plan._replace(settled=[files.write(each) for each in settled]), files)
    want = {(k, "a") for k in range(12)} - {(10, "a"), (1, "a")} | {(1, "b")}
    assert sum((contents_of(each) for each in found), Counter()) == Counter(want)


def test_hashes_are_read_only_where_a_superseded_one_may_be_and_keys_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    files, read = Files(), []
    rows = updates([(k, "a", 1, 1) for k in range(12)])
    order = np.argsort(hash_rows(rows, SCHEMA.key))
    last = int(order[-1])
    plan = plan_of(files, [rows], [updates([(last, "a", 5, -1)])])
    real = pq.ParquetFile.read_row_group

    def recorded(file: pq.ParquetFile, group: int, columns: list[str], **options: Any) -> pa.Table:
        read.append((group, columns))
        return real(file, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", recorded)
    found = contents(plan, files, ["v"])
    assert sum(table.num_rows for table in found) == 11
    assert read == [(3, [HASH]), (0, ["v"]), (1, ["v"]), (2, ["v"]), (3, ["v"])]


def test_a_damaged_part_is_corrupt() -> None:
    files = Files()
    plan = plan_of(files, [updates([(k, "a", 1, 1) for k in range(10)])], [])
    files.damage(plan.settled[0])
    with pytest.raises(CorruptError, match="part-0"):
        contents(plan, files)
