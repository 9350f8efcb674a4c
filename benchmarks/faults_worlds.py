"""Clusters for `faults`: two nodes over S3 and PostgreSQL, or one node over a directory and SQLite, under load."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS)]

import confluent_kafka as ck  # noqa: E402
import psycopg  # noqa: E402

from support.capture.standbys import primary, standby  # noqa: E402
from support.faults.cluster import Cluster, until  # noqa: E402
from support.faults.faulty_stores import FaultyPostgres, FaultyS3  # noqa: E402
from support.faults.served import World  # noqa: E402
from support.ports import free_port  # noqa: E402
from support.postgres import EmbeddedPostgres  # noqa: E402

TOPIC = "clicks"
KEYS = "access_key_id=k&secret_access_key=s"
PAUSE_S = 0.1
SOON = {"reconnect.backoff.max.ms": 200, "retry.backoff.ms": 50, "retry.backoff.max.ms": 200}
"""Resume the load as soon as a fault ends: the default back-off of the producer is up to ten seconds."""


class Leading(FaultyPostgres):
    """Leads to another server from one moment on, as an address that a failover moves does."""

    def lead_to(self, dsn: str) -> None:
        from urllib.parse import urlsplit

        self._parts = urlsplit(dsn)
        for task in list(self._tasks):
            task.cancel()


class Load:
    """A record of 200 bytes and a row in each database, ten times a second each."""

    def __init__(self, kafka: list[str], dsns: list[str]) -> None:
        self._over = threading.Event()
        self.dsns = dsns
        self._threads = [threading.Thread(target=self._produce, args=(kafka,), daemon=True)]
        self._threads += [threading.Thread(target=self._insert, args=(n,), daemon=True) for n in range(len(dsns))]
        for thread in self._threads:
            thread.start()

    def _produce(self, kafka: list[str]) -> None:
        producer = ck.Producer({"bootstrap.servers": ",".join(kafka), "log_level": 0, "linger.ms": 0, **SOON})
        while not self._over.wait(PAUSE_S):
            with contextlib.suppress(BufferError):
                producer.produce(TOPIC, os.urandom(200))
            producer.poll(0)
        producer.purge()
        producer.poll(0)

    def _insert(self, number: int) -> None:
        while not self._over.wait(PAUSE_S):
            with contextlib.suppress(psycopg.Error), psycopg.connect(self.dsns[number], autocommit=True) as rows:
                while not self._over.wait(PAUSE_S):
                    rows.execute("INSERT INTO t DEFAULT VALUES")

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)


class Remote:
    """Nodes n1 and n2; captures `shop` (a proxy before it), `kept` and `lost` (a standby behind each)."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.world = World()
        stack.callback(self.world.close)
        moto = free_port()
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(moto)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(server.wait)
        stack.callback(server.kill)
        self.server = stack.enter_context(EmbeddedPostgres(directory / "stores", settings={"fsync": "off"}))
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            for name in ("consensus", "shop"):
                connection.execute(f"CREATE DATABASE {name}")
        self.primaries: dict[str, EmbeddedPostgres] = {}
        self.standbys: dict[str, EmbeddedPostgres] = {}
        for name in ("kept", "lost"):
            (directory / name).mkdir()
            made = stack.enter_context(primary(directory / name, wal_sender_timeout="5s"))
            follower = standby(made, directory / name, f"standby_{name}", sync_replication_slots="on")
            # At the end it asks its primary, which a failover has stopped.
            stack.enter_context(contextlib.suppress(psycopg.Error))
            self.primaries[name] = made
            self.standbys[name] = stack.enter_context(follower)
        self.dsns = {"shop": self.server.dsn_for("shop"), **{n: p.dsn for n, p in self.primaries.items()}}
        for dsn in self.dsns.values():
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("CREATE TABLE t (id serial PRIMARY KEY)")
        self.proxies: dict[str, Any] = {
            "s3": FaultyS3(f"http://127.0.0.1:{moto}"),
            "consensus": FaultyPostgres(self.server.dsn_for("consensus")),
            **{name: Leading(dsn) for name, dsn in self.dsns.items()},
        }
        for proxy in self.proxies.values():
            self.world.run(proxy.__aenter__())
            stack.callback(lambda proxy=proxy: self.world.run(proxy.__aexit__()))
        until(lambda: _bucket(moto))
        captures = "".join(
            f'[capture.{name}]\ndsn = "{self.proxies[name].dsn}"\nfailover = {str(name != "shop").lower()}\n'
            for name in self.dsns
        )
        toml = (
            f'[objects]\nurl = "s3://faults?endpoint={self.proxies["s3"].endpoint}&{KEYS}"\n'
            f'[consensus]\nurl = "{self.proxies["consensus"].dsn}"\n[topics.{TOPIC}]\npartitions = 4\n{captures}'
        )
        self.nodes = [_up(stack, Cluster(directory / name, toml, name=name)) for name in ("n1", "n2")]
        for each in self.nodes:
            each.ready()
        self.load = Load([each.kafka for each in self.nodes], list(self.dsns.values()))
        stack.callback(self.load.end)
        until(lambda: all(self.nodes[0].state(f"capture:{name}") in ("idle", "moving") for name in self.dsns))

    @contextmanager
    def switched(self, proxy: str, fault: str) -> Iterator[None]:
        at = self.proxies[proxy]
        self.world.call(lambda: at.switch(fault))
        try:
            yield
        finally:
            self.world.call(lambda: at.switch(""))
            self.world.run(at.cut())

    def holder_of(self, capture: str) -> Cluster:
        """The node that captures it: `/readyz` of that one names what it fails with."""
        process = self.nodes[0].marks().get(f"capture:{capture}", {}).get("process", "")
        return next((each for each in self.nodes if process == f"node:{each.name}"), self.nodes[0])

    def anywhere(self, path: str) -> tuple[int, str]:
        """The answers of both nodes: a capture may move to the other node while its database is away."""
        found = [each.get(path) for each in self.nodes]
        return max(code for code, _ in found), "".join(body for _, body in found)

    def in_step(self, capture: str) -> None:
        """The standby has what was captured until now, and the capture's slot."""
        made = self.standbys[capture]
        with psycopg.connect(self.primaries[capture].dsn, autocommit=True) as here:
            [lsn] = here.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("0/0",)

            def holds() -> bool:
                with psycopg.connect(made.dsn, autocommit=True) as there:
                    found = there.execute(
                        "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn AND EXISTS (SELECT FROM pg_replication_slots"
                        " WHERE slot_name = %s AND NOT temporary)",
                        (lsn, f"tidemill_{capture}"),
                    ).fetchone()
                if found != (True,):
                    here.execute("SELECT pg_log_standby_snapshot()")
                return found == (True,)

            until(holds, lambda: f"the standby of {capture} is in step")

    def well(self) -> None:
        until(
            lambda: all(each.get("/readyz") == (200, "ready\n") for each in self.nodes),
            lambda: [each.get("/readyz") for each in self.nodes],
        )


