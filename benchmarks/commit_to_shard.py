"""Commit to shard: from a Postgres COMMIT to the row readable in the shard, compared with its binding.

    python benchmarks/commit_to_shard.py [--seconds S] [--warm-up S] [--rate TPS] [--transaction N] [--json]

Method: the whole of Harbour Shop (node, Spark driver, shop at the given rate, no clicks). A reader in this process
listens to the shard `payment` and another follows the bindings of the database. The latency of a payment is the moment
the listener has the row minus the row's own clock_timestamp(), same machine, same clock. The limit is the binding:
before it no pipeline may know the row's time. `bound` is from the row's time, when it was bound, to the row: the
pipeline's own share. With --rate 2 every commit comes alone, to an idle pipeline. Rows are verified after the run: the
shard at the last binding must equal SELECT.

With --transaction one transaction of N payments instead of the load: seconds from COMMIT until it is confirmed to
PostgreSQL (confirmed_flush_lsn), and until the shard has its time, which has all of it. `peak_mib` is the highest
resident size (VmHWM) of node, driver and the driver's JVM, over their whole lives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import psycopg

import paths
from demo.environment import Environment
from harbour import harbour, machine, percentile
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import MissingError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.factory import open_consensus
from tidemill.objects.factory import open_objects
from tidemill.shards.api import TIME, Remap, Shard
from tidemill.shards.registry import open_remap, open_shard

KINDS = {"jvm": b"bin/java\0", "node": b"tidemill.cli.serve", "driver": b"tidemill.spark.pipeline.driver"}
WARM_UP_S = 30
"""Warm-up under load. During it Spark's JVM compiles its code, on the cores that all processes share."""
DEADLINE_S = 120


Samples = list[tuple[float, float]]
"""(when the source had it, how many ms later it was seen), both in ms."""


async def follow_shard(shard: Shard, clock: SystemClock, into: Samples, bound: Samples) -> None:
    _, upper = await shard.frontiers()
    async for delta in shard.listen(upper):
        now_ms = clock.now_ms()
        paid_ms = [at.timestamp() * 1000 for at in delta.rows.column("paid_at").to_pylist()]
        into.extend((at_ms, now_ms - at_ms) for at_ms in paid_ms)
        bound.extend((at_ms, now_ms - at_ms) for at_ms in set(delta.rows.column(TIME).to_pylist()))


async def follow_bindings(remap: Remap, clock: SystemClock, into: Samples) -> None:
    latest = await remap.latest()
    at_ms = latest.time_ms if latest else 0
    lsn = latest.lsn if latest else 0
    while True:
        await remap.wait(at_ms, 1.0)
        for binding in await remap.after(at_ms):
            if binding.lsn > lsn and binding.source_time_ms:
                into.append((binding.source_time_ms, clock.now_ms() - binding.source_time_ms))
            at_ms, lsn = binding.time_ms, binding.lsn


async def opened(open_one, clock: SystemClock):
    deadline = clock.monotonic_s() + DEADLINE_S
    while True:
        try:
            shard = await open_one()
            if (await shard.frontiers())[1] > 0:
                return shard
        except (MissingError, UnavailableError):
            pass
        if clock.monotonic_s() > deadline:
            raise SystemExit("the shard did not appear in time")
        await asyncio.sleep(0.2)


async def verify(environment: Environment, shard: Shard, remap: Remap) -> int:
    """The load has ended: the shard, at the binding that covers a marker sent now, must equal SELECT."""
    nonce = Rand().nonce()
    with psycopg.connect(environment.dsn) as connection:
        connection.execute("SELECT pg_logical_emit_message(true, 'tidemill', %s)", (nonce,))
        connection.commit()
        expected = {i: a for i, a in connection.execute("SELECT p_id, amount FROM payment").fetchall()}
    after = 0
    async with asyncio.timeout(DEADLINE_S):
        while True:
            bindings = await remap.after(after)
            found = [binding for binding in bindings if binding.tag == nonce]
            if found:
                break
            after = bindings[-1].time_ms if bindings else after
            await remap.wait(after, 1.0)
        rows = await shard.snapshot(found[0].time_ms, timeout_s=DEADLINE_S)
    got = dict(zip(rows.column("p_id").to_pylist(), rows.column("amount").to_pylist(), strict=True))
    if got != expected:
        raise SystemExit(f"the shard differs from SELECT: shard={len(got)} select={len(expected)}")
    return len(expected)


def peaks_mib() -> dict[str, int]:
    """Return the peaks of the processes below this one, by kind; of several of a kind the highest."""
    said: dict[int, tuple[bytes, dict[str, str]]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines() if ":" in line)
            said[int(path.name)] = (path / "cmdline").read_bytes(), fields
    under, found = {os.getpid()}, dict[str, int]()
    while True:  # a child that another thread than the main one started is in no list of children
        more = {pid for pid, (_, fields) in said.items() if int(fields["PPid"]) in under} - under
        if not more:
            break
        under |= more
    for command, fields in (said[pid] for pid in under):
        kind = next((name for name, part in KINDS.items() if part in command), "")
        if kind and "VmHWM" in fields:
            found[kind] = max(found.get(kind, 0), int(fields["VmHWM"].split()[0]) >> 10)
    return found


