"""The mirror: tiered runs, deltas, the cache on disk."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from support.spark.upsert_world import SCHEMA, ModelShard, Writer, oracle
from tidemill.base.errors import CorruptError
from tidemill.shards.api import Column
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema_evolution import SchemaChanges, evolve_schema
from tidemill.spark.merge import mirror as mirror_file
from tidemill.spark.merge.mirror import RUNS_MAX, Mirror


def rows(found: pa.Table) -> dict[int, int]:
    return {r["k"]: r["v"] for r in found.to_pylist()}


def delta(*found: tuple[int, int, int, int]) -> pa.Table:
    names = ("k", "v", "_time", "_diff")
    return pa.table({n: pa.array([r[i] for r in found], pa.int64()) for i, n in enumerate(names)})


def test_many_small_batches_keep_few_runs_and_exact_lookups() -> None:
    draw = random.Random(7)
    writer = Writer(ModelShard())
    sets = []
    for time in range(150):
        batch = [(draw.randrange(400), draw.choice([None, draw.randrange(9)]), time, time * 100 + n) for n in range(20)]
        sets += batch
        writer.step(batch, time + 1)
        assert len(writer.operator.mirror.runs) <= RUNS_MAX
    mirror = writer.operator.mirror
    expected = oracle(sets, 150)
    assert rows(mirror.live_rows()) == expected
    keys = pa.table({"k": pa.array(range(500), pa.int64())})
    hashes = hash_rows(keys, ("k",))
    order = np.argsort(hashes)
    found_rows, found = mirror.lookup(keys.take(pa.array(order)), hashes[order])
    values = found_rows.column("v").to_pylist()
    found_values = {int(order[i]): values[at] for i, at in enumerate(found.tolist()) if at >= 0}
    assert found_values == expected


def test_a_long_history_is_rewritten_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten = 0
    merge = mirror_file.merge_runs

    def counting(schema, runs, *, drop_absent, path):  # type: ignore[no-untyped-def]
        nonlocal rewritten
        rewritten += sum(len(run) for run in runs)
        return merge(schema, runs, drop_absent=drop_absent, path=path)

    monkeypatch.setattr(mirror_file, "merge_runs", counting)
    mirror = Mirror.hydrate(SCHEMA, pa.table({"k": range(50_000), "v": [0] * 50_000}), 1)
    for time in range(1, 201):
        keys = [(time * 50 + n) % 60_000 for n in range(50)]
        mirror.apply(delta(*[(k, time, time, 1) for k in keys]), time, time + 1)
    assert len(mirror.runs) <= RUNS_MAX
    assert rewritten < 200 * 50 * 12, "10,000 new rows are not paid for with the 50,000 old ones again and again"


def test_a_delta_takes_the_last_state_of_each_key() -> None:
    mirror = Mirror.hydrate(SCHEMA, pa.table({"k": [1, 2, 3], "v": [10, 20, 30]}), 5)
    mirror.apply(
        delta((1, 10, 5, -1), (1, 11, 5, 1), (1, 11, 7, -1), (1, 12, 7, 1), (2, 20, 6, -1), (4, 40, 8, 1)), 5, 9
    )
    assert rows(mirror.live_rows()) == {1: 12, 3: 30, 4: 40}
    assert mirror.upper == 9


def test_a_delta_whose_rows_cancel_at_one_time_changes_nothing() -> None:
    mirror = Mirror.hydrate(SCHEMA, pa.table({"k": [1, 2], "v": [10, 20]}), 5)
    mirror.apply(delta((1, 10, 5, -1), (1, 10, 5, 1), (3, 7, 5, 1), (3, 7, 5, -1), (2, 20, 5, -1), (2, 21, 5, 1)), 5, 6)
    mirror.apply(delta((2, 21, 6, -1), (2, 22, 6, 1), (2, 22, 6, -1), (2, 23, 6, 1)), 6, 7)
    assert rows(mirror.live_rows()) == {1: 10, 2: 23}


def test_a_delta_that_leaves_two_live_rows_of_a_key_is_corrupt() -> None:
    mirror = Mirror(SCHEMA)
    with pytest.raises(CorruptError, match="two live rows"):
        mirror.apply(delta((1, 10, 0, 1), (1, 11, 0, 1)), 0, 1)
    with pytest.raises(CorruptError, match="two live rows"):
        Mirror.hydrate(SCHEMA, pa.table({"k": [1, 1], "v": [1, 2]}), 1)


def test_a_delta_that_does_not_continue_the_mirror_is_refused() -> None:
    mirror = Mirror(SCHEMA, 5)
    with pytest.raises(CorruptError, match="does not continue"):
        mirror.apply(delta(), 4, 8)
    with pytest.raises(CorruptError, match="does not continue"):
        mirror.apply(delta(), 6, 8)


def test_a_saved_mirror_opens_again_at_its_upper_and_goes_on(tmp_path: Path) -> None:
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(100)]), 0, 1)
    mirror.apply(delta((5, 5, 1, -1), (6, 6, 1, -1), (6, 7, 1, 1)), 1, 2)
    mirror.save("shard-1", "boot-1")
    again = Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1")
    assert again is not None
    assert again.upper == 2
    assert rows(again.live_rows()) == {k: (7 if k == 6 else k) for k in range(100) if k != 5}
    again.apply(delta((6, 7, 2, -1)), 2, 3)
    assert 6 not in rows(again.live_rows())


def test_a_saved_mirror_of_another_shard_boot_or_schema_is_not_trusted(tmp_path: Path) -> None:
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta((1, 1, 0, 1)), 0, 1)
    mirror.save("shard-1", "boot-1")
    assert Mirror.load(tmp_path, SCHEMA, "shard-2", "boot-1") is None
    assert Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-2") is None
    other = type(SCHEMA)(SCHEMA.columns, SCHEMA.key, buckets=2)
    assert Mirror.load(tmp_path, other, "shard-1", "boot-1") is None
    assert Mirror.load(tmp_path / "none", SCHEMA, "shard-1", "boot-1") is None


def test_a_mirror_that_was_saved_under_an_older_version_goes_on_under_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.spark.merge.sorted_runs.PIECE_ROWS", 64)
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(200)]), 0, 1)
    mirror.apply(delta((5, 5, 1, -1), (6, 6, 1, -1), (6, 7, 1, 1)), 1, 2)
    mirror.save("shard-1", "boot-1")
    newer = evolve_schema(SCHEMA, SchemaChanges((Column("n", "float32", "0.1"), Column("s", "string"))))
    newest = evolve_schema(newer, SchemaChanges(widen=(Column("n", "float64"),)))
    again = Mirror.load(tmp_path, newest, "shard-1", "boot-1")
    assert again is not None and again.upper == 2
    live = again.live_rows()
    assert rows(live) == {k: (7 if k == 6 else k) for k in range(200) if k != 5}
    assert set(live.column("n").to_pylist()) == {float(np.float32(0.1))} and set(live.column("s").to_pylist()) == {None}
    again.save("shard-1", "boot-1")
    assert Mirror.load(tmp_path, newest, "shard-1", "boot-1") is not None
    assert Mirror.load(tmp_path, newer, "shard-1", "boot-1") is None, "what is newer is not made older"


@pytest.mark.parametrize("kept", [0, 10, 1000, -1, -24])
def test_a_damaged_run_is_not_trusted(tmp_path: Path, kept: int) -> None:
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(1000)]), 0, 1)
    mirror.save("shard-1", "boot-1")
    (run,) = tmp_path.glob("run-*.arrow")
    run.write_bytes(run.read_bytes()[:kept])
    assert Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1") is None


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("where", [0.1, 0.4, 0.7, 0.95])
def test_f332_a_flipped_bit_of_a_saved_run_is_not_trusted(tmp_path: Path, where: float) -> None:
    """The bit is in the rows, the hashes or the live bytes. The mirror is rebuilt from the table."""
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(1000)]), 0, 1)
    mirror.save("shard-1", "boot-1")
    (run,) = tmp_path.glob("run-*.arrow")
    assert Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1") is not None
    flipped(run, int(run.stat().st_size * where))
    assert Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1") is None


def test_a_merge_of_a_damaged_run_is_corrupt_and_names_the_file(tmp_path: Path) -> None:
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(1000)]), 0, 1)
    mirror.save("shard-1", "boot-1")
    (run,) = tmp_path.glob("run-*.arrow")
    flipped(run, 2000)
    with pytest.raises(CorruptError, match=run.name):
        until_merged(mirror)


def test_f332_a_run_that_rots_after_it_was_opened_is_not_opened_again(tmp_path: Path) -> None:
    """A flipped bit changes no time of the file, by which a run that was verified before is known."""
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(1000)]), 0, 1)
    mirror.save("shard-1", "boot-1")
    (run,) = tmp_path.glob("run-*.arrow")
    opened = Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1")
    assert opened is not None
    with run.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        before = run.stat()
        data[2000] ^= 4
        data.flush()
    os.utime(run, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError, match=run.name):
        until_merged(opened)
    assert Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1") is None, "it is built again from the table"


def until_merged(mirror: Mirror) -> None:
    for time in range(1, 2 * RUNS_MAX):
        mirror.apply(delta(*[(k, time, time, 1) for k in range(1000, 2000)]), time, time + 1)


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("run-*.arrow"))


def test_files_of_merged_runs_go_at_once_but_for_those_that_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run a file, every key written again and again: the directory stays within a multiple of what lives."""
    monkeypatch.setattr(mirror_file, "SPILL_BYTES", 1)
    mirror = Mirror(SCHEMA, directory=tmp_path)
    live = [(k, 0) for k in range(4000)]
    mirror.apply(delta(*[(k, v, 0, 1) for k, v in live]), 0, 1)
    mirror.save("shard-1", "boot-1")
    alone = stored_bytes(tmp_path)
    saves = most = 0
    for time in range(1, 120):
        keys = [(time * 500 + n) % 4000 for n in range(500)]
        changed = [(k, live[k][1], time, -1) for k in keys] + [(k, time, time, 1) for k in keys]
        for k in keys:
            live[k] = (k, time)
        mirror.apply(delta(*changed), time, time + 1)
        most = max(most, stored_bytes(tmp_path))
        before = Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1")
        assert before is not None and before.upper <= time + 1, "what was saved last can be opened all the while"
        if mirror.is_outdated:
            mirror.save("shard-1", "boot-1")
            saves += 1
    assert rows(mirror.live_rows()) == dict(live)
    assert most < 3 * alone and 0 < saves < 60, (most / alone, saves)


