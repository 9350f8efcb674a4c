"""A driver of a table with a sequence ends by SIGKILL at any of its appends, and the next one continues."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.spark.programs import sequence_child
from support.spark.users_topic import contents, expected_of, random_records, value
from support.waiting import SCENARIO_S

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
SEED = 2


def run_until_killed(harbour: Any, scratch: Path, mode: str, rand: random.Random) -> bool:
    """Run a driver that kills itself at a random append; return whether it reached its end first."""
    kill = [str(rand.randint(1, 4)), rand.choice(["before", "after"])]
    command = [sys.executable, sequence_child.__file__, harbour.urls.objects, harbour.urls.consensus, str(scratch)]
    done = subprocess.run(
        [*map(str, command), mode, *kill],
        capture_output=True,
        text=True,
        timeout=SCENARIO_S,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout == "done\n"


def test_a_driver_that_is_killed_at_its_appends_leaves_the_table_exact(harbour: Any, tmp_path: Path) -> None:
    """First it follows the topic, then it replays the dead letters of an expectation that is repaired."""
    rand = random.Random(SEED)
    topic = harbour.create_topic("users")
    records = random_records(SEED, 120)
    for number in range(6):
        harbour.produce(topic, [value(*record) for record in records[number * 20 : number * 20 + 20]])
        harbour.mint("topic/users", number * 1000 + 1000, topic)
    for mode in ("follow", "replay"):
        killed = 0
        while not run_until_killed(harbour, tmp_path / "scratch", mode, rand):
            killed += 1
            upper = harbour.upper("users") if mode == "follow" else 0
            if upper > 1000:
                good = [r for r in records[: upper // 1000 * 20] if r[2] is None or r[2] < 60]
                assert contents(harbour) == expected_of(good)
        assert killed
        if mode == "follow":
            good = [r for r in records if r[2] is None or r[2] < 60]
            assert contents(harbour) == expected_of(good) != expected_of(records)
    assert contents(harbour) == expected_of(records)
    assert harbour.contents("p.dead_letters") == []
