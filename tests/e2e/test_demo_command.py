"""The command line of the demo: arguments that it refuses, and help that names its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_address

ROOT = Path(__file__).parents[2]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_fresh_deletes_no_directory_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = demo(
        "--fresh", "--data", str(tmp_path), "--for", "1", "--http", free_address(), "--kafka", free_address()
    )  # fmt: skip
    refused(done, "--fresh", "--data")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_a_load_of_no_time_is_refused(seconds: str) -> None:
    refused(demo("--for", seconds), "--for must be above 0", f"for={float(seconds)}")


def test_help_names_the_command_as_it_is_called_and_its_options() -> None:
    done = demo("--help")
    assert done.returncode == 0, done.stderr
    for text in ("./dev demo", "--for", "--crash", "--fresh", "--data", "--nodes", "--json"):
        assert text in done.stdout


def refused(done: subprocess.CompletedProcess[str], *named: str) -> None:
    """The refusal is one sentence, the last line of stderr, and exit code 2."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for text in named:
        assert text in done.stderr.strip().splitlines()[-1]
