"""Commands report data of another user in one sentence as unreadable, not as a missing cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli.process import Done, run_tidemill
from support.unprivileged import call_unprivileged, closed, enterable_directory
from tidemill.query import connect

DENIED = (
    "the data of the cluster cannot be read: path={} reason=Permission denied. Run the command as the user of the node."
)


@pytest.fixture
def root() -> Iterator[Path]:
    with enterable_directory() as root:
        (root / "tidemill.toml").write_text("[node]\ndata = 'data'\n")
        (root / "data" / "logs").mkdir(parents=True)
        yield root


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "private", "path"),
    [
        ("status", "data", "data/consensus.db"),
        ("sql 'SELECT * FROM orders'", "data", "data/consensus.db"),
        ("doctor --deep", "data", "data/objects"),
        ("restore --dry-run", "data", "data/objects"),
        ("logs", "data", "data/logs"),
        ("logs", "data/logs", "data/logs"),
    ],
)
def test_a_command_cannot_read_the_data_of_another_user(root: Path, command: str, private: str, path: str) -> None:
    absent = run_tidemill(command, cwd=root)  # also imports what the child cannot
    assert absent.exit_code == 2 and "reason=Permission" not in absent.errors
    with closed(root / private):
        said = call_unprivileged(lambda: run_tidemill(command, cwd=root))
    assert said == str(Done(2, "", f"tidemill: {DENIED.format(root / path)}\n"))


@pytest.mark.processes
def test_a_program_cannot_read_the_data_of_another_user(root: Path) -> None:
    objects, consensus = root / "data" / "objects", root / "data" / "consensus.db"
    with closed(root / "data"):
        said = call_unprivileged(lambda: connect(objects=str(objects), consensus=f"sqlite://{consensus}"))
    assert said == f"InvalidError: {DENIED.format(consensus)}"
