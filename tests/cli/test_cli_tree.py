"""The tree of commands: names, short flags, help with examples that parse, and what the first screen imports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from typer.core import TyperGroup
from typer.testing import CliRunner

import tidemill
from support.cli.commands import EVERY, SHOWN
from support.waiting import DEADLINE_S
from tidemill import __version__
from tidemill.cli.examples import EXAMPLES
from tidemill.cli.main import COMMANDS, app, load_command, with_global_options
from tidemill.cli.output.output import Form
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.check import _rebuild_error
from tidemill.spark.ingest.sources import as_text_error
from tidemill.spark.ingest.table_ownership import find_refused

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
        assert " ".join(shlex.split(example)[1:]).startswith(name), example
        parsed(example)


def parsed(line: str) -> dict[str, Any]:
    """Return the parameters of a command line. Raises UsageError."""
    parts = shlex.split(line)[1:]
    command, rest = load_command(parts[0]), parts[1:]
    while isinstance(command, TyperGroup):
        command, rest = command.commands[rest[0]], rest[1:]
    params: dict[str, Any] = command.make_context(parts[0], rest).params
    return params


@pytest.mark.parametrize("name", ["orders", "my table", "it's.public"])
def test_the_remedy_of_an_error_about_a_table_is_a_command_that_parses_and_is_not_refused_as_in_use(name: str) -> None:
    before = PipelineRow("p", {name: "topic:a"})
    texts = PipelineRow("p", {name: "topic:a"}, formats={name: '{"format":"avro"}'})
    moved = replace(before, tables={name: "topic:b"})
    array = ShardSchema((Column("k", "int32"), Column("v", "array<int>")), ("k",))
    errors = [
        find_refused(moved, before, [before], {name})[name],
        find_refused(before, texts, [texts], {name})[name],
        str(as_text_error(name, ("v",), array)),
        str(_rebuild_error(name, "v")),
    ]
    for error in errors:
        assert "tidemill table drop" in error, error
        params = parsed(error[error.index("tidemill table drop") :])
        assert (params["name"], params["force"]) == (name, True), error


def test_every_remedy_that_drops_a_table_is_formed_by_one_function() -> None:
    """A command without --force is refused: a pipeline counts as a user of its tables also while it is stopped."""
    package = Path(tidemill.__file__).parent
    found = [path.relative_to(package) for path in package.rglob("*.py") if " table drop {" in path.read_text()]
    assert found == [Path("base/errors.py")]


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
