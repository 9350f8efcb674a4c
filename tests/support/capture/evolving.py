"""Compare a captured topic, folded into a table under its newest description, with SELECT. For tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from support.capture.world import World
from support.waiting import until
from tidemill.capture.catalog.schema_versions import columns_at_version
from tidemill.metastore.catalogue import CaptureTableRow
from tidemill.topics.batch import Record

Rows = dict[str, dict[str, str | None]]


def folded(row: CaptureTableRow, records: Sequence[Record]) -> Rows:
    """Fold records as a reader does: a column that a record's version lacks has its default, and a real keeps its
    value as a real.
    """
    rows: Rows = {}
    newest = columns_at_version(row.columns, row.version)
    for record in records:
        version = int(dict(record.headers).get("tm.version") or b"1")
        assert version <= row.version, "the catalogue knows of it before it is written"
        if record.key is None:
            rows.clear()
            continue
        key = str(list(json.loads(record.key).values()))
        if record.value is None:
            rows.pop(key, None)
            continue
        value, then = json.loads(record.value), {c.name: c.type_name for c in columns_at_version(row.columns, version)}
        assert value.keys() == then.keys()
        full = {c.name: value[c.name] if c.name in then else c.default for c in newest}
        rows[key] = {c.name: _text(full[c.name], c.type_name, then.get(c.name, "")) for c in newest}
    return rows


def _text(value: Any, kind: str, then: str) -> str | None:
    if value is None:
        return None
    if then == "real":
        value = float(np.float32(value))
    if kind in ("real", "double precision"):
        return repr(float(np.float32(value)) if kind == "real" else float(value))
    return str(value)


async def selected(world: World, row: CaptureTableRow) -> Rows:
    names = [f'"{c.name}"::text' for c in row.columns]
    out: Rows = {}
    for found in await world.select(f"SELECT {', '.join(names)} FROM {row.table}"):
        texts = {c.name: _text(v, c.type_name, c.type_name) if c.type_name in ("real", "double precision") else v
                 for c, v in zip(row.columns, found, strict=True)}  # fmt: skip
        out[f"[{texts['id']}]"] = texts
    return out


async def equal(world: World, *tables: str) -> None:
    """Each of them flows, and all of it that is bound now is what SELECT says."""
    binding = await world.caught_up()
    for name in tables:
        row = await world.table(f"public.{name}")
        assert row is not None and row.is_streaming, (name, row and row.reason)
        end = sum(binding.offsets[await world.topic_id(name)])
        topic, source = folded(row, await world.records(name, end)), await selected(world, row)
        assert topic == source, (name, [(key, topic.get(key), source.get(key)) for key in {**topic, **source}
                                        if topic.get(key) != source.get(key)][:8])  # fmt: skip


async def ends_equal(world: World, table: str) -> None:
    """Wait until topic and table are equal.

    Needed for a partition that was detached or attached with rows: the stream has no message about it, a check of the
    catalogue finds it, and until then the table flows unchanged (docs/guides/capture.md).
    """
    said: list[AssertionError] = []

    async def holds() -> bool:
        try:
            await equal(world, table)
        except AssertionError as error:
            said[:] = [error]
            return False
        return True

    try:
        await until(holds, f"{table} is what SELECT says")
    except AssertionError as late:
        raise late from (said[0] if said else None)


async def version(world: World, table: str) -> int:
    row = await world.table(f"public.{table}")
    return row.version if row is not None and row.is_streaming else 0