async def large(environment: Environment, shard: Shard, remap: Remap, rows: int) -> dict[str, object]:
    """Measure one transaction of `rows` payments."""
    clock = SystemClock()
    before = peaks_mib()
    with psycopg.connect(environment.dsn) as connection:
        connection.execute(
            "INSERT INTO payment (w_id, d_id, c_id, amount) SELECT g % 4, g % 10, g, g % 1000 / 100.0"
            f" FROM generate_series(1, {rows}) g"
        )
        connection.commit()
    committed_s = clock.monotonic_s()
    confirmed_s = 0.0
    with psycopg.connect(environment.dsn, autocommit=True) as connection:
        (end,) = connection.execute("SELECT pg_current_wal_flush_lsn() - '0/0'").fetchone() or (0,)
        slot = "SELECT coalesce(max(confirmed_flush_lsn - '0/0'), 0) FROM pg_replication_slots"
        while not confirmed_s:
            if (connection.execute(slot).fetchone() or (0,))[0] >= end:
                confirmed_s = clock.monotonic_s() - committed_s
            await asyncio.sleep(0.05)
    time_ms = next(b.time_ms for b in await remap.after(0) if b.lsn >= end - 64)
    while (await shard.frontiers())[1] <= time_ms:
        await asyncio.sleep(0.1)
    shard_s = clock.monotonic_s() - committed_s
    peaks = peaks_mib()
    verified = await verify(environment, shard, remap)
    return {
        "machine": machine(),
        "rows": rows,
        "rows_verified": verified,
        "commit_to_confirmed_s": round(confirmed_s, 1),
        "commit_to_shard_s": round(shard_s, 1),
        "peak_mib_before": before,
        "peak_mib": peaks,
    }


async def run(args: argparse.Namespace) -> dict[str, object]:
    clock, rand = SystemClock(), Rand()
    async with harbour(pipeline=True) as environment:
        config = environment.config
        consensus = await open_consensus(config.consensus_url, clock, rand)
        objects = await open_objects(config.objects_url, clock, rand)
        shard = await opened(lambda: open_shard(consensus, objects, clock, rand, "payment"), clock)
        remap = await open_remap(consensus, clock, rand, "capture/shop")
        if args.transaction:
            return await large(environment, shard, remap, args.transaction)
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "demo.load", "--dsn", environment.dsn, "--rate", str(args.rate),
            stdout=asyncio.subprocess.DEVNULL, cwd=paths.ROOT,
        )  # fmt: skip
        shards_ms: Samples = []
        bindings_ms: Samples = []
        bound_ms: Samples = []
        async with Tasks(print) as tasks:
            # From the first row on: who begins to follow later reads what it missed first, and that is not latency.
            tasks.spawn(follow_shard(shard, clock, shards_ms, bound_ms), name="shard")
            tasks.spawn(follow_bindings(remap, clock, bindings_ms), name="bindings")
            await asyncio.sleep(args.warm_up)
            from_ms = clock.now_ms()
            await asyncio.sleep(args.seconds)
            until_ms = clock.now_ms()
            # Every row of these seconds counts, however late it is seen.
            async with asyncio.timeout(DEADLINE_S):
                while not bound_ms or bound_ms[-1][0] < until_ms:
                    await asyncio.sleep(0.1)
        load.terminate()
        await load.wait()
        verified = await verify(environment, shard, remap)
        await consensus.aclose()
        await objects.aclose()
    result: dict[str, object] = {"rows_verified": verified}
    for name, found in (("shard", shards_ms), ("binding", bindings_ms), ("bound", bound_ms)):
        samples = [late_ms for at_ms, late_ms in found if from_ms <= at_ms < until_ms]
        result.setdefault("payments", len(samples))
        result[name] = {"p50_ms": round(percentile(samples, 0.5), 1), "p99_ms": round(percentile(samples, 0.99), 1)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S)
    parser.add_argument("--rate", type=float, default=300)
    parser.add_argument("--transaction", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(run(args))
    if args.json or args.transaction:
        print(json.dumps(result))
        return
    print(f"commit_to_shard   {machine()}")
    print(f"{result['payments']} payments at {args.rate:g} transactions/s; rows verified: {result['rows_verified']}")
    for name in ("shard", "binding", "bound"):
        print(f"  {name:8} p50 {result[name]['p50_ms']:8} ms   p99 {result[name]['p99_ms']:8} ms")
    print(f"  ratio to the binding at p50: {result['shard']['p50_ms'] / result['binding']['p50_ms']:.1f}x")


if __name__ == "__main__":
    main()
