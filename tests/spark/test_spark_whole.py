"""Inputs that are given whole, in real Spark: a plan at exactly the round's time, held by it, without rows in the
driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.objects.moto_access import start_server
from support.spark.connector import without_s3
from support.spark.harbour import Harbour
from support.spark.known_clicks import Clicks
from tidemill.shards.handle import LogShard
from tidemill.shards.read import read_plan
from tidemill.shards.read.part_reader import PartReader
from tidemill.spark import Pipeline
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.session.code_shipping import set_worker_environment
from tidemill.spark.settings import IN_ENVIRONMENT, StoreUrls
from tidemill.spark.source import register

pytestmark = pytest.mark.spark

COUNT = 20_000


def counted(
    harbour: Any, spark: Any, scratch: Path, before: Callable[[], None] = lambda: None, by: str = ""
) -> Derivation:
    p = Pipeline("p")

    @p.derived("counts", key="product", inputs="clicks", by=by or ())
    def counts(_: Any, clicks: Any) -> Any:
        before()
        return clicks.groupBy("product").count()

    return Derivation(harbour.portal, harbour.stores, spark, p.derived_tables["counts"], scratch / "mirrors" / "counts")


def held(harbour: Any, at: int) -> dict[int, int]:
    return {row["product"]: row["count"] for row in harbour.contents("counts", at)}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat no shard as small."""
    monkeypatch.setattr(read_plan, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("by", ["", "product"])
def test_a_whole_round_gives_spark_the_parts_and_holds_no_input_in_the_driver(
    harbour: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The first round by group is whole too; the driver then reads only what it needs to find the groups."""
    clicks = Clicks(harbour)
    clicks.change(range(COUNT), 1)
    derived = counted(harbour, spark, tmp_path, by=by)
    snapshots: list[str] = []
    decoded: list[int] = []
    snapshot, read_part = LogShard.snapshot, PartReader.read_part

    async def seen(self: LogShard, *given: Any) -> pa.Table:
        snapshots.append(self.name)
        return await snapshot(self, *given)

    async def counted_rows(self: PartReader, part: Any) -> pa.Table:
        decoded.append(part.rows)
        return await read_part(self, part)

    made: list[Any] = []
    create = spark.createDataFrame
    derived.open()
    monkeypatch.setattr(spark, "createDataFrame", lambda *given: made.append(given[0].num_rows) or create(*given))
    with monkeypatch.context() as patched:
        patched.setattr(LogShard, "snapshot", seen)
        patched.setattr(PartReader, "read_part", counted_rows)
        assert derived.recompute()
        assert (derived.groups, made) == (None, [])
        clicks.change([*range(10), COUNT], 7)
        assert derived.recompute()
    assert not snapshots
    if not by:
        assert sum(decoded) == 21, "what is not merged yet"
        assert sum(made) == 11 + 11, "the keys that are not as they were, and their rows"
    assert held(harbour, clicks.upper - 1) == clicks.expected()


@pytest.mark.usefixtures("large")
def test_what_is_merged_and_collected_before_and_during_a_round_changes_no_contents(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    """History moves past the round's time while the function runs, and all parts that it chose are replaced."""
    clicks, want = Clicks(harbour), {}

    def meanwhile() -> None:
        clicks.change(range(0, COUNT, 500), 40)
        clicks.merge(clicks.upper - 1)

    interrupted = [False]
    derived = counted(harbour, spark, tmp_path, lambda: meanwhile() if interrupted[0] else None)
    clicks.change(range(COUNT), 1)
    derived.open()
    for step in range(4):
        at, expected = clicks.upper - 1, clicks.expected()
        interrupted[0] = step % 2 == 1
        assert derived.recompute()
        want[at] = expected
        clicks.change(range(step, COUNT, 50), 10 * step)
        clicks.change(range(step, COUNT, 700), None)
        if step == 1:
            clicks.merge(clicks.upper - 1)
    interrupted[0] = False
    want[clicks.upper - 1] = clicks.expected()
    assert derived.recompute()
    for at, expected in want.items():
        assert held(harbour, at) == expected, at
    derived.release_inputs()
    clicks.merge(clicks.upper - 1)
    shard = harbour.shard("clicks")
    assert [hold.reader for hold in shard.state.holds] == ["keeper"], "a hold ends with who took it"
    assert not shard.state.garbage


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a harbour on S3 (moto's server)."""
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = start_server()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys).create_bucket(Bucket="bucket")
    secrets = "access_key_id=test&secret_access_key=test"
    url = f"s3://bucket/tables?endpoint=http://{host}:{port}&region=us-east-1&{secrets}"
    found = Harbour(tmp_path, StoreUrls(url, f"sqlite://{tmp_path}/consensus.db"))
    yield found
    found.close()
    server.stop()


@pytest.mark.usefixtures("large")
def test_in_a_bucket_the_data_source_reads_at_the_rounds_time_and_finds_the_cluster_as_workers_do(
    bucket: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = spark.newSession()
    environment = dict(spark.sparkContext.environment)
    monkeypatch.setattr(spark.sparkContext, "environment", environment)
    set_worker_environment(session.sparkContext, bucket.urls)
    register(session)
    bucket.stores.urls = IN_ENVIRONMENT
    clicks = Clicks(bucket)
    clicks.change(range(2_000), 1)
    later = [False]
    derived = counted(bucket, session, tmp_path, lambda: clicks.change(range(100), 30) if later[0] else None)
    derived.open()
    later[0] = True
    at, expected = clicks.upper - 1, clicks.expected()
    with without_s3(spark):
        assert derived.recompute()
    assert held(bucket, at) == expected
    assert "no connector for S3" in derived.function.no_plan["clicks"]
