"""A captured server fails over to a standby that is behind: HTTP clients and a pipeline's tables equal SELECT on the
new primary. One node and one driver serve a pair of every PostgreSQL that capture supports."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))

from oracle_failover import Failover
from oracle_follower import Follower

import tidemill
from support.faults.cluster import Cluster, cluster
from support.postgres import EmbeddedPostgres
from support.waiting import eventually
from tidemill.base.errors import TidemillError

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

INSTALLED = Path(__file__).parents[1] / "clients" / "node_modules"
SETTINGS = {"fsync": "off", "shared_buffers": "16MB", "wal_sender_timeout": "5s"}
TABLES = ("moved", "still")
"""The standby lacks rows of the first; the second has none that it lacks."""
DESCRIBED = ("grown", "shrunk", "emptied", "gone")
"""The standby lacks a change of the description of each, or what removed all its rows."""
SIDES = {
    **{f"pg{version}": (version, TABLES) for version in ("14", "16", "18")},
    **{f"restarted{version}": (version, TABLES) for version in ("15", "17")},
    "described18": ("18", DESCRIBED),
}
COLUMNS = "id int PRIMARY KEY, v text, n int"

Rows = dict[int, tuple[str | None, int | None]]


def binaries(version: str) -> Path | None:
    return None if version == "18" else INSTALLED / f"postgres-{version}" / "native" / "bin"


def installed(version: str) -> bool:
    found = binaries(version)
    return found is None or (found / "postgres").exists()


class Side:
    """A primary with its standby, and everything that follows two of its tables."""

    def __init__(self, name: str, version: str, tables: tuple[str, ...], directory: Path, stack: ExitStack) -> None:
        self.capture = name
        directory.mkdir()
        server = EmbeddedPostgres(directory / "primary", settings=SETTINGS, binaries=binaries(version))
        stack.enter_context(server)
        self.dsn = server.dsn
        self.names = {table: f"{table}_{name}" for table in tables}
        for name in self.names.values():
            self.sql(
                f"CREATE TABLE {name} ({COLUMNS})",
                f"INSERT INTO {name} SELECT i, 'old ' || i, i FROM generate_series(1, 40) i",
            )
        self.failover = Failover(server, directory, stack)
        self.clients: list[Follower] = []
        self.cluster: Cluster

    @property
    def toml(self) -> str:
        more = "failover = true\n" if self.failover.slots else ""
        return f'[capture.{self.capture}]\ndsn = "{self.failover.dsn}"\ntables = ["public.*"]\n{more}'

    @property
    def pipeline(self) -> str:
        return "".join(f'    p.table("{n}", p.capture("{self.capture}").table("{n}"))\n' for n in self.names.values())

    def follow(self, made: Cluster, stack: ExitStack) -> None:
        self.cluster = made
        for name in self.names.values():
            for sse in (False, True):
                more = {"where": "n > 10"} if sse else {}
                client = Follower(made.http, {"table": f"public.{name}", **more}, ["id", "v", "n"], ["id"], sse=sse)
                client.start()
                stack.callback(client.stop)
                self.clients.append(client)

    def sql(self, *statements: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[arg-type]

    def select(self, name: str, where: str = "true") -> Rows:
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(f"SELECT id, v, n FROM {name} WHERE {where}").fetchall()  # type: ignore[arg-type]
        return {key: (v, n) for key, v, n in found}

    def shard(self, name: str) -> Rows:
        with tidemill.connect(self.cluster.config) as connected:
            rows = connected.table(name).to_arrow().to_pylist()
        return {row["id"]: (row["v"], row["n"]) for row in rows}

    def equal(self) -> None:
        """Wait until every client and every table of the pipeline equals SELECT. No writer runs in between."""
        for client in self.clients:
            wanted = self.select(client.params["table"], client.params.get("where", "true"))

            def same(client: Follower = client, wanted: Rows = wanted) -> bool:
                view = client.view()
                rows = {int(row["id"]): (row["v"], int(row["n"])) for row in view.rows.values()}
                return view.complete and rows == wanted

            eventually(same, lambda client=client: f"{client.name} {client.view()} {self.cluster.said[-3000:]}")  # type: ignore[misc]
        for name in self.names.values():
            eventually(
                lambda name=name: self._read(name) == self.select(name),  # type: ignore[misc]
                lambda name=name: f"{name} {self._read(name)} {self.cluster.marks()} {self.cluster.said[-3000:]}",  # type: ignore[misc]
            )

    def _read(self, name: str) -> Rows:
        try:
            return self.shard(name)
        except TidemillError:
            return {}  # it does not exist yet


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Side]]:
    directory = tmp_path_factory.mktemp("failover")
    with ExitStack() as stack:
        made = {
            name: Side(name, version, tables, directory / name, stack)
            for name, (version, tables) in SIDES.items()
            if installed(version)
        }
        file = directory / "pipeline.py"
        file.write_text("def build(p):\n" + "".join(side.pipeline for side in made.values()))
        toml = "[shapes]\nlong_poll_s = 2\nsse_s = 8\n" + "".join(side.toml for side in made.values())
        toml += f'[pipeline.p]\nfile = "{file}"\n[spark]\nmaster = "local[1]"\n'
        node = stack.enter_context(cluster(directory / "node", toml))
        node.ready()
        for side in made.values():
            side.follow(node, stack)
        yield made


def chosen(sides: dict[str, Side], name: str) -> Side:
    if name not in sides:
        pytest.skip("an older PostgreSQL is not here: tests/clients/install")
    return sides[name]


def started_over(side: Side, before: dict[Follower, int]) -> None:
    for client in side.clients:
        eventually(lambda client=client: client.view().refetches > before[client], client.name)  # type: ignore[misc]


@pytest.mark.parametrize("name", [name for name, (_, tables) in SIDES.items() if tables is TABLES])
def test_f499_shapes_and_pipelines_equal_select_after_a_failover_that_lost_commits(
    sides: dict[str, Side], name: str
) -> None:
    """`restarted`: the node sees nothing of it and begins with the new primary."""
    side = chosen(sides, name)
    moved, still = side.names["moved"], side.names["still"]
    side.sql(f"UPDATE {moved} SET v = 'known' WHERE id < 5", f"DELETE FROM {still} WHERE id = 9")
    side.equal()
    side.failover.cut(f"tidemill_{side.capture}")
    before = {client: client.view().refetches for client in side.clients}
    for number in range(20):
        side.sql(f"INSERT INTO {moved} VALUES ({100 + number}, 'lost', {100 + number})")
    side.sql(f"UPDATE {moved} SET v = 'lost' WHERE id <= 10", f"DELETE FROM {moved} WHERE id BETWEEN 11 AND 15")
    side.equal()
    assert {client: client.view().refetches for client in side.clients} == before

    restarted = name.startswith("restarted")
    if restarted:
        side.cluster.signal("node", signal.SIGSTOP)
    side.dsn = side.failover.over()
    if restarted:
        side.cluster.signal("node", signal.SIGKILL)
    with psycopg.connect(side.dsn) as writer:  # open while a slot is created, if it is missing
        writer.execute(f"UPDATE {moved} SET v = 'open' WHERE id = 20")  # type: ignore[arg-type]
        for number in range(30):
            side.sql(
                f"INSERT INTO {moved} VALUES ({110 + number}, 'new', {number})",
                f"UPDATE {still} SET v = 'new {number}' WHERE id = {number + 1}",
            )
    assert len(side.select(moved)) == 70
    started_over(side, before)
    side.equal()

    side.sql(f"UPDATE {moved} SET v = 'later', n = 90 - n", f"DELETE FROM {still} WHERE id % 3 = 0")
    side.equal()


@pytest.mark.parametrize("name", [name for name, (_, tables) in SIDES.items() if tables is DESCRIBED])
def test_f499_a_change_of_a_description_that_the_new_primary_never_had_is_undone(
    sides: dict[str, Side], name: str
) -> None:
    side = chosen(sides, name)
    grown, shrunk, emptied, gone = (side.names[table] for table in DESCRIBED)
    side.equal()
    side.failover.cut(f"tidemill_{side.capture}")
    before = {client: client.view().refetches for client in side.clients}
    side.sql(
        f"ALTER TABLE {grown} ADD COLUMN more int", f"INSERT INTO {grown} VALUES (100, 'lost', 1, 1)",
        f"ALTER TABLE {shrunk} DROP COLUMN v", f"INSERT INTO {shrunk} VALUES (100, 1)",
        f"TRUNCATE {emptied}",
        f"DROP TABLE {gone}",
    )  # fmt: skip
    eventually(lambda: side._read(emptied) == {}, lambda: side._read(emptied))
    eventually(lambda: 100 in side._read(grown), lambda: side._read(grown))
    started_over(side, before)

    side.dsn = side.failover.over()
    for table in side.names.values():
        side.sql(f"INSERT INTO {table} VALUES (200, 'new', 20)", f"DELETE FROM {table} WHERE id < 10")
    # A column that goes is an operator's to accept, also where it never was.
    mark = f"shard:{grown}"
    eventually(lambda: "capture accept" in side.cluster.marks()[mark]["error"], lambda: side.cluster.marks()[mark])
    code, said = side.cluster.command("capture", "accept", f"public.{grown}", "--yes")
    assert code == 0, said
    side.equal()
