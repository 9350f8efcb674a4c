"""Objects: rates and latencies of put, get and ranged get, each compared with its limit from the same run.

    python benchmarks/objects.py [--seconds S] [--size BYTES] [--clients N] [--stores memory,local,s3] [--json]

Method: per store and operation `clients` coroutines call in a closed loop for S seconds. The limit is the same work
without our code, at the same concurrency:

    local put    temporary file, write, fdatasync, link, unlink, directory fsync, in the same number of threads
    local get    open, fstat, pread, close, in a plain loop
    s3           obstore's put (create) and get_range, from the same number of coroutines
    memory       a dict of bytes

Every object put is read back whole and compared afterwards; ranged reads are compared on arrival. The S3 server is
moto's, in this process: its figures measure overhead against plain obstore, not S3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tidemill.base.clock import Rand, SystemClock
from tidemill.objects import ObjectStore, open_objects
from tidemill.objects.local import THREADS

RANGE_BYTES = 4096
OneCall = Callable[[int], Awaitable[None]]


def payload(number: int, size: int) -> bytes:
    head = f"object {number} ".encode()
    return (head * (size // len(head) + 1))[:size]


class Timer:
    """Durations of one closed loop."""

    def __init__(self, durations_s: list[float], elapsed_s: float, calls: int) -> None:
        ordered = sorted(durations_s) or [0.0]
        self.calls = calls
        self.per_s = calls / elapsed_s
        self.p50_ms = ordered[len(ordered) // 2] * 1000
        self.p99_ms = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000


async def closed_loop(one: OneCall, clients: int, seconds: float) -> Timer:
    durations: list[float] = []
    calls = 0
    started = time.perf_counter()
    end = started + seconds

    async def client() -> None:
        nonlocal calls
        while (begin := time.perf_counter()) < end:
            number, calls = calls, calls + 1
            await one(number)
            durations.append(time.perf_counter() - begin)

    await asyncio.gather(*(client() for _ in range(clients)))
    return Timer(durations, time.perf_counter() - started, calls)


def threaded_loop(one: Callable[[int], None], threads: int, seconds: float) -> Timer:
    durations: list[float] = []
    started = time.perf_counter()
    end = started + seconds

    def client(first: int) -> None:
        number = first
        while (begin := time.perf_counter()) < end:
            one(number)
            durations.append(time.perf_counter() - begin)
            number += threads

    workers = [threading.Thread(target=client, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return Timer(durations, time.perf_counter() - started, len(durations))


async def measure(store: ObjectStore, size: int, clients: int, seconds: float) -> dict[str, Timer]:
    bodies = [payload(i, size) for i in range(64)]

    async def put(number: int) -> None:
        await store.put(f"bench/{number % 16}/{number}", bodies[number % 64])

    results = {"put": await closed_loop(put, clients, seconds)}
    count = results["put"].calls
    source = random.Random(1)

    async def get(number: int) -> None:
        which = source.randrange(count)
        if await store.get(f"bench/{which % 16}/{which}") != bodies[which % 64]:
            raise SystemExit(f"wrong bytes: object={which}")

    async def get_range(number: int) -> None:
        which, start = source.randrange(count), source.randrange(max(1, size - RANGE_BYTES))
        end = min(size, start + RANGE_BYTES)
        if await store.get(f"bench/{which % 16}/{which}", start, end) != bodies[which % 64][start:end]:
            raise SystemExit(f"wrong bytes: object={which} start={start}")

    results["get"] = await closed_loop(get, clients, seconds)
    results["get_range"] = await closed_loop(get_range, clients, seconds)
    seen = 0
    async for meta in store.list("bench/"):
        number = int(meta.key.rpartition("/")[2])
        if await store.get(meta.key) != bodies[number % 64]:
            raise SystemExit(f"wrong bytes at the end: key={meta.key}")
        seen += 1
    if seen != count:
        raise SystemExit(f"objects are missing at the end: put={count} found={seen}")
    return results


def local_limit(root: Path, size: int, seconds: float, threads: int) -> dict[str, Timer]:
    bodies = [payload(i, size) for i in range(64)]
    for i in range(16):
        (root / str(i)).mkdir()

    def put(number: int) -> None:
        temporary, target = f"{root}/t{number}", f"{root}/{number % 16}/{number}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, bodies[number % 64])
        os.fdatasync(fd)
        os.close(fd)
        os.link(temporary, target)
        os.unlink(temporary)
        fd = os.open(f"{root}/{number % 16}", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    results = {"put": threaded_loop(put, threads, seconds)}
    paths = [str(p) for p in root.glob("*/*")]
    source = random.Random(1)

    def read(length: int) -> Callable[[int], None]:
        def one(number: int) -> None:
            start = source.randrange(max(1, size - length)) if length < size else 0
            fd = os.open(paths[source.randrange(len(paths))], os.O_RDONLY)
            os.fstat(fd)
            os.pread(fd, length, start)
            os.close(fd)

        return one

    results["get"] = threaded_loop(read(size), 1, seconds)
    results["get_range"] = threaded_loop(read(RANGE_BYTES), 1, seconds)
    return results


async def s3_limit(plain: Any, size: int, clients: int, seconds: float) -> dict[str, Timer]:
    import obstore

    bodies = [payload(i, size) for i in range(64)]
    source = random.Random(1)

    async def put(number: int) -> None:
        await obstore.put_async(plain, f"plain/{number % 16}/{number}", bodies[number % 64], mode="create")

    results = {"put": await closed_loop(put, clients, seconds)}
    count = results["put"].calls

    def path() -> str:
        which = source.randrange(count)
        return f"plain/{which % 16}/{which}"

    async def get(number: int) -> None:
        bytes(await (await obstore.get_async(plain, path())).bytes_async())

    async def get_range(number: int) -> None:
        start = source.randrange(max(1, size - RANGE_BYTES))
        bytes(await obstore.get_range_async(plain, path(), start=start, end=min(size, start + RANGE_BYTES)))

    results["get"] = await closed_loop(get, clients, seconds)
    results["get_range"] = await closed_loop(get_range, clients, seconds)
    return results


async def memory_limit(size: int, clients: int, seconds: float) -> dict[str, Timer]:
    bodies, kept, source = [payload(i, size) for i in range(64)], {}, random.Random(1)

    async def put(number: int) -> None:
        kept[f"bench/{number % 16}/{number}"] = bytes(bodies[number % 64])

    async def get(number: int) -> None:
        kept[f"bench/{(which := source.randrange(len(kept))) % 16}/{which}"]

    results = {"put": await closed_loop(put, clients, seconds), "get": await closed_loop(get, clients, seconds)}

    async def get_range(number: int) -> None:
        start = source.randrange(max(1, size - RANGE_BYTES))
        kept[f"bench/{(which := source.randrange(len(kept))) % 16}/{which}"][start : start + RANGE_BYTES]

    results["get_range"] = await closed_loop(get_range, clients, seconds)
    return results


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    clock, rand = SystemClock(), Rand()
    size, clients, seconds = options.size, options.clients, options.seconds
    rows: list[dict[str, Any]] = []
    for name in options.stores.split(","):
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            limit: dict[str, Timer]
            if name == "memory":
                limit = await memory_limit(size, clients, seconds)
                store = await open_objects("memory:", clock, rand)
                note = "dict"
            elif name == "local":
                (Path(scratch) / "limit").mkdir()
                limit = local_limit(Path(scratch) / "limit", size, seconds, min(clients, THREADS))
                store = await open_objects(f"{scratch}/objects", clock, rand)
                note = f"raw system calls, {min(clients, THREADS)} threads for put, 1 for reads"
            else:
                store, plain = await moto_store(clock, rand)
                limit = await s3_limit(plain, size, clients, seconds)
                note = "plain obstore on the same server"
            results = await measure(store, size, clients, seconds)
            await store.aclose()
        for operation, result in results.items():
            rows.append(
                {
                    "store": name,
                    "operation": operation,
                    "per_s": round(result.per_s, 1),
                    "p50_ms": round(result.p50_ms, 3),
                    "p99_ms": round(result.p99_ms, 3),
                    "limit_per_s": round(limit[operation].per_s, 1),
                    "ratio": round(result.per_s / limit[operation].per_s, 3),
                    "limit": note,
                    "verified_objects": results["put"].calls,
                }
            )
    return rows


async def moto_store(clock: SystemClock, rand: Rand) -> tuple[ObjectStore, Any]:
    import logging

    import boto3
    from moto.server import ThreadedMotoServer

    from tidemill.objects.buckets.s3 import S3Objects
    from tidemill.objects.retrying import RetryingObjects

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="bench")
    url = f"s3://bench/?endpoint={endpoint}&access_key_id=k&secret_access_key=s"
    store = await open_objects(url, clock, rand)
    for i in range(16):  # the server's first requests cost it imports
        await store.put(f"warm-up/{i}", b"x")
    assert isinstance(store, RetryingObjects) and isinstance(store.inner, S3Objects)
    return store, store.inner.raw_store


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="per store and operation")
    parser.add_argument("--size", type=int, default=16 << 10, help="bytes per object")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--stores", default="memory,local,s3")
    parser.add_argument("--dir", default=None, help="directory on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if options.json:
        print(json.dumps({"machine": machine, "size_bytes": options.size, "clients": options.clients, "rows": rows}))
        return
    print(f"{machine}; {options.size} B objects, {options.clients} clients, {options.seconds} s per cell")
    print(f"{'store':8}{'operation':11}{'per s':>11}{'p50 ms':>9}{'p99 ms':>9}{'limit/s':>11}{'ratio':>7}  limit")
    for row in rows:
        print(
            f"{row['store']:8}{row['operation']:11}{row['per_s']:>11,.0f}{row['p50_ms']:>9.3f}{row['p99_ms']:>9.3f}"
            f"{row['limit_per_s']:>11,.0f}{row['ratio']:>7.2f}  {row['limit']}"
        )
    print(
        "verified: "
        + ", ".join(f"{r['verified_objects']} objects {r['store']}" for r in rows if r["operation"] == "put")
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # moto's threads do not end by themselves
