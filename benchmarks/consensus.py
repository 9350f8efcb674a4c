"""Consensus: compare-and-set and log appends per second, each compared with a limit measured in the same run.

    python benchmarks/consensus.py [--seconds S] [--size BYTES] [--clients 1,64] [--backends memory,sqlite,postgres]
                                   [--dir DIR] [--json]

Method: `clients` coroutines of one process call in a closed loop for S seconds, each on a separate register or log,
every call acknowledged durable (SQLite synchronous=FULL, PostgreSQL with fsync). The limit is the same rows through the
bare library on the same disk, half of it measured before and half after:

    memory           a coroutine that yields to the loop once per call
    sqlite, 1        apsw, one INSERT per transaction
    sqlite, n        apsw, n INSERTs per transaction, in a plain loop
    postgres, 1      psycopg, one INSERT per transaction, one connection
    postgres, n      psycopg, n INSERTs between two syncs of one pipeline (one commit)

After each run every record and register is read back and compared with what was acknowledged. `fdatasync` is the rate
of 4 KiB overwrites with fdatasync in the same directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import psycopg

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus

NONCE = "0123456789abcdef" * 2


class Result:
    def __init__(self, durations_s: list[float], elapsed_s: float) -> None:
        ordered = sorted(durations_s) or [0.0]
        self.calls = len(durations_s)
        self.per_s = self.calls / elapsed_s
        self.p50_ms = ordered[len(ordered) // 2] * 1000
        self.p99_ms = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000
        self.max_ms = ordered[-1] * 1000


def payload(client: int, number: int, size: int) -> bytes:
    return f"{client}.{number}.".encode().ljust(size, b"x")


async def closed_loop(
    one: Callable[[int, int], Awaitable[object]], clients: int, seconds: float
) -> tuple[Result, list[int]]:
    durations: list[float] = []
    counts = [0] * clients
    started = time.perf_counter()
    end = started + seconds

    async def client(number: int) -> None:
        while (begin := time.perf_counter()) < end:
            await one(number, counts[number])
            counts[number] += 1
            durations.append(time.perf_counter() - begin)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return Result(durations, time.perf_counter() - started), counts


async def measure(consensus: Consensus, operation: str, clients: int, size: int, seconds: float) -> Result:
    prefix = f"bench/{operation}/{clients}/"

    async def append(client: int, number: int) -> None:
        await consensus.append(f"{prefix}{client}", 0, number, [payload(client, number, size)], NONCE)

    async def cas(client: int, number: int) -> None:
        await consensus.cas(f"{prefix}{client}", number, payload(client, number, size), NONCE)

    result, counts = await closed_loop(append if operation == "append" else cas, clients, seconds)
    for client, count in enumerate(counts):
        if operation == "append":
            number = 0
            while number < count:
                for record in (await consensus.read(f"{prefix}{client}", number)).records:
                    if (record.position, record.data) != (number, payload(client, number, size)):
                        raise SystemExit(f"wrong record: log={prefix}{client} position={number}")
                    number += 1
            if (await consensus.log_head(f"{prefix}{client}")).next != count:
                raise SystemExit(f"records too many: log={prefix}{client} acknowledged={count}")
        else:
            version = await consensus.head(f"{prefix}{client}")
            if count and (version is None or (version.seq, version.data) != (count, payload(client, count - 1, size))):
                raise SystemExit(f"wrong register: key={prefix}{client} acknowledged={count}")
    return result


# limits ------------------------------------------------------------------------------------------


async def memory_limit(clients: int, size: int, seconds: float) -> float:
    async def one(client: int, number: int) -> None:
        await asyncio.sleep(0)

    return (await closed_loop(one, clients, seconds))[0].per_s


def sqlite_limit(folder: Path, clients: int, size: int, seconds: float) -> float:
    connection = apsw.Connection(str(folder / f"limit-{time.monotonic_ns()}.db"))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, nonce TEXT, data BLOB)")
    data = payload(0, 0, size)
    rows = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO rows (nonce, data) VALUES (?, ?)", [(NONCE, data)] * clients)
        connection.execute("COMMIT")
        rows += clients
    elapsed = time.perf_counter() - started
    connection.close()
    return rows / elapsed


async def postgres_limit(dsn: str, clients: int, size: int, seconds: float) -> float:
    connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=0)
    await connection.execute("CREATE TABLE IF NOT EXISTS limit_rows (id bigserial PRIMARY KEY, nonce text, data bytea)")
    data = payload(0, 0, size)
    rows = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        async with connection.pipeline():
            for _ in range(clients):
                await connection.execute("INSERT INTO limit_rows (nonce, data) VALUES (%b, %b)", (NONCE, data))
        rows += clients
    elapsed = time.perf_counter() - started
    await connection.close()
    return rows / elapsed


def fdatasync_rate(folder: Path, seconds: float) -> float:
    fd = os.open(folder / "fdatasync", os.O_RDWR | os.O_CREAT)
    page = os.urandom(4096)
    os.pwrite(fd, page * 256, 0)
    os.fsync(fd)
    count = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        os.pwrite(fd, page, 4096 * (count % 256))
        os.fdatasync(fd)
        count += 1
    elapsed = time.perf_counter() - started
    os.close(fd)
    return count / elapsed


# the run -----------------------------------------------------------------------------------------

Limit = Callable[[int, int, float], Awaitable[float]]


@asynccontextmanager
async def engine(name: str, folder: Path) -> AsyncIterator[tuple[str, Limit]]:
    """The URL to open, and the limit of the same engine."""
    if name == "memory":
        yield "memory:", memory_limit
    elif name == "sqlite":

        async def limit(clients: int, size: int, seconds: float) -> float:
            return sqlite_limit(folder, clients, size, seconds)

        yield f"sqlite://{folder}/consensus.db", limit
    else:
        import paths  # noqa: F401
        from support.postgres import EmbeddedPostgres

        folder.chmod(0o755)
        with EmbeddedPostgres(folder / "postgres", settings={"synchronous_commit": "on", "fsync": "on"}) as server:

            async def limit(clients: int, size: int, seconds: float) -> float:
                return await postgres_limit(server.dsn, clients, size, seconds)

            yield server.dsn, limit


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for backend in options.backends.split(","):
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            folder = Path(scratch)
            folder.chmod(0o755)
            async with engine(backend, folder) as (url, limit):
                consensus = await open_consensus(url, SystemClock(), Rand())
                for clients in map(int, options.clients.split(",")):
                    for operation in ("cas", "append"):
                        part = max(0.2, options.seconds / 4)
                        before = await limit(clients, options.size, part)
                        result = await measure(consensus, operation, clients, options.size, options.seconds)
                        bound = (before + await limit(clients, options.size, part)) / 2
                        rows.append(
                            {
                                "backend": backend,
                                "operation": operation,
                                "clients": clients,
                                "per_s": round(result.per_s, 1),
                                "p50_ms": round(result.p50_ms, 3),
                                "p99_ms": round(result.p99_ms, 3),
                                "max_ms": round(result.max_ms, 1),
                                "limit_per_s": round(bound, 1),
                                "ratio": round(result.per_s / bound, 3),
                                "verified_rows": result.calls,
                            }
                        )
                await consensus.aclose()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="per backend, operation and number of clients")
    parser.add_argument("--size", type=int, default=512, help="bytes per record or register")
    parser.add_argument("--clients", default="1,64")
    parser.add_argument("--backends", default="memory,sqlite,postgres")
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
        "size_bytes": options.size,
        "fdatasync_per_s": round(synced, 1),
    }
    rows = asyncio.run(run(options))
    if options.json:
        print(json.dumps({"benchmark": "consensus", "machine": machine, "rows": rows}))
        return
    print(__doc__)
    print("machine: " + " ".join(f"{key}={value}" for key, value in machine.items()))
    columns = list(rows[0])
    widths = [max(len(column), *(len(str(row[column])) for row in rows)) for column in columns]
    for line in [columns, *[[str(row[column]) for column in columns] for row in rows]]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
