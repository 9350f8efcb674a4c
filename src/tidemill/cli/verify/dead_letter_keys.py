"""Keys of a captured table whose rows are dead letters, as canonical rows of the comparison.

A poisoned row is neither present nor equal: it is counted separately and named. A later repair shows by its key being
in the shard again, so an old dead letter explains only a row that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from tidemill.base.errors import MissingError
from tidemill.cli.verify.canonical_values import canonical_column, float_canonicalizer, ordered_columns
from tidemill.cli.verify.compare import Row
from tidemill.shards.api import Shard, ShardSchema
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.spark.upsert.commands import ORDER
from tidemill.topics.batch.records import columns_from_fields


async def poisoned_keys(
    letters: Shard, table: str, schema: ShardSchema, forms: Mapping[str, str] | None = None
) -> dict[Row, str]:
    """Return key → reason of its newest dead letter, for the captured `table` (schema.table). Older shards of dead
    letters contain no keys; the result is then empty."""
    if "key" not in {c.name for c in letters.schema.columns}:
        return {}
    try:
        _, upper = await letters.frontiers()
    except MissingError:
        return {}
    found: list[tuple[Any, int, str, str]] = []
    for batch in await letters.batches_until(upper - 1) if upper else ():
        rows = await letters.read_batch(batch, 0, upper)
        of_table = rows.filter(pc.and_(pc.equal(rows.column("table"), table), pc.not_equal(rows.column("key"), "")))
        fields = (of_table.column(name).to_pylist() for name in ("at", "offset", "key", "reason"))
        found += zip(*fields, strict=True)
    reasons = {key: reason for _, _, key, reason in sorted(found)}
    keys = canonical_keys([key.encode() for key in reasons], schema, forms)
    said = list(reasons.values())
    return {row: said[place] for row, place in keys.items()}


def canonical_keys(
    keys: Sequence[bytes | None], schema: ShardSchema, forms: Mapping[str, str] | None = None
) -> dict[Row, int]:
    """Return the canonical keys with their places in `keys`, which are as in topics: JSON of the key columns, in the
    representations of `forms` in event topics. A key that no key column can hold is left out: it can be in no shard."""
    columns_of_keys = columns_from_fields(keys, [None] * len(keys))
    records = Records("", 0, columns_of_keys.timestamps_ms, columns_of_keys)
    rows = CapturedDecoder(schema, forms=forms).decode(records).commands.rows
    columns = ordered_columns(schema)[: len(schema.key)]
    values: list[list[Any]] = [canonical_column(rows.column(c.name), c).to_pylist() for c in columns]
    fix = float_canonicalizer(columns)
    out = zip(*values, strict=True)
    return dict(zip(map(fix, out) if fix is not None else out, rows.column(ORDER).to_pylist(), strict=True))
