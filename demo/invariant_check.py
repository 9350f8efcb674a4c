"""The invariant strip of the page: the shop's money in Postgres and in the shard, at exactly one commit.

A transaction locks `payment` and `warehouse` against writers for a moment, sums the takings, and writes a marker into
the WAL. Capture mints a binding exactly at that commit, so the shard must have the same sum at the binding's time. The
page adds the sum of the browser at the same LSN.
"""

from __future__ import annotations

from decimal import Decimal

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.lsn import Lsn
from tidemill.shards.api import Binding, Remap, Shard

LOCK_TIMEOUT = "2s"
WAIT_S = 30.0


class MoneyCheck(msgspec.Struct, frozen=True):
    """Sums as decimal text, so that no float rounds them on the way to the browser."""

    lsn: int
    time_ms: int
    postgres: str
    payments: str
    shard: str

    @property
    def equal(self) -> bool:
        return self.postgres == self.payments == self.shard


class MoneyChecker:
    def __init__(self, dsn: str, remap: Remap, warehouse: Shard, rand: Rand) -> None:
        self._dsn = dsn
        self._remap = remap
        self._warehouse = warehouse
        self._rand = rand

    async def check(self) -> MoneyCheck | None:
        """Compare once. Return None on a lock timeout, without a binding in time, and while storage is unavailable."""
        nonce = self._rand.nonce()
        try:
            before = await self._remap.latest()
            sums = await self._source(nonce)
            if sums is None:
                return None
            binding = await self._binding(nonce, before.time_ms if before else 0)
            if binding is None or not sums[2] <= binding.lsn <= sums[3]:
                return None  # during a snapshot capture moves markers to its end
            rows = await self._warehouse.snapshot(binding.time_ms, timeout_s=WAIT_S)
        except (UnavailableError, UnknownOutcomeError, TimeoutError):
            return None
        shard = sum((Decimal(value) for value in rows.column("ytd").to_pylist()), Decimal(0))
        return MoneyCheck(binding.lsn, binding.time_ms, f"{sums[0]:.2f}", f"{sums[1]:.2f}", f"{shard:.2f}")

    async def _source(self, nonce: str) -> tuple[Decimal, Decimal, int, int] | None:
        """Return the sums of warehouses and payments, and the LSNs around the marker's commit; None on a timeout."""
        import psycopg

        async with await psycopg.AsyncConnection.connect(self._dsn) as connection:
            try:
                await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'".encode())
                # in the lock order of the shop's transactions, which excludes a deadlock
                await connection.execute("LOCK TABLE payment IN SHARE MODE")
                await connection.execute("LOCK TABLE warehouse IN SHARE MODE")
                cursor = await connection.execute(
                    "SELECT (SELECT sum(ytd) FROM warehouse), (SELECT coalesce(sum(amount), 0) FROM payment),"
                    " pg_logical_emit_message(true, 'tidemill', %s)::text",
                    (nonce,),
                )
                row = await cursor.fetchone()
                await connection.commit()
                cursor = await connection.execute("SELECT pg_current_wal_insert_lsn()::text")
                after = await cursor.fetchone()
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                return None
        if row is None or after is None:
            raise InvalidError("the shop has no warehouse table.", fix="Start over with --fresh.")
        return row[0], row[1], Lsn.parse(row[2]).value, Lsn.parse(after[0]).value

    async def _binding(self, nonce: str, after_ms: int) -> Binding | None:
        for _ in range(int(WAIT_S / 0.5)):
            bindings = await self._remap.after(after_ms)
            for binding in bindings:
                if binding.tag == nonce:
                    return binding
            if bindings:
                after_ms = bindings[-1].time_ms
            await self._remap.wait(after_ms, 0.5)
        return None
