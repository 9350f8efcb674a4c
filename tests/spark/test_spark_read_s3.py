"""`tidemill.spark.read` of a bucket in S3: Spark reads the parts itself, with its own pruning, if it can open S3."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from support.objects.moto_access import start_server
from support.spark.connector import HAS_S3, without_s3
from support.spark.harbour import Harbour
from support.spark.pipelines import until
from support.spark.wide_table import COLUMNS, SCHEMA, append, explained, holds, merge, rows, same
from tidemill.shards import handle
from tidemill.shards.api import HASH, Column, ShardSchema
from tidemill.shards.compaction import compaction
from tidemill.shards.parts import parts
from tidemill.shards.read.read_plan import PlanNotPossibleError
from tidemill.spark import read
from tidemill.spark import table_reader as reading
from tidemill.spark.file_access import files_base
from tidemill.spark.settings import StoreUrls

pytestmark = pytest.mark.spark

COUNT = 2_000
KEY, SECRET = "key-of-the-test", "secret-of-the-test"


@pytest.fixture(autouse=True)
def needs_connector(request: pytest.FixtureRequest) -> None:
    if not HAS_S3:
        pytest.skip("hadoop-aws is not installed: tests/clients/install brings it where Maven is")


@pytest.fixture(autouse=True)
def stored_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store even small parts as objects."""
    for writer in (handle, compaction):
        monkeypatch.setattr(writer, "INLINE_PART_BYTES", 0)


@pytest.fixture(scope="module")
def new_url() -> Iterator[Callable[[str], str]]:
    """Return a function that creates a bucket, and returns its URL."""
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = start_server()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}

    def make(name: str) -> str:
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=name)
        return f"s3://{name}/a/b?endpoint={endpoint}&region=us-east-1&access_key_id={KEY}&secret_access_key={SECRET}"

    yield make
    server.stop()


