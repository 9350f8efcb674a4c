"""Shapes on a node that is killed: the stock client continues under its handle and fetches nothing again."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.faults.cluster import Cluster, cluster, until
from support.faults.restarts import capture_of, kept, restarted
from support.waiting import DEADLINE_S

CLIENTS = Path(__file__).parents[1] / "clients"

pytestmark = [pytest.mark.node, pytest.mark.postgres]

SCHEMA = """CREATE TABLE item (id int PRIMARY KEY, grp int NOT NULL, note text);
INSERT INTO item SELECT n, n % 3, 'first' FROM generate_series(1, 300) n"""


class Follower:
    """The npm client in its own process; `last` is its most recent output."""

    def __init__(self, url: str, params: dict[str, str], mode: str = "") -> None:
        if shutil.which("node") is None or not (CLIENTS / "node_modules/@electric-sql/client").is_dir():
            pytest.skip("needs node and the packages of tests/clients: tests/clients/install")
        command = ["node", str(CLIENTS / "follow_shape.mjs"), url, json.dumps(params), *([mode] if mode else [])]
        self.last: dict[str, Any] = {"rows": {}, "refetches": 0, "handle": ""}
        self.handles: set[str] = set()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            self.last = found if "rows" in found else {**self.last, **found}
            self.handles.add(str(found.get("handle", found)))

    @property
    def rows(self) -> dict[int, tuple[int, str]]:
        return {row["id"]: (row["grp"], row["note"]) for row in self.last["rows"].values()}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def following(made: Cluster, *shapes: dict[str, str], mode: str = "") -> Iterator[list[Follower]]:
    clients = [Follower(f"http://{made.http}/v1/shape", shape, mode) for shape in shapes]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def select(connection: psycopg.Connection[Any], where: str = "true") -> dict[int, tuple[int, str]]:
    return {row[0]: (row[1], row[2]) for row in connection.execute(f"SELECT id, grp, note FROM item WHERE {where}")}  # type: ignore[arg-type]


class Writer:
    """Random transactions, some across fragments, until `stop`."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.error: BaseException | None = None

    def _run(self) -> None:
        rand, step = random.Random(5), 0
        try:
            with psycopg.connect(self._dsn) as connection:
                while not self._stop.is_set():
                    step += 1
                    for _ in range(rand.choice((1, 2, 700 if step % 40 == 0 else 3))):
                        key = rand.randint(1, 400)
                        connection.execute(
                            rand.choice(
                                (
                                    f"INSERT INTO item VALUES ({key}, {key % 3}, 'n{step}') ON CONFLICT DO NOTHING",
                                    f"UPDATE item SET note = 'u{step}', grp = {rand.randint(0, 2)} WHERE id = {key}",
                                    f"DELETE FROM item WHERE id = {key}",
                                )
                            )
                        )
                    (connection.rollback if rand.random() < 0.1 else connection.commit)()
                    time.sleep(0.005)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert self.error is None, self.error


def test_clients_go_on_under_their_handles_while_the_node_is_killed_again_and_again(
    tmp_path: Path, postgres_dsn: str
) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(SCHEMA)
        name = capture_of(postgres_dsn)
        toml = f'[capture.{name}]\ndsn = "{postgres_dsn}"\ntables = ["public.item"]\n[shapes]\nchunk_kb = 4\n'
        wheres = ("true", "grp = 1", "note LIKE 'u%' OR id < 20")
        shapes = [{"table": "item"}, *({"table": "item", "where": where} for where in wheres[1:])]
        with cluster(tmp_path, toml) as made:
            made.ready()
            until(lambda: made.get("/v1/shape?table=item&offset=-1")[0] == 200, lambda: made.said)
            with following(made, *shapes) as polling, following(made, *shapes[:2], mode="sse") as streaming:
                clients = polling + streaming
                until(lambda: all(client.last["handle"] for client in clients))
                writer = Writer(postgres_dsn)
                for _ in range(3):
                    time.sleep(1.5)
                    pid = made.children()["node"]
                    made.signal("node", signal.SIGKILL)
                    until(lambda pid=pid: restarted(made, pid), lambda: made.said)  # type: ignore[misc]
                time.sleep(1.0)
                writer.stop()
                for client, where in zip(clients, (*wheres, *wheres[:2]), strict=True):
                    due = select(connection, where)
                    until(lambda c=client, d=due: c.rows == d, lambda c=client: (c.last, made.said[-3000:]))  # type: ignore[misc]
                for client in clients:
                    assert (client.last["refetches"], len(client.handles)) == (0, 1), made.said[-3000:]


def test_a_table_that_changed_while_nobody_was_there_ends_its_shape_and_no_other(
    tmp_path: Path, postgres_dsn: str
) -> None:
    """The stream reports the rows that were deleted while the node was dead, and the TRUNCATE. Only the latter causes a
    refetch.
    """
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(SCHEMA)
        connection.execute("CREATE TABLE other (id int PRIMARY KEY, grp int, note text)")
        connection.execute("INSERT INTO other VALUES (1, 1, 'stays'), (2, 2, 'goes')")
        name = capture_of(postgres_dsn)
        toml = f'[capture.{name}]\ndsn = "{postgres_dsn}"\ntables = ["public.*"]\n'
        with cluster(tmp_path, toml) as made:
            made.ready()
            until(
                lambda: made.get("/v1/shape?table=other&offset=-1")[0] == 200,
                lambda: (made.get("/v1/shape?table=other&offset=-1"), made.marks(), made.said),
            )
            with following(made, {"table": "item"}, {"table": "other"}) as (item, other):
                until(lambda: len(item.rows) == 300 and len(other.rows) == 2)
                # The initial rows become durable within a second or so, and a client cannot observe when.
                until(lambda: kept(made, name) == 2, lambda: made.get("/api/status"))
                pid = made.children()["node"]
                made.signal("node", signal.SIGKILL)
                connection.execute("TRUNCATE item")
                connection.execute("INSERT INTO item VALUES (7, 1, 'after')")
                connection.execute("DELETE FROM other WHERE id = 2")
                until(lambda: restarted(made, pid), lambda: made.said)
                until(lambda: item.rows == {7: (1, "after")}, lambda: item.last)
                until(lambda: other.rows == {1: (1, "stays")}, lambda: other.last)
                assert item.last["refetches"] == 1 and len(item.handles) == 2
                assert other.last["refetches"] == 0 and len(other.handles) == 1
