"""`tidemill logs`: the last lines of each process, merged by time, readable, and followed through a rotation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli.process import run_tidemill
from support.waiting import DEADLINE_S, eventually


def entry(second: int, event: str, **more: object) -> str:
    return json.dumps({"event": event, "level": "info", "timestamp": f"2026-11-28T20:00:{second:02}.123456Z", **more})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tidemill.toml").touch()
    found = tmp_path / ".tidemill" / "logs"
    found.mkdir(parents=True)
    return found


def test_logs_of_several_processes_are_merged_by_time_and_a_traceback_stays_with_its_line(directory: Path) -> None:
    (directory / "node.log").write_text(f"{entry(1, 'node serves', http='h:1')}\n{entry(4, 'leading')}\n")
    (directory / "pipeline-shop.log").write_text(f"{entry(2, 'fails')}\nTraceback\n  ValueError: x\n{entry(3, 'ok')}\n")
    done = run_tidemill("logs", cwd=directory.parents[1])
    assert done.exit_code == 0 and done.output.splitlines() == [
        "2026-11-28T20:00:01.123 info    node  node serves  http=h:1",
        "2026-11-28T20:00:02.123 info    pipeline-shop  fails",
        "pipeline-shop  Traceback",
        "pipeline-shop    ValueError: x",
        "2026-11-28T20:00:03.123 info    pipeline-shop  ok",
        "2026-11-28T20:00:04.123 info    node  leading",
    ]
    rows = [json.loads(line) for line in run_tidemill("logs shop --json", cwd=directory.parents[1]).output.splitlines()]
    assert [row["event"] for row in rows] == ["fails", "Traceback", "  ValueError: x", "ok"]
    assert {row["process"] for row in rows} == {"pipeline-shop"}


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 5000])
def test_the_last_lines_are_found_in_a_log_of_any_size(directory: Path, count: int) -> None:
    lines = [entry(number % 60, f"line {number}", filler="x" * 200) for number in range(1000)]
    (directory / "node.log").write_text("\n".join(lines) + "\nnot yet a li")
    shown = run_tidemill(f"logs node --lines {count}", cwd=directory.parents[1]).output.splitlines()
    assert [line.split("node  ")[1].partition("  ")[0] for line in shown] == [f"line {n}" for n in range(1000)][
        max(0, 1000 - count) :
    ]


def test_names_without_a_log_are_refused_and_nothing_is_created(tmp_path: Path, directory: Path) -> None:
    (directory / "pipeline-shop.log").touch()
    unknown = run_tidemill("logs shopp", cwd=tmp_path)
    assert unknown.exit_code == 2 and "Did you mean shop?" in unknown.errors
    (directory / "pipeline-shop.log").unlink()
    none = run_tidemill("logs", cwd=tmp_path)
    assert none.exit_code == 2 and "no process has run here" in none.errors and list(directory.iterdir()) == []


def test_a_log_is_followed_through_a_rotation(directory: Path, tmp_path: Path) -> None:
    path = directory / "node.log"
    path.write_text(entry(1, "first") + "\n")
    command = [sys.executable, "-m", "tidemill", "logs", "node", "-f", "--config", str(tmp_path / "tidemill.toml")]
    seen: list[str] = []
    with (tmp_path / "out").open("w") as out, subprocess.Popen(command, stdout=out, cwd="/") as process:
        try:

            def shows(event: str) -> bool:
                seen[:] = (tmp_path / "out").read_text().splitlines()
                return any(event in line for line in seen)

            eventually(lambda: shows("first"))
            with path.open("a") as log:
                log.write(entry(2, "second") + "\n")
            eventually(lambda: shows("second"))
            path.write_text(entry(3, "third") + "\n")  # truncated by a rotation, and shorter than before
            eventually(lambda: shows("third"))
            assert [line.split("  ")[-1] for line in seen] == ["first", "second", "third"]
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def test_a_reader_that_ends_early_is_no_error(directory: Path, tmp_path: Path) -> None:
    (directory / "node.log").write_text("".join(entry(1, f"line {n}") + "\n" for n in range(20_000)))
    line = f"{sys.executable} -m tidemill logs -n 20000 | head -1"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
