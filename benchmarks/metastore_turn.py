"""One engine in one process: it does the steps it reads from standard input, a line of JSON each, and answers alike.

    python benchmarks/metastore_turn.py ENGINE COUNT FOLDER

A step's rows are made before its time begins and compared after it ends. An answer holds `n` (calls or rows),
`s` (wall seconds), `cpu_s` (processor seconds of the whole process) and what else the step found.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metastore_engines import directory_bytes, make
from metastore_rows import GROUP, RowDigest, Versions, absent, batches, group_prefix, key, outside, shuffled, value

BATCH = 1000


class Watch:
    """Wall and processor time of a `with` block."""

    def __enter__(self) -> Watch:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.s, self.cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def result(self, n: int, **more: Any) -> dict[str, Any]:
        return {"n": n, "s": self.s, "cpu_s": self.cpu_s, **more}


class Ticker:
    """The longest time between two turns of the event loop: on the wall, and in processor time of its thread.

    A gap on the wall alone is another process that had the core; one in processor time is our own.
    """

    def __init__(self, period_s: float = 0.001) -> None:
        self._period_s = period_s
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.get_running_loop().create_task(self._run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(2 * self._period_s)
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(self._period_s)
            self.wall_ms.append((time.perf_counter() - wall - self._period_s) * 1000)
            self.cpu_ms.append((time.thread_time() - cpu) * 1000)

    def facts(self) -> dict[str, Any]:
        wall, cpu = sorted(self.wall_ms), sorted(self.cpu_ms)
        return {
            "turns": len(wall),
            "stall_ms": round(wall[-1], 1),
            "stall_cpu_ms": round(cpu[-1], 1),
            "stall_p99_ms": round(wall[len(wall) * 99 // 100], 1),
            "over_20_ms": sum(gap > 20 for gap in wall),
            "cpu_over_20_ms": sum(gap > 20 for gap in cpu),
        }


class Turn:
    def __init__(self, name: str, count: int, folder: Path) -> None:
        self.name, self.count, self.folder = name, count, folder
        self.engine = make(name)
        self.versions = Versions(count)
        self._random = random.Random(5)
        self._slow = 10 if name == "slatedb" else 1  # its calls take some 70 µs each: fewer give the same rate

    async def do(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        gc.collect()  # what earlier steps left behind is not this step's
        result: dict[str, Any] = await getattr(self, step)(**arguments)
        return result

    # life ----------------------------------------------------------------------------------------

    async def open(self, buffer_bytes: int, cache_bytes: int) -> dict[str, Any]:
        self._sizes = buffer_bytes, cache_bytes
        async with Ticker() as ticker:
            with Watch() as watch:
                await self.engine.open(self.folder / self.name, *self._sizes)
        return watch.result(1, **ticker.facts())

    async def reopen(self) -> dict[str, Any]:
        await self.engine.close()
        self.engine = make(self.name)
        return await self.open(*self._sizes)

    async def close(self) -> dict[str, Any]:
        await self.engine.close()
        return {}

    async def facts(self) -> dict[str, Any]:
        with open("/proc/self/io") as io:
            written = int(io.read().split("wchar:")[1].split()[0])
        facts = {"disk_bytes": directory_bytes(self.folder / self.name), "process_written_bytes": written}
        return {**facts, **self.engine.facts()}

    # writes --------------------------------------------------------------------------------------

    async def put_batch(self, start: int, end: int, version: int) -> dict[str, Any]:
        made = list(batches(shuffled(self.count, start, end), version, BATCH))
        put = self.engine.put_batch
        with Watch() as watch:
            for keys, values in made:
                await put(keys, values)
        self.versions.wrote(start, end, version)
        return watch.result(end - start)

    async def put_each(self, start: int, end: int, version: int) -> dict[str, Any]:
        end = start + (end - start) // self._slow
        made = list(batches(shuffled(self.count, start, end), version, end - start))
        with Watch() as watch:
            for keys, values in made:
                await self.engine.put_each(keys, values)
        self.versions.wrote(start, end, version)
        return watch.result(end - start)

    async def flush(self) -> dict[str, Any]:
        async with Ticker() as ticker:
            with Watch() as watch:
                await self.engine.flush()
        return watch.result(self.count, **ticker.facts())

    async def compact(self, rows: int) -> dict[str, Any]:
        async with Ticker() as ticker:
            with Watch() as watch:
                await self.engine.compact()
        return watch.result(rows, **ticker.facts())

    async def settle(self) -> dict[str, Any]:
        with Watch() as watch:
            await self.engine.settle()
        return watch.result(1)

    async def load(self) -> dict[str, Any]:
        """Load all rows in generated batches, with every flush and merge that they cause, until no work is left.

        The time of generating rows is subtracted: none of our code runs during it, but RocksDB's threads do.
        """
        made_s = 0.0
        rows = batches(shuffled(self.count), 0, BATCH)
        async with Ticker() as ticker:
            with Watch() as watch:
                while True:
                    started = time.perf_counter()
                    batch = next(rows, None)
                    made_s += time.perf_counter() - started
                    if batch is None:
                        break
                    await asyncio.sleep(0)
                    await self.engine.put_batch(*batch)
                    await asyncio.sleep(0)
                await self.engine.flush()
            with Watch() as rest:
                await self.engine.settle()
        return watch.result(self.count, settle_s=rest.s, loaded_s=watch.s - made_s, **ticker.facts())

    # reads ---------------------------------------------------------------------------------------

    async def get_hot(self, calls: int) -> dict[str, Any]:
        rows = self._hot(calls)
        await self.engine.get_each([key(row) for row in set(rows)])
        return await self._get(rows, self.engine.get_each)

    async def peek_hot(self, calls: int) -> dict[str, Any]:
        rows = self._hot(calls)
        await self.engine.get_each([key(row) for row in set(rows)])

        async def peek(keys: list[bytes]) -> list[Any]:
            return self.engine.peek_each(keys)  # type: ignore[attr-defined]

        return await self._get(rows, peek)

    async def get_spread(self, calls: int) -> dict[str, Any]:
        return await self._get(self._anywhere(calls), self.engine.get_each)

    async def get_cold(self, calls: int) -> dict[str, Any]:
        """Get rows after a fresh open. Object reads are counted one get at a time, after another open."""
        rows = self._anywhere(calls // self._slow)
        result = await self._get(rows, self.engine.get_each)
        if not hasattr(self.engine, "reads"):
            return result
        await self.reopen()
        most, first = 0, self.engine.reads
        for row in rows:
            before = self.engine.reads
            await self.engine.get_each([key(row)])
            most = max(most, self.engine.reads - before)
        return {**result, "reads_max": most, "reads_mean": round((self.engine.reads - first) / len(rows), 3)}

    async def get_missing(self, calls: int) -> dict[str, Any]:
        return await self._miss([absent(row) for row in self._anywhere(calls // self._slow)])

    async def get_outside(self, calls: int) -> dict[str, Any]:
        return await self._miss([outside(row) for row in self._anywhere(calls // self._slow)])

    async def scan(self) -> dict[str, Any]:
        with Watch() as watch:
            total = await self.engine.walk()
        if total != self.count * len(value(0, 0)):
            raise SystemExit(f"{self.name}: a full scan saw {total} bytes of values, not those of {self.count} rows")
        return watch.result(self.count)

    async def prefix(self, calls: int) -> dict[str, Any]:
        return await self._prefix(self._anywhere(calls // self._slow))

    async def prefix_hot(self, calls: int) -> dict[str, Any]:
        rows = self._hot(calls)
        await self._prefix(rows)
        return await self._prefix(rows)

    async def _prefix(self, rows: Sequence[int]) -> dict[str, Any]:
        groups = [row // GROUP for row in rows if row // GROUP < self.count // GROUP]
        prefixes = [group_prefix(group * GROUP) for group in groups]
        prefix = self.engine.prefix
        with Watch() as watch:
            found = [await prefix(one) for one in prefixes]
        for group, (keys, values) in zip(groups, found, strict=True):
            here = range(group * GROUP, (group + 1) * GROUP)
            if list(keys) != [key(row) for row in here] or list(values) != [self.versions.value(row) for row in here]:
                raise SystemExit(f"{self.name}: wrong rows under prefix {group_prefix(group * GROUP)!r}")
        return watch.result(len(groups))

    async def verify(self) -> dict[str, Any]:
        """Every row by a digest over a full scan, and 2,000 of them by get."""
        seen = RowDigest()
        async for keys, values in self.engine.scan():
            seen.add(keys, values)
        if seen.text() != self.versions.digest():
            raise SystemExit(f"{self.name}: the rows are not those that were written: {seen.text()}")
        await self._get(self._anywhere(min(2000, self.count)), self.engine.get_each)
        return {"verified_rows": seen.rows}

    def _hot(self, calls: int) -> list[int]:
        """Return indexes in the order of a shuffle, from 20,000 neighbouring rows."""
        width = min(20_000, self.count)
        first = (self.count - width) // 3
        return [first + self._random.randrange(width) for _ in range(calls // self._slow)]

    def _anywhere(self, calls: int) -> list[int]:
        return [self._random.randrange(self.count) for _ in range(calls)]

    async def _get(self, rows: Sequence[int], get: Any) -> dict[str, Any]:
        keys = [key(row) for row in rows]
        with Watch() as watch:
            found = await get(keys)
        if found != [self.versions.value(row) for row in rows]:
            raise SystemExit(f"{self.name}: a get returned a wrong value")
        return watch.result(len(rows))

    async def _miss(self, keys: list[bytes]) -> dict[str, Any]:
        await self.engine.get_each(keys[:1000])
        with Watch() as watch:
            found = await self.engine.get_each(keys)
        if found != [None] * len(keys):
            raise SystemExit(f"{self.name}: a key that was never written has a value")
        return watch.result(len(keys))


async def serve(turn: Turn) -> None:
    # The loop does not run between steps: an engine's threads continue, its tasks do not.
    for line in sys.stdin:
        step, arguments = json.loads(line)
        answer = await turn.do(step, arguments)
        print(json.dumps(answer), flush=True)


def main() -> None:
    name, count, folder = sys.argv[1:]
    turn = Turn(name, int(count), Path(folder))
    os.set_inheritable(1, False)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    asyncio.run(serve(turn))


if __name__ == "__main__":
    main()
