"""The source of `./dev bench versus`: PostgreSQL with Harbour Shop, its load generator, and a probe row every 0.5 s.

The probe inserts rows into an eighth table, and a reader in a separate process reports when each becomes visible.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pyarrow as pa

import paths
from demo import shop
from demo.postgres import Postgres
from tidemill.base.clock import Rand
from versus_stack import TABLES, stop_process

PROBE_EVERY_S = 0.5
CREATE_PROBE = "CREATE TABLE probe (id bigint PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp())"


class Shop:
    """A started server with the shop and an empty table `probe`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = Postgres(directory)
        self._server.start()
        with psycopg.connect(self._server.dsn_for("postgres"), autocommit=True) as connection:
            connection.execute("CREATE DATABASE shop")
        self.dsn = self._server.dsn_for("shop")
        shop.create(self.dsn, Rand(7))
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(CREATE_PROBE)
        self.transactions = 0
        """Number of transactions of the load that runs or ran last."""
        self._load: subprocess.Popen[str] | None = None

    def start_load(self, rate: float, seed: int) -> None:
        command = [sys.executable, "-m", "demo.load", "--dsn", self.dsn, "--rate", str(rate), "--seed", str(seed)]
        self._load = subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._count, args=(self._load,), daemon=True).start()

    def _count(self, load: subprocess.Popen[str]) -> None:
        assert load.stdout is not None
        for line in load.stdout:
            self.transactions = json.loads(line)["transactions"]

    def check(self) -> None:
        """Raise RuntimeError if the load ended."""
        if self._load is not None and self._load.poll() is not None:
            raise RuntimeError(f"the load generator ended: code={self._load.returncode}")

    def stop_load(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            stop_process(load)  # type: ignore[arg-type]

    def roots(self) -> dict[int, str]:
        found = {int((self._directory / "postmaster.pid").read_text().split("\n", 1)[0]): "postgres"}
        return found | ({self._load.pid: "load"} if self._load is not None else {})

    def contents(self) -> dict[str, pa.Table]:
        """Return SELECT of every table, in one transaction."""
        found = {}
        with psycopg.connect(self.dsn) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            for table in TABLES:
                cursor = connection.execute(f"SELECT * FROM {table}")
                assert cursor.description is not None
                names = [column.name for column in cursor.description]
                rows = cursor.fetchall()
                found[table] = pa.table({name: [row[at] for row in rows] for at, name in enumerate(names)})
        return found

    def close(self) -> None:
        self.stop_load()
        self._server.stop()


class Probe:
    """Inserts a row every half second, and records when each was committed and when the reader saw it, in s of the
    machine's clock.
    """

    def __init__(self, dsn: str, reader: Sequence[str], log: Path) -> None:
        self.sent: dict[int, float] = {}
        self.seen: dict[int, float] = {}
        self.failed: BaseException | None = None
        self._dsn = dsn
        self._log = log
        self._inserting = threading.Lock()
        self._stopping = threading.Event()
        with log.open("ab") as errors:
            self._reader = subprocess.Popen(reader, stdout=subprocess.PIPE, stderr=errors, cwd=paths.ROOT)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._insert, self._read)]
        for thread in self._threads:
            thread.start()

    def roots(self) -> dict[int, str]:
        return {self._reader.pid: "reader"}

    def check(self) -> None:
        """Raise the error of the inserting thread, or RuntimeError if the reader ended."""
        if self.failed is not None:
            raise self.failed
        if self._reader.poll() is not None:
            raise RuntimeError(f"the reader ended: log={self._log.read_text()[-2_000:]}")

    def waiting_s(self) -> float:
        """Return the age of the oldest row that was not seen; 0 if all were."""
        unseen = [at_s for each, at_s in list(self.sent.items()) if each not in self.seen]
        return time.time() - min(unseen) if unseen else 0.0

    def all_seen(self, until_s: float) -> bool:
        """Return whether every row that was committed before this time was seen."""
        return all(each in self.seen for each, at_s in list(self.sent.items()) if at_s < until_s)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Insert no row inside the context."""
        with self._inserting:
            yield

    def stop(self) -> None:
        self._stopping.set()
        self._threads[0].join()
        stop_process(self._reader)
        self._threads[1].join()

    def _insert(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                number = 0
                while not self._stopping.wait(PROBE_EVERY_S):
                    with self._inserting:
                        connection.execute("INSERT INTO probe (id) VALUES (%s)", (number,))
                        self.sent[number] = time.time()
                    number += 1
        except psycopg.Error as error:
            self.failed = error

    def _read(self) -> None:
        assert self._reader.stdout is not None
        for line in self._reader.stdout:
            found = json.loads(line)
            self.seen.setdefault(found["id"], found["at_s"])
