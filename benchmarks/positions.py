"""Cost of a read if a retraction is a row that must be summed, or names the position that it deletes (RFC 0004).

    plain       the contents at that time as Parquet: the limit
    all sums    every update is read and summed, without knowledge of the parts
    difference  the settled part unchanged, minus the keys that later updates touch, plus their last states
    positions   the settled part minus a bitmap of deleted rows, plus the rows that live elsewhere

Each reads the same bytes from memory into Arrow, alternating, and must find the same rows. Also measured: the cost of a
mirror that knows the position of every key, and of one merge of parts, after which every position has changed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harbour import machine
from tidemill.shards.api import DIFF, HASH, Column, ShardSchema
from tidemill.shards.parts.consolidate import sum_contents
from tidemill.shards.parts.parts import encode_part
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import contents_schema, part_schema, update_schema
from tidemill.shards.read.read_plan import last_states

SCHEMA = ShardSchema((Column("id", "string"), Column("amount", "int64"), Column("note", "string")), ("id",))
NAMES = contents_schema(SCHEMA).names
BATCHES = 10


def rows(ids: np.ndarray, time_ms: int, diff: int, version: int) -> pa.Table:
    """Return the row of each id for one version, always the same."""
    keys = pc.binary_join_element_wise("k", pc.cast(pa.array(ids), pa.string()), "")
    amounts = pa.array(ids * 31 + version)
    notes = pc.binary_join_element_wise("n", pc.utf8_lpad(pc.cast(amounts, pa.string()), 80, "x"), "")
    fixed = [pa.array(np.full(len(ids), value, dtype=np.int64)) for value in (time_ms, diff)]
    return pa.Table.from_arrays([keys, amounts, notes, *fixed], schema=update_schema(SCHEMA))


class Shard:
    """One settled part of `count` keys, and BATCHES later parts in which `share` of them changed once."""

    def __init__(self, count: int, share: float) -> None:
        ids = np.arange(count, dtype=np.int64)
        self.base = encode_part(SCHEMA, rows(ids, 1, 1, 0), "zstd").data
        touched = np.random.default_rng(1).choice(ids, int(count * share), replace=False)
        self.later = [
            encode_part(SCHEMA, pa.concat_tables([rows(some, n + 2, -1, 0), rows(some, n + 2, 1, n + 1)])).data
            for n, some in enumerate(np.array_split(touched, BATCHES))
        ]
        live = sum_contents(SCHEMA, pa.concat_tables([self.read(self.base), *map(self.read, self.later)]))
        sink = pa.BufferOutputStream()
        pq.write_table(live, sink, row_group_size=128 << 10, compression="zstd")
        self.plain = sink.getvalue()
        # Hashes that positions would have stored with the parts.
        base_hashes = self.read(self.base, [HASH]).column(HASH).to_numpy()
        gone = hash_rows(rows(touched, 0, 0, 0), SCHEMA.key)
        self.alive = pa.array(~np.isin(base_hashes, gone))

    @staticmethod
    def read(data: pa.Buffer, names: list[str] | None = None) -> pa.Table:
        return pq.read_table(pa.BufferReader(data), columns=names, use_threads=False)


def plain(shard: Shard, names: list[str]) -> pa.Table:
    return shard.read(shard.plain, names)


def all_sums(shard: Shard, names: list[str]) -> pa.Table:
    return sum_contents(SCHEMA, pa.concat_tables([shard.read(shard.base), *map(shard.read, shard.later)])).select(names)


def difference(shard: Shard, names: list[str]) -> pa.Table:
    states = last_states(SCHEMA, pa.concat_tables(map(shard.read, shard.later)))
    assert states is not None
    gone, live = states
    base = shard.read(shard.base, [*names, HASH])
    hashes, touched = base.column(HASH).to_numpy(), gone.column(HASH).to_numpy()
    hit = np.minimum(np.searchsorted(hashes, touched), len(hashes) - 1)
    # The keys of both sides are compared where the hashes meet, as the exact reading would.
    hit = hit[hashes[hit] == touched]
    keys = base if SCHEMA.key[0] in names else shard.read(shard.base, list(SCHEMA.key))
    stale = np.ones(len(hashes), dtype=bool)
    stale[hit[pc.is_in(keys.column(SCHEMA.key[0]).take(pa.array(hit)), gone.column(SCHEMA.key[0])).to_numpy()]] = False
    return pa.concat_tables([base.filter(pa.array(stale)).select(names), live.select(names)])


def positions(shard: Shard, names: list[str]) -> pa.Table:
    newest = [shard.read(data, [*names, DIFF]) for data in shard.later]
    kept = [table.filter(pc.equal(table.column(DIFF), 1)).select(names) for table in newest]
    return pa.concat_tables([shard.read(shard.base, names).filter(shard.alive), *kept])


def cpu_s(call: Callable[..., object], *arguments: object) -> float:
    began = time.process_time()
    call(*arguments)
    return time.process_time() - began


def measure(count: int, share: float, rounds: int) -> None:
    shard = Shard(count, share)
    print(f"\n{count:,} keys, {share:.0%} of them changed since the last merge, in {BATCHES} parts")
    print(f"{'columns':>8} {'plain':>8} {'all sums':>16} {'difference':>16} {'positions':>16}   CPU s, × plain")
    for label, names in (("all", NAMES), ("one", ["amount"])):
        ways = (plain, all_sums, difference, positions)
        want = found_in(plain(shard, names))
        assert all(found_in(way(shard, names)) == want for way in ways), "the ways disagree"
        rounds_s = [[cpu_s(way, shard, names) for way in ways] for _ in range(rounds)]
        took = [min(times) for times in zip(*rounds_s, strict=True)]
        reported = [f"{one:8.3f} {one / took[0]:6.1f}×" for one in took[1:]]
        print(f"{label:>8} {took[0]:8.3f} {' '.join(reported)}")
    moved(shard, count)


def found_in(rows: pa.Table) -> pa.Table | tuple[int, int]:
    """Return what must be equal for every way: all rows, or for a single column their number and sum."""
    if "id" in rows.column_names:
        return rows.sort_by("id").combine_chunks()
    return rows.num_rows, int(pc.sum(rows.column("amount")).as_py())


def moved(shard: Shard, count: int) -> None:
    """A merge was accepted: every place in the replaced parts is another one now, in every writer's mirror."""
    hashes = shard.read(shard.base, [HASH]).column(HASH).to_numpy()
    places = np.zeros(count, dtype=[("part", np.uint32), ("row", np.uint64)])

    def follow() -> None:
        merged = shard.read(shard.base, [HASH]).column(HASH).to_numpy()
        places["row"] = np.searchsorted(merged, hashes)

    print(
        f"   a mirror's places: {places.nbytes / count:.0f} bytes a key; following one merge: {cpu_s(follow):.3f} CPU s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    assert part_schema(SCHEMA).names[-1] == HASH
    for share in (0.01, 0.1, 0.5):
        measure(options.rows, share, options.rounds)


if __name__ == "__main__":
    main()
