"""One writer in a separate process: `CONSENSUS OBJECTS NAME UNTIL MODE`.

It races other writers for every interval [n, n+1) and prints the ones that it won. MODE `race` continues to the end;
`hang` stores one part, reports that, and waits to be killed before it appends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the packages of tests

from support.shards.world import SCHEMA, append, updates
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, UnavailableError
from tidemill.consensus.factory import open_consensus
from tidemill.objects.factory import open_objects
from tidemill.shards.registry import open_shard


async def main(consensus_url: str, objects_url: str, name: str, until: int, mode: str) -> None:
    clock, rand = SystemClock(), Rand()
    objects = await open_objects(objects_url, clock, rand)
    consensus = await open_consensus(consensus_url, clock, rand)
    try:
        shard = await open_shard(consensus, objects, clock, rand, "t", SCHEMA)
        shard.writer = name
        if mode == "hang":
            upper = (await shard.frontiers())[1]
            big = [(1_000_000 + i, f"{name}-{i:0100d}", upper, 1) for i in range(20_000)]
            part = await shard.write_part(updates(big))
            print(f"stored {part.object_key}", flush=True)
            await asyncio.sleep(60)
            await shard.compare_and_append(upper, upper + 1, [part], "")
            return
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        at = (await shard.frontiers())[1]
        while at < until:
            try:
                await append(shard, at, at + 1, [(at, name, at, 1)])
                print(f"won {at}", flush=True)
                at += 1
            except ConflictError as error:
                at = int(str(error.current))
            except UnavailableError:
                await asyncio.sleep(0.05)
    finally:
        await consensus.aclose()
        await objects.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]))
