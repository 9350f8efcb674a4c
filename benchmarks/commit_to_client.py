"""Commit to client: from the return of a Postgres COMMIT to the row in a live shape client, compared with
LISTEN/NOTIFY.

    python benchmarks/commit_to_client.py [--seconds S] [--rate TPS] [--followers N [--apart] [--sse]] [--json]

Method: one connection places orders at the given rate, each transaction also sends NOTIFY with the order's id. One
thread long-polls the shape of all orders, another listens. Both note when they see an order; the latency is that moment
minus the moment COMMIT returned (monotonic clock, one process). NOTIFY is the limit: the server's own push, without a
log, a snapshot or a reconnect. Rows are verified after the run: the client's rows must equal SELECT.

`--followers N` adds N clients in a separate process (followers.py): all of them follow all orders, or (`--apart`) those
of one of twenty districts each, by long polls or (`--sse`) by streams of events. Their figures are over all clients and
the orders that are theirs; that each saw every one of these is verified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg

import paths  # noqa: F401
from demo import shop
from demo.follower import Follower
from harbour import harbour, machine, percentile
from tidemill.base.clock import Rand, SystemClock

DEADLINE_S = 60.0


class Seen:
    """Order id → when it was first seen, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def note(self, order: int) -> None:
        self.at.setdefault(order, time.monotonic())


