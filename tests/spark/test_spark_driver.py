"""The driver as a process: configuration errors, SIGTERM, and kill -9 between any two steps."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import DEADLINE_S, eventually

PIPELINE = """
def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))
"""

WITH_DERIVED = (
    PIPELINE
    + """
    @p.derived("copy", key="click_id", inputs=("clicks",))
    def copy(spark, clicks):
        return clicks
"""
)


def command(harbour: Any, tmp_path: Path, **more: str) -> list[str]:
    file = tmp_path / "pipeline.py"
    if not file.exists():
        file.write_text(PIPELINE)
    options = {
        "objects": harbour.urls.objects,
        "consensus": harbour.urls.consensus,
        "pipeline": str(file),
        "name": "p",
        "master": "local[1]",
        "scratch": str(tmp_path / "scratch"),
        **more,
    }
    flags = [part for key, value in options.items() for part in (f"--{key}", value)]
    return [sys.executable, "-m", "tidemill.spark.pipeline.driver", *flags]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory in which paths of sockets are short enough, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp", ignore_cleanup_errors=True) as found:
        yield Path(found)


@pytest.mark.parametrize(
    ("more", "text", "said"),
    [
        ({"pipeline": "/nonexistent.py"}, PIPELINE, "no such pipeline file"),
        ({}, "x = 1", "has no build"),
        ({}, "def build(p):\n    p.table(", "does not parse"),
        ({}, "import nothing_of_that_name", "line=1 error=ModuleNotFoundError"),
        ({}, "def build(p):\n    x = 1\n    raise SystemExit(0)", "line=3 error=SystemExit"),
        ({}, "def build(p):\n    p.table('t', p.topic('t', key='nope', schema='a long'))", "key column"),
        ({"objects": "ftp://x"}, PIPELINE, "objects.url"),
        ({"consensus": "oracle:x"}, PIPELINE, "consensus.url"),
    ],
)
def test_a_wrong_configuration_is_one_sentence_and_exit_2(
    harbour: Any, tmp_path: Path, more: dict[str, str], text: str, said: str
) -> None:
    (tmp_path / "pipeline.py").write_text(text)
    done = subprocess.run(
        command(harbour, tmp_path, **more), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    last = [line for line in done.stderr.splitlines() if line.strip()][-1]
    assert said in last


def test_a_scratch_directory_in_use_is_refused(harbour: Any, tmp_path: Path) -> None:
    from tidemill.spark.ingest.pipeline_context import lock_scratch_directory

    with lock_scratch_directory(tmp_path / "scratch"):
        done = subprocess.run(
            command(harbour, tmp_path), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.returncode == 2
    assert "in use by another process" in done.stderr


@pytest.mark.spark
def test_kill_9_at_any_moment_loses_and_doubles_nothing(
    harbour: Any, tmp_path: Path, short_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """And the sockets that a killed driver left behind are gone after the next start."""
    (tmp_path / "pipeline.py").write_text(WITH_DERIVED)
    draw = random.Random(5)
    topic = harbour.create_topic("clicks", 2)
    expected: dict[str, int] = {}
    bad = n = 0
    left_behind = set[Path]()
    for life in range(4):
        process = subprocess.Popen(command(harbour, tmp_path, scratch=str(short_path)))
        started.append(process)
        upper = harbour.upper("clicks")
        until_s = time.monotonic() + DEADLINE_S
        extra = draw.uniform(0.0, 0.6)
        while True:
            n += 1
            key = f"k{draw.randrange(50)}"
            harbour.produce(topic, [(key.encode(), {"click_id": key, "product_id": n})], hash(key) % 2)
            expected[key] = n
            if n % 5 == 0:
                harbour.produce(topic, [(b"", b"bad")], n % 2)
                bad += 1
            harbour.mint("topic/clicks", n * 10, topic)
            assert time.monotonic() < until_s, f"life {life} never appended"
            assert process.poll() is None
            if harbour.upper("clicks") > upper:  # it works: kill it somewhere in its next rounds
                time.sleep(extra)
                break
            time.sleep(0.02)
        assert not any(path.exists() for path in left_behind)
        if life == 2:  # the JVM starts concurrently with the first rounds
            left_behind = eventually(lambda: set(short_path.glob("sockets/.*.sock")), "the JVM has a socket")
        if life < 3:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if life == 2:
            assert any(path.exists() for path in left_behind)
    at = n * 10
    until_s = time.monotonic() + DEADLINE_S
    while harbour.upper("clicks") <= at:
        harbour.mint("topic/clicks", at + int(time.monotonic() * 1000), topic)
        assert time.monotonic() < until_s
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert {r["click_id"]: r["product_id"] for r in harbour.contents("clicks", at)} == expected
    assert len(harbour.contents("p.dead_letters")) == bad