def test_a_run_of_the_form_before_is_made_anew(tmp_path: Path) -> None:
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(10)]), 0, 1)
    mirror.save("shard-1", "boot-1")
    (run,) = tmp_path.glob("run-*.arrow")
    old = mirror.live_rows().append_column("_live", pa.array([True] * 10)).append_column("_hash", pa.array(range(10)))
    with pa.OSFile(str(run), "wb") as sink, pa.ipc.new_file(sink, old.schema) as writer:
        writer.write_table(old)
    assert Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1") is None


def test_a_mirror_in_files_needs_no_memory_for_what_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.spark.merge.sorted_runs.PIECE_ROWS", 1_000)
    monkeypatch.setattr(mirror_file, "SPILL_BYTES", 1)
    mirror = Mirror(SCHEMA, directory=tmp_path)
    mirror.apply(delta(*[(k, k, 0, 1) for k in range(100_000)]), 0, 1)
    mirror.save("shard-1", "boot-1")
    del mirror
    before = pa.total_allocated_bytes()
    again = Mirror.load(tmp_path, SCHEMA, "shard-1", "boot-1")
    assert again is not None
    (run,) = again.runs
    assert pa.total_allocated_bytes() - before < 100_000
    assert not run.hashes.flags.owndata and not run.live.flags.owndata
    assert len(again) == 100_000 and again.held_bytes == 0


