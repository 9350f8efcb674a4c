"""Truncations as deletions: the same result as one deletion per truncation and key, from far fewer rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.row_hash import bucket_of, hash_rows
from tidemill.shards.parts.schema import contents_schema
from tidemill.spark.ingest.steps.oversized_step import _RangeView
from tidemill.spark.merge import mirror as mirror_file
from tidemill.spark.merge.commands import BEFORE_ALL, Commands, Truncate, command_schema, partial_command_schema
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.range_mirror import HashRange
from tidemill.spark.merge.resolve import KeyChanges, Resolved, resolve, resolve_in_sequence
from tidemill.spark.merge.sequence import DELETED_MS, Sequence, SequenceRule, tombstone_schema
from tidemill.spark.merge.sorted_runs import merge_runs
from tidemill.spark.merge.truncations import expand_truncations
from tidemill.spark.predicates.expectations import Expectation, ExpectationCheck, Expectations

SCHEMA = ShardSchema((Column("k", "int64"), Column("f", "float64"), Column("a", "int64"), Column("s", "int64")),
                     ("k", "f"))  # fmt: skip
KEYS = [(0, 0.0), (0, -0.0), (1, 1.5), (2, float("nan")), (3, 0.0), (4, 2.0)]
CHECK = ExpectationCheck(SCHEMA, Expectations((Expectation("sum", "a + s < 6"),)))
RULE = SequenceRule(("s",), 3)
UPPER = 9


def few_hashes(rows: pa.Table, key: tuple[str, ...]) -> Any:
    return hash_rows(rows, key) % np.uint64(2)


def exact(row: dict[str, Any]) -> str:
    """Return a key that is equal for equal bits only."""
    return f"{row['k']} {row['f']!r}"


def spelled_out(commands: Commands, mirror: Mirror) -> Commands:
    """Return the commands with a deletion for every truncation and every key that it applies to."""
    rows = commands.rows.to_pylist()
    keys = {exact(row): row for row in mirror.live_rows().to_pylist()} | {exact(row): row for row in rows}
    last: dict[str, tuple[int, int, int]] = {}
    for row in rows:
        last[exact(row)] = max(last.get(exact(row), (-1,) * 3), (row["_time"], row["_order"], row["_partition"]))
    deletions = [
        {"k": row["k"], "f": row["f"], "_time": t.time_ms, "_order": t.order, "_partition": t.partition, "_live": False}
        for t in commands.truncates
        for key, row in keys.items()
        if key not in last or last[key][2] == t.partition
    ]
    return Commands(pa.concat_tables([commands.rows, pa.Table.from_pylist(deletions, schema=commands.rows.schema)]))


@st.composite
def mirrors(draw: st.DrawFn, hasher: Callable[..., Any]) -> Mirror:
    """Return a mirror of up to three runs, in which keys are live, changed and absent."""
    mirror = Mirror(SCHEMA, hasher=hasher)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.lists(st.integers(0, len(KEYS) - 1), unique=True, max_size=len(KEYS)))
        rows = pa.table(
            {
                "k": pa.array([KEYS[n][0] for n in at], pa.int64()),
                "f": pa.array([KEYS[n][1] for n in at], pa.float64()),
                "a": pa.array([draw(st.integers(0, 4)) for _ in at], pa.int64()),
                "s": pa.array([draw(st.sampled_from([None, 0, 2, 4])) for _ in at], pa.int64()),
            }
        )
        hashes = hasher(rows, SCHEMA.key)
        order = np.argsort(hashes, kind="stable")
        live = np.array([draw(st.integers(0, 3)) > 0 for _ in at], dtype=bool)
        mirror.advance(KeyChanges(rows.take(order), hashes[order], live), 0, 0)
    return mirror


@st.composite
def steps(draw: st.DrawFn, partial: bool) -> Commands:
    """Return commands of [0, UPPER) in three partitions, and truncations at and between their places."""
    one_partition = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(0, 16))):
        number = draw(st.integers(0, len(KEYS) - 1))
        live = draw(st.integers(0, 3)) > 0
        left = draw(st.lists(st.sampled_from(["a", "s"]), unique=True)) if partial and live else []
        values = {name: draw(st.integers(0, 4)) for name in ("a", "s") if name not in left}
        rows.append(
            {"k": KEYS[number][0], "f": KEYS[number][1], **(values if live else {"s": values["s"]}),
             "_time": draw(st.integers(0, UPPER - 1)), "_order": draw(st.integers(0, 12)), "_live": live,
             "_partition": number % 3 if one_partition else draw(st.integers(0, 2)),
             "_tm.unchanged": json.dumps(left).encode() if left else None, "_tm.key": b"{}"}
        )  # fmt: skip
    rows = list({(r["_time"], r["_order"], r["_partition"], r["k"], r["f"]): r for r in rows}.values())
    orders = st.sampled_from([BEFORE_ALL, *range(13)])
    truncates = draw(st.lists(st.builds(Truncate, st.integers(0, UPPER - 1), st.integers(0, 2), orders), max_size=8))
    schema = partial_command_schema(SCHEMA) if partial else command_schema(SCHEMA)
    return Commands(pa.Table.from_pylist(rows, schema=schema), tuple(truncates))


def changed(changes: KeyChanges) -> list[tuple[int, str, bool]]:
    rows = map(repr, changes.rows.to_pylist())
    return sorted(zip(changes.hashes.tolist(), rows, changes.live.tolist(), strict=True))


def same(found: Resolved, want: Resolved) -> None:
    for name in ("updates", "tombstones"):
        ours, theirs = getattr(found, name), getattr(want, name)
        # Keys that differ in the sign of a zero have one hash, and no order.
        assert sorted(map(repr, ours.to_pylist() if ours else ())) == sorted(
            map(repr, theirs.to_pylist() if theirs else ())
        ), name
    assert found.changes.hashes.tolist() == want.changes.hashes.tolist()
    assert changed(found.changes) == changed(want.changes)
    assert (found.lost, found.rejected) == (want.lost, want.rejected)
    assert (found.late, found.revived) == (want.late, want.revived)


@pytest.mark.parametrize("hasher", [hash_rows, few_hashes])
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_step_is_what_a_deletion_for_every_truncation_and_key_makes_it(
    hasher: Callable[..., Any], data: st.DataObject
) -> None:
    mirror, commands = data.draw(mirrors(hasher)), data.draw(steps(partial=data.draw(st.booleans())))
    wanted = spelled_out(commands, mirror)
    for check in (None, CHECK):
        found, want = (resolve(SCHEMA, each, mirror, 0, UPPER, hasher, check) for each in (commands, wanted))
        same(found, want)
    expanded = expand_truncations(SCHEMA, commands, mirror, hasher)
    assert expanded.num_rows <= 2 * commands.rows.num_rows + mirror.live_rows().num_rows
    assert expanded.num_rows <= wanted.rows.num_rows


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_step_of_a_table_with_a_sequence_is_what_a_deletion_for_every_truncation_and_key_makes_it(
    data: st.DataObject,
) -> None:
    mirror, commands = data.draw(mirrors(hash_rows)), data.draw(steps(partial=False))
    held = {exact(row) for row in mirror.live_rows().to_pylist()}
    gone = [k for k in KEYS if exact({"k": k[0], "f": k[1]}) not in held and data.draw(st.booleans())]
    tombstones = [
        {"k": k, "f": f, "s": data.draw(st.integers(0, 4)), DELETED_MS: data.draw(st.integers(-4, -1))} for k, f in gone
    ]
    buried = Mirror(tombstone_schema(SCHEMA, RULE))
    buried.insert(pa.Table.from_pylist(tombstones, schema=contents_schema(buried.schema)))
    sequence = Sequence(RULE, buried)
    both = commands, spelled_out(commands, mirror)
    found, want = (resolve_in_sequence(SCHEMA, each, mirror, 0, UPPER, sequence) for each in both)
    same(found, want)


def whole_rows(keys: range, places: range, partition: Callable[[int], int] = lambda _: 0) -> pa.Table:
    """Return an insertion of each key at its place, which is its time and its order."""
    rows = [
        {"k": k, "f": 0.0, "a": k, "s": 0, "_time": at, "_order": at, "_partition": partition(k), "_live": True}
        for k, at in zip(keys, places, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=command_schema(SCHEMA))


def mirror_of(count: int) -> Mirror:
    mirror = Mirror(SCHEMA)
    mirror.insert(whole_rows(range(count), range(count)))
    return mirror


def test_each_row_is_deleted_once_however_often_its_table_is_truncated() -> None:
    """A table is refreshed 300 times by TRUNCATE and ten insertions: a row is deleted by the next truncation only."""
    mirror = Mirror(SCHEMA)
    parts = [whole_rows(range(10 * n, 10 * n + 10), range(11 * n + 1, 11 * n + 11)) for n in range(300)]
    commands = Commands(pa.concat_tables(parts), tuple(Truncate(11 * n, 0, 11 * n) for n in range(300)))
    expanded = expand_truncations(SCHEMA, commands, mirror, hash_rows)
    assert expanded.num_rows == 3000 + 2990
    resolved = resolve(SCHEMA, commands, mirror, 0, 3300)
    assert resolved.updates.num_rows == 3000 + 2990
    assert sorted(resolved.changes.rows.column("k").to_pylist()) == list(range(2990, 3000))


@pytest.mark.parametrize("restored", [0, 400])
def test_each_live_row_is_deleted_once_though_a_topic_begins_in_every_partition(restored: int) -> None:
    mirror = mirror_of(1000)
    rows = whole_rows(range(restored), range(5, 5 + restored), lambda k: k % 16)
    gone = tuple(Truncate(time, p, BEFORE_ALL) for time in (3, 4) for p in range(16))
    expanded = expand_truncations(SCHEMA, Commands(rows, gone), mirror, hash_rows)
    assert expanded.num_rows == restored + 1000
    assert set(expanded.slice(restored).column("_time").to_pylist()) == {3}


def test_a_first_copy_is_not_grouped_by_key_and_earlier_rows_of_the_step_are_deleted() -> None:
    def failing(rows: pa.Table, key: tuple[str, ...]) -> Any:
        raise AssertionError("the keys are not needed")

    rows, mirror = whole_rows(range(10), range(3, 13)), Mirror(SCHEMA)
    begins = Truncate(3, 0, BEFORE_ALL)
    assert expand_truncations(SCHEMA, Commands(rows, (begins,)), mirror, failing) is rows
    again = Truncate(5, 0, BEFORE_ALL)
    expanded = expand_truncations(SCHEMA, Commands(rows, (begins, again)), mirror, hash_rows)
    assert sorted(expanded.slice(10).column("k").to_pylist()) == [0, 1]


def test_only_the_columns_of_the_key_are_read_from_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = mirror_of(100)
    mirror.insert(whole_rows(range(100, 200), range(100)))
    read: list[list[str]] = []

    def recording(schema: ShardSchema, runs: Any, **more: Any) -> Any:
        read.extend(run.rows.column_names for run in runs)
        return merge_runs(schema, runs, **more)

    monkeypatch.setattr(mirror_file, "merge_runs", recording)
    commands = Commands(whole_rows(range(0), range(0)), (Truncate(1, 0, 5),))
    expanded = expand_truncations(SCHEMA, commands, mirror, hash_rows)
    assert expanded.num_rows == 200 and read == [["k", "f"]] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_the_ranges_of_a_mirror_are_its_rows_by_bucket_and_read_each_row_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirror_of(500)
    mirror.insert(whole_rows(range(500, 900), range(400)))
    live = mirror.live_rows()
    buckets = bucket_of(hash_rows(live, SCHEMA.key), count)
    read = 0

    def counting(schema: ShardSchema, runs: Any, **more: Any) -> Any:
        nonlocal read
        read += sum(len(run) for run in runs)
        return merge_runs(schema, runs, **more)

    monkeypatch.setattr(mirror_file, "merge_runs", counting)
    for number in range(count):
        found = _RangeView(mirror, HashRange(number, count)).live_rows()
        assert found.equals(live.filter(pa.array(buckets == number)))
    assert read == 900


@given(st.integers(1, 1 << 20), st.data())
def test_the_bounds_of_a_range_are_where_buckets_change(count: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, count - 1))
    lower, upper = HashRange(number, count).bounds
    inside = np.array([lower, upper - 1], dtype=np.uint64)
    assert bucket_of(inside, count).tolist() == [number, number]
    outside = [(hash_, each) for hash_, each in ((lower - 1, number - 1), (upper, number + 1)) if 0 <= each < count]
    assert [int(bucket_of(np.array([h], np.uint64), count)[0]) for h, _ in outside] == [each for _, each in outside]
