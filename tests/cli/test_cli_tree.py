"""The tree of commands: names, short flags, help with examples that parse, and what the first screen imports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from support.cli.commands import EVERY, SHOWN
from support.waiting import DEADLINE_S
from tidemill import __version__
from tidemill.cli.examples import EXAMPLES
from tidemill.cli.main import COMMANDS, app, load_command, with_global_options
from tidemill.cli.output.output import Form

GLOBAL_SHORT_FLAGS = {"-c": "config", "-o": "output", "-y": "yes", "-f": "follow"}
"""A short flag has the same meaning in every command that has it."""


@pytest.mark.parametrize("name", EVERY)
def test_a_short_flag_has_one_meaning(name: str) -> None:
    for param in EVERY[name].params:
        for flag in [option for option in param.opts if len(option) == 2]:
            assert GLOBAL_SHORT_FLAGS.get(flag, param.name) == param.name, (name, flag)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_begins_its_help(name: str) -> None:
    help_text = " ".join((load_command(name).help or "").split())
    assert help_text.startswith(COMMANDS[name].summary), help_text


@pytest.mark.parametrize("name", SHOWN)
def test_every_help_has_an_example_that_parses(name: str) -> None:
    assert EXAMPLES[name][0] in (SHOWN[name].epilog or ""), f"tidemill {name} --help has no example"
    for example in EXAMPLES[name]:
        parts = shlex.split(example)[1:]
        assert " ".join(parts).startswith(name), example
        command, rest = load_command(parts[0]), parts[1:]
        while isinstance(command, TyperGroup):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(name, rest)  # raises UsageError


def test_every_example_is_of_a_command() -> None:
    assert set(EXAMPLES) == set(SHOWN)


def test_options_before_a_command_are_given_to_it_and_its_own_override_them() -> None:
    given = {"config": "a.toml", "as_json": True}
    table = load_command("table")
    before = ["--config", "a.toml", "--output", "json"]
    assert with_global_options(table, ["list"], given) == ["list", *before]
    assert with_global_options(table, ["list", "-c", "b.toml"], given) == ["list", *before, "-c", "b.toml"]
    assert with_global_options(table, ["--help"], given) == ["--help"]
    assert with_global_options(load_command("version"), [], given) == before[2:]
    assert with_global_options(load_command("version"), [], {"output": Form.CSV}) == ["--output", "csv"]
    assert with_global_options(load_command("version"), ["--json"], {"output": Form.CSV}) == ["--json"]
    assert with_global_options(load_command("topic"), ["produce", "t"], {"as_json": True}) == ["produce", "t"]


def test_the_version_is_one_line_and_the_command_names_the_stored_formats() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"tidemill {__version__}\n"
    shown = json.loads(CliRunner().invoke(app, ["version", "--json"]).stdout)
    assert shown["tidemill"] == __version__ and shown["python"] and shown["pyspark"] and shown["formats"]["sst"] >= 1
    assert "formats" in CliRunner().invoke(app, ["--json", "version"]).stdout


LIGHT = """
import sys
sys.argv = {arguments!r}
from tidemill.cli.examples import EXAMPLES
from tidemill.cli.main import run
try:
    run()
except SystemExit:
    pass
heavy = "pyarrow psycopg duckdb numpy starlette pyspark obstore confluent_kafka".split()
print("loaded", [name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["status"], ["why"], ["table", "--help"]])
def test_the_first_screen_imports_no_heavy_library(arguments: list[str], tmp_path: Any) -> None:
    program = LIGHT.format(arguments=["tidemill", *arguments])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stderr.splitlines()[-1] == "loaded []", done.stderr


def test_the_shell_completes_commands_without_importing_them() -> None:
    command: Any = typer.main.get_command(app)
    with command.make_context("tidemill", [], resilient_parsing=True) as context:
        assert set(command.list_commands(context)) == set(COMMANDS)