def _bucket(port: int) -> bool:
    with contextlib.suppress(URLError, OSError):
        urlopen(Request(f"http://127.0.0.1:{port}/faults", method="PUT"), timeout=5).close()
        return True
    return False


def _up(stack: ExitStack, cluster: Cluster) -> Cluster:
    cluster.up()
    stack.callback(cluster.close)
    return cluster


class Local:
    """Node n1 over `objects`, if given a directory with a separate file system, and SQLite."""

    def __init__(self, stack: ExitStack, directory: Path, objects: Path | None = None) -> None:
        self.objects = objects or directory / "objects"
        toml = (
            f'[objects]\nurl = "file://{self.objects}"\n[topics.{TOPIC}]\npartitions = 1\n'
            "[metastore]\npersist_interval_s = 1\ncheckpoint_interval_s = 1\nalive_interval_s = 0.5\n"
        )
        self.node = _up(stack, Cluster(directory / "n1", toml, name="n1"))
        self.node.ready()
        self.load = Load([self.node.kafka], [])
        stack.callback(self.load.end)

    def well(self) -> None:
        until(lambda: self.node.get("/readyz") == (200, "ready\n"), lambda: self.node.get("/readyz"))


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system of 256 MiB and 4,000 inodes. Raises PermissionError without the right to mount one."""
    directory.mkdir(parents=True)
    options = "size=256m,nr_inodes=4000"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", directory], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=False)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += [int(child) for child in Path(f"/proc/{each}/task/{each}/children").read_text().split()]
    return found


def pause() -> None:
    """Wait until the notices of the previous fault have ended: they are shown for ten seconds."""
    time.sleep(0.5)
