"""`tidemill schema`, as its user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.cli.cluster import create_stores
from support.registry.world import record
from tidemill.base.errors import InvalidError
from tidemill.cli.main import app
from tidemill.registry.errors import RegistryError


class Terminal:
    def __init__(self, directory: Path) -> None:
        self._config = directory / "tidemill.toml"
        self._config.write_text(f'[node]\ndata = "{directory}/data"\n')
        create_stores(self._config)

    def run(self, *arguments: str, code: int = 0) -> Any:
        line = ["schema", *arguments, "--config", str(self._config), "--json"]
        done = CliRunner().invoke(app, line)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return json.loads(done.output.strip().splitlines()[-1])


def test_schemas_are_registered_listed_shown_checked_and_deleted(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    old, new, bad = tmp_path / "old.avsc", tmp_path / "new.avsc", tmp_path / "bad.avsc"
    old.write_text(record("a:int"))
    new.write_text(record("a:int", "b:int=0"))
    bad.write_text(record("a:string"))
    assert terminal.run("list") == []
    assert terminal.run("register", "s", str(old)) == {"subject": "s", "version": 1, "id": 1}
    assert terminal.run("check", "s", str(new))["is_compatible"] is True
    assert terminal.run("check", "s", str(bad), code=1)["messages"]
    with pytest.raises(RegistryError, match="incompatible"):
        terminal.run("register", "s", str(bad))
    assert terminal.run("register", "s", str(new))["version"] == 2
    assert terminal.run("list") == [{"subject": "s", "versions": [1, 2], "ids": [1, 2], "compatibility": "BACKWARD"}]
    assert terminal.run("show", "s", "--version", "1")["schema"] == record("a:int")
    other = tmp_path / "other.json"
    other.write_text(record("r:R", name="O"))
    reference = ["--type", "avro", "--reference", "R=s:2"]
    assert terminal.run("register", "o", str(other), *reference)["id"] == 3
    assert terminal.run("delete", "o") == {"subject": "o", "deleted": [1], "permanent": False}
    assert terminal.run("delete", "o", "--permanent", "--yes")["deleted"] == [1]
    assert terminal.run("delete", "s", "--version", "2")["deleted"] == [2]
    assert terminal.run("list", "--deleted")[0]["versions"] == [1, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("register", "s", "nothing.avsc"),
        ("register", "s", "pyproject.toml"),
        ("register", "s", "x.avsc", "--reference", "R=s"),
        ("show", "s"),
        ("delete", "s"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(InvalidError):
        Terminal(tmp_path).run(*arguments)


def test_a_subject_is_checked_under_the_name_under_which_it_is_registered(tmp_path: Path) -> None:
    terminal, file = Terminal(tmp_path), tmp_path / "s.avsc"
    file.write_text(record("a:int"))
    terminal.run("register", "s", str(file))
    file.write_text(record("a:string"))
    assert terminal.run("check", ":.:s", str(file), code=1)["messages"]
    with pytest.raises(RegistryError, match="not a valid subject"):
        terminal.run("check", "__GLOBAL", str(file))
