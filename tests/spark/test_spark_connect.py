"""Spark Connect, with a client that has no py4j: reads, writes, changes, and what needs a session with a JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark


def test_a_client_without_a_jvm_reads_writes_and_follows_and_holds_what_its_frames_read(tmp_path: Path) -> None:
    """The program runs in a separate process: one with a classic session cannot have another."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, tests / "support" / "spark" / "programs" / "connect_child.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    run, build = found.pop("needs_jvm")
    assert "a pipeline needs a session with a JVM" in run and "`pyspark-client`, which has no JVM" in build
    assert found.pop("changes") == [[1, 10, 1]]
    assert found == {"connect": True, "held": ["dataframe"], "gone": [], "counted": 29_990, "after": 1}
