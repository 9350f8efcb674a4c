"""The examples of the page about Python run in order, in one program, against a small cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "python.md"
ORDERS = ShardSchema((Column("id", "int64"), Column("status", "string"), Column("total", "decimal(12,2)")), ("id",))
CUSTOMERS = ShardSchema((Column("id", "int64"), Column("name", "string")), ("id",))


def test_every_example_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "tidemill.toml").write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    (tmp_path / "data").mkdir()
    with BlockingPortal() as portal:
        portal.call(_fill(tmp_path / "data"))
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ends = "assert (now.num_rows, one.num_rows, dear.num_rows, paid, copy.num_rows, frame.height) == (8, 1, 2, 1, 8, 8)"
    program = "\n".join([*examples, "assert open_orders.num_rows == 7 and totals.height == 2 and at == 9", ends])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "['customers', 'orders']" and len(examples) >= 5


async def _fill(data: Path) -> None:
    stores = await open_stores(
        StoreUrls(f"file://{data}/objects", f"sqlite://{data}/consensus.db"), SystemClock(), Rand()
    )
    orders = await stores.shard("orders", ORDERS)
    for at, rows in enumerate([[(i, "open", 1) for i in range(8)], [(7, "open", -1), (7, "paid", 1)]]):
        ids, status, diffs = zip(*rows, strict=True)
        totals = pa.array([i * 10 for i in ids], pa.int64()).cast(pa.decimal128(21, 2)).cast(pa.decimal128(12, 2))
        stamped = {TIME: pa.array([at * 10 + 9] * len(ids)), DIFF: pa.array(diffs)}
        table = pa.table({"id": pa.array(ids), "status": pa.array(status), "total": totals, **stamped})
        await orders.compare_and_append(at * 10, at * 10 + 10, [await orders.write_part(table)], "")
    customers = await stores.shard("customers", CUSTOMERS)
    await customers.compare_and_append(0, 10, [], "")
    await stores.aclose()
