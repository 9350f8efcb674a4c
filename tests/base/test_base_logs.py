"""Errors in logging never reach the code that logs."""

from __future__ import annotations

import os
import subprocess
import sys

from support.waiting import DEADLINE_S

CHILD = """
import sys, threading
import structlog
from tidemill.base.status.logging import configure_logs
configure_logs()
sys.stdin.readline()
for n in range(3):
    structlog.get_logger().error("still here", n=n)
print("alive")
"""


def test_a_reader_of_the_logs_that_went_away_ends_nobody() -> None:
    command = [sys.executable, "-c", CHILD]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered
    ) as child:
        assert child.stderr is not None and child.stdin is not None and child.stdout is not None
        child.stderr.close()
        child.stdin.write("\n")
        child.stdin.close()
        assert child.stdout.read() == "alive\n"
        assert child.wait(DEADLINE_S) == 0


def test_a_closed_stderr_ends_nobody() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD.replace("sys.stdin.readline()", "sys.stderr.close()")],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert child.stdout == "alive\n"
