"""A node on a thread, under a load, asked as its operator asks: by `/readyz`, `why` and `status`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import confluent_kafka as ck
import psycopg

from support.ports import free_address
from support.waiting import DEADLINE_S, SCALE, eventually
from tidemill.base.config.config import parse
from tidemill.base.errors import TidemillError
from tidemill.cli.cluster.status import status
from tidemill.cli.cluster.why import why
from tidemill.cli.output.output import JSON
from tidemill.console.app import console_routes
from tidemill.node.node import Node

PROMISED_S = 5.0 * max(1.0, SCALE)
"""Seconds within which a fault is named, on an idle machine: multiply it by `slowness`."""
ENDPOINT_S = 3.0 * max(1.0, SCALE)
"""An HTTP path that reads the status board answers within two seconds, on a machine that runs other tests as well."""


class Printed(io.TextIOBase):
    """Standard output, apart for each thread: commands run side by side."""

    def __init__(self) -> None:
        self._of = threading.local()

    def write(self, text: str) -> int:
        self._of.text = getattr(self._of, "text", "") + text
        return len(text)

    def take(self) -> str:
        text, self._of.text = getattr(self._of, "text", ""), ""
        return " ".join(text.split())


PRINTED = Printed()


def asked(command: Callable[..., None], *arguments: Any) -> str:
    """Return the output of a command that runs in this process while `PRINTED` is standard output."""
    PRINTED.take()
    try:
        command(*arguments)
    except SystemExit:
        pass
    except TidemillError as error:
        PRINTED.write(str(error))
    return PRINTED.take()


class Served:
    """A node on a separate thread, queried as its operator queries it."""

    def __init__(self, directory: Path, sections: dict[str, Any]) -> None:
        self.http, self.kafka = free_address(), free_address()
        node = {"name": "n1", "data": str(directory / "data"), "http": self.http, "kafka": self.kafka}
        sections = {"node": node, **sections}
        self.path = directory / "tidemill.toml"
        self.path.write_text(_toml(sections))
        self.node = Node(parse(sections, origin=""), console_routes)
        self._loaded = threading.Event()

    async def run(self, stop: asyncio.Event) -> None:
        await self.node.run(stop)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://{self.http}{path}", timeout=DEADLINE_S) as answer:
                return int(answer.status), answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def well(self) -> None:
        eventually(lambda: self.get("/readyz") == (200, "ready\n"), lambda: self.get("/readyz"))

    def load(self, dsn: str = "") -> None:
        """A record, and a row in a captured database, every 50 ms until `unload`."""
        producer = ck.Producer({"bootstrap.servers": self.kafka, "log_level": 0, "linger.ms": 0,
                                "queue.buffering.max.messages": 100_000})  # fmt: skip

        def produce() -> None:
            rows = psycopg.connect(dsn, autocommit=True) if dsn else None
            while not self._loaded.wait(0.05):
                if rows is not None:
                    rows.execute("INSERT INTO t DEFAULT VALUES")
                with contextlib.suppress(BufferError):
                    producer.produce("clicks", os.urandom(200))
                producer.poll(0)
            if rows is not None:
                rows.close()
            producer.purge()
            producer.poll(0)

        self._thread = threading.Thread(target=produce)
        self._thread.start()

    def unload(self) -> None:
        self._loaded.set()
        self._thread.join(DEADLINE_S)

    def answers_in_time(self) -> None:
        def took_s(path: str) -> float:
            began_s = time.monotonic()
            self.get(path)
            return time.monotonic() - began_s

        paths = ("/readyz", "/freshz", "/metrics", "/api/status")
        with ThreadPoolExecutor(len(paths)) as pool:
            found = dict(zip(paths, pool.map(took_s, paths), strict=True))
        assert max(found.values()) < ENDPOINT_S, found

    def reported(self, mark: str, words: str, *, ready: int | None) -> dict[str, float]:
        """Seconds until each way of asking names the fault; `ready`: the status of /readyz, None = either."""
        return {place: s for place, (s, _) in named(self.get, self.path, mark, words, ready=ready).items()}


def named(
    get: Callable[[str], tuple[int, str]],
    config: Path,
    mark: str,
    words: str,
    *,
    ready: int | None = None,
    since_s: float | None = None,
    within_s: float = DEADLINE_S,
) -> dict[str, tuple[float, str]]:
    """Return, for each way of asking, the seconds from `since_s` (now) until its answer has `words`, and that
    answer.

    `why` and `status` run in this process, so that Python's start is not counted. Raises AssertionError.
    """

    def readyz() -> str:
        code, body = get("/readyz")
        return body if ready in (None, code) else ""

    places: dict[str, Callable[[], str]] = {
        "/readyz": readyz,
        "why": lambda: asked(why, mark, config),
        "status": lambda: asked(partial(status, config, out=JSON)),
    }
    began_s = time.monotonic() if since_s is None else since_s
    last: dict[str, str] = {}

    def first(place: str) -> tuple[float, str]:
        def names() -> bool:
            last[place] = places[place]()
            return words in last[place]

        eventually(names, lambda: f"{place}: {last}", within_s)
        return time.monotonic() - began_s, last[place]

    with contextlib.redirect_stdout(PRINTED), ThreadPoolExecutor(len(places)) as pool:  # type: ignore[type-var]
        return dict(zip(places, pool.map(first, places), strict=True))


def _toml(sections: dict[str, Any], prefix: str = "") -> str:
    lines: list[str] = []
    for name, value in sections.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{name}]", _toml(value, f"{prefix}{name}.")]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines)


class World:
    """The loop of the node and its proxies, on a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(function)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()


@contextlib.contextmanager
def running(served: Served, world: World, dsn: str = "") -> Iterator[None]:
    stop = asyncio.Event()
    ended = asyncio.run_coroutine_threadsafe(served.run(stop), world.loop)
    try:
        eventually(lambda: ended.done() or served.get("/readyz")[0] == 200, lambda: served.get("/readyz"))
        assert not ended.done(), ended.exception()
        served.load(dsn)
        try:
            yield
        finally:
            served.unload()
    finally:
        world.call(stop.set)
        ended.result(DEADLINE_S)
