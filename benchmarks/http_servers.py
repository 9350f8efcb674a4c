"""HTTP servers compared with the application of a node: granian, which the node uses, and uvicorn.

    small       CPU time per GET of a shape that is up to date, with and without TLS
    large       CPU time per GET of about 1 MiB of a shape's log, with and without TLS
    streams     CPU time per event at N event streams
    polls       memory per long poll that is held open, and CPU time per poll that one change answers

Each measurement starts a server process with an empty node of shapes: no PostgreSQL, changes are handed to the tap.
Clients are other processes or this one. Only the CPU time of the server process counts (utime and stime of
/proc/PID/stat, all threads), because other work shares the machine. The servers take turns within each round, and the
ratio of a round compares the turns of that round. Every response is checked: its status, its length, its rows. Long
polls and streams do not time out during a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from harbour import machine

SERVERS = ("granian", "httptools", "h11")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CLIENTS = 8
ROWS_PER_FRAGMENT = 500
LARGE_BYTES = 1 << 20
STEP = 200
"""Connections that are opened together; the backlog of a server holds more."""
DEADLINE_S = 300.0
TARGET = "/v1/shape?table=t"


# --- the server process ---------------------------------------------------------------------------------------------


async def serve(name: str, certificates: str) -> None:
    """Serve shapes. A line on standard input is a number of changes and the rows of each."""
    from starlette.applications import Starlette

    from shapes_live import empty_service, fragment
    from tidemill.base.config.listeners import TlsSection
    from tidemill.node.http.limits import HttpLimits, LimitsMiddleware
    from tidemill.node.http.server import HttpServer
    from tidemill.shapes import shape_routes
    from tidemill.shapes.settings import ShapeSettings

    raise_descriptor_limit()
    settings = ShapeSettings(max_initial=100_000, max_existing=100_000, long_poll_s=600, sse_s=600)
    service, sink = empty_service(settings)
    while sink.restoring:
        await asyncio.sleep(0.01)
    app = Starlette(routes=list(shape_routes(service)))

    class Limits(HttpLimits):
        """Limits without HTTP's share of the descriptors, so that 20,000 are enough for 10,000 connections."""

        def connection_limit(self) -> int:
            return self.connections

    limits = Limits(connections=100_000, per_address=100_000, address_connections=100_000, header_timeout_s=600)
    pair = (f"{certificates}/server.pem", f"{certificates}/server.key") if certificates else None
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        if name == "granian":
            tls = TlsSection(certificate=pair[0], key=pair[1]) if pair else None
            server = HttpServer(app, on_failure=print, limits=limits, tls=tls)
            port = await server.start()
            stack.push_async_callback(server.aclose)
        else:
            port = await stack.enter_async_context(uvicorn_server(name, LimitsMiddleware(app, limits), pair))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        print(port, flush=True)
        ended = asyncio.ensure_future(stop.wait())
        number = 0
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while not ended.done():
            line = asyncio.ensure_future(lines.readline())
            await asyncio.wait({line, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done() or not line.result():
                break
            count, rows = map(int, line.result().split())
            for _ in range(count):
                sink.process_fragment(fragment(number, 1 << 40, rows))
                number += 1
                await asyncio.sleep(0.01)
        await service.aclose()


@asynccontextmanager
async def uvicorn_server(parser: str, app: Any, pair: tuple[str, str] | None) -> AsyncIterator[int]:
    """Serve with uvicorn in this loop, by public interfaces only."""
    import socket

    import uvicorn

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=parser, loop="asyncio", ws="none", lifespan="off", interface="asgi3", access_log=False,
        log_level="error", proxy_headers=False, server_header=False, backlog=1024, timeout_keep_alive=600,
        timeout_graceful_shutdown=1, ssl_certfile=pair and pair[0], ssl_keyfile=pair and pair[1],
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started:
        if serving.done():
            await serving
        await asyncio.sleep(0.01)
    try:
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=10)


def raise_descriptor_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# --- the clients ----------------------------------------------------------------------------------------------------


class Served:
    """A server process, as its clients and its measurements see it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, context: ssl.SSLContext | None) -> None:
        self._process = process
        self.port = port
        self.context = context

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

    async def change(self, count: int, rows: int = 1) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count} {rows}\n".encode())
        await self._process.stdin.drain()

    async def settle(self) -> None:
        """Return when the server has been idle for half a second."""
        before = -1.0
        while (now := self.cpu_s()) - before > 0.02:
            before = now
            await asyncio.sleep(0.5)


@asynccontextmanager
async def started(name: str, certificates: str = "") -> AsyncIterator[Served]:
    command = [sys.executable, __file__, "--serve", name, "--certificates", certificates]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
        context = ssl.create_default_context(cafile=f"{certificates}/ca.pem") if certificates else None
        yield Served(process, int(line), context)
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


class Client:
    """One connection that requests the shape and remembers its place in the log."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.query = "&offset=-1"
        self.rows = 0

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self._served.port, ssl=self._served.context, limit=1 << 20
        )

    async def send(self, query: str) -> dict[str, str]:
        """Send a request; return the headers of its response. Raises SystemExit for any status but 200."""
        self.writer.write(f"GET {TARGET}{query} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.split("\r\n")
        if " 200 " not in status:
            raise SystemExit(f"{status}: {lines}")
        return dict(line.lower().split(": ", 1) for line in lines if ": " in line)

    async def get(self, query: str) -> bytes:
        """Return the body of a response, and move on in the log."""
        headers = await self.send(query)
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
        self.query = f"&handle={headers['electric-handle']}&offset={headers['electric-offset']}"
        self.rows += body.count(b'"value"')
        return body

    async def follow(self, rows: int) -> None:
        """Read an event stream until it has brought `rows` rows."""
        await self.send(f"{self.query}&live=true&live_sse=true")
        left = b""
        while self.rows < rows:
            some = await self.reader.read(1 << 18)
            if not some:
                raise SystemExit("an event stream ended")
            left += some
            self.rows += left.count(b'"value"')
            left = left[-6:] if not left.endswith(b'"value"') else b""


async def open_clients(served: Served, count: int) -> list[Client]:
    """Return clients that have read the whole shape."""
    clients = [Client(served) for _ in range(count)]
    for first in range(0, count, STEP):
        await asyncio.gather(*(client.connect() for client in clients[first : first + STEP]))
        await asyncio.gather(*(client.get(client.query) for client in clients[first : first + STEP]))
    return clients


# --- the measurements -----------------------------------------------------------------------------------------------


async def measure_requests(served: Served, count: int, *, large: bool) -> dict[str, float]:
    clients = await open_clients(served, 1)
    query = clients[0].query
    if large:
        await served.change(LARGE_BYTES // (ROWS_PER_FRAGMENT * 128), ROWS_PER_FRAGMENT)
        await served.settle()
    clients += await open_clients(served, CLIENTS - 1)
    expected = len(await clients[0].get(query))
    if large and expected < LARGE_BYTES // 2:
        raise SystemExit(f"the large response is too small: bytes={expected}")

    async def ask(client: Client) -> None:
        for _ in range(count // CLIENTS):
            body = await client.get(query)
            if len(body) != expected:
                raise SystemExit(f"a response has another length: bytes={len(body)} expected={expected}")

    await asyncio.gather(*(ask(client) for client in clients[:1]))  # warm
    before = served.cpu_s()
    await asyncio.gather(*(ask(client) for client in clients))
    done = count // CLIENTS * CLIENTS
    return {"cpu_us": (served.cpu_s() - before) / done * 1e6, "bytes": expected, "verified": done}


async def measure_streams(served: Served, count: int, changes: int) -> dict[str, float]:
    clients = await open_clients(served, count)
    following = [asyncio.ensure_future(client.follow(changes)) for client in clients]
    await asyncio.sleep(1)
    await served.settle()
    before = served.cpu_s()
    await served.change(changes)
    await asyncio.wait_for(asyncio.gather(*following), DEADLINE_S)
    return {"cpu_us": (served.cpu_s() - before) / (count * changes) * 1e6, "verified": count * changes}


async def measure_polls(served: Served, count: int) -> dict[str, float]:
    await open_clients(served, CLIENTS)  # modules and the shape are there
    await served.settle()
    before_bytes = served.resident_bytes()
    clients: list[Client] = []
    polls: list[asyncio.Future[bytes]] = []
    for first in range(0, count, STEP):
        some = await open_clients(served, min(STEP, count - first))
        clients += some
        polls += [asyncio.ensure_future(client.get(f"{client.query}&live=true")) for client in some]
    await asyncio.sleep(1)
    await served.settle()
    grown_bytes, before = served.resident_bytes() - before_bytes, served.cpu_s()
    if any(poll.done() for poll in polls):
        raise SystemExit("a long poll was answered before the change")
    await served.change(1)
    await asyncio.wait_for(asyncio.gather(*polls), DEADLINE_S)
    cpu_s = served.cpu_s() - before
    if any(client.rows != 1 for client in clients):
        raise SystemExit("a long poll did not bring the row")
    return {"kib_each": grown_bytes / count / 1024, "cpu_us": cpu_s / count * 1e6, "verified": count}


Measurement = Callable[[Served], Any]


def measurements(args: argparse.Namespace) -> dict[str, Measurement]:
    def of_requests(count: int, large: bool) -> Measurement:
        return lambda served: measure_requests(served, count, large=large)

    def of_polls(count: int) -> Measurement:
        return lambda served: measure_polls(served, count)

    return {
        "small": of_requests(args.requests, False),
        "small/tls": of_requests(args.requests, False),
        "large": of_requests(args.requests // 20, True),
        "large/tls": of_requests(args.requests // 20, True),
        "streams": lambda served: measure_streams(served, args.streams, args.changes),
        "streams/tls": lambda served: measure_streams(served, args.streams, args.changes),
        "polls": of_polls(args.polls),
        "polls/tls": of_polls(args.tls_polls),
    }


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    from support.kafka.security import Authority

    raise_descriptor_limit()
    known = measurements(args)
    chosen = [name for name in known if not args.lanes or name in args.lanes.split(",")]
    servers = args.servers.split(",")
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="http-servers-") as directory:
        Authority(Path(directory)).tls()
        for _ in range(args.rounds):
            for lane in chosen:
                for server in servers:
                    async with started(server, directory if lane.endswith("/tls") else "") as served:
                        found.setdefault((lane, server), []).append(await known[lane](served))
                    if not args.json:
                        print(f"  {lane:12} {server:10} {found[lane, server][-1]}", flush=True)
                servers.append(servers.pop(0))  # the first turn is another server's each time
    return [summary(lane, server, found) for lane in chosen for server in sorted(servers, key=args.servers.index)]


def summary(lane: str, server: str, found: dict[tuple[str, str], list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians over the rounds, and the median of the ratios to granian's turn in the same round."""
    rounds, base = found[lane, server], found.get((lane, "granian"), [])
    out: dict[str, Any] = {"lane": lane, "server": server, "verified": sum(one["verified"] for one in rounds)}
    for name in rounds[0]:
        if name != "verified":
            out[name] = round(statistics.median(one[name] for one in rounds), 1)
        if name in ("cpu_us", "kib_each") and base:
            ratios = [one[name] / max(other[name], 0.01) for one, other in zip(rounds, base, strict=True)]
            out[f"{name}_ratio"] = round(statistics.median(ratios), 2)
            out[f"{name}_ratios"] = [round(ratio, 2) for ratio in ratios]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--lanes", default="", help="all of them unless named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--polls", type=int, default=10_000)
    parser.add_argument("--tls-polls", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--certificates", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.certificates))
        return
    if strange := set(args.servers.split(",")) - set(SERVERS):
        parser.error(f"--servers knows {', '.join(SERVERS)}, not {', '.join(strange)}")
    began_s = time.monotonic()
    if not args.json:
        print(f"http_servers   {machine()}", flush=True)
    found = asyncio.run(run(args))
    if args.json:
        print(json.dumps(found))
        return
    for each in found:
        print("  ".join(f"{name} {value}" for name, value in each.items()))
    print(f"{args.rounds} rounds in turns, {time.monotonic() - began_s:.0f} s, every response verified")


if __name__ == "__main__":
    main()
