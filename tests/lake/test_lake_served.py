"""A node publishes tables and serves the catalogue; foreign readers follow, and the guide's examples run."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey

from support.faults.served import Served, World
from support.lake.readers import FROM_CATALOGUE, ForeignReader, ReadError, packages_of
from support.lake.world import rows_of
from support.objects.moto_access import start_server
from support.waiting import eventually
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.catalogue import PipelineRow
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import AclRule, Operation, Pattern, Permission, Resource
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores

pytestmark = [pytest.mark.lake, pytest.mark.processes]

GUIDE = Path(__file__).parents[2] / "docs/guides/lake.md"
ADDRESS = "http://127.0.0.1:8600"
"""Address of the node in the guide."""
SECRET = "a secret of thirty-two bytes or more"
TABLES = {
    "orders": ShardSchema((Column("id", "int64"), Column("status", "string")), ("id",)),
    "customers": ShardSchema((Column("id", "int64"), Column("name", "string")), ("id",)),
}
Row = tuple[int, str, int]
"""(id, text, diff)."""


class Lake:
    """A served node, and a writer of its tables."""

    def __init__(self, served: Served, portal: BlockingPortal, stores: Stores) -> None:
        self.url = f"http://{served.http}"
        self.catalogue = f"{self.url}/iceberg"
        self._portal = portal
        self._stores = stores

    def append(self, table: str, rows: list[Row]) -> None:
        """Append rows to one table, and advance both to one time, as the commits of a capture do."""
        self._portal.call(self._append(table, rows))
        self._portal.call(self._advance())

    async def _append(self, name: str, rows: list[Row]) -> None:
        schema = TABLES[name]
        shard = await self._stores.shard(name, schema)
        _, upper = await shard.frontiers()
        columns: dict[str, Any] = {"id": [row[0] for row in rows], schema.columns[1].name: [row[1] for row in rows]}
        columns |= {TIME: [upper] * len(rows), DIFF: [row[2] for row in rows]}
        await shard.compare_and_append(upper, upper + 1, [await shard.write_part(pa.table(columns))], "")

    async def _advance(self) -> None:
        shards = [await self._stores.shard(name, schema) for name, schema in TABLES.items()]
        uppers = [(await shard.frontiers())[1] for shard in shards]
        for shard, upper in zip(shards, uppers, strict=True):
            await shard.compare_and_append(upper, max(uppers) + 1, [], "")

    def allow(self, user: str, table: str) -> None:
        """Let a user read a table."""

        async def add() -> None:
            rules = AclCache(self._stores.metastore, self._stores.clock, [])
            topic = (int(Resource.TOPIC), int(Pattern.LITERAL), f"shard.{table}")
            await rules.add([AclRule(*topic, f"User:{user}", "*", int(Operation.READ), int(Permission.ALLOW))])

        self._portal.call(add())

    def contents(self, table: str) -> pa.Table:
        async def read() -> pa.Table:
            shard = await self._stores.shard(table, TABLES[table])
            _, upper = await shard.frontiers()
            return await shard.snapshot(upper - 1)

        return self._portal.call(read())


@contextmanager
def served_lake(
    directory: Path, objects_url: str, settings: dict[str, Any] | None = None, **more: dict[str, Any]
) -> Iterator[Lake]:
    """Serve a lake with these settings, and further sections of the configuration."""
    urls = StoreUrls(objects_url, f"sqlite://{directory}/consensus.db")
    sections = {"objects": {"url": urls.objects}, "consensus": {"url": urls.consensus}, **more}
    world = World()
    served = Served(directory, sections | {"lake": {"enabled": True, "interval_s": 0.2, **(settings or {})}})
    stop = asyncio.Event()
    ended = asyncio.run_coroutine_threadsafe(served.run(stop), world.loop)
    try:
        served.well()
        with BlockingPortal() as portal:
            stores = portal.call(open_stores(urls, SystemClock(), Rand()))
            found = Lake(served, portal, stores)
            tables = {name: f"capture:shop:public.{name}" for name in TABLES}
            portal.call(stores.catalogue.put(PipelineRow("shop", tables)))
            found.append("orders", [(i, "open", 1) for i in range(3000)])
            found.append("customers", [(1, "Ada", 1), (2, "Grace", 1)])
            yield found
            portal.call(stores.aclose())
    finally:
        world.call(stop.set)
        ended.result(60)
        world.close()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    directory = tmp_path_factory.mktemp("lake")
    with served_lake(directory, f"file://{directory}/objects") as found:
        yield found


@pytest.fixture(params=FROM_CATALOGUE)
def reader(request: pytest.FixtureRequest, open_reader: Callable[[str], ForeignReader]) -> ForeignReader:
    return open_reader(request.param)


def current(reader: ForeignReader, lake: Lake) -> Any:
    """Return the rows of the orders. None for DuckDB's refusal of a publication that is newer than its transaction."""
    try:
        return rows_of(reader.read_catalogue(lake.catalogue, "orders"))
    except ReadError as error:
        if "does not have a reachable state in this transaction" in str(error):
            return None
        raise