@pytest.fixture(scope="module")
def bucket(new_url: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    directory = tmp_path_factory.mktemp("bucket")
    found = Harbour(directory, StoreUrls(new_url("read-s3"), f"sqlite://{directory}/consensus.db"))
    yield found
    found.close()


def where(harbour: Harbour) -> dict[str, str]:
    return {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}


def settled(harbour: Harbour, name: str) -> None:
    append(harbour, name, 10, rows(np.arange(COUNT), 0, 5, 1))
    merge(harbour, name, 9)


def planned(spark: Any, harbour: Harbour, name: str, as_of: int) -> Any:
    with capture_logs() as logs:
        frame = read(spark, name, as_of=as_of, **where(harbour))
    assert not [entry for entry in logs if "because" in entry]
    return frame


def test_the_plan_is_the_contents_at_every_time_and_columns_and_filters_are_sparks_own(
    bucket: Harbour, spark: Any
) -> None:
    settled(bucket, "t")
    hundredth, half = np.arange(0, COUNT, 100), np.arange(0, COUNT, 2)
    append(bucket, "t", 20, rows(hundredth, 0, 15, -1), rows(hundredth, 1, 15, 1))
    append(bucket, "t", 30, rows(half[half % 100 != 0], 0, 25, -1), rows(half[half % 100 == 0], 1, 25, -1))
    append(bucket, "t", 40, rows(np.arange(1, COUNT, 2), 0, 35, -1))
    counts = {9: COUNT, 19: COUNT, 29: COUNT // 2, 39: 0}
    assert {at: same(bucket, "t", planned(spark, bucket, "t", at), at) for at in counts} == counts
    frame = planned(spark, bucket, "t", 19)
    assert frame.where("k >= 150").count() == COUNT - 150 and frame.columns == [c.name for c in COLUMNS]
    plan = explained(spark, frame.select("v").where("k = 51"))
    assert "Scan parquet" in plan and "s3a://read-s3/a/b/shards/" in plan and "EqualTo(k,51)" in plan
    assert not [name for name in ("x", "at", "m") if f"{name}:" in plan.partition("ReadSchema: ")[2].split("\n")[0]]
    assert "Join" not in explained(spark, planned(spark, bucket, "t", 9)), "without a difference it is Parquet alone"


def test_parts_of_earlier_forms_and_earlier_schemas_are_read_as_the_table_is(
    bucket: Harbour, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_in_memory(schema: ShardSchema, updates: pa.Table, hashes: Any) -> pa.Table:
        return updates.append_column(HASH, pa.array(hashes))

    with monkeypatch.context() as earlier:
        earlier.setattr(parts, "stored_rows", as_in_memory)
        settled(bucket, "grown")
    append(bucket, "grown", 20, rows([5], 0, 15, -1), rows([5], 1, 15, 1))
    assert same(bucket, "grown", planned(spark, bucket, "grown", 19), 19) == COUNT
    wider = ShardSchema((*COLUMNS, Column("note", "string")), ("k",))

    def noted(keys: Any, version: int, diff: int) -> pa.Table:
        return rows(keys, version, 25, diff).append_column("note", pa.array(["new"] * len(keys)))

    append(bucket, "grown", 30, noted([COUNT, COUNT + 1], 0, 1), schema=wider)
    frame = planned(spark, bucket, "grown", 29)
    assert same(bucket, "grown", frame, 29) == COUNT + 2
    assert frame.groupBy("note").count().orderBy("note").collect() == [(None, COUNT), ("new", 2)]


def test_an_empty_table_is_an_empty_frame(bucket: Harbour, spark: Any) -> None:
    bucket.portal.call(bucket.stores.shard("empty", SCHEMA))
    frame = read(spark, "empty", **where(bucket))
    assert (frame.columns, frame.count()) == ([c.name for c in COLUMNS], 0)


def test_secrets_are_in_no_plan_setting_or_log(bucket: Harbour, spark: Any) -> None:
    settled(bucket, "secret")
    with capture_logs() as logs:
        frame = read(spark, "secret", **where(bucket))
    options = frame.where("k = 1")._jdf.queryExecution().analyzed().toJSON()
    settings = [spark.sparkContext.getConf().getAll(), spark.sql("SET").collect()]
    told = [*(explained(spark, frame, mode) for mode in ("extended", "formatted", "codegen")), options, settings, logs]
    assert "s3a://read-s3" in str(told) and SECRET not in str(told) and KEY not in str(told)


def test_what_a_frame_reads_is_held_until_its_last_descendant_is_gone(
    bucket: Harbour, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "USE_CHECK_S", 0.05)
    monkeypatch.setattr(reading, "LINGER_S", 0.2)
    settled(bucket, "held")
    frame = planned(spark, bucket, "held", 9)
    descendant = frame.where("k > 3").groupBy("s").count()
    del frame
    for _ in range(3):
        gc.collect()
        spark._jvm.System.gc()
    assert holds(bucket, "held") == ["dataframe"]
    assert descendant.selectExpr("sum(count)").collect() == [(COUNT - 4,)]
    del descendant

    def let_go() -> bool:
        gc.collect()
        spark._jvm.System.gc()
        return not holds(bucket, "held")

    until(let_go, "the hold ends")


def test_a_session_that_cannot_open_the_bucket_reads_through_the_data_source_and_the_log_says_what_to_add(
    new_url: Callable[[str], str], spark: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("closed")
    harbour = Harbour(directory, StoreUrls(new_url("closed-s3"), f"sqlite://{directory}/consensus.db"))
    settled(harbour, "t")

    def reading_with_reason() -> tuple[Any, str]:
        with capture_logs() as logs:
            frame = read(spark, "t", as_of=9, **where(harbour))
        return frame, next(entry["because"] for entry in logs if entry["event"] == "read through the data source")

    with without_s3(spark):
        frame, because = reading_with_reason()
    assert because.startswith("Spark has no connector for S3: add spark.jars.packages=org.apache.hadoop:hadoop-aws:3.")
    assert same(harbour, "t", frame, 9) == COUNT
    hadoop = spark._jsc.hadoopConfiguration()
    hadoop.set("fs.s3a.bucket.closed-s3.aws.credentials.provider", "not.installed.Provider")
    because = reading_with_reason()[1]
    assert because.startswith("Spark cannot open the bucket: ") and "not.installed.Provider" in because
    harbour.close()


def test_settings_that_the_session_has_for_a_bucket_take_precedence(spark: Any) -> None:
    hadoop, prefix = spark._jsc.hadoopConfiguration(), "fs.s3a.bucket.own-s3."
    hadoop.set(f"{prefix}aws.credentials.provider", "of.the.session")
    hadoop.set(f"{prefix}endpoint", "http://internal")
    url = (
        "s3://own-s3/p?endpoint=http://external&region=eu-west-1&virtual_host=true&access_key_id=a&secret_access_key=b"
    )
    assert files_base(spark, url) == "s3a://own-s3/p"
    names = ("endpoint", "endpoint.region", "path.style.access", "access.key", "secret.key", "aws.credentials.provider")
    assert {name: hadoop.get(prefix + name) for name in names} == {
        "endpoint": "http://internal",
        "endpoint.region": "eu-west-1",
        "path.style.access": "false",
        "access.key": None,
        "secret.key": None,
        "aws.credentials.provider": "of.the.session",
    }
    files_base(spark, "s3://own-s3-of-a-role?region=eu-west-1&credentials=instance")
    assert hadoop.get("fs.s3a.bucket.own-s3-of-a-role.aws.credentials.provider") is None
    files_base(spark, "s3://own-s3-for-an-hour", {f"AWS_{name}": name for name in (
        "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")})  # fmt: skip
    found = {name: hadoop.get(f"fs.s3a.bucket.own-s3-for-an-hour.{name}") for name in ("session.token", "endpoint")}
    assert found == {"session.token": "SESSION_TOKEN", "endpoint": None}


@pytest.mark.parametrize("url", ["gs://bucket/p", "az://container?account=a", "memory:", "file:///with/[brackets]"])
def test_other_buckets_are_read_through_the_data_source(url: str, spark: Any) -> None:
    with pytest.raises(PlanNotPossibleError):
        files_base(spark, url)
