"""Serve shapes over shards in a separate process, which a test kills: `CONSENSUS OBJECTS DIRECTORY PORT CLUSTER`.

Answers contain at most a few bytes of a base, so that clients are in the middle of it when the process dies.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.factory import open_consensus
from tidemill.node.http.server import HttpServer
from tidemill.objects.factory import open_objects
from tidemill.shapes import LogLimits, ShapeService, ShapeSettings, shape_routes
from tidemill.shards.registry import open_shard


async def main(consensus_url: str, objects_url: str, directory: str, port: int, cluster: str) -> None:
    clock, rand = SystemClock(), Rand()
    objects = await open_objects(objects_url, clock, rand)
    consensus = await open_consensus(consensus_url, clock, rand)
    settings = ShapeSettings(long_poll_s=1.0, directory=Path(directory), limits=LogLimits(chunk_bytes=2_000))
    service = ShapeService(clock, rand, StatusTracker(), settings)

    async def opener(name: str) -> Any:
        return await open_shard(consensus, objects, clock, rand, name)

    async def named() -> str:
        return cluster

    service.add_shards(opener, named)
    server = HttpServer(Starlette(routes=list(shape_routes(service))), port=port, on_failure=lambda *_: None)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await server.aclose()
    await service.aclose()
    await consensus.aclose()
    await objects.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]))
