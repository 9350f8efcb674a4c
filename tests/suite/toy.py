"""Small suites in a directory of their own, run by pytest with this folder's plugins."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "suite.recording",
    "-p",
    "suite.selection",
)

FAILS_ONCE = """
from pathlib import Path

def test_first():
    seen = Path(__file__).with_suffix(".seen")
    runs = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (runs + 1))
    print("what the first failure printed" if runs == 0 else "later")
    assert runs >= 1
"""


class Toy:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    processes\n    extended\n")
        self.temporary = directory / "temporary"
        """Place of pytest's temporary directories. It is the toy's own: pytest warns of what another run left there."""
        self.temporary.mkdir()
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DEBUG_TEMPROOT": str(self.temporary),
        }

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(textwrap.dedent(text))

    def run(
        self, *arguments: str, before: Sequence[str] = (), timeout_s: float = 170
    ) -> subprocess.CompletedProcess[str]:
        """`before` is the command that gets pytest's as its arguments."""
        return subprocess.run(
            [*before, *PYTEST, *arguments], cwd=self.directory, env=self.environ, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
        )  # fmt: skip
