"""`python -m demo.load`: the shop's transactions at a steady rate until SIGTERM.

The process prints one JSON line per second ({"transactions": n, "errors": n}) and one at the end. It is separate from
tidemill's processes, so that killing those does not affect the source.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

import psycopg

from demo import shop
from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.runtime.tasks import Tasks

CONNECTIONS = 4


class Load:
    def __init__(self, dsn: str, rate: float, rand: Rand, clock: Clock) -> None:
        self._dsn = dsn
        self._rate = rate
        self._rand = rand
        self._clock = clock
        self._stopping = asyncio.Event()
        self.transactions = 0
        self.errors = 0

    def stop(self) -> None:
        self._stopping.set()

    def _lost(self, name: str, error: BaseException) -> None:
        """End the load, since fewer connections than requested would be another load."""
        print(f"{name}: {error!r}", file=sys.stderr)
        self.errors += 1
        self._stopping.set()

    async def run(self) -> None:
        """Run an open loop: the clock makes work due, so a slow database causes a backlog and not a lower rate."""
        due: asyncio.Queue[tuple[str, tuple[object, ...]]] = asyncio.Queue(maxsize=1000)
        async with Tasks(self._lost) as tasks:
            for number in range(CONNECTIONS):
                tasks.spawn(self._worker(due), name=f"load-{number}")
            started_s = self._clock.monotonic_s()
            made = 0
            printed_s = started_s
            while not self._stopping.is_set():
                elapsed_s = self._clock.monotonic_s() - started_s
                while made < elapsed_s * self._rate and not due.full():
                    due.put_nowait(shop.next_transaction(self._rand))
                    made += 1
                if self._clock.monotonic_s() - printed_s >= 1:
                    printed_s += 1
                    self._print()
                await asyncio.sleep(0.01)
            await due.join()
        self._print()

    async def _worker(self, due: asyncio.Queue[tuple[str, tuple[object, ...]]]) -> None:
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as connection:
            while True:
                statement, parameters = await due.get()
                try:
                    await connection.execute(statement, parameters)
                    self.transactions += 1
                except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                    self.errors += 1
                finally:
                    due.task_done()

    def _print(self) -> None:
        print(json.dumps({"transactions": self.transactions, "errors": self.errors}), flush=True)


async def _main(dsn: str, rate: float, seed: int) -> None:
    load = Load(dsn, rate, Rand(seed), SystemClock())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, load.stop)
    await load.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--rate", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(_main(options.dsn, options.rate, options.seed))


if __name__ == "__main__":
    main()
