"""A pipeline and a streaming write in a user's own job, started by spark-submit and killed, concurrent with another
driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from support.spark.programs import session_job
from support.spark.running import pipeline
from support.waiting import eventually
from tidemill.base.errors import MissingError
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark.pipeline import run_lease
from tidemill.spark.session.java import ensure_spark_home, find_java

pytestmark = [pytest.mark.spark, pytest.mark.processes]

BESIDE = 'def build(p):\n    p.table("clicks", p.topic("clicks", key="id", schema="id string, product bigint"))\n'


@contextmanager
def submitted(harbour: Any, root: Path) -> Iterator[subprocess.Popen[str]]:
    home = ensure_spark_home() or str(Path(pyspark.__file__).parent)
    urls = {"TIDEMILL_OBJECTS__URL": harbour.urls.objects, "TIDEMILL_CONSENSUS__URL": harbour.urls.consensus}
    given = {"JAVA_HOME": str(find_java().home), "SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable}
    tests = str(Path(__file__).parent.parent)
    environ = {**os.environ, **urls, **given, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": tests}
    command = [f"{home}/bin/spark-submit", "--master", "local[2]", str(session_job.__file__), str(root)]
    process = subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stored(harbour: Any, name: str) -> list[dict[str, Any]]:
    try:
        return list(harbour.contents(name)) if harbour.upper(name) else []
    except MissingError:
        return []


def test_f335_a_killed_job_leaves_its_tables_exact_beside_another_driver(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "job"
    (root / "incoming").mkdir(parents=True)
    topic = harbour.create_topic("clicks")
    clicks: dict[str, int] = {}
    stock: dict[int, int] = {}

    def more(batch: int) -> None:
        rows = {f"c{n}": (n * 7 + batch) % 5 for n in range(batch * 30, batch * 30 + 50)}  # 20 of them change
        clicks.update(rows)
        harbour.produce(topic, [(None, {"id": key, "product": product}) for key, product in rows.items()])
        harbour.mint("topic/clicks", harbour.stores.clock.now_ms(), topic)
        # No key twice: an epoch may have several files. Each epoch starts Python processes, which are slow when busy.
        lines = {n: n * 100 + batch for n in range(batch * 5, batch * 5 + 5)}
        stock.update(lines)
        written = root / f"{batch}.tmp"
        written.write_text("".join(json.dumps({"id": key, "n": n}) + "\n" for key, n in lines.items()))
        written.rename(root / "incoming" / f"{batch:04}.json")

    def exact() -> bool:
        counts = Counter(clicks.values())
        return (
            {row["id"]: row["product"] for row in stored(harbour, "clicks")} == clicks
            and {row["product"]: row["count"] for row in stored(harbour, "by_product")} == counts
            and {row["id"]: row["n"] for row in stored(harbour, "stock")} == stock
        )

    for batch in range(3):
        more(batch)
    with submitted(harbour, root) as first:
        eventually(lambda: first.poll() is not None or list(root.glob("started-*")), "the job has started")
        eventually(lambda: first.poll() is not None or stored(harbour, "clicks"), "the pipeline works")
        eventually(lambda: first.poll() is not None or stored(harbour, "stock"), "the query works")
        assert first.poll() is None
        more(3)
        os.killpg(first.pid, signal.SIGKILL)
    more(4)
    with submitted(harbour, root) as second, pipeline(harbour, tmp_path / "driver", BESIDE):
        eventually(lambda: second.poll() is not None or len(list(root.glob("started-*"))) == 2, "it has started again")
        eventually(lambda: second.poll() is not None or stored(harbour, "by_product"), "the pipeline derives")
        monkeypatch.setattr(run_lease, "LEASE_WAIT_MS", 0)
        lease = run_lease.RunLease(harbour.urls, "p", "session", "a third")
        assert (holder := lease.acquire()) is not None and f" on {os.uname().nodename}" in holder
        lease.close()
        more(5)
        eventually(lambda: second.poll() is not None or exact(), "the job and the other driver have caught up")
        (root / "finish").touch()
        told, _ = second.communicate(timeout=120)
        assert second.returncode == 0 and "ended True stopped" in told, told
        reports = harbour.portal.call(StatusBoard(harbour.stores.consensus, harbour.stores.rand).reports())
        assert [report.process for report in reports] == ["pipeline:p"], "the run that ended in order is forgotten"
    assert exact(), "and it stays so"
