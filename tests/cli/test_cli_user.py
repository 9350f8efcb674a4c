"""`tidemill user`: passwords from stdin, users that a node accepts immediately, and bad input that changes nothing."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from support.waiting import DEADLINE_S
from tidemill.base.errors import InvalidError, MissingError
from tidemill.cli.context import open_stores
from tidemill.cli.main import build_application
from tidemill.security.scram import SCRAM_SHA_256, SCRAM_SHA_512, matches_password
from tidemill.security.users import Users


def user(directory: Path, *arguments: str, stdin: str = "") -> Result:
    (directory / "tidemill.toml").touch()  # a command that prepares a cluster needs its configuration
    with contextlib.chdir(directory):
        return CliRunner().invoke(build_application(), ["user", *arguments], input=stdin)


def test_a_user_is_added_listed_changed_and_deleted(tmp_path: Path) -> None:
    added = user(tmp_path, "add", "alice", "--json", stdin="first\n")
    assert added.exit_code == 0, added.stderr
    assert json.loads(added.stdout.splitlines()[-1])["mechanisms"] == ["SCRAM-SHA-256", "SCRAM-SHA-512"]
    assert user(tmp_path, "add", "alice", "--iterations", "8192", stdin="second: ünd = mehr").exit_code == 0
    with open_stores(_configuration(tmp_path), create=True) as opened:
        users = Users(opened.metastore, opened.clock)
        for mechanism in (SCRAM_SHA_256, SCRAM_SHA_512):
            found = opened.portal.call(users.credential("alice", mechanism))
            assert found is not None and matches_password(found, "second: ünd = mehr") and found.iterations == 8192
    listed = json.loads(user(tmp_path, "list", "--json").stdout.splitlines()[-1])
    assert listed == [{"user": "alice", "mechanisms": {"SCRAM-SHA-256": 8192, "SCRAM-SHA-512": 8192}}]
    for refused in (
        user(tmp_path, "add", "bob", stdin=""),
        user(tmp_path, "add", "bob", stdin="x" * 5_000),
        user(tmp_path, "add", "b\tob", stdin="x\n"),
        user(tmp_path, "add", "bob", "--iterations", "1", stdin="x\n"),
        user(tmp_path, "delete", "bob"),
    ):
        assert isinstance(refused.exception, InvalidError | MissingError), refused.exception
    command = [sys.executable, "-m", "tidemill", "user", "delete", "bob", "--yes"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert user(tmp_path, "delete", "alice", "--yes").exit_code == 0
    assert json.loads(user(tmp_path, "list", "--json").stdout.splitlines()[-1]) == []


def _configuration(directory: Path) -> Path:
    path = directory / "tidemill.toml"
    path.write_text(f'[node]\ndata = "{directory}/.tidemill"\n')
    return path
