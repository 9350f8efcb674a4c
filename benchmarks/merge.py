"""`./dev bench merge`: the cost of compaction per row, with its sums compared with Arrow's group-by over whole rows.

    decode   the parts, from memory
    merge    `consolidate.merge_updates`, and the cut into parts
    groups   the same through group-by alone, and a sort by hash: the limit without knowing of keys
    encode   the merged parts, zstd

Merge and groups in turns, in one process; CPU-µs per input row, the median of the rounds (least to most). After
each round both must hold the same rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harbour import machine
from tidemill.shards.api import DIFF, HASH, TIME, Column, Part, ShardSchema
from tidemill.shards.compaction.compaction import _split_parts
from tidemill.shards.parts.consolidate import merge_updates
from tidemill.shards.parts.parts import decode_part, encode_part
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import contents_schema, update_schema

SCHEMA = ShardSchema((Column("k", "string"), Column("n", "int64"), Column("v", "string")), ("k",))
NAMES = contents_schema(SCHEMA).names
SHAPES = {
    "1,000 updates a batch, 200 batches, on 100 k keys": lambda rng: history(rng, 100_000, 200, 1000),
    "40,000 updates a batch, 4 batches, on 400 k keys": lambda rng: history(rng, 400_000, 4, 40_000),
    "inserts alone, 8 batches of 50,000": lambda rng: [
        rows(np.arange(50_000) + 50_000 * at, np.zeros(50_000, int), at, 1) for at in range(8)
    ],
    "300 k inserted, half of them deleted": lambda rng: [
        rows(np.arange(300_000), np.zeros(300_000, int), 0, 1),
        rows(rng.choice(300_000, 150_000, replace=False), np.zeros(150_000, int), 1, -1),
    ],
    "3,000 updates a batch, 20 batches, on 30 k keys, 1 kB of text": lambda rng: history(rng, 30_000, 20, 3000, 1000),
    "nothing cancels: every update twice": lambda rng: 2 * history(rng, 100_000, 30, 1000),
}


def rows(keys: np.ndarray, versions: np.ndarray, time_ms: int, diff: int, wide: int = 60) -> pa.Table:
    numbers = pa.array(keys * 1000 + versions)
    text = pc.cast(numbers, pa.string())
    return pa.Table.from_arrays(
        [
            pc.binary_join_element_wise("key-", pc.cast(pa.array(keys), pa.string()), ""),
            numbers,
            pc.utf8_lpad(text, wide, "x"),
            pa.array(np.full(len(keys), time_ms)),
            pa.array(np.full(len(keys), diff)),
        ],
        schema=update_schema(SCHEMA),
    )


def history(rng: np.random.Generator, keys: int, batches: int, per_batch: int, wide: int = 60) -> list[pa.Table]:
    """Every key inserted, then random ones replaced, a batch a time."""
    versions = np.zeros(keys, int)
    found = [rows(np.arange(keys), versions, 0, 1, wide)]
    for at in range(1, batches + 1):
        chosen = rng.choice(keys, per_batch, replace=False)
        gone = rows(chosen, versions[chosen], at, -1, wide)
        versions[chosen] += 1
        found.append(pa.concat_tables([gone, rows(chosen, versions[chosen], at, 1, wide)]))
    return found


def grouped(updates: pa.Table, to: int) -> pa.Table:
    summed = updates.group_by(NAMES, use_threads=False).aggregate([(DIFF, "sum")])
    summed = summed.filter(pc.not_equal(summed.column(f"{DIFF}_sum"), 0))
    hashes = hash_rows(summed, SCHEMA.key)
    times = pa.array(np.full(summed.num_rows, to))
    summed = summed.append_column(TIME, times).append_column(HASH, pa.array(hashes))
    return summed.take(pa.array(np.argsort(hashes, kind="stable")))


def timed(work: Callable[[], pa.Table], spent: list[float]) -> pa.Table:
    begin = time.process_time()
    found = work()
    spent.append(time.process_time() - begin)
    return found


def shown(spent: list[float], count: int) -> str:
    each = [1e6 * cpu_s / count for cpu_s in spent]
    return f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench merge")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"merge   {machine()}   CPU-µs a row, {args.rounds} rounds\n")
    print("| shape | rows in → out | decode | merge | groups | encode |\n|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        encoded = [encode_part(SCHEMA, table) for table in shape(np.random.default_rng(7))]
        parts = [(Part(e.rows, e.data.size), e.data) for e in encoded]
        to, count = len(parts), sum(e.rows for e in encoded)
        spent: dict[str, list[float]] = {"decode": [], "merge": [], "groups": [], "encode": []}
        for _ in range(args.rounds):
            decoded = timed(lambda p=parts: [decode_part(SCHEMA, data, part) for part, data in p], spent["decode"])
            updates = pa.concat_tables(decoded)
            ours = timed(lambda u=updates, to=to: _split_parts(SCHEMA, merge_updates(SCHEMA, u, to)), spent["merge"])
            plain = timed(lambda u=updates, to=to: grouped(u, to), spent["groups"])
            timed(lambda o=ours: [encode_part(SCHEMA, table, "zstd") for _, table in o], spent["encode"])
            whole = pa.concat_tables([table for _, table in ours]).sort_by([(n, "ascending") for n in (*NAMES, DIFF)])
            plain = plain.rename_columns([DIFF if n == f"{DIFF}_sum" else n for n in plain.column_names])
            plain = plain.sort_by([(n, "ascending") for n in (*NAMES, DIFF)])
            assert whole.select([*NAMES, DIFF]).equals(plain.select([*NAMES, DIFF])), name
        reported = " | ".join(shown(spent[stage], count) for stage in spent)
        print(f"| {name} | {count:,} → {whole.num_rows:,} | {reported} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
