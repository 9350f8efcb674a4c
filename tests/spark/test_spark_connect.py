"""`tidemill.spark.read` under Spark Connect: what a frame reads is held while its client has a frame made from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark


def test_what_a_frame_of_spark_connect_reads_is_held_until_its_last_descendant_is_gone(tmp_path: Path) -> None:
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
    assert found == {"connect": True, "held": ["dataframe"], "gone": [], "counted": 29_990, "after": 1}
