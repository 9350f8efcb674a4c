"""The table of all commands and situations without a cluster: the exit code, the first words, and nothing created.

Each command of the tree runs with its first example. A new command is in the table without any change here.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli.commands import EVERY, SHOWN
from support.cli.process import run_tidemill
from support.waiting import DEADLINE_S
from tidemill.cli.examples import EXAMPLES

LINES = {name: EXAMPLES[name][0].removeprefix("tidemill ").replace(":5432/", ":1/") for name in SHOWN}
"""Examples that reach no PostgreSQL: one may listen on the usual port, none does on port 1."""
Outcome = tuple[int, str]
FILE = (2, "tidemill: no such configuration file: path=nope.toml")
VARIABLE = (2, "tidemill: the configuration uses ${NO_SUCH_VARIABLE}, which is not set")
EARLY: dict[str, Outcome] = {
    "pipeline check": (1, "shop.py: no such pipeline file: file=shop.py"),
    "schema register": (2, "tidemill: the schema cannot be read: file=clicks.avsc reason=No such file"),
    "schema check": (2, "tidemill: the schema cannot be read: file=clicks.avsc reason=No such file"),
    "init": (4, "tidemill: PostgreSQL does not answer: server=localhost:1 dbname=shop"),
}
"""Outcomes of commands that read another file first, or ask the database of a cluster that does not exist yet."""
ELSEWHERE: dict[str, Outcome] = EARLY | {
    "pipeline run": (2, "tidemill: no such pipeline in the configuration: pipeline=shop. Known: none"),
    "restore": (2, "tidemill: the bucket contains no cluster: path="),
    "logs": (2, "tidemill: no process has run here: directory="),
    "doctor": (0, "ok   python: "),
    "version": (0, '{"tidemill": '),
    "shape list": (4, "tidemill: the node does not answer: address="),
    "shape get": (4, "tidemill: the node does not answer: address="),
    "shape sign": (2, "tidemill: no signing key is configured"),
    "topic produce": (2, "tidemill: no such file: path=clicks.txt"),
    "topic consume": (4, "tidemill: no node answers: cause="),
}
"""Outcomes of commands that need no cluster, or another part of one, in the wrong directory."""
PREPARING = {"topic create", "acl add", "user add", "schema register"}
STARTING = {"up"}
EXTRAS = {
    "node": ["up", "shape sign", "capture drop", "topic produce", "topic consume", "schema show", "schema register",
             "schema check", "group alter", "group delete", "txn list", "txn abort", "lake publish"],
    "duckdb": ["sql"],
}  # fmt: skip
"""Commands that need an extra. The others work with the reader alone."""


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from tidemill.cli.topic import client

    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a password\n"))


def check(directory: Path, line: str, wanted: Outcome) -> None:
    """Run a command line, and compare its outcome and the files."""
    before = entries(directory)
    done = run_tidemill(line, cwd=directory)
    said = done.errors or done.output
    assert (done.exit_code, said[: len(wanted[1])]) == wanted, done
    if done.exit_code in (2, 4):
        assert done.output == "" and len(done.errors.splitlines()) == 1, done
    assert entries(directory) == before


def entries(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("name", sorted(LINES.keys() - STARTING))
def test_in_the_wrong_directory(tmp_path: Path, name: str) -> None:
    nothing = (2, f"tidemill: no cluster here: directory={tmp_path} has neither tidemill.toml")
    check(tmp_path, LINES[name], ELSEWHERE.get(name, nothing))


@pytest.mark.parametrize("name", sorted(LINES.keys() - STARTING - PREPARING - ELSEWHERE.keys()))
def test_with_a_cluster_that_was_never_started(tmp_path: Path, name: str) -> None:
    (tmp_path / "tidemill.toml").write_text('[node]\nname = "n"\n')
    check(tmp_path, LINES[name], (2, "tidemill: the cluster of tidemill.toml was never started: "))


@pytest.mark.parametrize("name", LINES)
def test_with_a_configuration_file_that_is_missing(tmp_path: Path, name: str) -> None:
    options = {option for param in SHOWN[name].params for option in param.opts}
    if "--config" not in options:
        assert name in ("version", "init")
        return
    check(tmp_path, f"{LINES[name].partition(' --config')[0]} --config nope.toml", EARLY.get(name, FILE))


@pytest.mark.parametrize("name", LINES)
def test_with_a_variable_that_is_not_set(tmp_path: Path, name: str) -> None:
    (tmp_path / "tidemill.toml").write_text('[capture.shop]\ndsn = "${NO_SUCH_VARIABLE}"\n')
    without = {"version": ELSEWHERE["version"], **EARLY}
    check(tmp_path, LINES[name], without.get(name, VARIABLE))


@pytest.mark.parametrize("name", EVERY)
def test_with_a_mistyped_option(tmp_path: Path, name: str) -> None:
    done = run_tidemill(f"{name} --no-such-option", cwd=tmp_path)
    assert (done.exit_code, done.output) == (2, "") and done.errors.startswith(f"Usage: tidemill {name} ")
    assert "No such option: --no-such-option" in done.errors and entries(tmp_path) == []


LISTED_BY_NAME = {"dead-letters", "dlq"}
"""Groups that take any other word as the name of a pipeline whose records they list."""
GROUPS = sorted({name.split()[0] for name in EVERY if " " in name} - LISTED_BY_NAME)


@pytest.mark.parametrize("name", sorted(LISTED_BY_NAME))
def test_with_a_word_that_is_no_command_but_a_name(tmp_path: Path, name: str) -> None:
    check(tmp_path, f"{name} lisst", (2, "tidemill: no cluster here: "))


@pytest.mark.parametrize("name", ["", *GROUPS])
def test_with_a_mistyped_command(tmp_path: Path, name: str) -> None:
    done = run_tidemill(f"{name} lisst".strip(), cwd=tmp_path)
    assert (done.exit_code, done.output) == (2, "") and done.errors.startswith(f"Usage: tidemill {name}".rstrip())
    assert "No such command 'lisst'" in done.errors and entries(tmp_path) == []
    if name == "table":
        assert "Did you mean 'list'?" in done.errors


@pytest.mark.parametrize("line", ["why a b", "topic", "topic create"])
def test_with_arguments_that_are_too_many_or_missing(tmp_path: Path, line: str) -> None:
    done = run_tidemill(line, cwd=tmp_path)
    assert done.exit_code == 2 and "Usage: tidemill" in done.errors + done.output and entries(tmp_path) == []


WITHOUT_EXTRAS = """
import io, json, sys, tempfile
from pathlib import Path
from tidemill.base.libraries import EXTRA_OF

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
from support.cli.process import run_tidemill

found = {}
for name, line in json.load(sys.stdin).items():
    sys.stdin = io.StringIO("a password\\n")
    with tempfile.TemporaryDirectory() as directory:
        done = run_tidemill(line, cwd=Path(directory))
        found[name] = [done.exit_code, done.errors or done.output, len(list(Path(directory).rglob("*")))]
print(json.dumps(found))
"""


def test_without_any_extra() -> None:
    """One process runs all commands, because modules that are loaded cannot be hidden."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], input=json.dumps(LINES), capture_output=True, text=True,
        timeout=4 * DEADLINE_S, env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    extra_of = {name: extra for extra, names in EXTRAS.items() for name in names}
    for name, (code, said, created) in found.items():
        assert created == 0 and "Traceback" not in said, (name, said)
        if name in extra_of:
            assert code == 2 and f"Install it: pip install 'tidemill[{extra_of[name]}]'" in said, (name, code, said)
        else:
            wanted = ELSEWHERE.get(name, (2, "tidemill: no cluster here: directory="))
            assert name == "doctor" or (code, said[: len(wanted[1])]) == wanted, (name, code, said)
