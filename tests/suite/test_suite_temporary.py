"""Temporary directories are deleted after a run that passed, and stay after a run that failed."""

from __future__ import annotations

import pytest
from toy import Toy

from support.waiting import eventually

ONE = """
import os

def test_one(tmp_path_factory):
    (tmp_path_factory.mktemp("server") / "file").write_text("x")
    assert "FAILS" not in os.environ
"""


@pytest.mark.parametrize("fails", [False, True])
def test_directories_are_deleted_unless_a_test_failed(toy: Toy, fails: bool) -> None:
    toy.write("test_one.py", ONE)
    if fails:
        toy.environ["FAILS"] = "1"
    done = toy.run("-p", "suite.temporary")
    assert ("1 failed" if fails else "1 passed") in done.stdout, done.stdout
    if fails:
        assert [path.read_text() for path in toy.temporary.glob("pytest-of-*/pytest-0/server0/file")] == ["x"]
    else:
        eventually(lambda: not list(toy.temporary.glob("pytest-of-*/*-*")), "the deletion")
