"""Earlier names of commands and options: hidden, with the behaviour and the exit codes of the present names."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from support.cli.cluster import create_stores
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.cli.context import open_stores
from tidemill.cli.main import app, load_command
from tidemill.cli.pipeline import dead_letters
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.registry import open_shard
from tidemill.spark.replay.table_replay import Outcome

SCHEMA = ShardSchema((Column("k", "int32"),), ("k",))
FORCE = ("--force", "--yes-really")
LOSS = ("--accept-loss", "--let-go")


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.config = directory / "tidemill.toml"
        self.config.write_text(f'[node]\ndata = "{directory}/data"\n')

    def run(self, *arguments: str) -> str:
        """Return the output. Raises the error that the command reported."""
        done = CliRunner().invoke(app, [*arguments, "--config", str(self.config)])
        if isinstance(done.exception, TidemillError):
            raise done.exception
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    def create_table(self, name: str) -> None:
        with open_stores(self.config, create=True) as opened:
            made = open_shard(opened.consensus, opened.objects, opened.clock, opened.rand, name, SCHEMA)
            opened.portal.call(opened.portal.call(made).aclose())

    def create_pipeline(self, row: PipelineRow) -> None:
        with open_stores(self.config, create=True) as opened:
            opened.portal.call(opened.catalogue.put(row))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize(
    ("page", "present", "earlier"),
    [
        ((), ("table", "dead-letters"), ("shard", "dlq")),
        (("capture",), ("resnapshot",), ("recopy",)),
        (("capture", "drop"), FORCE[:1], FORCE[1:]),
        (("topic", "delete"), FORCE[:1], FORCE[1:]),
        (("table", "drop"), FORCE[:1], FORCE[1:]),
        (("topic", "lost"), LOSS[:1], LOSS[1:]),
    ],
)
def test_help_shows_only_the_present_names(
    page: tuple[str, ...], present: tuple[str, ...], earlier: tuple[str, ...]
) -> None:
    command: Any = load_command(page[0]) if page else typer.main.get_command(app)
    for name in page[1:]:
        command = command.commands[name]
    shown = CliRunner().invoke(app, [*page, "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).stdout
    assert all(word in shown for word in present) and not any(word in shown for word in earlier), shown
    known = set(getattr(command, "commands", {})) | {option for each in command.params for option in each.opts}
    assert known >= {*present, *earlier}


def test_the_group_shard_is_the_group_table(cluster: Cluster) -> None:
    assert set(load_command("shard").commands) == set(load_command("table").commands)
    cluster.create_table("orders")
    for arguments in (["list"], ["list", "--json"], ["describe", "orders", "--json"], ["history", "orders"]):
        assert cluster.run("shard", *arguments) == cluster.run("table", *arguments)
    for group in ("shard", "table"):
        with pytest.raises(TidemillError, match=r"no such table: table=nope. See `tidemill table list`"):
            cluster.run(group, "describe", "nope")
    assert json.loads(cluster.run("shard", "drop", "orders", "--yes", "--json"))["dropped"] == "orders"


def test_dlq_is_dead_letters(cluster: Cluster) -> None:
    cluster.create_pipeline(PipelineRow("p", {}))
    assert cluster.run("dlq", "p", "--json") == cluster.run("dead-letters", "p", "--json")
    for command in ("dlq", "dead-letters"):
        with pytest.raises(TidemillError, match="no such pipeline: pipeline=nope"):
            cluster.run(command, "nope")


def test_dead_letters_are_listed_unless_a_replay_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_pipeline(PipelineRow("p", {}))
    assert cluster.run("dead-letters", "--json") == cluster.run("dead-letters", "list", "p", "--json")
    with pytest.raises(InvalidError, match=r"the configuration has no such pipeline: key=pipeline\.p"):
        cluster.run("dead-letters", "replay", "p")
    file = tmp_path / "p.py"
    file.write_text("def build(p):\n    p.table('t', p.topic('t', key='k', schema='k string'))\n")
    cluster.config.write_text(f'{cluster.config.read_text()}\n[pipeline.p]\nfile = "{file}"\n')
    answer = json.loads(cluster.run("dead-letters", "replay", "p", "--json"))
    assert answer == {
        "dry_run": False, "applied": 0, "superseded": 0, "invalid": 0, "waiting": 0, "unknown": 0, "records": []
    }  # fmt: skip
    monkeypatch.setattr(dead_letters, "_replay", lambda *_: [Outcome("t", ("t", 0, 7), "applied")])
    dry = ("dead-letters", "replay", "p", "--dry-run", "-o")
    assert json.loads(cluster.run(*dry, "jsonl"))["dry_run"] is True
    assert cluster.run(*dry, "csv").startswith("dry_run,") and "dry_run" not in cluster.run(*dry, "table")
    assert "dry_run" not in cluster.run("dead-letters", "replay", "p", "-o", "jsonl")


@pytest.mark.parametrize("command", ["resnapshot", "recopy"])
def test_recopy_is_resnapshot(cluster: Cluster, command: str) -> None:
    with open_stores(cluster.config, create=True) as opened:
        row = CaptureTableRow("shop", "public.orders", "shop.public.orders")
        opened.portal.call(opened.catalogue.change_table("shop", "public.orders", lambda _: row))
    assert json.loads(cluster.run("capture", command, "public.orders", "--yes", "--json"))["recopy"] is True
    with pytest.raises(TidemillError, match=r"no such captured table: table=public.nope"):
        cluster.run("capture", command, "public.nope", "--yes")


@pytest.mark.parametrize("force", FORCE)
def test_yes_really_is_force(cluster: Cluster, force: str) -> None:
    cluster.create_table("orders")
    cluster.run("topic", "create", "clicks")
    cluster.create_pipeline(PipelineRow("p", {"orders": "topic:clicks", "t": "capture:shop:public.t"}))
    with pytest.raises(InvalidError, match=r"the table is in use: table=orders by=pipeline:p.*--force"):
        cluster.run("table", "drop", "orders", "--yes")
    assert json.loads(cluster.run("table", "drop", "orders", force, "--json"))["pipelines"] == ["p"]
    with pytest.raises(InvalidError, match=r"the topic is in use: topic=clicks by=pipeline:p.*--force"):
        cluster.run("topic", "delete", "clicks")
    assert json.loads(cluster.run("topic", "delete", "clicks", force, "--json"))["deleted"] == "clicks"
    with open_stores(cluster.config, create=True) as opened:
        row = CaptureTableRow("shop", "public.t", "shop.public.t")
        opened.portal.call(opened.catalogue.change_table("shop", "public.t", lambda _: row))
    drop = ("capture", "drop", "shop", "--dsn", "postgresql://127.0.0.1:1/nothing")
    with pytest.raises(InvalidError, match=r"the capture is in use: capture=shop by=p.*--force"):
        cluster.run(*drop, "--yes")
    with pytest.raises(UnavailableError):  # it went on to connect to the database
        cluster.run(*drop, force)


@pytest.mark.parametrize("loss", LOSS)
def test_let_go_is_accept_loss(cluster: Cluster, loss: str) -> None:
    cluster.run("topic", "create", "clicks")
    assert json.loads(cluster.run("topic", "lost", "clicks", loss, "all", "--json")) == []
    with pytest.raises(InvalidError, match="the object is not lost: object=l0/x"):
        cluster.run("topic", "lost", "clicks", loss, "all", loss, "l0/x")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (("table", "drop", "t"), FORCE),
        (("topic", "delete", "t"), FORCE),
        (("capture", "drop", "c", "--dsn", "postgresql://127.0.0.1:1/nothing"), FORCE),
        (("topic", "lost", "t"), LOSS),
    ],
)
def test_an_option_under_both_names_is_refused(
    cluster: Cluster, command: tuple[str, ...], names: tuple[str, str]
) -> None:
    given = names if names == FORCE else (names[0], "all", names[1], "all")
    with pytest.raises(InvalidError, match=f"the option was given twice: {names[0]} {names[1]}. Give only {names[0]}"):
        cluster.run(*command, *given)


def test_an_error_under_an_earlier_name_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "tidemill.toml").touch()
    with contextlib.chdir(tmp_path):
        create_stores(Path("tidemill.toml"))
    for command in (["shard", "describe", "nope"], ["dlq", "nope"], ["table", "describe", "nope"]):
        done = subprocess.run(
            [sys.executable, "-m", "tidemill", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and done.stderr.startswith("tidemill: no such "), done.stderr
