"""A driver whose Spark session has become useless ends, so that it is restarted, for every kind of table."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.derived.function_call import FunctionFailedError
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.pipeline.streaming_query import SparkSessionLostError
from tidemill.spark.settings import DriverSettings

ALONE = """
def build(p):
    @p.derived("counted", key="click_id", inputs=("clicks",))
    def counted(spark, clicks):
        return clicks
"""


def driver(harbour: Any, tmp_path: Path, stopping: threading.Event) -> PipelineRunner:
    file = tmp_path / "pipeline.py"
    file.write_text(ALONE)
    runner = PipelineRunner(DriverSettings("p", file, harbour.urls, "local[1]", tmp_path / "scratch"), stopping)
    spark: Any = object()
    runner.spark = spark
    runner._open_session = runner.session_ready.set  # type: ignore[method-assign]
    return runner


def test_f319_a_driver_of_derived_tables_alone_ends_when_its_session_is_gone(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, tries = threading.Event(), list[int]()

    def raises(*_: Any) -> None:
        tries.append(1)
        raise FunctionFailedError("derived function raised: Connection refused")

    monkeypatch.setattr(Derivation, "run", raises)
    runner = driver(harbour, tmp_path, stopping)
    monkeypatch.setattr(runner, "session_is_lost", lambda: len(tries) > 1)  # the first time it is the function's own
    with pytest.raises(SparkSessionLostError, match="Connection refused"):
        runner.run()
    assert len(tries) == 2


def test_f319_a_session_whose_directory_was_deleted_is_lost(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=SimpleNamespace(poll=lambda: None)))
    runner = driver(harbour, tmp_path, threading.Event())
    try:
        runner.spark = None
        assert not runner.session_is_lost()
        runner.spark_local = tmp_path / "spark-local"
        assert runner.session_is_lost()
        runner.spark_local.mkdir()
        assert not runner.session_is_lost()
    finally:
        runner.portal.close()
