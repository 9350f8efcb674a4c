"""verify one table: fix a point in the source, find its time, and compare the shard at that time."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from tidemill.base.clock import Rand
from tidemill.base.errors import Invalid, Unavailable
from tidemill.base.frontier import Lsn
from tidemill.cli.verify.compare import Comparison, Outcome, Row
from tidemill.cli.verify.postgres import SourcePoint, source_point
from tidemill.cli.verify.spool import Spool
from tidemill.shards.front import Binding, Remap, Shard

Progress = Callable[[str, int, int], None]
"""(table, rows of the source compared, rows expected; 0 = not known)"""

BINDING_TIMEOUT_S = 60.0
SHARD_TIMEOUT_S = 120.0
GROUP_ROWS = 200_000


class Verified(msgspec.Struct, frozen=True):
    """One table's verdict. `lsn` 0 = the source has none. `time_ms` is the shard's time that was compared."""

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

    @property
    def clean(self) -> bool:
        return self.source_hash == self.shard_hash and not (self.missing or self.extra or self.different)


async def verify_captured(
    dsn: str,
    remap: Remap,
    tables: Sequence[tuple[str, Shard]],
    rand: Rand,
    *,
    progress: Progress | None = None,
    timeout_s: float = SHARD_TIMEOUT_S,
) -> list[Verified]:
    """Compare captured tables, all at one commit. `tables`: (schema.table, its shard); results in that order.

    Raises Unavailable when no binding was minted or a shard did not reach its time (who holds it is in `why`),
    Missing for a table the source does not have, Invalid for a shard without a key.
    """
    before = await remap.latest()
    nonce = rand.nonce()
    async with source_point(dsn, [name for name, _ in tables], nonce) as point:
        binding = await marked_binding(remap, nonce, before.time_ms if before else -1)
        if not point.lsns[0] <= binding.lsn <= point.lsns[1]:
            # While a table's snapshot is being stitched in, capture carries markers on to where it ends.
            raise Unavailable(
                f"capture bound the marker at another commit: remap={remap.name} lsn={Lsn(binding.lsn)}.",
                fix="Verify again once the capture's snapshot is done.",
            )
        return [await _captured(point, name, shard, binding, progress, timeout_s) for name, shard in tables]


async def _captured(
    point: SourcePoint, name: str, shard: Shard, binding: Binding, progress: Progress | None, timeout_s: float
) -> Verified:
    expected = await point.count(name)
    source = point.rows(name, shard.schema)
    outcome = await compare_shard(shard, binding.time_ms, source, _for_table(progress, shard.name, expected), timeout_s)
    return _verdict(shard.name, outcome, binding.lsn, binding.time_ms)


async def verify_expected(
    shard: Shard,
    time_ms: int,
    source: Callable[[Path], AsyncIterator[list[Row]]],
    *,
    lsn: int = 0,
    progress: Progress | None = None,
    timeout_s: float = SHARD_TIMEOUT_S,
) -> Verified:
    """Compare a shard at a time with rows from anywhere: canonical, in key order (`table_rows`, `Spool`).

    `source` is given a scratch directory that lives as long as the comparison.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-verify-") as scratch:
        rows = source(Path(scratch))
        outcome = await compare_shard(shard, time_ms, rows, _for_table(progress, shard.name, 0), timeout_s)
    return _verdict(shard.name, outcome, lsn, time_ms)


async def marked_binding(remap: Remap, nonce: str, after_ms: int, timeout_s: float = BINDING_TIMEOUT_S) -> Binding:
    """The binding that capture minted at the marked commit. Raises Unavailable after the timeout."""
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
            raise Unavailable(
                f"capture did not reach the marked commit: remap={remap.name} waited_s={waited_s:.0f}.",
                fix="See `tidemill why`: the capture is stopped or behind.",
            )
        if not await remap.wait(after_ms, slice_s):
            waited_s += slice_s


async def compare_shard(
    shard: Shard,
    time_ms: int,
    source: AsyncIterator[list[Row]],
    progress: Callable[[int], None] | None = None,
    timeout_s: float = SHARD_TIMEOUT_S,
) -> Outcome:
    """Stream both sides in key order; memory is bounded by chunks and the spool's limit."""
    if not shard.schema.key:
        raise Invalid(f"shard has no key to compare by: shard={shard.name}.", fix="Verify it by its aggregates.")
    comparison = Comparison(len(shard.schema.key))
    with tempfile.TemporaryDirectory(prefix="tidemill-verify-") as scratch:
        spool = Spool(Path(scratch), "shard", shard.schema)
        try:
            await spool_shard(shard, time_ms, spool, timeout_s)
            await _merge(comparison, source, spool.contents(), progress)
        finally:
            await spool.aclose()
    return comparison.outcome()


async def spool_shard(shard: Shard, time_ms: int, spool: Spool, timeout_s: float) -> None:
    """Every update of the shard up to `time_ms`, some batches at a time. Raises Unavailable, Invalid below since."""
    upper = await shard.wait_upper(time_ms, timeout_s)
    if upper <= time_ms:
        raise Unavailable(
            f"shard did not reach the time: shard={shard.name} time_ms={time_ms} upper={upper}.",
            fix=f"See `tidemill why shard:{shard.name}`.",
        )
    held: list[pa.Table] = []
    for batch in await shard.batches_until(time_ms):
        held.append(await shard.read_batch(batch, 0, time_ms + 1))
        if sum(t.num_rows for t in held) >= GROUP_ROWS:
            await spool.add_updates(pa.concat_tables(held))
            held = []
    if held:
        await spool.add_updates(pa.concat_tables(held))


async def _merge(
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
        i, j = comparison.step(left, right, left_ended, right_ended)
        left, right = left[i:], right[j:]
        if progress is not None:
            progress(comparison.rows)


def _for_table(progress: Progress | None, table: str, expected: int) -> Callable[[int], None] | None:
    return None if progress is None else lambda rows: progress(table, rows, max(rows, expected))


def _verdict(table: str, o: Outcome, lsn: int, time_ms: int) -> Verified:
    return Verified(
        table, o.rows, o.missing, o.extra, o.different, o.source_hash, o.shard_hash, lsn, time_ms, o.examples
    )
