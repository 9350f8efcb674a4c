"""A session whose Python lacks tidemill: the first call into our code fails with a sentence that names the setting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.spark.session.java import find_java

pytestmark = pytest.mark.spark


def test_a_plain_program_whose_spark_runs_another_python_is_told_what_to_set(tmp_path: Path) -> None:
    """The situation of `venv/bin/python job.py` when PATH has the system's python3."""
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    programs = Path(__file__).parents[1] / "support" / "spark" / "programs"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "PYTHONPATH", "SPARK_", "TIDEMILL_"))}
    env |= {"PATH": f"{other.parent}{os.pathsep}{env['PATH']}", "JAVA_HOME": str(find_java().home)}
    done = subprocess.run(
        [sys.executable, programs / "other_python_child.py", tmp_path / "data"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**env, "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "[DATA_SOURCE_NOT_FOUND]" in found["plain"][1], "Spark's own, which docs/guides/pipelines.md explains"
    for what in ("register", "read"):
        kind, said = found[what]
        assert kind == "Invalid" and "Set PYSPARK_PYTHON to the Python that runs this program" in said, found
