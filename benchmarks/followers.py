"""Many clients of one shape in one process, as raw as can be: what `commit_to_client --followers N` starts.

    python followers.py poll|sse HOST:PORT N PATTERN TARGET…

Each opens a connection, reads the initial rows, and long-polls or follows the stream of events from then on; they take
the targets in turns. A line `live` on standard output once all wait, and one for each line on standard input, which is
{value: seconds}: how many of these values of PATTERN's group all of them saw together, in how many answers, and
percentiles of (seen − seconds) over all, in ms of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

from harbour import percentile

AT_ONCE = 200
SEEN = re.compile(rb'"global_last_seen_lsn":"(\d+)"')


class Follower:
    def __init__(self, how: str, address: str, target: str, pattern: re.Pattern[bytes]) -> None:
        self.streams = how == "sse"
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.target = target
        self.pattern = pattern
        self.seen: dict[int, float] = {}
        self.live = False
        self.requests = 0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        handle, offset, cursor = "", "-1", ""
        while True:
            where = f"{self.target}&offset={offset}" + (f"&handle={handle}" if handle else "")
            where += f"&live=true&cursor={cursor}" if self.live else ""
            where += "&live_sse=true" if self.live and self.streams else ""
            writer.write(f"GET {where} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
            self.requests += 1
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *lines = head.split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
            if headers.get("content-type", "").startswith("text/event-stream"):
                offset = await self._events(reader) or offset
                continue
            body = await _body(reader, headers)
            if " 200 " not in status:
                if " 503 " not in status:
                    raise SystemExit(f"{status} {body[:300]!r}")
                await asyncio.sleep(0.2)
                continue
            now_s = time.monotonic()
            if self.live:
                for found in self.pattern.finditer(body):
                    self.seen.setdefault(int(found[1]), now_s)
            handle, offset = headers["electric-handle"], headers["electric-offset"]
            cursor = headers.get("electric-cursor", cursor)
            self.live = self.live or "electric-up-to-date" in headers

    async def _events(self, reader: asyncio.StreamReader) -> str:
        """Read until the server ends the stream; return the offset to continue with, if there were changes.

        An event may arrive in two parts.
        """
        left, seen_lsn = b"", b""
        while not left.endswith(b"\r\n0\r\n\r\n"):
            some = await reader.read(1 << 18)
            if not some:
                raise SystemExit("the server closed a stream in the middle")
            now_s = time.monotonic()
            self.requests += 1
            left += some
            for found in self.pattern.finditer(left):
                self.seen.setdefault(int(found[1]), now_s)
            seen_lsn = (SEEN.findall(left) or [seen_lsn])[-1]
            left = left[max(left.rfind(b"data: "), 0) :] if not left.endswith(b"\n\n\r\n") else b""
        return f"{seen_lsn.decode()}_0" if seen_lsn else ""


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


async def main(how: str, address: str, count: str, pattern: str, *targets: str) -> None:
    matches = re.compile(pattern.encode())
    clients = [Follower(how, address, targets[n % len(targets)], matches) for n in range(int(count))]
    tasks = []
    for first in range(0, len(clients), AT_ONCE):  # no more than the server's backlog holds
        some = clients[first : first + AT_ONCE]
        tasks += [asyncio.create_task(client.run()) for client in some]
        while not all(client.live for client in some):
            await asyncio.sleep(0.01)
            for task in tasks[first:]:
                if task.done():
                    task.result()
    await asyncio.sleep(0.5)
    print("live", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        committed = {int(value): at_s for value, at_s in json.loads(line).items()}
        ms = [(c.seen[value] - at_s) * 1000 for c in clients for value, at_s in committed.items() if value in c.seen]
        found = {"seen": len(ms), "answers": sum(client.requests for client in clients)}
        if ms:
            found |= {"p50_ms": round(percentile(ms, 0.5), 2), "p99_ms": round(percentile(ms, 0.99), 2)}
        print(json.dumps(found), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
