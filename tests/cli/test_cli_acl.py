"""`tidemill acl`: rules are written, listed and deleted; unknown words are refused."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from support.waiting import DEADLINE_S
from tidemill.base.errors import InvalidError
from tidemill.cli.main import build_application


def acl(directory: Path, *arguments: str) -> Result:
    (directory / "tidemill.toml").touch()  # a command that prepares a cluster needs its configuration
    with contextlib.chdir(directory):
        return CliRunner().invoke(build_application(), ["acl", *arguments])


def test_rules_are_added_listed_and_deleted(tmp_path: Path) -> None:
    assert acl(tmp_path, "add", "User:alice", "read,WRITE", "topic:orders:eu").exit_code == 0
    assert acl(tmp_path, "add", "User:*", "describe", "cluster", "--deny", "--host", "1.1.1.1").exit_code == 0
    assert acl(tmp_path, "add", "User:alice", "all", "group:g-", "--prefix").exit_code == 0
    assert acl(tmp_path, "add", "User:alice", "read", "topic:orders:eu").exit_code == 0, "again changes nothing"
    listed = json.loads(acl(tmp_path, "list", "--json").stdout.splitlines()[-1])
    words = {(r["principal"], r["permission"], r["operation"], r["resource"], r["name"], r["pattern"]) for r in listed}
    assert words == {
        ("User:alice", "allow", "read", "topic", "orders:eu", "literal"),
        ("User:alice", "allow", "write", "topic", "orders:eu", "literal"),
        ("User:*", "deny", "describe", "cluster", "kafka-cluster", "literal"),
        ("User:alice", "allow", "all", "group", "g-", "prefixed"),
    }
    for bad in (
        ("add", "alice", "read", "topic:a"),
        ("add", "User:alice", "reed", "topic:a"),
        ("add", "User:alice", "read", "topics:a"),
        ("add", "User:alice", "read", "topic:"),
        ("add", "User:alice", "read", "cluster"),
        ("delete", "User:alice", "alter", "topic:orders:eu"),
    ):
        assert isinstance(acl(tmp_path, *bad).exception, InvalidError), bad
    command = [sys.executable, "-m", "tidemill", "acl", "add", "alice", "read", "topic:a"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
    assert acl(tmp_path, "delete", "User:alice", "read,write", "topic:orders:eu", "--yes").exit_code == 0
    assert len(json.loads(acl(tmp_path, "list", "--principal", "User:alice", "--json").stdout.splitlines()[-1])) == 1
