"""Metastore commits: from a caller's rows through the replicated state machine to applied, compared with bare appends.

    python benchmarks/metastore_commits.py [--seconds S] [--backends sqlite,postgres] [--clients 1x1,64x1,64x10]
                                           [--dir DIR] [--json]

Method: one process leads one domain whose files are in a local directory. `clients` coroutines commit in a closed loop
for S seconds, each time some new rows (28 B keys, 100 B values); a commit returns when it is durable in consensus
(SQLite synchronous=FULL, PostgreSQL with fsync) and applied, so that a read sees it. Flushes, merges and manifests
continue concurrently. The limit is the bare log of the same consensus on the same disk, half of it measured before and
half after: one append after another, each with one record per client, as large as the commit's rows.

After each run the domain is closed, reopened from the consensus and the bucket, and every row compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw

from consensus import NONCE, Result, engine, fdatasync_rate
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext
from tidemill.objects.local import LocalObjects

KEYS_PER_CLIENT = 1000
TARGETS = {("sqlite", "64x1"): 40_000, ("sqlite", "64x10"): 10_000, ("postgres", "64x1"): 15_000}
"""Commits per second. 64x10 asks for 100,000 rows."""
P50_MS = {("sqlite", "64x1"): 1.0}


def row(client: int, number: int, index: int) -> tuple[bytes, bytes]:
    key = b"bench/%04d/%08d/%08d" % (client, number % KEYS_PER_CLIENT, index)
    return key, (b"%d.%d.%d." % (client, number, index)).ljust(100, b"x")


async def bare_appends(consensus: Consensus, log: str, records: int, rows: int, seconds: float) -> float:
    """Records per second of one log, `records` in an append, each as large as a commit of `rows` rows."""
    size = sum(len(key) + len(value) for key, value in (row(0, 0, index) for index in range(rows)))
    data = [b"x" * size] * records
    position = (await consensus.log_head(log)).next
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        await consensus.append(log, 0, position, data, NONCE)
        position += records
        done += records
    await consensus.truncate(log, position)
    return done / elapsed


async def commits(domain: Domain, clients: int, rows: int, seconds: float) -> tuple[Result, list[int]]:
    durations: list[float] = []
    counts = [0] * clients
    started = time.perf_counter()
    end = started + seconds

    async def client(which: int) -> None:
        while (begin := time.perf_counter()) < end:
            await domain.commit([row(which, counts[which], index) for index in range(rows)])
            counts[which] += 1
            durations.append(time.perf_counter() - begin)

    await asyncio.gather(*(client(which) for which in range(clients)))
    return Result(durations, time.perf_counter() - started), counts


async def verify(domain: Domain, counts: list[int], rows: int) -> int:
    """Each client's last writes of every key it used, and nothing else."""
    expected = {}
    for client, count in enumerate(counts):
        for number in range(max(0, count - KEYS_PER_CLIENT), count):
            expected.update(row(client, number, index) for index in range(rows))
    found: dict[bytes, bytes] = {}
    await domain.sync()
    async for keys, values in domain.prefix(b"bench/"):
        found.update(zip(keys, values, strict=True))
    if found != expected:
        wrong = sum(expected.get(key) != found.get(key) for key in expected.keys() | found.keys())
        raise SystemExit(f"rows differ after reopening: expected={len(expected)} found={len(found)} wrong={wrong}")
    return len(found)


@asynccontextmanager
async def leading(consensus: Consensus, folder: Path) -> AsyncIterator[Domain]:
    """The domain, led by this process, with its files in `folder`."""
    clock, rand = SystemClock(), Rand()
    objects = LocalObjects.open(folder / "objects", clock, rand)
    domain = await Domain.open(
        DomainContext(consensus, objects, "bench", holder="bench/1", clock=clock, rand=rand),
        own_earlier_life=lambda _: True,
    )
    try:
        await domain.wait_until_leading(30.0)
        yield domain
    finally:
        await domain.aclose()
        await objects.aclose()


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for backend in options.backends.split(","):
        for shape in options.clients.split(","):
            clients, rows = map(int, shape.split("x"))
            with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
                folder = Path(scratch)
                folder.chmod(0o755)
                async with engine(backend, folder) as (url, _):
                    lines.append(await one(backend, url, folder, shape, clients, rows, options.seconds))
    return lines


async def one(
    backend: str, url: str, folder: Path, shape: str, clients: int, rows: int, seconds: float
) -> dict[str, Any]:
    consensus = await open_consensus(url, SystemClock(), Rand())
    part = max(0.3, seconds / 4)
    try:
        before = await bare_appends(consensus, "limit", clients, rows, part)
        async with leading(consensus, folder) as domain:
            result, counts = await commits(domain, clients, rows, seconds)
        limit = (before + await bare_appends(consensus, "limit", clients, rows, part)) / 2
        async with leading(consensus, folder) as domain:
            verified = await verify(domain, counts, rows)
    finally:
        await consensus.aclose()
    target, p50_target = TARGETS.get((backend, shape)), P50_MS.get((backend, shape))
    passed = (target is None or result.per_s >= target) and (p50_target is None or result.p50_ms <= p50_target)
    return {
        "backend": backend,
        "clients x rows": shape,
        "commits/s": round(result.per_s),
        "rows/s": round(result.per_s * rows),
        "p50_ms": round(result.p50_ms, 3),
        "p99_ms": round(result.p99_ms, 2),
        "max_ms": round(result.max_ms, 1),
        "bare/s": round(limit),
        "ratio": round(result.per_s / limit, 2),
        "target/s": target or "",
        "verdict": "" if target is None else "pass" if passed else "MISS",
        "verified_rows": verified,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="per backend and number of clients")
    parser.add_argument("--clients", default="1x1,64x1,64x10", help="clients x rows per commit")
    parser.add_argument("--backends", default="sqlite,postgres")
    parser.add_argument("--dir", default=None, help="directory on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        synced = fdatasync_rate(Path(scratch), 0.5)
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "fdatasync_per_s": round(synced, 1),
    }
    lines = asyncio.run(run(options))
    if options.json:
        print(json.dumps({"benchmark": "metastore_commits", "machine": machine, "rows": lines}))
        return
    print(__doc__)
    print("machine: " + " ".join(f"{key}={value}" for key, value in machine.items()))
    columns = list(lines[0])
    widths = [max(len(column), *(len(str(line[column])) for line in lines)) for column in columns]
    for texts in [columns, *[[str(line[column]) for column in columns] for line in lines]]:
        print("  ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True)))


if __name__ == "__main__":
    main()
