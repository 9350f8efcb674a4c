"""Spark Connect, with a client that has no JVM: reads, writes, streams, and what needs a session with a JVM.

The server is a process of Spark's own class. Its clients are processes whose package `pyspark` has only what
`pyspark-client` has.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.spark.connector import EXTRA, HAS_S3
from support.waiting import SCENARIO_S

pytestmark = [pytest.mark.spark, pytest.mark.processes]

TESTS = Path(__file__).parents[1]
BUCKETS = ("connect-open", "connect-closed")
COUNT = 10_000
"""Rows of a table in a bucket: enough for a part that is an object."""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Yield the endpoint of an S3 server."""
    from support.objects.moto_access import start_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    found = start_server()
    host, port = found.get_host_and_port()
    yield f"http://{host}:{port}"
    found.stop()


@pytest.fixture(scope="module")
def server(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run one server for all tests, and yield its URL. It can open only the first of the buckets in S3."""
    from support.spark.connect_server import connect_server

    opens, cannot_open = (f"spark.hadoop.fs.s3a.bucket.{name}." for name in BUCKETS)
    settings = {
        f"{opens}endpoint": s3,
        f"{opens}endpoint.region": "us-east-1",
        f"{opens}path.style.access": "true",
        f"{opens}access.key": "of-the-server",
        f"{opens}secret.key": "of-the-server",
        f"{cannot_open}aws.credentials.provider": "not.installed.Provider",
    }
    with connect_server(tmp_path_factory.mktemp("server"), settings | EXTRA) as url:
        yield url


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the Python path of the clients."""
    from support.spark.connect_server import client_package

    return [client_package(tmp_path_factory.mktemp("package")), TESTS]


def client(path: list[Path], program: str, *arguments: str | Path) -> dict[str, Any]:
    """Run a program of a client to its end, and return the JSON that it printed last."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    done = subprocess.run(
        [sys.executable, TESTS / "support" / "spark" / "programs" / program, *arguments],
        capture_output=True,
        text=True,
        timeout=SCENARIO_S,
        env={**environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_a_frame_of_spark_connect_reads_is_held_until_its_last_descendant_is_gone(
    server: str, path: list[Path], tmp_path: Path
) -> None:
    found = client(path, "connect_child.py", server, tmp_path)
    assert found == {"client_alone": True, "held": ["dataframe"], "gone": [], "counted": 29_990, "after": 1}


@pytest.fixture(scope="module")
def harbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a cluster for the tables of `connect_client.py`."""
    from support.spark.harbour import Harbour

    found = Harbour(tmp_path_factory.mktemp("harbour"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def in_s3(s3: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Create a cluster with a table `t` in each bucket, and return their URLs."""
    import boto3

    from support.spark.harbour import Harbour
    from support.spark.wide_table import append, merge, rows
    from tidemill.spark.settings import StoreUrls

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    found = []
    for name in BUCKETS:
        boto3.client("s3", endpoint_url=s3, **keys).create_bucket(Bucket=name)
        objects = f"s3://{name}/p?endpoint={s3}&access_key_id=test&secret_access_key=test"
        urls = StoreUrls(objects, f"sqlite://{tmp_path_factory.mktemp(name)}/consensus.db")
        harbour = Harbour(Path(), urls)
        append(harbour, "t", 10, rows(range(COUNT), 0, 5, 1))
        merge(harbour, "t", 9)
        harbour.close()
        found += [urls.objects, urls.consensus]
    return found


@pytest.fixture(scope="module")
def seen(
    server: str, path: list[Path], harbour: Any, in_s3: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the results of one client of the server (`connect_client.py`)."""
    directory, urls = tmp_path_factory.mktemp("client"), harbour.urls
    return client(path, "connect_client.py", server, urls.objects, urls.consensus, directory, *in_s3)


def stored(harbour: Any, table: str) -> list[list[Any]]:
    """Return the rows of a table, read without Spark."""
    return [[row["id"], row["n"]] for row in harbour.contents(table)]


def test_the_client_has_no_jvm(seen: dict[str, Any]) -> None:
    assert seen["client_alone"] and seen["session"].startswith("pyspark.sql.connect.")


def test_frames_are_written_and_read(seen: dict[str, Any], harbour: Any) -> None:
    assert seen["upserted"] == [[1, 11], [3, 30], [4, 40]], "the append of three rows, and an upsert that deletes one"
    assert seen["overwritten"] == stored(harbour, "stock") == [[1, 11], [5, 50]]


def test_a_stream_of_changes_follows_a_table_and_resumes_at_its_checkpoint(seen: dict[str, Any]) -> None:
    assert seen["delivered"] == [[1, 11, 1], [3, 30, -1], [3, 30, 1], [4, 40, -1], [4, 40, 1], [5, 50, 1]]


def test_a_stream_is_written(seen: dict[str, Any], harbour: Any) -> None:
    assert seen["copy"] == stored(harbour, "copy") == [[1, 11], [5, 50]]


def test_foreach_batch_upserts_on_the_server(seen: dict[str, Any], harbour: Any) -> None:
    assert seen["batched"] == stored(harbour, "batched") == [[1, 11], [5, 50]]


def test_a_registered_cluster_need_not_be_named(seen: dict[str, Any], harbour: Any) -> None:
    assert seen["named"] == seen["plan"] == stored(harbour, "named") == [[7, 71]]


def test_nested_values_are_written_read_and_streamed(seen: dict[str, Any], harbour: Any) -> None:
    expected = [
        [1, ["x", None], {"a": None, "b": [1]}, ["n", 5]],
        [2, [], None, [None, 6]],
        [3, ["y"], {"c": []}, None],
    ]
    assert seen["tagged"] == seen["tagged_copy"] == expected
    assert [list(row.values())[1] for row in harbour.contents("tagged_copy")] == [["x", None], [], ["y"]]


def test_the_server_reads_a_bucket_that_it_can_open_itself_and_another_one_through_the_data_source(
    seen: dict[str, Any],
) -> None:
    if not HAS_S3:
        pytest.skip("hadoop-aws is not installed: tests/clients/install brings it where Maven is")
    opened, (counted, because) = seen["buckets"]
    assert opened == [COUNT - 5] and counted == COUNT - 5
    assert because.startswith("Spark cannot open the bucket: ")


@pytest.mark.parametrize("what", ["run", "build_session"])
def test_what_needs_a_jvm_is_refused_in_one_sentence(seen: dict[str, Any], what: str) -> None:
    sentence = {
        "run": "a pipeline needs a session with a JVM, and this is a client of Spark Connect: setting=spark.remote.",
        "build_session": "a session of this process needs `pyspark`; installed is `pyspark-client`, which has no JVM.",
    }
    kind, said = seen["refused"][what]
    assert kind == "InvalidError" and said.startswith(sentence[what]), said


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("twice", "a key occurs twice: id=1"),
        ("option", "option has no effect on a write: option=as_of"),
        ("missing", "no such table: table=nothing"),
        ("key", "the table has another key"),
    ],
)
def test_an_error_of_the_server_reaches_the_client(seen: dict[str, Any], what: str, says: str) -> None:
    kind, said = seen["refused"][what]
    assert kind and says in said, said
