"""The first page: short, with the two commands, a pipeline file that is valid, and versions that are those of the code.

Its lines of code run in tests/e2e/test_stalls.py, which has a cluster with such a table.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from support.docs.examples import blocks, section
from tidemill.base.config.config import parse
from tidemill.base.status.status import StageStatus, StatusReport
from tidemill.cli.cluster.ready_block import ready_block
from tidemill.cli.main import app
from tidemill.kafka.handlers import APIS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MAX_LINES = 200


def test_it_is_short_and_begins_with_the_problem_a_picture_and_the_two_commands_that_do_all_set_up() -> None:
    text = README.read_text()
    assert text.count("\n") <= MAX_LINES
    assert text.index("diagrams/overview.svg") < text.index("./dev demo ") < text.index("## What it does")
    ((_, commands),) = blocks(section(README, "Two commands"))
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["./dev demo", "./dev test"]


def test_its_pipeline_is_valid(tmp_path: Path) -> None:
    ((_, code),) = [b for b in blocks(section(README, "Your database in ten minutes")) if b[0] == "python"]
    (tmp_path / "pipeline.py").write_text(code)
    done = CliRunner().invoke(app, ["pipeline", "check", str(tmp_path / "pipeline.py")])
    assert done.exit_code == 0, done.output


def test_what_it_says_that_up_prints_is_what_up_prints() -> None:
    ((_, shown),) = [b for b in blocks(section(README, "Your database in ten minutes")) if b[0] == "text"]
    marks = (StageStatus("node:node-1", 0, 0), StageStatus("shard:orders", 7, 9))
    report = StatusReport("node:node-1", 1_800_000_000_000, marks, {}, pid=1, host="h")
    config = parse({"pipeline": {"shop": {"file": "pipeline.py"}}}, origin="/shop/tidemill.toml")
    printed = ready_block(config, "", [report], 1_800_000_000_000, 31.0)
    assert shown.splitlines() == printed.splitlines()


def test_its_versions_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section(README, "Status and versions"), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={rows['Python'].split()[0]}"
    (newest,) = re.findall(r"^NEWEST=(\d+)$", (ROOT / "dev").read_text(), re.MULTILINE)
    for name in ("README.md", "CONTRIBUTING.md", "docs/start/install.md"):
        assert f"to 3.{newest}" in (ROOT / name).read_text(), name
    (spark,) = [name for name in project["optional-dependencies"]["spark"] if name.startswith("pyspark")]
    named = re.findall(r"\d+\.\d+", rows["Spark"])
    assert named and all(f"{version}.0" in SpecifierSet(spark.removeprefix("pyspark")) for version in named)
    client = json.loads((ROOT / "tests/clients/package.json").read_text())["dependencies"]["@electric-sql/client"]
    assert client.startswith(rows["Electric's client"].split()[-1] + ".")
    assert f"{len(APIS)} APIs" in rows["Kafka clients"]


def test_the_compared_systems_are_those_of_the_detailed_page() -> None:
    compared = re.findall(r"\*\*([\w ]+?)\*\*", section(README, "Compared with").replace(" + ", " "))
    page = (ROOT / "docs/concepts/comparison.md").read_text()
    assert len(compared) > 7
    assert not [name for name in compared if name != "Do not use tidemill" and name.split()[-1] not in page]
