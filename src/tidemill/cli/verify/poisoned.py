"""Keys that a captured table lacks because their rows are dead letters, as canonical rows of the comparison.

A poisoned row is not there and not equal: it is counted by itself and named. Whether a letter was healed since shows
by its key being in the shard again, so an old letter explains nothing but a row that is missing.
"""

from __future__ import annotations

from typing import Any

from tidemill.base.errors import Missing
from tidemill.cli.verify.canonical import fix_floats, ordered_columns, plain_arrow
from tidemill.cli.verify.compare import Row
from tidemill.shards.front import Shard, ShardSchema
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.topics.batch.columns import of_fields


async def poisoned_keys(letters: Shard, table: str, schema: ShardSchema) -> frozenset[Row]:
    """Of the captured `table` (schema.table), from a pipeline's dead letters. An older shard of them names no keys."""
    if "key" not in {c.name for c in letters.schema.columns}:
        return frozenset()
    try:
        _, upper = await letters.frontiers()
    except Missing:
        return frozenset()
    found: list[bytes | None] = []
    for batch in await letters.batches_until(upper - 1) if upper else ():
        rows = await letters.read_batch(batch, 0, upper)
        tables, keys = rows.column("table").to_pylist(), rows.column("key").to_pylist()
        found += [key.encode() for name, key in zip(tables, keys, strict=True) if name == table and key]
    return canonical_keys(sorted(set(found), key=lambda key: key or b""), schema)


def canonical_keys(keys: list[bytes | None], schema: ShardSchema) -> frozenset[Row]:
    """Keys as topics carry them (JSON of the key columns); one that no key column holds can be in no shard."""
    columns_of_keys = of_fields(keys, [None] * len(keys))
    records = Records("", 0, columns_of_keys.timestamps_ms, columns_of_keys)
    rows = CapturedDecoder(schema).decode(records).commands.rows
    columns = ordered_columns(schema)[: len(schema.key)]
    values: list[list[Any]] = [plain_arrow(rows.column(c.name), c).to_pylist() for c in columns]
    fix = fix_floats(columns)
    out = zip(*values, strict=True)
    return frozenset(fix(row) for row in out) if fix is not None else frozenset(out)
