"""Boundaries, xid visibility, JSON values, COPY rows and lanes: pure functions."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.capture.fragments import at
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import CorruptError, MissingError
from tidemill.capture.catalog.table_choice import choose_tables
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.changes import Column, Relation
from tidemill.capture.decode.copy_text import parse_copy_row
from tidemill.capture.encode.row_encoder import RowEncoder
from tidemill.capture.postgres.connection import literal
from tidemill.capture.topics.binder import MAX_UNMERGED_BOUNDARIES, Binder, CommitBoundary, merge_boundaries
from tidemill.capture.topics.captured_table import is_in_snapshot
from tidemill.capture.topics.partition_writer import SEQUENCE_MODULUS, PartitionWriter, SendRound
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import TableSnapshot
from tidemill.shards.api import Binding
from tidemill.shards.bindings.remap import LogRemap
from tidemill.topics.batch import Record, parse_header


def test_no_binding_is_minted_while_a_table_copied_beside_the_stream_is_behind_the_newest() -> None:
    """Otherwise a crash at that moment would leave its topic bound beyond changes that never reached it."""

    async def scenario() -> None:
        clock = ManualClock()
        remap = LogRemap(MemoryConsensus(clock), "capture/x", clock, Rand(1))
        await remap.mint(Binding(1, {"old": (5,)}, lsn=100))
        binder = Binder(remap, clock, lambda _: None, interval_ms=0, idle_ms=5)
        await binder.open()
        binder.start_at({"old": [5], "late": [3]}, gate=60, late_lsn=60)
        running = asyncio.ensure_future(binder.run())
        binder.add_durable([CommitBoundary(80, at(80), True, 1, [("late", 0, 4)])])
        await asyncio.sleep(0.05)
        latest = await remap.latest()
        assert latest is not None and latest.lsn == 100 and "late" not in latest.offsets
        binder.add_durable([CommitBoundary(100, at(100), True, 1, [("late", 0, 5)])])
        while latest is None or "late" not in latest.offsets:
            await asyncio.sleep(0.01)
            latest = await remap.latest()
        assert (latest.lsn, latest.offsets) == (100, {"old": (5,), "late": (5,)})
        running.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def snapshot(xmin: int, xmax: int, xip: tuple[int, ...] = (), lsn: int = 1000) -> TableSnapshot:
    return TableSnapshot(xmin, xmax, xip, lsn, 0, (0,))


def test_a_commit_at_or_after_the_snapshots_lsn_is_never_skipped() -> None:
    s = snapshot(10, 20, lsn=1000)
    assert is_in_snapshot(5, 999, s)
    assert not is_in_snapshot(5, 1000, s)  # the xid counter may have wrapped
    assert not is_in_snapshot(5, 1, None)


def test_merged_boundaries_say_what_the_later_one_said_and_keep_all_offsets() -> None:
    a = CommitBoundary(5, at(5, 2), True, 50, [("t", 0, 3), ("u", 0, 1)])
    b = CommitBoundary(7, at(7, 0), True, 70, [("t", 0, 4)], ("tag",))
    both = merge_boundaries(a, b)
    assert (both.lsn, both.last, both.commit, both.commit_time_ms, both.tags) == (7, at(7, 0), True, 70, ("tag",))
    assert set(both.offsets) == {("t", 0, 4), ("u", 0, 1)}
    idle = merge_boundaries(a, CommitBoundary(9, at(9), False))
    assert (idle.lsn, idle.last, idle.commit) == (9, at(5, 2), True)


async def test_the_binder_stays_exact_at_markers_when_boundaries_pile_up() -> None:
    clock = ManualClock()
    remap = LogRemap(MemoryConsensus(clock), "capture/x", clock, Rand(1))
    bound: list[Any] = []
    binder = Binder(remap, clock, bound.append, interval_ms=0, idle_ms=10_000)
    await binder.open()
    binder.start_at({"t": [0]}, gate=0)
    total = 3 * MAX_UNMERGED_BOUNDARIES
    tags = {n: (f"m{n}",) for n in range(0, total, 100)}
    for n in range(total):
        binder.add_durable([CommitBoundary(n + 1, at(n + 1), True, n, [("t", 0, n + 1)], tags.get(n, ()))])
    task = asyncio.ensure_future(binder.run())
    while not bound or bound[-1] != at(total):
        await asyncio.sleep(0)
        assert not task.done()
    task.cancel()
    bindings = await remap.after(0)
    assert {b.tag: b.offsets["t"] for b in bindings if b.tag} == {f"m{n}": (n + 1,) for n in tags}
    assert (bindings[-1].offsets["t"], bindings[-1].lsn) == ((total,), total)
    assert len(binder._ready) == 0


async def test_nothing_is_bound_below_the_gate_and_early_tags_are_carried() -> None:
    clock = ManualClock()
    remap = LogRemap(MemoryConsensus(clock), "capture/x", clock, Rand(1))
    bound: list[Any] = []
    binder = Binder(remap, clock, bound.append, interval_ms=0, idle_ms=5)
    await binder.open()
    binder.start_at({"t": [10]}, gate=100)
    task = asyncio.ensure_future(binder.run())
    binder.add_durable([CommitBoundary(50, at(50), True, 0, [("t", 0, 11)], ("early",))])
    await asyncio.sleep(0.03)
    assert await remap.latest() is None and bound == []
    binder.add_durable([CommitBoundary(100, at(100), True, 0, [("t", 0, 12)])])
    while not bound:
        await asyncio.sleep(0)
    found = await remap.after(0)
    assert [(b.tag, b.lsn, b.offsets) for b in found][:1] == [("early", 100, {"t": (12,)})]
    task.cancel()


COLUMNS = (
    Column('we"ird', 25, -1, "text", 1),
    Column("n", 20, -1, "bigint", 0),
    Column("f", 701, -1, "double precision", -1),
    Column("b", 16, -1, "boolean", -1),
    Column("x", 1700, -1, "numeric", -1),
)


@given(
    st.text(st.characters(blacklist_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans()
)
def test_values_are_valid_json_that_means_the_same(text: str, number: int, real: float, flag: bool) -> None:
    encoder = RowEncoder(Relation(1, "public", "t", COLUMNS))
    names = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
    printed = names.get(repr(real), repr(real))
    row = {'we"ird': text, "n": str(number), "f": printed, "b": "t" if flag else "f", "x": None}
    found = json.loads(encoder.value(row))
    assert list(found) == ['we"ird', "n", "f", "b", "x"]
    assert found['we"ird'] == text and found["n"] == number and found["b"] is flag and found["x"] is None
    assert found["f"] == (printed if printed in names.values() else real)
    assert list(json.loads(encoder.key(row))) == ["n", 'we"ird']


def test_copy_rows_are_unescaped() -> None:
    assert parse_copy_row(b"1\t\\N\ta\\tb\\\\n\\n\t\n") == ["1", None, "a\tb\\n\n", ""]
    assert parse_copy_row("é\tplain\n".encode()) == ["é", "plain"]
    assert parse_copy_row(b"\\\\N\n") == ["\\N"]


def test_literals_are_quoted() -> None:
    assert literal("it's") == "'it''s'"
    assert literal("a\\b").strip() == "E'a\\\\b'"


def writer() -> PartitionWriter:
    return PartitionWriter("t", "id", 0, 1 << 62)


def test_a_lane_counts_what_is_there_and_writes_what_is_not() -> None:
    x = writer()
    x.start_at(base=5, high_watermark=7, tail=at(10, 2))
    assert not x.assign_offset(at(10, 0))
    assert not x.assign_offset(at(10, 2))
    assert x.assign_offset(at(10, 4))
    x.add(Record(b"k", b"v", (), 1))
    (batch,) = x.close_batches(SendRound(at(10, 4)))
    assert (batch.start, batch.end) == (7, 8)
    assert parse_header(batch.data).base_sequence == 7


def test_a_lane_whose_tail_is_another_ones_is_corrupt() -> None:
    x = writer()
    x.start_at(base=5, high_watermark=6, tail=at(10, 2))
    with pytest.raises(CorruptError, match="tail"):
        x.assign_offset(at(10, 0))
    with pytest.raises(CorruptError, match="shorter"):
        writer().start_at(base=5, high_watermark=4, tail=None)


def test_sequences_follow_offsets_over_the_wrap() -> None:
    x = writer()
    x.start_at(SEQUENCE_MODULUS + 3, SEQUENCE_MODULUS + 3, None)
    x.assign_offset(at(1))
    x.add(Record(b"k", b"v", (), 1))
    (batch,) = x.close_batches(SendRound(at(1)))
    assert parse_header(batch.data).base_sequence == 3


def test_large_waiting_work_is_cut_into_several_batches() -> None:
    x = writer()
    for n in range(40):
        x.assign_offset(at(1, n))
        x.add(Record(b"k", b"v" * 50_000, (), 1))
    round_ = SendRound(at(1, 39))
    batches = x.close_batches(round_)
    assert len(batches) > 2 and round_.left == len(batches)
    assert [(b.start, b.end) for b in batches][-1][1] == 40
    assert all(a.end == b.start for a, b in pairwise(batches))
    assert x.expected_high_watermark == 0
    assert len(x.remove_landed(batches[0].end)) == 1
    assert x.expected_high_watermark == batches[1].start


def table(name: str, *, key: bool = True, persistence: str = "p") -> TableInfo:
    schema, _, plain = name.partition(".")
    return TableInfo(hash(name) & 0xFFFF, schema, plain, "r", persistence, "d", key)


def chosen(patterns: tuple[str, ...], tables: list[TableInfo], version: int = 180_000) -> list[str]:
    return [t.name for t in choose_tables(patterns, tables, version).tables]


def test_patterns_choose_tables_in_name_order() -> None:
    tables = [table("public.b"), table("public.a"), table("other.c"), table("public.log", persistence="u")]
    assert chosen(("public.*",), tables) == ["public.a", "public.b"]
    assert chosen(("b", "other.*"), tables) == ["other.c", "public.b"]
    assert chosen(("*.*", "!public.a"), tables) == ["other.c", "public.b"]
    for patterns in (("nope",), ("b", "!b"), ("nope", "x.*")):
        with pytest.raises(MissingError, match="table="):
            choose_tables(patterns, tables, 180_000)


def test_what_cannot_be_taken_is_refused_by_name_and_left_by_pattern() -> None:
    log, keyless = table("public.log", persistence="u"), table("public.x", key=False)
    virtual = TableInfo(9, "public", "v", "r", "p", "d", True, generated="v")
    choice = choose_tables(("public.*", "log", "nope"), [log, keyless, virtual], 180_000)
    assert choice.tables == ()
    assert {name: why.state for name, why in choice.refused.items()} == {
        "public.log": "refused", "public.nope": "refused", "public.v": "left", "public.x": "left",
    }  # fmt: skip
    skipped = choose_tables(("public.*",), [log, keyless, virtual], 180_000).refused
    assert [why.state for why in skipped.values()] == ["left"] * 3 and "primary key" in skipped["public.x"].fix
    assert {why.state for why in choose_tables(("x", "public.v"), [keyless, virtual], 180_000).refused.values()} == {
        "refused"
    }
    assert chosen(("public.*",), [virtual], 170_000) == ["public.v"]


def test_a_generated_key_column_is_refused_where_the_stream_lacks_it() -> None:
    docs = TableInfo(9, "public", "docs", "r", "p", "d", True, generated="s", generated_key="tag")
    for version in (140_000, 170_009):
        refused = choose_tables(("docs",), [docs], version).refused["public.docs"]
        assert refused.state == "refused" and "column=tag" in refused.reason and "DROP EXPRESSION" in refused.fix
    assert chosen(("docs",), [docs], 180_000) == ["public.docs"]
