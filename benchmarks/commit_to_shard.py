"""Commit to shard: from a Postgres COMMIT to the row readable in the shard, beside the moment its time was minted.

    python benchmarks/commit_to_shard.py [--seconds S] [--rate TPS] [--json]

Method: the whole of Harbour Shop (node, Spark driver, shop at the given rate, no clicks). A reader in this
process listens to the shard `payment` and another follows the bindings of the database. The latency of a
payment is the moment the listener has the row minus the row's own clock_timestamp(), same machine, same
clock. The limit is the binding: before it no pipeline may know the row's time. `bound` is from the row's time, when
it was bound, to the row: the pipeline's own share. With --rate 2 every commit comes alone, to an idle pipeline. Rows
are verified after the run: the shard at the last binding must equal SELECT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import psycopg

from harbour import harbour, machine, percentile
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import Missing, Unavailable
from tidemill.base.tasks import Tasks
from tidemill.cli.demo.environment import Environment
from tidemill.consensus.open import open_consensus
from tidemill.objects.open import open_objects
from tidemill.shards.front import TIME, Remap, Shard
from tidemill.shards.open import open_remap, open_shard

WARM_UP_S = 8
DEADLINE_S = 120


async def follow_shard(shard: Shard, clock: SystemClock, into: list[float], bound: list[float]) -> None:
    _, upper = await shard.frontiers()
    async for delta in shard.listen(upper):
        now_ms = clock.now_ms()
        into.extend(now_ms - at.timestamp() * 1000 for at in delta.rows.column("paid_at").to_pylist())
        bound.extend(now_ms - time_ms for time_ms in set(delta.rows.column(TIME).to_pylist()))


async def follow_bindings(remap: Remap, clock: SystemClock, into: list[float]) -> None:
    latest = await remap.latest()
    at_ms = latest.time_ms if latest else 0
    lsn = latest.lsn if latest else 0
    while True:
        await remap.wait(at_ms, 1.0)
        for binding in await remap.after(at_ms):
            if binding.lsn > lsn and binding.source_time_ms:
                into.append(clock.now_ms() - binding.source_time_ms)
            at_ms, lsn = binding.time_ms, binding.lsn


async def opened(open_one, clock: SystemClock):
    deadline = clock.monotonic_s() + DEADLINE_S
    while True:
        try:
            shard = await open_one()
            if (await shard.frontiers())[1] > 0:
                return shard
        except (Missing, Unavailable):
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


async def run(args: argparse.Namespace) -> dict[str, object]:
    clock, rand = SystemClock(), Rand()
    async with harbour(pipeline=True) as environment:
        config = environment.config
        consensus = await open_consensus(config.consensus_url, clock, rand)
        objects = await open_objects(config.objects_url, clock, rand)
        shard = await opened(lambda: open_shard(consensus, objects, clock, rand, "payment"), clock)
        remap = await open_remap(consensus, clock, rand, "capture/shop")
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidemill.cli.demo.load", "--dsn", environment.dsn, "--rate", str(args.rate),
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await asyncio.sleep(WARM_UP_S)
        shards_ms: list[float] = []
        bindings_ms: list[float] = []
        bound_ms: list[float] = []
        async with Tasks(print) as tasks:
            tasks.spawn(follow_shard(shard, clock, shards_ms, bound_ms), name="shard")
            tasks.spawn(follow_bindings(remap, clock, bindings_ms), name="bindings")
            await asyncio.sleep(args.seconds)
        load.terminate()
        await load.wait()
        verified = await verify(environment, shard, remap)
        await consensus.aclose()
        await objects.aclose()
    result: dict[str, object] = {"payments": len(shards_ms), "rows_verified": verified}
    for name, samples in (("shard", shards_ms), ("binding", bindings_ms), ("bound", bound_ms)):
        result[name] = {"p50_ms": round(percentile(samples, 0.5), 1), "p99_ms": round(percentile(samples, 0.99), 1)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=float, default=300)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(run(args))
    if args.json:
        print(json.dumps(result))
        return
    print(f"commit_to_shard   {machine()}")
    print(f"{result['payments']} payments at {args.rate:g} transactions/s; rows verified: {result['rows_verified']}")
    for name in ("shard", "binding", "bound"):
        print(f"  {name:8} p50 {result[name]['p50_ms']:8} ms   p99 {result[name]['p99_ms']:8} ms")
    print(f"  ratio to the binding at p50: {result['shard']['p50_ms'] / result['binding']['p50_ms']:.1f}x")


if __name__ == "__main__":
    main()
