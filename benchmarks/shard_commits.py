"""`./dev bench shard_commits [--batches N]`: what a commit to a shard costs as its batches grow in number, unmerged.

One handle appends batches of one row, SQLite as consensus and a directory as bucket, with no keeper: nothing is ever
merged. Printed per tenth of the run: processor time of a commit (part and append), the longest append, and the bytes
of the state's rollup. A second handle, opened at the end, reads everything back and the rows are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

import pyarrow as pa

from harbour import machine
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import update_schema
from tidemill.shards.state.codec import encode_state
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores

SCHEMA = ShardSchema((Column("id", "int64"), Column("note", "string")), ("id",))


def row(number: int) -> pa.Table:
    columns = [pa.array([number]), pa.array([f"n{number:049}"]), pa.array([number]), pa.array([1])]
    return pa.Table.from_arrays(columns, schema=update_schema(SCHEMA))


async def measure(directory: str, count: int) -> None:
    urls = StoreUrls(f"file://{directory}/objects", f"sqlite://{directory}/consensus.db")
    stores = await open_stores(urls)
    shard = await stores.shard("commits", SCHEMA)
    spent: list[float] = []
    print(f"{'batches':>9} {'CPU ms a commit':>16} {'longest append, ms':>20} {'rollup, KiB':>12}")
    for tenth in range(10):
        longest_s, began_s = 0.0, time.process_time()
        for number in range(tenth * count // 10, (tenth + 1) * count // 10):
            part = await shard.write_part(row(number))
            asked_s = time.perf_counter()
            await shard.compare_and_append(number, number + 1, (part,), str(number))
            longest_s = max(longest_s, time.perf_counter() - asked_s)
        spent.append((time.process_time() - began_s) / (count // 10) * 1000)
        state = shard.state
        kib = len(encode_state(state)) >> 10
        print(f"{len(state.batches):9,} {spent[-1]:16.2f} {longest_s * 1000:20.0f} {kib:12,}", flush=True)
    await shard.aclose()
    await stores.aclose()
    again = await open_stores(urls)
    reader = await again.shard("commits", SCHEMA)
    found = (await reader.snapshot(count - 1)).sort_by("id")
    want = pa.concat_tables([row(n).select(["id", "note"]) for n in range(count)])
    assert found.combine_chunks().equals(want.combine_chunks()), "what was read back is not what was committed"
    await reader.aclose()
    await again.aclose()
    print(f"{found.num_rows:,} rows verified; CPU of the last tenth to the first: {spent[-1] / spent[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10_000)
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(directory, options.batches))


if __name__ == "__main__":
    main()
