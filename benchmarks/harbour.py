"""Shared parts of the end-to-end benchmarks: Harbour Shop on a temporary directory, its processes, and percentiles."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import paths  # noqa: F401
from demo.environment import Environment, prepare
from support.ports import free_port
from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.errors import MissingError
from tidemill.consensus.api import Consensus
from tidemill.node.supervise.processes import start_all
from tidemill.objects.store import ObjectStore
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard


def machine() -> str:
    """Describe the machine with its current load, of the last minute and the last five."""
    load = "load {:.1f} {:.1f}".format(*os.getloadavg())
    cores = f"{os.cpu_count()} cores, {load}"
    return f"{cores}, Python {platform.python_version()}, {platform.system()} {platform.release()}"


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Nearest rank; samples must not be empty."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


async def open_created(
    consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, name: str, until_s: float
) -> LogShard:
    """Open a shard that a driver creates. Raises MissingError if it does not exist at `until_s` (time.monotonic)."""
    while True:
        try:
            return await open_shard(consensus, objects, clock, rand, name)
        except MissingError:
            if time.monotonic() > until_s:
                raise
        await asyncio.sleep(0.05)


@asynccontextmanager
async def harbour(*, pipeline: bool) -> AsyncIterator[Environment]:
    """The shop with its node, and with the Spark driver when asked; everything ends with the context."""
    with tempfile.TemporaryDirectory(prefix="harbour-") as directory:
        http, kafka = (f"127.0.0.1:{free_port()}" for _ in range(2))
        environment = prepare(Path(directory) / "demo", http=http, kafka=kafka, fresh=True)
        failed: list[BaseException] = []
        config = environment.config if pipeline else environment.config.model_copy(update={"pipeline": {}})
        supervisor = start_all(config, SystemClock(), failed.append)
        try:
            yield environment
            if failed:
                raise failed[0]
        finally:
            await supervisor.stop()
            await asyncio.to_thread(environment.postgres.stop)
