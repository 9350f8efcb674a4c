"""`./dev flaky` counts failures over runs, continues interrupted runs, and leaves no process behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy import PYTEST, Toy

from suite.flaky import burners, parse, summary
from suite.recording import Record, read
from suite.selection import shuffle
from support.waiting import eventually


def test_the_summary_says_in_how_many_of_how_many_runs_each_test_failed() -> None:
    runs = [
        Record({"a": "failed", "b": "passed", "c": "failed"}, {"a": "", "c": ""}),
        Record({"a": "failed", "b": "passed", "c": "passed"}, {"a": ""}),
        Record({"a": "failed"}, {"a": ""}, broken=["d\nworker 'gw1' crashed"]),
    ]
    assert summary(runs) == ["failed in 3 of 3 runs: a", "failed in 1 of 2 runs: c", "broke a run: d"]


def test_the_count_and_the_seed_are_taken_and_the_rest_goes_to_pytest() -> None:
    plan = parse(["5", "-k", "kafka", "--seed", "7", "tests/kafka"])
    assert (plan.runs, plan.seed, plan.arguments) == (5, 7, ("-k", "kafka", "tests/kafka"))
    assert parse([]).runs == 3
    assert parse(["--seed", "7"]).directory != parse(["--seed", "7", "tests/kafka"]).directory


def test_the_burners_end_with_the_block_also_when_it_is_interrupted() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted() -> None:
        with burners() as running:
            started.extend(running)
            assert all(process.poll() is None for process in running)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_run_goes_on_with_the_tests_that_have_no_outcome_yet(toy: Toy) -> None:
    toy.write("test_one.py", "import pytest\n@pytest.mark.parametrize('n', range(6))\ndef test_n(n): assert n != 3\n")
    record = toy.directory / "record.jsonl"
    toy.run("test_one.py::test_n[3]", "test_one.py::test_n[4]", f"--record={record}")
    assert read(record).outcomes == {"test_one.py::test_n[3]": "failed", "test_one.py::test_n[4]": "passed"}
    done = toy.run("-n", "2", f"--record={record}", "--continue-record")
    assert "4 passed" in done.stdout, done.stdout
    assert len(read(record).outcomes) == 6 and list(read(record).failed) == ["test_one.py::test_n[3]"]


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_a_seed_gives_one_random_order_and_files_stay_together() -> None:
    def order(seed: int) -> list[str]:
        items: list[Any] = [Item(f"{file}.py::test_{number}") for file in "abc" for number in range(5)]
        shuffle(items, seed)
        return [item.nodeid for item in items]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))
    files = [name[0] for name in order(1)]
    assert sum(one != other for one, other in itertools.pairwise(files)) == 2


def test_an_interrupted_run_prints_what_is_known_and_ends_its_burners(tmp_path: Path) -> None:
    """Run `flaky` itself on a suite with a test that fails and one that never ends, in either order."""
    toy = Toy(tmp_path)
    toy.write("test_one.py", FIRST_FAILS)
    toy.write("drive.py", DRIVE)
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [sys.executable, "drive.py", *PYTEST]
        process = subprocess.Popen(command, cwd=tmp_path, env=toy.environ, stdout=output, stderr=output)
    try:
        record = tmp_path / "run-1.jsonl"

        def failed() -> object:
            assert process.poll() is None, log.read_text()
            return read(record).failed

        eventually(failed, log.read_text)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 3  # pytest and two burners
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 1, log.read_text()
    finally:
        process.kill()  # its burners end by themselves
        process.wait()
    assert "failed in 1 of 1 runs: test_one.py::test_it[" in log.read_text()
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


FIRST_FAILS = """
import time
from pathlib import Path
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_it(n):
    second = Path("begun").exists()
    Path("begun").touch()
    assert second
    time.sleep(900)
"""

DRIVE = """
import sys
from pathlib import Path
from suite import flaky

class Plan(flaky.Plan):
    directory = Path.cwd()

flaky.ROOT, flaky.PYTEST = Path.cwd(), tuple(sys.argv[1:])
flaky.parse = lambda words: Plan(1, 1, ())
sys.exit(flaky.main([]))
"""