def test_runs_of_many_pieces_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is in memory or in a file; keys that share a hash stay in one piece."""
    from tidemill.spark.merge import sorted_runs as runs

    monkeypatch.setattr(runs, "PIECE_ROWS", 50)
    for directory, spill in ((None, 1 << 40), (tmp_path, 1)):
        monkeypatch.setattr(mirror_file, "SPILL_BYTES", spill)

        def shared(rows: pa.Table, columns: tuple[str, ...]) -> np.ndarray:  # type: ignore[type-arg]
            return hash_rows(rows, columns) >> np.uint64(56) << np.uint64(56)

        mirror = Mirror(SCHEMA, directory=directory, hasher=shared)
        expected: dict[int, int] = {}
        for time in range(20):
            chosen = [(time * 37 + n * 11) % 900 for n in range(80)]
            changes = [(k, expected[k], time, -1) for k in chosen if k in expected]
            expected |= dict.fromkeys(chosen, time)
            mirror.apply(delta(*changes, *[(k, time, time, 1) for k in chosen]), time, time + 1)
        assert mirror.merges > 1 and any(len(run.rows.to_batches()) > 3 for run in mirror.runs)
        assert (directory is None) == all(run.path is None for run in mirror.runs)
        assert rows(mirror.live_rows()) == expected
        keys = pa.table({"k": pa.array(range(1000), pa.int64())})
        hashes = shared(keys, ("k",))
        order = np.argsort(hashes, kind="stable")
        found_rows, found = mirror.lookup(keys.take(pa.array(order)), hashes[order])
        values = found_rows.column("v").to_pylist()
        assert {int(order[i]): values[at] for i, at in enumerate(found.tolist()) if at >= 0} == expected


def test_a_file_of_a_process_that_had_this_pid_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver is always pid 1 in a container, and counts its files from 1 again: what it reads is what is there."""
    monkeypatch.setattr(mirror_file, "_FILES", itertools.count(1))
    mirror = Mirror(SCHEMA, directory=tmp_path)
    first = mirror._new_file()
    first.write_bytes(b"mapped")
    monkeypatch.setattr(mirror_file, "_FILES", itertools.count(1))
    assert mirror._new_file() != first