def listen(dsn: str, seen: Seen, ready: threading.Event, stop: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN bench")
        ready.set()
        while not stop.is_set():
            for notification in connection.notifies(timeout=0.2):
                seen.note(int(notification.payload))


def place_orders(
    dsn: str, seconds: float, rate: float, districts: dict[int, tuple[int, int]] | None = None
) -> dict[int, float]:
    """Order id → when its COMMIT returned. `districts` gets of each its (w_id, d_id)."""
    rand = Rand(3)
    committed: dict[int, float] = {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < seconds:
            if len(committed) > elapsed * rate:
                time.sleep(0.0005)
                continue
            products = sorted({1 + rand.below(shop.PRODUCTS) for _ in range(3)})
            district = (1 + rand.below(2), 1 + rand.below(10))
            row = connection.execute(
                "WITH o AS (SELECT shop_new_order(%s, %s, %s, %s::bigint[]) AS id)"
                " SELECT id, pg_notify('bench', id::text) FROM o",
                (*district, 1 + rand.below(shop.CUSTOMERS), products),
            ).fetchone()
            committed[row[0]] = time.monotonic()
            if districts is not None:
                districts[row[0]] = district
    return committed


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not in time: {what}")
        time.sleep(0.02)


class Crowd:
    """Many clients in a process of their own; `apart`: number n follows the district n modulo 20."""

    def __init__(self, http: str, count: int, apart: bool, how: str) -> None:
        self._count = count
        self._targets: list[tuple[int, int] | None] = (
            [(w, d) for w in (1, 2) for d in range(1, 11)] if apart else [None]
        )
        table = "/v1/shape?table=public.orders"
        urls = [f"{table}&where=w_id={of[0]}%20AND%20d_id={of[1]}" if of else table for of in self._targets]
        command = [
            sys.executable,
            str(Path(__file__).parent / "followers.py"),
            how,
            http,
            str(count),
            r'"o_id":"(\d+)"',
        ]
        self._process = subprocess.Popen([*command, *urls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._process.stdout.readline() != "live\n":
            raise SystemExit("the followers did not come to wait")

    def clients_of(self, district: tuple[int, int]) -> int:
        places = [n for n, of in enumerate(self._targets) if of in (None, district)]
        return sum(len(range(place, self._count, len(self._targets))) for place in places)

    def seen(self, committed: dict[int, float]) -> dict[str, float]:
        self._process.stdin.write(json.dumps(committed) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def measure(
    dsn: str, http: str, seconds: float, rate: float, followers: int = 0, apart: bool = False, how: str = "poll"
) -> dict[str, object]:
    by_client, by_notify = Seen(), Seen()
    client = Follower(
        http, {"table": "public.orders"}, SystemClock(), lambda op, row, _: by_client.note(int(row["o_id"] or 0))
    )
    client.start()
    ready, stop = threading.Event(), threading.Event()
    listener = threading.Thread(target=listen, args=(dsn, by_notify, ready, stop))
    listener.start()
    ready.wait()
    warm = place_orders(dsn, 3, rate)
    wait_for(lambda: warm.keys() <= by_client.at.keys() or len(client.rows) >= len(warm), "the shape is live")
    crowd = Crowd(http, followers, apart, how) if followers else None
    districts: dict[int, tuple[int, int]] = {}
    committed = place_orders(dsn, seconds, rate, districts)
    wait_for(lambda: committed.keys() <= by_client.at.keys(), "every order at the client")
    wait_for(lambda: committed.keys() <= by_notify.at.keys(), "every notification")
    stop.set()
    listener.join()
    reported: dict[str, float] = {}
    if crowd is not None:
        expected_seen = sum(crowd.clients_of(districts[order]) for order in committed)
        wait_for(lambda: crowd.seen(committed)["seen"] >= expected_seen, "every order at every follower")
        reported = crowd.seen(committed)
        crowd.stop()
        if reported["seen"] != expected_seen:
            raise SystemExit(f"followers saw what is not theirs: seen={reported['seen']} expected={expected_seen}")
    with psycopg.connect(dsn) as connection:
        expected = {str(i): str(t) for i, t in connection.execute("SELECT o_id, total FROM orders").fetchall()}
    got = {row["o_id"]: row["total"] for row in client.rows.values()}
    client.stop()
    if got != expected:
        raise SystemExit(f"the client's rows differ from SELECT: client={len(got)} select={len(expected)}")
    result: dict[str, object] = {"orders": len(committed), "rows_verified": len(expected)}
    for name, seen in (("client", by_client), ("notify", by_notify)):
        latencies = [(seen.at[order] - at) * 1000 for order, at in committed.items()]
        result[name] = {"p50_ms": round(percentile(latencies, 0.5), 2), "p99_ms": round(percentile(latencies, 0.99), 2)}
    if reported:
        result |= {"followers": reported, "answers": reported["answers"]}
    result["added_p50_ms"] = round(result["client"]["p50_ms"] - result["notify"]["p50_ms"], 2)
    return result


async def run(args: argparse.Namespace) -> dict[str, object]:
    async with harbour(pipeline=False) as environment:
        host, _, port = environment.config.node.http.rpartition(":")
        await asyncio.to_thread(wait_for, lambda: answers(host, int(port)), "the node answers")
        return await asyncio.to_thread(
            measure,
            environment.dsn,
            environment.config.node.http,
            args.seconds,
            args.rate,
            args.followers,
            args.apart,
            "sse" if args.sse else "poll",
        )


def answers(host: str, port: int) -> bool:
    import socket

    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--followers", type=int, default=0, metavar="N")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--sse", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(run(args))
    if args.json:
        print(json.dumps(result))
        return
    print(f"commit_to_client   {machine()}")
    print(f"{result['orders']} orders at {args.rate:g}/s; rows verified: {result['rows_verified']}")
    if "followers" in result:
        print(f"followers: {args.followers}; orders seen by them, verified: {result['followers']['seen']}")
    for name in [name for name in ("client", "followers", "notify") if name in result]:
        print(f"  {name:9} p50 {result[name]['p50_ms']:8} ms   p99 {result[name]['p99_ms']:8} ms")
    worst = result.get("followers", result["client"])
    print(f"  ratio to NOTIFY at p99: {worst['p99_ms'] / result['notify']['p99_ms']:.1f}x")
    print(f"  added to NOTIFY at p50: {result['added_p50_ms']} ms")


if __name__ == "__main__":
    main()
