"""`tidemill.spark.run` in the session of the test: its handle, its settings, and what it refuses."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.waiting import eventually
from tidemill.base.errors import InvalidError
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark import Pipeline, run
from tidemill.spark.pipeline import pipeline_run, run_lease, session_run
from tidemill.spark.session import requirements

pytestmark = pytest.mark.spark

ZONE = "spark.sql.session.timeZone"


def shop(p: Pipeline) -> None:
    p.table("clicks", p.topic("clicks", key="id", schema="id string, product bigint"))

    @p.derived(key="product", every_s=0.05)
    def zones(spark: Any, clicks: Any) -> Any:
        return clicks.groupBy("product").count().selectExpr("product", "count", f"'{spark.conf.get(ZONE)}' AS zone")


def stores_of(harbour: Any) -> dict[str, str]:
    return {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}


def produce(harbour: Any, topic: Any, rows: dict[str, int]) -> None:
    harbour.produce(topic, [(None, {"id": key, "product": product}) for key, product in rows.items()])
    harbour.mint("topic/clicks", harbour.stores.clock.now_ms(), topic)


def test_a_pipeline_runs_in_a_session_and_leaves_it_as_it_was(harbour: Any, spark: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    given = {**stores_of(harbour), "scratch": tmp_path / "scratch"}
    spark.conf.set(ZONE, "Europe/Berlin")
    try:
        with run(spark, shop, **given) as found:
            assert (found.name, found.instance, found.is_running) == ("shop", "session", True)
            produce(harbour, topic, {"a": 1, "b": 1, "c": 2})
            eventually(lambda: harbour.upper("zones") and len(harbour.contents("zones")) == 2)
            assert harbour.contents("zones")[0] == {"product": 1, "count": 2, "zone": "UTC"}
            eventually(lambda: {t.state for t in found.status().tables.values()} == {"idle"})
            assert found.status()[:4] == ("shop", "session", "running", "") and "clicks: idle, lag 0 ms" in repr(found)
            assert not spark.streams.active, "a session of another program gets no query"
            with pytest.raises(InvalidError, match="pipeline=shop instance=session by=this process"):
                run(spark, shop, **given)
            assert found.wait(0.01) is False, "a wait that ends changes nothing"
            spark.sparkContext.cancelAllJobs()  # as PySpark does when a notebook's cell is interrupted
            produce(harbour, topic, {"b": 2})
            eventually(lambda: {"product": 2, "count": 2, "zone": "UTC"} in harbour.contents("zones"))
            reports = harbour.portal.call(StatusBoard(harbour.stores.consensus, harbour.stores.rand).reports())
            assert "pipeline:shop:session" in {report.process for report in reports}
        assert not found.is_running and found.wait() and found.status().state == "stopped"
        with run(spark, shop, **given) as again:
            produce(harbour, topic, {"d": 3})
            eventually(lambda: len(harbour.contents("clicks")) == 4)
            session_run.stop_all()  # as at the end of a program
            assert again.wait(0)
    finally:
        zone = spark.conf.get(ZONE)
        spark.conf.set(ZONE, "UTC")
    assert zone == "Europe/Berlin" and spark.range(3).count() == 3, "the session still works, as it was set"


def test_f336_a_pipeline_of_another_process_is_named_and_one_that_is_taken_over_ends(
    harbour: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**stores_of(harbour), "scratch": tmp_path / "scratch"}
    monkeypatch.setattr(run_lease, "LEASE_WAIT_MS", 300)
    other = run_lease.RunLease(harbour.urls, "shop", "session", "local-7 pid 9 on there")
    assert other.acquire() is None
    with pytest.raises(InvalidError, match="by=local-7 pid 9 on there") as refused:
        run(spark, shop, **given)
    assert "instance=NAME" in refused.value.fix
    other.close()
    with run(spark, shop, **given) as found:
        lease = found._lease
        portal, consensus = harbour.portal, harbour.stores.consensus
        portal.call(consensus.release(lease._name, lease._holder, lease._lease.term))  # type: ignore[union-attr]
        taken = run_lease.RunLease(harbour.urls, "shop", "session", "a third")
        assert taken.acquire() is None
        eventually(lambda: not found.is_running)
        assert found.status().state == "failed" and "by=a third" in found.status().error
        with pytest.raises(InvalidError, match="another session runs the pipeline"):
            found.wait()
        taken.close()


def test_a_session_that_ends_ends_its_pipeline_without_an_error(harbour: Any, spark: Any, tmp_path: Path) -> None:
    """The context of the test process outlives the test, so only this run believes that it was stopped."""
    stopped = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_run, requirements):
            patch.setattr(module, "is_context_stopped", lambda _: stopped.is_set())
        found = run(spark, shop, **stores_of(harbour), scratch=tmp_path / "scratch")
        stopped.set()
        eventually(lambda: not found.is_running)
        assert found.wait() and found.status().state == "stopped"
        with pytest.raises(InvalidError, match="the session was stopped"):
            run(spark, shop, **stores_of(harbour))


def test_a_session_without_what_a_pipeline_needs_is_refused_by_name(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidError, match=r"setting=spark\.remote"):
        requirements.check_pipeline_session(SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(requirements, "is_context_stopped", lambda _: False)
    with pytest.raises(InvalidError, match=r"a pipeline needs Spark 4\.0 or newer: version=3\.5\.9"):
        requirements.check_pipeline_session(SimpleNamespace(_jsparkSession=None, version="3.5.9"))  # type: ignore[arg-type]
    requirements.check_pipeline_session(spark)


def test_a_pipeline_has_the_name_of_its_function_or_of_its_file() -> None:
    def build(p: Pipeline) -> None: ...

    assert session_run._name_of(shop) == "shop" and session_run._name_of(build) == "test_spark_session_run"
    code = compile("def build(p): pass", "/tmp/ipykernel_7/123.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_run.sys, "modules", {"__main__": SimpleNamespace()})
        with pytest.raises(InvalidError, match="the pipeline has no name"):
            session_run._name_of(names["build"])
