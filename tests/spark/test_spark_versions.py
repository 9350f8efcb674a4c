"""Every supported Spark: reads, writes, streams and a pipeline, in one process for each version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = Path(__file__).parent / "versions"
FURTHER = Path(sys.prefix) / "spark-versions"
INSTALLED = [folder.name for folder in sorted(FURTHER.glob("4.*"))]
ALL = ["4.0", "4.1", "4.2", "4.3"]
TESTED = ALL if len(INSTALLED) == 3 else sorted({"4.0", *INSTALLED})
"""4.3, which all other tests run with, takes part only where all others do (`./dev spark-versions`)."""
SEEN = {
    "read": [[1, 10], [2, 20]],
    "plan": [[2, 20]],
    "sql": [[10]],
    "changes": [[1, 10, 1], [2, 20, 1]],
    "later": [[1, 10, -1], [1, 10, 1], [1, 11, 1], [2, 20, -1], [2, 20, 1], [3, 30, 1]],
    "topic": [["a", 1], ["b", 1], ["c", 2]],
    "copy": [["a", 1], ["b", 1], ["c", 2]],
    "counted": [[1, 2], [2, 1]],
}
NO_STREAMING_WRITE = 'writeStream.format("tidemill") needs Spark 4.1 or newer'


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.spark
@pytest.mark.parametrize("version", TESTED)
def test_reads_writes_streams_and_a_pipeline_work_on_spark(version: str, tmp_path: Path) -> None:
    """4.3 is the version of the project's environment; `tests/spark/versions/install` installs the others."""
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    if version != "4.3":
        if version not in INSTALLED:
            pytest.skip(f"PySpark {version} is not installed, see tests/spark/versions/install")
        path = [str(FURTHER / version), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(
        [sys.executable, VERSIONS / "scenario.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=1000,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(f"PySpark {seen['version']}: {seen.pop('seconds')} s")
    assert seen.pop("version").startswith(f"{version}.")
    if version == "4.0":
        assert NO_STREAMING_WRITE in seen.pop("copy")
        assert seen == {name: rows for name, rows in SEEN.items() if name != "copy"}
    else:
        assert seen == SEEN
