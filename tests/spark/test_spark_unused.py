"""A pipeline that does not compute with Spark runs without a session, a JVM and a streaming query (RFC 0014)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.spark.connect_server import client_package
from support.spark.running import mark, started
from support.waiting import DEADLINE_S, eventually
from tidemill.base.clock import Rand
from tidemill.base.errors import TidemillError
from tidemill.consensus.status.board import StatusBoard
from tidemill.console.views.pipelines import _driver_state
from tidemill.spark.pipeline import shared_driver
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.session.opener import SessionOpener
from tidemill.spark.settings import DriverSettings, StoreUrls

TABLE = """
def build(p):
    p.table("t", p.topic("t", key="id", schema="id string"))
"""
STRUCT = TABLE.replace('"id string"', 'StructType([StructField("id", StringType())])')
HISTORY = TABLE + '    p.history("t_history", of="t")\n'
DERIVED = TABLE + '    p.derived("n", key="id", inputs=("t",))(lambda spark, t: t)\n'


@pytest.mark.parametrize(
    ("text", "master", "given", "uses"),
    [
        (TABLE, "local[*]", False, False),
        (HISTORY, "local[2]", False, False),
        (HISTORY, "local", False, False),
        (DERIVED, "local[*]", False, True),
        (TABLE, "spark://host:7077", False, True),
        (TABLE, "local-cluster[1,1,1024]", False, True),
        (TABLE, "local[*]", True, True),
    ],
)
def test_a_pipeline_uses_spark_for_derived_tables_for_executors_and_in_a_session_that_exists(
    harbour: Any, tmp_path: Path, text: str, master: str, given: bool, uses: bool
) -> None:
    file = tmp_path / "p.py"
    file.write_text(text)
    settings = DriverSettings("p", file, harbour.urls, master, tmp_path / "scratch")
    session: Any = object()
    runner = PipelineRunner(settings, threading.Event(), SessionOpener(settings, spark=session if given else None))
    try:
        assert runner.uses_spark is uses
        assert (runner.query is not None) is uses
        assert runner.session_ready.is_set() is not uses, "otherwise it waits for the session"
    finally:
        runner.portal.close()


def test_tables_and_histories_flow_without_a_session_and_the_driver_is_running(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionOpener, "session", lambda _: pytest.fail("a session was opened"))
    topic = harbour.create_topic("t")
    _, stopping, thread = started(harbour, tmp_path, HISTORY, session=True)
    try:
        harbour.produce(topic, [(b"", {"id": "a"})])
        harbour.mint("topic/t", 1000, topic)
        eventually(lambda: harbour.upper("t") == 1001 and harbour.upper("t_history") == 1001)
        assert harbour.contents("t") == [{"id": "a"}]
        eventually(lambda: (m := mark(harbour, "pipeline:p")) and m.position >= m.target and not m.reason)
        (report,) = harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports())
        assert report.facts["spark"] is None and _driver_state(report, "p") == "running"
        assert mark(harbour, "pipeline:p:spark") is None
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


class Failing:
    """A runner that fails immediately in its first life, while the JVM of its driver is gone."""

    lives = 0

    def __init__(self, settings: DriverSettings, stopping: threading.Event, opening: SessionOpener) -> None:
        self.has_stopped, self._stopping = True, stopping
        self.uses_spark = settings.name == "computes"

    def session_is_lost(self) -> bool:
        return True

    def run(self) -> None:
        Failing.lives += 1
        if Failing.lives == 1:
            raise TidemillError("it failed.")
        self._stopping.wait()


@pytest.mark.parametrize("name", ["tables", "computes"])
def test_a_lost_jvm_ends_a_shared_driver_only_through_a_pipeline_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def publish_failure(*_: object) -> None: ...

    monkeypatch.setattr(Failing, "lives", 0)
    monkeypatch.setattr(shared_driver, "PipelineRunner", Failing)
    monkeypatch.setattr(shared_driver, "publish_failure", publish_failure)
    stopping, errors = threading.Event(), list[str]()
    (one, session) = (
        DriverSettings(each, tmp_path / "p.py", StoreUrls("", ""), "local", tmp_path / each) for each in (name, "all")
    )
    driver = shared_driver.SharedDriver([one], session, stopping)

    def run() -> None:
        try:
            driver.run()
        except TidemillError as error:
            errors.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: Failing.lives == 2 or stopping.is_set())
    ended = stopping.is_set()
    stopping.set()
    thread.join()
    assert (ended, errors) == ((True, ["it failed."]) if name == "computes" else (False, []))


@pytest.mark.processes
def test_such_a_driver_needs_neither_java_nor_bash_nor_a_pyspark_with_a_jvm(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("t")
    harbour.produce(topic, [(b"", {"id": "a"})])
    harbour.mint("topic/t", 1000, topic)
    file = tmp_path / "p.py"
    file.write_text("from pyspark.sql.types import StringType, StructField, StructType\n" + STRUCT)
    client = client_package(tmp_path / "client")
    environ = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environ |= {"PYTHONPATH": str(client), "PATH": "/nonexistent"}
    options = {
        "pipeline": file,
        "name": "p",
        "scratch": tmp_path / "scratch",
        "objects": harbour.urls.objects,
        "consensus": harbour.urls.consensus,
    }
    command = [sys.executable, "-m", "tidemill.spark.pipeline.driver"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(command, env=environ)
    try:
        eventually(lambda: (m := mark(harbour, "pipeline:p")) and m.position == 1001)
        (report,) = harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports())
        assert [m.error for m in report.marks if m.error] == [] and _driver_state(report, "p") == "running"
        process.terminate()
        assert process.wait(DEADLINE_S) == 0 and harbour.contents("t") == [{"id": "a"}]
    finally:
        process.kill()
        process.wait()
