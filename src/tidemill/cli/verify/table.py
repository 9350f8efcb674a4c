"""Verification of one table: fix a point in the source, find its time, and compare the shard at that time."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa

from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.cli.verify.compare import Comparison, Outcome, Row
from tidemill.cli.verify.postgres import SourceColumn, SourcePoint, open_source_point
from tidemill.cli.verify.spool import Spool
from tidemill.shards.api import Binding, Remap, Shard, ShardSchema
from tidemill.shards.parts.pg_columns import column_for, with_existing_types
from tidemill.shards.parts.schema import canonical_type

Progress = Callable[[str, int, int], None]
"""Callback with (table, rows of the source compared, rows expected; 0 if unknown)."""

PoisonedKeys = Callable[[str, Shard], Awaitable[Mapping[Row, str]]]
"""Function from (schema.table, its shard) to the keys whose rows are dead letters, with the reasons."""

BINDING_TIMEOUT_S = 60.0
SHARD_TIMEOUT_S = 120.0
GROUP_ROWS = 200_000


class Verified(msgspec.Struct, frozen=True):
    """Verdict on one table. `lsn` is 0 if the source has none. `time_ms` is the compared time of the shard."""

    table: str
    rows: int
    missing: int
    extra: int
    different: int
    source_hash: str
    shard_hash: str
    lsn: int
    time_ms: int
    examples: tuple[str, ...] = ()
    poisoned: int = 0
    columns: str = ""
    """Difference between the columns of the source and of the shard; rows are compared by the columns that both have.
    """
    parked: str = ""
    """Reason why the table is paused: its rows are not compared, and it never counts as equal."""
    unverified: str = ""
    """Reason why the table cannot be compared: it never counts as equal."""

    @property
    def clean(self) -> bool:
        wrong = self.missing or self.extra or self.different or self.poisoned or self.columns
        return self.source_hash == self.shard_hash and not (wrong or self.parked or self.unverified)


async def verify_captured(
    dsn: str,
    remap: Remap,
    tables: Sequence[tuple[str, Shard]],
    rand: Rand,
    *,
    progress: Progress | None = None,
    timeout_s: float = SHARD_TIMEOUT_S,
    poisoned: PoisonedKeys | None = None,
) -> list[Verified]:
    """Compare captured tables, all at one commit. `tables` are (schema.table, its shard); results are in that order.

    Raises UnavailableError when no binding was minted or a shard did not reach its time (`tidemill why` names the
    blocker), MissingError for a table that the source does not have, InvalidError for a shard without a key.
    """
    before = await remap.latest()
    nonce = rand.nonce()
    async with open_source_point(dsn, [name for name, _ in tables], nonce) as point:
        binding = await wait_for_marked_binding(remap, nonce, before.time_ms if before else -1)
        if not point.lsns[0] <= binding.lsn <= point.lsns[1]:
            # While a copied table joins the stream, capture moves markers to the position at which the copy ends.
            raise UnavailableError(
                f"capture bound the marker at another commit: remap={remap.name} lsn={Lsn(binding.lsn)}.",
                fix="Verify again once the capture's snapshot is done.",
            )
        return [
            await _verify_captured_table(point, name, shard, binding, progress, timeout_s, poisoned)
            for name, shard in tables
        ]


async def _verify_captured_table(
    point: SourcePoint,
    name: str,
    shard: Shard,
    binding: Binding,
    progress: Progress | None,
    timeout_s: float,
    poisoned: PoisonedKeys | None,
) -> Verified:
    columns, key = await point.columns(name)
    difference = column_difference(columns, key, shard.schema)
    there = {c.name for c in columns}
    if any(column.name not in there for column in shard.schema.columns if not column.retired):
        return Verified(shard.name, 0, 0, 0, 0, "", "", binding.lsn, binding.time_ms, columns=difference)
    expected = await point.count(name)
    source = point.rows(name, shard.schema)
    report = _table_progress(progress, shard.name, expected)
    keys = partial(poisoned, name, shard) if poisoned is not None else None
    outcome = await compare_shard(shard, binding.time_ms, source, report, timeout_s, keys)
    verdict = _verdict(shard.name, outcome, binding.lsn, binding.time_ms)
    return msgspec.structs.replace(verdict, columns=difference)


def column_difference(columns: Sequence[SourceColumn], key: Sequence[str], schema: ShardSchema) -> str:
    """Describe the columns that only one side has, generated columns included, and other types or keys; "" if there is
    no difference. A retired column does not count as one of the shard: every row must hold null in it."""
    ours = {column.name: canonical_type(column.type) for column in schema.columns if not column.retired}
    kinds = {"s": "generated ", "v": "virtual generated "}
    said = [f"{kinds.get(c.generated, '')}column {c.name!r} is not in the table" for c in columns if c.name not in ours]
    said += [f"column {name!r} is not in the source" for name in ours if name not in {c.name for c in columns}]
    for column in columns:
        (held,) = with_existing_types([column_for(column.name, column.type_name)], schema)
        wanted = canonical_type(held.type)
        if column.name in ours and ours[column.name] != wanted:
            said.append(f"column {column.name!r} is {column.type_name} in the source, {ours[column.name]} in the table")
    if tuple(key) != schema.key:
        said.append(f"the primary key is ({', '.join(key)}) in the source, ({', '.join(schema.key)}) in the table")
    return "; ".join(said)


async def verify_expected(
    shard: Shard,
    time_ms: int,
    source: Callable[[Path], AsyncIterator[list[Row]]],
    *,
    lsn: int = 0,
    progress: Progress | None = None,
    timeout_s: float = SHARD_TIMEOUT_S,
) -> Verified:
    """Compare a shard at a time with rows from any source: canonical, in key order (from a `Spool`).

    `source` gets a scratch directory that lives as long as the comparison.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-verify-") as scratch:
        rows = source(Path(scratch))
        outcome = await compare_shard(shard, time_ms, rows, _table_progress(progress, shard.name, 0), timeout_s)
    return _verdict(shard.name, outcome, lsn, time_ms)


