"""A mirror made from the parts of a shard is the one that had followed it all along, and is made with little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.upsert_world import SCHEMA
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.shards.api import Batch, Part
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.parts import parts
from tidemill.shards.read import read_handle
from tidemill.shards.registry import open_shard
from tidemill.spark.ingest.fetch_decode import mirror_identity
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.merge import mirror
from tidemill.spark.merge.mirror import Mirror, build_mirror

Update = tuple[int, int, int, int]
"""(key, value, time, diff)"""


def delta(found: list[Update]) -> pa.Table:
    names = ("k", "v", "_time", "_diff")
    return pa.table({n: pa.array([r[i] for r in found], pa.int64()) for i, n in enumerate(names)})


def part_of(found: list[Update]) -> Part:
    encoded = parts.encode_part(SCHEMA, delta(found))
    data = encoded.data.to_pybytes()
    return Part(encoded.rows, len(data), 0, "", data, encoded.min_hash, encoded.max_hash)


def live(found: Mirror) -> dict[int, int]:
    return {r["k"]: r["v"] for r in found.live_rows().to_pylist()}


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[Batch], dict[int, dict[int, int]]]:
    """Batches of parts, overlapping or not, as upserts leave them; and the contents at each time."""
    contents: dict[int, int] = {}
    at: dict[int, dict[int, int]] = {}
    batches, time = [], 0
    for _ in range(draw(st.integers(1, 5))):
        lower, rows = time, []
        for _ in range(draw(st.integers(1, 3))):
            for key in draw(st.sets(st.integers(0, 12))):
                before, after = contents.pop(key, None), draw(st.none() | st.integers(0, 3))
                if before is not None:
                    rows.append((key, before, time, -1))
                if after is not None:
                    rows.append((key, after, time, 1))
                    contents[key] = after
            at[time] = dict(contents)
            time += 1
        homes = [draw(st.integers(0, 2)) for _ in rows]
        pieces = [[row for row, home in zip(rows, homes, strict=True) if home == number] for number in range(3)]
        batches.append(Batch(lower, time, tuple(part_of(piece) for piece in pieces if piece)))
    return batches, at


@settings(max_examples=40, deadline=None)
@given(shards(), st.integers(1, 4), st.booleans(), st.data())
def test_a_mirror_of_parts_has_the_contents_at_any_time(
    tmp_path_factory: pytest.TempPathFactory,
    shard: tuple[list[Batch], dict[int, dict[int, int]]],
    group_rows: int,
    large: bool,
    data: st.DataObject,
) -> None:
    batches, at = shard
    upper = data.draw(st.sampled_from(sorted(at))) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "ROW_GROUP_ROWS", group_rows)
        patch.setattr(mirror, "ADOPT_BYTES", 0 if large else 1 << 30)
        cut = [Batch(b.lower, b.upper, b.parts) for b in batches if b.lower < upper]
        found = build_mirror(SCHEMA, cut, upper, lambda part: part.inline, tmp_path_factory.mktemp("m"))
    assert live(found) == at[upper - 1]
    assert (found.upper, found.count_live()) == (upper, len(at[upper - 1]))
    found.apply(delta([(99, 1, upper, 1)]), upper, upper + 1)
    assert live(found) == at[upper - 1] | {99: 1}


def test_what_is_settled_is_taken_a_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 1_000)
    monkeypatch.setattr(mirror, "ADOPT_BYTES", 0)
    taken = []
    fold = Mirror._fold_delta

    def noted(self: Mirror, updates: pa.Table) -> Any:
        taken.append(updates.num_rows)
        return fold(self, updates)

    monkeypatch.setattr(Mirror, "_fold_delta", noted)
    monkeypatch.setattr(mirror, "group_by_key", lambda *_: pytest.fail("what is sorted is not sorted again"))
    settled = part_of([(key, 1, 3, 1) for key in range(20_000)])
    found = build_mirror(SCHEMA, [Batch(0, 4, (settled,))], 4, lambda part: part.inline, tmp_path)
    assert sum(taken) == 20_000 and max(taken) <= 1_000
    assert [run.path is not None for run in found.runs] == [True]
    assert live(found) == dict.fromkeys(range(20_000), 1)


@pytest.mark.parametrize("adopt_bytes", [0, 1 << 30])
def test_two_live_rows_of_a_key_are_found_whichever_batches_they_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopt_bytes: int
) -> None:
    monkeypatch.setattr(mirror, "ADOPT_BYTES", adopt_bytes)
    apart = [Batch(0, 1, (part_of([(1, 10, 0, 1), (2, 5, 0, 1)]),)), Batch(1, 2, (part_of([(1, 11, 1, 1)]),))]
    together = [Batch(0, 1, (part_of([(1, 10, 0, 1)]), part_of([(1, 11, 0, 1)])))]
    for batches in (apart, together):
        with pytest.raises(CorruptError, match="two live rows"):
            build_mirror(SCHEMA, batches, batches[-1].upper, lambda part: part.inline, tmp_path)


def test_a_large_table_is_read_under_a_hold_that_ends_with_it(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_handle, "HOLD_ABOVE_BYTES", 0)
    monkeypatch.setattr(mirror, "ADOPT_BYTES", 0)
    s = harbour.stores
    shard = harbour.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, "t", SCHEMA))
    rows = [(key, 0, 0, 1) for key in range(30_000)]
    for time, found in enumerate([rows, [(5, 0, 1, -1)], [(6, 0, 2, -1), (6, 7, 2, 1)]]):
        part = harbour.portal.call(shard.write_part(delta(found)))
        harbour.portal.call(shard.compare_and_append(time, time + 1, [part], ""))
    held = []
    fetch = type(shard).fetch

    async def noted(self: Any, part: Part, chosen: Any) -> Any:
        if not held:  # what is read is replaced under the reader, who holds what it chose
            held.append([hold.since for hold in self.state.holds])
            await shard.downgrade_since("retention", 1, 2)
            await compact_once(shard, s.objects, s.rand)
        return await fetch(self, part, chosen)

    monkeypatch.setattr(type(shard), "fetch", noted)
    table = TableWriter(harbour.portal, s, harbour.shard("t"), tmp_path / "mirror")
    table.hydrate()
    assert held == [[2]]
    assert live(table.operator.mirror) == {key: 7 if key == 6 else 0 for key in range(30_000) if key != 5}
    harbour.portal.call(shard.frontiers())
    assert [hold.reader for hold in shard.state.holds if hold.reader != "retention"] == []


def test_a_read_that_is_cut_off_leaves_no_files_however_often_it_is_tried(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "ADOPT_BYTES", 0)
    s = harbour.stores
    shard = harbour.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, "t", SCHEMA))
    for time in range(3):
        rows = [(key, time, time, 1) for key in range(time * 20_000, (time + 1) * 20_000)]
        part = harbour.portal.call(shard.write_part(delta(rows)))
        harbour.portal.call(shard.compare_and_append(time, time + 1, [part], ""))
    fetch, away = type(shard).fetch, [True]

    async def cut_off(self: Any, part: Part, chosen: Any) -> Any:
        if away[0] and part is chosen[-1].parts[0]:
            raise UnavailableError("the bucket is away.")
        return await fetch(self, part, chosen)

    monkeypatch.setattr(type(shard), "fetch", cut_off)
    directory = tmp_path / "mirror"
    directory.mkdir()
    (directory / "run-0-1-1.arrow").write_bytes(b"of a life that ended before it saved anything")
    table = TableWriter(harbour.portal, s, harbour.shard("t"), directory)
    for _ in range(3):
        with pytest.raises(UnavailableError):
            table.hydrate()
        assert len(list(directory.iterdir())) == 2, "what the last try had made, and nothing of those before it"
    away[0] = False
    table.hydrate()
    hydrated = table.operator.mirror
    assert len(live(hydrated)) == 60_000
    assert set(directory.iterdir()) == {run.path for run in hydrated.runs if run.path is not None}
    table.save()
    again = TableWriter(harbour.portal, s, harbour.shard("t"), directory)
    monkeypatch.setattr(type(shard), "fetch", None)
    again.hydrate()
    assert len(live(again.operator.mirror)) == 60_000, "sweeping keeps what is saved"


def test_a_damaged_part_ends_the_hydration_of_its_table_with_the_objects_key_and_no_mirror_is_made(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.spark.sinks import clicks_sink
    from tidemill.shards import handle

    monkeypatch.setattr(handle, "INLINE_PART_BYTES", 0)
    topic = harbour.create_topic("clicks")
    harbour.produce(topic, [(None, {"click_id": f"c{i}", "product_id": i}) for i in range(50)])
    harbour.mint("topic/clicks", 1000, topic)
    sink = clicks_sink(harbour, tmp_path / "1")
    sink.process(sink.latest())
    before = harbour.contents("clicks")
    assert len(before) == 50
    shard = harbour.shard("clicks")
    harbour.portal.call(shard.frontiers())
    (part,) = [part for batch in shard.state.batches for part in batch.parts]

    def flip() -> None:
        data = bytearray(harbour.portal.call(harbour.stores.objects.get(part.object_key)))
        data[len(data) // 3] ^= 1
        harbour.portal.call(harbour.stores.objects.delete(part.object_key))
        harbour.portal.call(harbour.stores.objects.put(part.object_key, bytes(data)))

    flip()
    with pytest.raises(CorruptError, match=f"part is damaged: object={part.object_key}"):
        clicks_sink(harbour, tmp_path / "2")
    assert not list((tmp_path / "2").rglob("run-*.arrow"))
    flip()
    again = clicks_sink(harbour, tmp_path / "2").seats.tables[0].operator.mirror
    assert len(again.live_rows()) == 50


def test_a_saved_mirror_is_not_trusted_under_another_life_of_consensus(harbour: Any, tmp_path: Path) -> None:
    """Consensus failed over and lost what the mirror holds; others have appended up to its upper since."""
    s = harbour.stores
    shard = harbour.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, "t", SCHEMA))
    part = harbour.portal.call(shard.write_part(delta([(1, 10, 0, 1)])))
    harbour.portal.call(shard.compare_and_append(0, 1, [part], ""))
    gone = Mirror.hydrate(SCHEMA, pa.table({"k": [2], "v": [20]}), 1, directory=tmp_path / "mirror")
    gone.save(shard.shard_id, mirror_identity(s.consensus_life))

    def hydrated() -> dict[int, int]:
        table = TableWriter(harbour.portal, s, harbour.shard("t"), tmp_path / "mirror")
        table.hydrate()
        return live(table.operator.mirror)

    assert hydrated() == {2: 20}, "within one life what was saved is the truth"
    s.consensus.life = "another"
    assert hydrated() == {1: 10}
