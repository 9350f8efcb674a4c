"""Benchmark of `shapes.py --polls N`: N long polls of one shape at one node, over HTTP, from a separate process.

    resident    growth of the node's process when all of them wait
    idle        of a core, while they wait: each is answered and asks again every 20 s
    woken       from one change to the last client that has it

No PostgreSQL: the catalogue's answer for the table is given, changes are handed to the tap. Afterwards every client has
seen every change.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from starlette.applications import Starlette

from http_servers import raise_descriptor_limit
from shapes_live import MIB, empty_service, fragment
from tidemill.base.runtime.memory_budget import resident_bytes
from tidemill.node.http.limits import HttpLimits
from tidemill.node.http.server import HttpServer
from tidemill.shapes import shape_routes
from tidemill.shapes.settings import ShapeSettings

CHANGES = 3
IDLE_S = 20.0


async def measure(count: int) -> dict[str, float]:
    raise_descriptor_limit()
    settings = ShapeSettings(max_initial=count + 1, max_existing=count + 1)
    service, sink = empty_service(settings)
    limits = HttpLimits(connections=2 * count + 100, per_address=2 * count, address_connections=2 * count)
    server = HttpServer(Starlette(routes=list(shape_routes(service))), on_failure=print, limits=limits)
    await server.start()
    before = resident_bytes()
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).parent / "followers.py"), "poll", f"127.0.0.1:{server.port}", str(count),
        r'"value":\{"id":"(\d+)"', "/v1/shape?table=t", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    if await child.stdout.readline() != b"live\n":
        raise SystemExit("the clients did not come to wait")
    grown = resident_bytes() - before
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(IDLE_S)
    idle = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
    woken: list[float] = []
    committed: dict[int, float] = {}
    for number in range(CHANGES):
        change = fragment(number, 1 << 40, 1)
        key = int(change.changes[0].new["id"])
        committed[key] = time.monotonic()
        sink.process_fragment(change)
        woken.append(await _seen_by_all(child, {key: committed[key]}, count))
    result = await _ask(child, committed)
    child.stdin.close()
    await child.wait()
    await service.aclose()
    await server.aclose()
    return {
        "grown_mib": grown / MIB,
        "kib_each": grown / 1024 / count,
        "idle_percent": idle * 100,
        "p50_ms": result["p50_ms"],
        "p99_ms": result["p99_ms"],
        "all_woken_ms": sorted(woken)[CHANGES // 2] * 1000,
        "seen_verified": result["seen"],
    }


async def _seen_by_all(child: asyncio.subprocess.Process, change: dict[int, float], count: int) -> float:
    (at_s,) = change.values()
    while (await _ask(child, change))["seen"] < count:
        if time.monotonic() - at_s > 120:
            raise SystemExit("not in time: a change at every client")
        await asyncio.sleep(0.02)
    return time.monotonic() - at_s


async def _ask(child: asyncio.subprocess.Process, committed: dict[int, float]) -> dict[str, float]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps(committed).encode() + b"\n")
    return json.loads(await child.stdout.readline())