async def wait_for_marked_binding(
    remap: Remap, nonce: str, after_ms: int, timeout_s: float = BINDING_TIMEOUT_S
) -> Binding:
    """Return the binding that capture minted at the marked commit. Raises UnavailableError after the timeout."""
    waited_s, slice_s = 0.0, 1.0
    while True:
        bindings = await remap.after(after_ms)
        for binding in bindings:
            if binding.tag == nonce:
                return binding
        if bindings:
            after_ms = bindings[-1].time_ms
            continue
        if waited_s >= timeout_s:
            raise UnavailableError(
                f"capture did not reach the marked commit: remap={remap.name} waited_s={waited_s:.0f}.",
                fix="Run `tidemill why`: the capture is stopped or behind.",
            )
        if not await remap.wait(after_ms, slice_s):
            waited_s += slice_s


async def compare_shard(
    shard: Shard,
    time_ms: int,
    source: AsyncIterator[list[Row]],
    progress: Callable[[int], None] | None = None,
    timeout_s: float = SHARD_TIMEOUT_S,
    poisoned: Callable[[], Awaitable[Mapping[Row, str]]] | None = None,
) -> Outcome:
    """Stream both sides in key order. Memory is bounded by chunks and the spool's limit."""
    if not shard.schema.key:
        raise InvalidError(
            f"the table has no key to compare by: table={shard.name}.", fix="Verify it by its aggregates."
        )
    with tempfile.TemporaryDirectory(prefix="tidemill-verify-") as scratch:
        spool = Spool(Path(scratch), "shard", shard.schema)
        try:
            async with shard.hold_during("verify", time_ms):
                await spool_shard(shard, time_ms, spool, timeout_s)
            # A dead letter is stored before the shard passes its record, so the letters must not be read earlier.
            comparison = Comparison(len(shard.schema.key), await poisoned() if poisoned is not None else {})
            await _merge_streams(comparison, source, spool.contents(), progress)
        finally:
            await spool.aclose()
    return comparison.outcome()


async def spool_shard(shard: Shard, time_ms: int, spool: Spool, timeout_s: float) -> None:
    """Add every update of the shard up to `time_ms`, some batches at a time. Raises UnavailableError, and InvalidError
    below since."""
    upper = await shard.wait_upper(time_ms, timeout_s)
    if upper <= time_ms:
        raise UnavailableError(
            f"the table did not reach the time: table={shard.name} time_ms={time_ms} upper={upper}.",
            fix=f"Run `tidemill why shard:{shard.name}`.",
        )
    held: list[pa.Table] = []
    for batch in await shard.batches_until(time_ms):
        held.append(await shard.read_batch(batch, 0, time_ms + 1))
        if sum(t.num_rows for t in held) >= GROUP_ROWS:
            await spool.add_updates(pa.concat_tables(held))
            held = []
    if held:
        await spool.add_updates(pa.concat_tables(held))


async def _merge_streams(
    comparison: Comparison,
    source: AsyncIterator[list[Row]],
    shard: AsyncIterator[list[Row]],
    progress: Callable[[int], None] | None,
) -> None:
    left: list[Row] = []
    right: list[Row] = []
    left_ended = right_ended = False
    while not (left_ended and right_ended and not left and not right):
        if not left and not left_ended:
            left = await anext(source, [])
            left_ended = not left
        if not right and not right_ended:
            right = await anext(shard, [])
            right_ended = not right
        i, j = comparison.compare_chunks(left, right, left_ended, right_ended)
        left, right = left[i:], right[j:]
        if progress is not None:
            progress(comparison.rows)


def _table_progress(progress: Progress | None, table: str, expected: int) -> Callable[[int], None] | None:
    return None if progress is None else lambda rows: progress(table, rows, max(rows, expected))


def _verdict(table: str, o: Outcome, lsn: int, time_ms: int) -> Verified:
    return Verified(
        table,
        o.rows,
        o.missing,
        o.extra,
        o.different,
        o.source_hash,
        o.shard_hash,
        lsn,
        time_ms,
        o.examples,
        o.poisoned,
    )