def test_a_reader_follows_a_table_through_the_catalogue(reader: ForeignReader, lake: Lake) -> None:
    number = 10 + FROM_CATALOGUE.index(reader.name)
    lake.append("orders", [(number, "open", -1), (number, f"paid {reader.name}", 1), (9000 + number, "new", 1)])
    want = rows_of(lake.contents("orders"))
    eventually(lambda: current(reader, lake) == want, "the newest contents")
    some = reader.read_catalogue(lake.catalogue, "orders", between=["id", 2999, 9999])
    assert some.num_rows == sum(1 for row in want if "'" not in row[0] and int(row[0].split(":")[1]) >= 2999)


def test_a_table_that_does_not_exist_is_an_error_in_the_readers_words(reader: ForeignReader, lake: Lake) -> None:
    with pytest.raises(ReadError, match=r"(?i)nothing"):
        reader.read_catalogue(lake.catalogue, "nothing")


@pytest.mark.parametrize("name", ["pyiceberg", "duckdb"])
def test_a_reader_without_keys_reads_a_bucket_with_those_of_the_catalogue(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_reader: Callable[[str], ForeignReader]
) -> None:
    server = start_server()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "writer")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the node")
    reader = open_reader(name)
    try:
        with urlopen(Request(f"http://{host}:{port}/harbour", method="PUT")) as created:
            assert created.status == 200
        url = f"s3://harbour/{name}?endpoint=http://{host}:{port}&region=us-east-1"
        keys = {"credentials": "static-read", "access_key_id": "reader", "secret_access_key": "of readers"}
        with served_lake(tmp_path, url, keys) as lake:
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            lake.append("orders", [(7, "open", -1), (7, "paid", 1)])
            want = rows_of(lake.contents("orders"))
            eventually(lambda: current(reader, lake) == want, "the contents on S3")
    finally:
        server.stop()


