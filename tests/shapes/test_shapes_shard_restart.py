"""Shapes over shards survive the process that serves them: their clients continue under their handles."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.parse import urlencode

import pyarrow as pa

from support.ports import free_address
from support.shapes.world import Answer, Client, ShapeWorld
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.objects.factory import open_objects
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard, unregister

CHILD = Path(__file__).parents[1] / "support" / "shapes" / "shard_child.py"
KEYED = ShardSchema((Column("id", "int32"), Column("v", "string")), ("id",))
BAG = ShardSchema((Column("id", "int32"), Column("v", "string")), ())
NOW_MS = 1_764_000_000_000

Rows = Sequence[tuple[int, int, int, str]]
"""(time, diff, id, v)"""


class Served:
    """Shards of this process, whose shapes another one serves: `start`, `kill`, `stop`, as often as one likes."""

    def __init__(self, directory: Path) -> None:
        self._stores = f"sqlite:{directory / 'c.db'}", f"file:{directory / 'objects'}"
        self._directory = directory
        self._address = free_address()
        self.cluster = "one"

    async def __aenter__(self) -> Self:
        self._clock, self._rand = SystemClock(), Rand()
        self._objects = await open_objects(self._stores[1], self._clock, self._rand)
        self._consensus = await open_consensus(self._stores[0], self._clock, self._rand)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._child.returncode is None:
            await self.kill()
        await self._consensus.aclose()
        await self._objects.aclose()

    async def shard(self, name: str, schema: ShardSchema) -> LogShard:
        return await open_shard(self._consensus, self._objects, self._clock, self._rand, name, schema)

    async def append(self, shard: LogShard, upper: int, rows: Rows) -> None:
        parts = []
        if rows:
            time, diff, ids, values = zip(*rows, strict=True)
            table = {"id": pa.array(ids, pa.int32()), "v": list(values), TIME: list(time), DIFF: list(diff)}
            parts.append(await shard.write_part(pa.table(table)))
        lower = (await shard.frontiers())[1]
        await shard.compare_and_append(lower, upper, parts, self._rand.nonce())

    async def dropped(self, shard: LogShard) -> None:
        await shard.drop()
        await unregister(self._consensus, self._rand, shard.name, shard.shard_id)

    async def start(self) -> None:
        port = self._address.rpartition(":")[2]
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), *self._stores, str(self._directory / "shapes"), port, self.cluster,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._child.stdout is not None
        while b"ready" not in await self._child.stdout.readline():
            assert self._child.returncode is None

    async def kill(self) -> None:
        self._child.kill()
        await self._child.wait()

    async def stop(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        await self._child.wait()

    async def get(self, **params: str) -> Answer:
        """Repeat the request while the answer is 503 or the server is unreachable, as clients do."""
        while True:
            with suppress(URLError, ConnectionError):
                answer = await ShapeWorld.ask(self, _target(params))  # type: ignore[arg-type]
                if answer.status != 503:
                    return answer
            await asyncio.sleep(0.05)

    def kept(self, handle: str = "%") -> int:
        """Shapes that are there after a kill."""
        path = self._directory / "shapes" / "%shards.db"
        with closing(sqlite3.connect(path)) as file:
            return int(file.execute("SELECT count(*) FROM shapes WHERE handle LIKE ?", (handle,)).fetchone()[0])

    @property
    def server(self) -> Any:
        return self

    @property
    def url(self) -> str:
        return f"http://{self._address}"

    def client(self, **params: str) -> Client:
        return Client(self, params)  # type: ignore[arg-type]


def _target(params: dict[str, str]) -> str:
    return f"/v1/shape?{urlencode(params)}"


def held(client: Client) -> dict[str, str]:
    return {row["id"]: row["v"] for row in client.rows.values()}


async def test_clients_of_a_shard_go_on_under_their_handles_while_the_process_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    """Clients see each item once, at any position in the log, also at a time that was not durable at the kill."""
    rand = random.Random(2)
    async with Served(tmp_path) as served:
        shard, bag = await served.shard("s", KEYED), await served.shard("bag", BAG)
        state = {n: f"v{n}" for n in range(300)}
        await served.append(shard, NOW_MS + 1, [(NOW_MS, 1, n, v) for n, v in state.items()])
        await served.append(bag, NOW_MS + 1, [(NOW_MS, 1, n % 3, "x") for n in range(6)])
        await served.start()
        clients = [
            served.client(table="shard.s"),
            served.client(table="shard.s", where="id < 100", replica="full"),
            served.client(table="shard.s", log="changes_only"),
        ]
        bags = served.client(table="shard.bag")
        for client in (*clients, bags):
            await client.catch_up()
        await until(lambda: served.kept() == 4)
        at = NOW_MS
        for round_ in range(2):
            for step in range(8):
                at += 10
                rows: list[tuple[int, int, int, str]] = []
                for key in rand.sample(range(300), 20):  # more than one answer takes
                    rows += [(at, -1, key, state[key]), (at, 1, key, f"{round_}.{step}")]
                    state[key] = f"{round_}.{step}"
                await served.append(shard, at + 1, rows)
                if step % 3 == round_ % 3:
                    await rand.choice(clients[:2]).step(live=True)
            await served.append(bag, at + 1, [(at, -1, 1, "x")])
            await served.kill()
            await served.start()
        expected = {str(key): value for key, value in state.items()}
        await clients[0].follow_until(lambda: held(clients[0]) == expected)
        await clients[1].follow_until(lambda: held(clients[1]) == {k: v for k, v in expected.items() if int(k) < 100})
        await bags.follow_until(lambda: "1" not in held(bags))
        for table in ("shard.s", "tidemill.s"):
            fresh = served.client(table=table)
            await fresh.catch_up()
            assert held(fresh) == expected
            assert fresh.handle == clients[0].handle, "a newcomer joins the shape that was there"
        for client in (*clients, bags):
            assert client.refetches == 0
            places = [(int(i["headers"].get("lsn", 0)), i["headers"].get("op_position", -1)) for i in client.seen]
            changes = [place for place in places if place[0]]
            assert changes == sorted(set(changes)), "each item once, in order"


async def test_a_shape_that_cannot_go_on_where_it_was_is_409_and_shows_no_stale_row(tmp_path: Path) -> None:
    """Cases: a shard whose later history is merged, a shard that was dropped and re-created, a restored cluster."""

    async def over(served: Served, clients: list[Client], old: list[str]) -> None:
        before = [client.refetches for client in clients]
        for handle, client in zip(old, clients * 2, strict=False):
            table = client.params["table"]
            refused = await served.get(table=table, offset=client.offset, handle=handle)
            assert (refused.status, refused.controls) == (409, ["must-refetch"]), "for ever"
        for client, refetches in zip(clients, before, strict=True):
            await client.follow_until(lambda c=client, n=refetches: c.refetches == n + 1 and held(c) == {"2": "b"})

    async with Served(tmp_path) as served:
        forgets, again = await served.shard("forgets", KEYED), await served.shard("again", KEYED)
        for shard in (forgets, again):
            await served.append(shard, NOW_MS + 1, [(NOW_MS, 1, 1, "a"), (NOW_MS, 1, 2, "b")])
        await served.start()
        clients = [served.client(table="shard.forgets"), served.client(table="shard.again")]
        for client in clients:
            await client.catch_up()
        old = [client.handle for client in clients]
        await until(lambda: served.kept() == 2)
        await served.stop()
        await served.append(forgets, NOW_MS + 100, [(NOW_MS + 50, -1, 1, "a")])
        await forgets.downgrade_since("keeper", 1, NOW_MS + 60)
        await served.dropped(again)
        again = await served.shard("again", KEYED)
        await served.append(again, NOW_MS + 100, [(NOW_MS, 1, 2, "b")])
        await served.start()
        await over(served, clients, old)
        old += [client.handle for client in clients]
        await until(lambda: served.kept() == 2)
        await served.kill()
        served.cluster = "two"
        await served.start()
        await over(served, clients, old)
