"""Faults of every store under a small load, one after another: each is told under its own name on `/readyz`, by `why`
and by `status`, within the time that the product promises."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import confluent_kafka as ck
import psycopg
import pytest
from faulty_stores import FaultyPostgres, FaultyS3

from patience import DEADLINE_S, SCALE, eventually
from tidemill.base.config import parse
from tidemill.base.errors import TidemillError
from tidemill.cli.demo.ports import free_address
from tidemill.cli.status import status
from tidemill.cli.why import why
from tidemill.console.app import console_routes
from tidemill.node.assembly import Node
from tidemill.objects import durable
from tidemill.objects.durable import RealSyscalls

PROMISED_S = 5.0 * max(1.0, SCALE)
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
    """What a command prints, run in this process while `PRINTED` is standard output."""
    PRINTED.take()
    try:
        command(*arguments)
    except SystemExit:
        pass
    except TidemillError as error:
        PRINTED.write(str(error))
    return PRINTED.take()


class Served:
    """A node on a thread of its own, asked as its operator asks."""

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

    def told(self, mark: str, words: str, *, ready: int | None) -> dict[str, float]:
        """Seconds until each way of asking names the fault; `ready`: the status of /readyz, None = either."""

        def readyz() -> str:
            code, body = self.get("/readyz")
            return body if ready in (None, code) else ""

        places: dict[str, Callable[[], str]] = {
            "/readyz": readyz,
            "why": lambda: asked(why, mark, self.path),
            "status": lambda: asked(status, self.path, False, False, False, True),
        }
        began_s = time.monotonic()
        last: dict[str, str] = {}

        def first(place: str) -> float:
            def names() -> bool:
                last[place] = places[place]()
                return words in last[place]

            eventually(names, lambda: f"{place}: {last}")
            return time.monotonic() - began_s

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


@dataclass
class Remote:
    """A node over S3 and two PostgreSQL databases, each behind a proxy."""

    world: World
    served: Served
    s3: FaultyS3
    consensus: FaultyPostgres
    captured: FaultyPostgres


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


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory, postgres_server: Any) -> Iterator[Remote]:
    import boto3
    from moto.server import ThreadedMotoServer

    directory = tmp_path_factory.mktemp("remote")
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE faults_consensus")
        connection.execute("CREATE DATABASE faults_captured")
    with psycopg.connect(postgres_server.dsn_for("faults_captured"), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id serial PRIMARY KEY)")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **keys).create_bucket(
        Bucket="faults"
    )
    world = World()

    async def proxies() -> tuple[FaultyS3, FaultyPostgres, FaultyPostgres]:
        return (
            await FaultyS3(f"http://{host}:{port}").__aenter__(),
            await FaultyPostgres(postgres_server.dsn_for("faults_consensus")).__aenter__(),
            await FaultyPostgres(postgres_server.dsn_for("faults_captured")).__aenter__(),
        )

    s3, consensus, captured = world.run(proxies())
    served = Served(
        directory,
        {
            "objects": {"url": f"s3://faults?endpoint={s3.endpoint}&access_key_id=k&secret_access_key=s"},
            "consensus": {"url": consensus.dsn},
            "capture": {"shop": {"dsn": captured.dsn, "tables": ["public.t"]}},
            "topics": {"clicks": {"partitions": 1}},
        },
    )
    try:
        with running(served, world, postgres_server.dsn_for("faults_captured")):
            yield Remote(world, served, s3, consensus, captured)
    finally:
        for proxy in (s3, consensus, captured):
            world.run(proxy.__aexit__())
        world.close()
        moto.stop()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A node over a directory and SQLite."""
    directory, world = tmp_path_factory.mktemp("local"), World()
    stores = {"objects": {"url": f"file://{directory}/objects"}, "consensus": {"url": f"sqlite://{directory}/c.db"}}
    served = Served(directory, {**stores, "topics": {"clicks": {"partitions": 1}}})
    try:
        with running(served, world):
            yield served
    finally:
        world.close()


@pytest.mark.parametrize(
    ("code", "inodes_left", "words"),
    [
        (errno.ENOSPC, 100, "found no space"),
        (errno.ENOSPC, 0, "found no free inode"),
        (errno.EMFILE, 100, "error=EMFILE"),
    ],
)
def test_f616_a_directory_that_takes_no_file_is_named_everywhere_in_time(
    local: Served, monkeypatch: pytest.MonkeyPatch, code: int, inodes_left: int, words: str
) -> None:
    def refuse(self: RealSyscalls, path: str) -> int:
        raise OSError(code, os.strerror(code), path)

    local.well()
    with monkeypatch.context() as broken:
        broken.setattr(RealSyscalls, "create", refuse)
        broken.setattr(durable, "_without_inodes", lambda root: not inodes_left)
        seen = local.told("objects@node:n1", words, ready=503)
        local.answers_in_time()
    assert max(seen.values()) < PROMISED_S, seen


@pytest.mark.parametrize(
    ("store", "fault", "mark", "words", "ready"),
    [
        ("s3", "500", "objects@node:n1", "status=500 code=InternalError", 503),
        ("s3", "503", "objects@node:n1", "status=503 code=SlowDown", 503),
        ("s3", "404", "objects@node:n1", "status=404 code=NoSuchKey", 503),
        ("s3", "hang", "objects@node:n1", "The object store does not answer", 503),
        ("consensus", "refused", "consensus@node:n1", "PostgreSQL", 503),
        ("consensus", "swallowed", "consensus@node:n1", "not answer", 503),
        ("consensus", "slow", "consensus@node:n1", "not answer", 503),
        ("captured", "refused", "capture:shop", "PostgreSQL", 200),
        ("captured", "swallowed", "capture:shop", "PostgreSQL does not answer", 200),
        ("captured", "slow", "capture:shop", "PostgreSQL does not answer", 200),
    ],
)
def test_f615_a_fault_of_a_store_under_load_is_named_everywhere_in_time(
    remote: Remote, store: str, fault: str, mark: str, words: str, ready: int
) -> None:
    named_in_time(remote, store, fault, mark, words, ready)


def test_f617_a_gateway_that_answers_412_after_its_own_success_is_a_notice_everywhere_in_time(remote: Remote) -> None:
    named_in_time(remote, "s3", "412", "objects@node:n1", "status=412", 200)


def named_in_time(remote: Remote, store: str, fault: str, mark: str, words: str, ready: int) -> None:
    served, proxy = remote.served, getattr(remote, store)
    served.well()
    remote.world.call(lambda: proxy.switch(fault))
    try:
        seen = served.told(mark, words, ready=ready)
        served.answers_in_time()
    finally:
        remote.world.call(lambda: proxy.switch(""))
        remote.world.run(proxy.cut())
    assert max(seen.values()) < PROMISED_S, seen