def test_a_reader_with_a_token_reads_what_its_principal_may_read_and_no_other_token_is_accepted(
    tmp_path: Path, open_reader: Callable[[str], ForeignReader]
) -> None:
    reader = open_reader("pyiceberg")

    def token(user: str, secret: str = SECRET, lives_s: float = 600.0) -> str:
        claims = {"sub": user, "exp": int(time.time() + lives_s)}
        return jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(secret))

    guarded = {"http": {"authenticate": True}, "security": {"oauth": {"secret": SECRET}}}
    with served_lake(tmp_path, f"file://{tmp_path}/objects", None, **guarded) as lake:
        lake.allow("alice", "orders")
        read = partial(reader.read_catalogue, lake.catalogue)
        want = rows_of(lake.contents("orders"))

        refused: list[str] = []

        def readable() -> bool:
            try:
                return rows_of(read("orders", token=token("alice"))) == want
            except ReadError as error:  # the node reads rules again after seconds
                refused.append(str(error))
                return False

        eventually(readable, lambda: refused[-1:])
        for table, wrong in (("customers", token("alice")), ("orders", token("bob"))):
            with pytest.raises(ReadError, match=r"(?i)forbidden|403"):
                read(table, token=wrong)
        for wrong in (token("alice", SECRET[::-1]), token("alice", lives_s=-60.0), None):
            with pytest.raises(ReadError, match=r"(?i)unauthorized|401"):
                read("orders", token=wrong)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def run(program: str, packages: Path, url: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    done = subprocess.run(
        [sys.executable, "-c", program.replace(ADDRESS, url)],
        env=environment | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_guides_examples_in_python_run(lake: Lake) -> None:
    programs = [text for text in blocks("python") if "SparkSession" not in text]
    assert len(programs) == 3
    lake.append("orders", [(7000, "open", 1)])
    want = f"{lake.contents('orders').num_rows} 2"

    def counts(text: str) -> str:
        return run(text, packages_of("pyiceberg"), lake.url).splitlines()[-1]

    eventually(lambda: counts(programs[-1]) == want, "the newest common time", pause_s=0.5)
    assert counts("\n".join(programs)) == want


@pytest.mark.extended
def test_the_guides_example_for_spark_runs(lake: Lake) -> None:
    (program,) = [text for text in blocks("python") if "SparkSession" in text]
    (jar,) = packages_of("spark").glob("*.jar")
    packages = '"spark.jars.packages", "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"'
    assert packages in program and jar.name == "iceberg-spark-runtime-4.1_2.13-1.12.0.jar"
    program = program.replace(packages, f'"spark.jars", "{jar}"').replace(
        ".getOrCreate()", '.master("local[1]").getOrCreate()'
    )
    assert re.search(r"\| +open\|", run(program, packages_of("spark/pyspark"), lake.url))


def test_the_guides_example_for_clickhouse_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ClickHouse refuses metadata files without a version in their names."""
    (statements,) = [text for text in blocks("sql") if "DataLakeCatalog" in text]
    server = start_server()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "writer")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the node")
    try:
        with urlopen(Request(f"http://{host}:{port}/harbour", method="PUT")) as created:
            assert created.status == 200
        url = f"s3://harbour/clickhouse?endpoint=http://{host}:{port}&region=us-east-1"
        with served_lake(tmp_path, url, {"format": 2}) as lake:
            lake.append("orders", [(7, "open", -1), (7, "paid", 1)])
            program = f"""
import chdb.session
session = chdb.session.Session()
for statement in {statements.replace("http://s3.example/bucket", f"http://{host}:{port}/harbour")!r}.split(";"):
    if statement.strip():
        print(session.query(statement))
"""

            def counts() -> set[str]:
                return set(run(program, packages_of("clickhouse"), lake.url).split())

            eventually(lambda: counts() == {'"open",2999', '"paid",1'}, "the contents on S3", pause_s=0.5)
    finally:
        server.stop()


def test_the_guides_example_for_duckdb_runs(lake: Lake) -> None:
    (statements,) = [text for text in blocks("sql") if "INSTALL iceberg" in text]
    program = f"""
import importlib, pathlib, duckdb
connection = duckdb.connect(config={{"autoinstall_known_extensions": "false"}})
for name in ("avro", "httpfs", "iceberg"):
    package = pathlib.Path(importlib.import_module(f"duckdb_extension_{{name}}").__path__[0])
    connection.execute(f"LOAD '{{next(package.rglob('*.duckdb_extension'))}}'")
for statement in {statements!r}.split(";"):
    if statement.strip() and "INSTALL" not in statement and "LOAD" not in statement:
        print(connection.execute(statement).fetchall())
"""
    assert "('open', " in run(program, packages_of("duckdb"), lake.url)
