"""Commands on a cluster without a running process or without consensus, without a terminal, and as a dry run. The table
of all commands without any cluster is `test_cli_table_of_situations`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cli.cluster import Cluster, create_stores
from support.cli.commands import EVERY
from support.cli.process import run_tidemill
from support.ports import free_port
from tidemill.cli.context import open_stores
from tidemill.kafka.groups.offline_admin import OfflineGroupAdmin
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow, TopicRow
from tidemill.metastore.rows.captures import TableSnapshot
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.security.scram import SCRAM_SHA_256, derive_credential
from tidemill.security.users import Users

PREPARING = ("topic create clicks", "acl add User:a read topic:t")
"""Commands that may prepare a cluster before its first start, if a configuration is present."""


def entries(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("command", PREPARING)
def test_a_cluster_is_prepared_before_its_first_start(tmp_path: Path, command: str) -> None:
    (tmp_path / "tidemill.toml").touch()
    assert run_tidemill(command, cwd=tmp_path).exit_code == 0
    assert run_tidemill("topic list", cwd=tmp_path).exit_code == 0


@pytest.mark.parametrize("command", ["status", "why", "why orders", "status --json"])
def test_of_a_cluster_without_a_process(tmp_path: Path, command: str) -> None:
    (tmp_path / "tidemill.toml").write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    create_stores(tmp_path / "tidemill.toml")
    done = run_tidemill(command, cwd=tmp_path)
    assert (done.exit_code, done.output) == (4, "")
    assert (
        done.errors
        == "tidemill: no process of the cluster is running. Start one: tidemill up. It reports after some seconds.\n"
    )


@pytest.mark.parametrize("command", ["status", "topic list", "topic create clicks"])
def test_with_a_consensus_server_that_is_away(tmp_path: Path, command: str) -> None:
    url = f"postgresql://u@127.0.0.1:{free_port()}/x"
    (tmp_path / "tidemill.toml").write_text(f'[consensus]\nurl = "{url}"\n')
    done = run_tidemill(command, cwd=tmp_path)
    assert done.exit_code == 4 and done.errors.count("\n") == 1, done.errors


def test_doctor_creates_nothing(tmp_path: Path) -> None:
    done = run_tidemill("doctor", cwd=tmp_path)
    assert done.exit_code == 0 and "ok   consensus.url: there is no cluster yet" in done.output, done
    deep = run_tidemill("doctor --deep", cwd=tmp_path)
    assert deep.exit_code == 2 and deep.errors.startswith("tidemill: there is no cluster")
    assert entries(tmp_path) == []


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster with one resource of each type that a command can delete."""
    directory = tmp_path_factory.mktemp("prepared")
    cluster = Cluster(directory)
    cluster.append([(1, "a", 1)])
    cluster.pipeline(PipelineRow("shop", {"other": "topic:other"}))
    (directory / "s.avsc").write_text('{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}')
    for line in ("topic create clicks", "acl add User:a read topic:t", "schema register s s.avsc", "schema delete s"):
        assert run_tidemill(line, cwd=directory).exit_code == 0, line
    with open_stores(directory / "tidemill.toml") as opened:
        users = Users(opened.metastore, opened.clock)
        opened.portal.call(users.put(derive_credential("alice", SCRAM_SHA_256, "x", b"s" * 16, 8192)))
        topic = opened.portal.call(opened.catalogue.get(TopicRow, "clicks"))
        offset = GroupOffsetRow("g", topic.topic_id, 0, 0, commit_ms=1)
        snapshot = TableSnapshot(1, 1, (), 1, 7, (7,))
        row = CaptureTableRow("shop", "public.orders", "shop.public.orders", snapshot=snapshot)
        opened.portal.call(opened.catalogue.change_table("shop", "public.orders", lambda _: row))
        opened.portal.call(OfflineGroupAdmin(opened.metastore, opened.clock, opened.rand).reset("g", [offset]))
    return directory


SHOWN_BY = {
    "group reset g --to latest": "group describe g",
    "group delete g": "group list",
    "topic delete clicks": "topic list",
    "topic lost clicks --accept-loss all": "topic describe clicks",
    "topic alter clicks --partitions 8": "topic describe clicks",
    "group alter g --set consumer.session.timeout.ms=60000": "group describe g",
    "user delete alice": "user list",
    "acl delete User:a read topic:t": "acl list",
    "schema delete s --permanent": "schema list --deleted",
    "pipeline delete shop": "pipeline list",
    "capture resnapshot orders": "capture list",
    "table evolve orders --add 'more int'": "table describe orders",
    "table compact orders": "table describe orders",
    "table drop orders": "table list",
}
"""Commands that destroy or change something, with the command that shows it. Other tests cover commands that need a
process or a database: `test_cli_pipeline` (restart), `test_cli_txn` (abort) and `test_cli_capture_accept`."""
NAMED = {
    "group alter g --set consumer.session.timeout.ms=60000": "g  consumer.session.timeout.ms=60000",
    "capture resnapshot orders": "copy public.orders again (7 rows last time); its topic shop.public.orders is deleted",
    "table drop orders": "drop orders: 1 updates",
    "topic delete clicks": "delete topic clicks and its 0 records",
}
"""Words of some dry runs about the change."""
QUESTIONS = [line for line in SHOWN_BY if line.split()[1] not in ("lost", "alter", "compact")]


@pytest.mark.parametrize("command", SHOWN_BY)
def test_a_dry_run_asks_nothing_says_what_would_happen_and_changes_nothing(prepared: Path, command: str) -> None:
    before = run_tidemill(f"{SHOWN_BY[command]} --json", cwd=prepared)
    assert before.exit_code == 0, before
    text, plain = (run_tidemill(f"{command} --dry-run{form}", cwd=prepared) for form in ("", " --json"))
    assert (text.exit_code, text.errors) == (plain.exit_code, plain.errors) == (0, "")
    assert text.output.startswith("dry run: ") and NAMED.get(command, "") in text.output, text.output
    reported = json.loads(plain.output)
    rows = reported if isinstance(reported, list) else [reported]
    assert all(row["dry_run"] is True for row in rows), reported
    assert rows or command.startswith("topic lost"), "only a topic without lost objects has no row"
    lines = run_tidemill(f"{command} --dry-run -o jsonl", cwd=prepared).output.splitlines()
    assert len(lines) >= len(rows) and all(json.loads(line)["dry_run"] is True for line in lines), lines
    assert run_tidemill(f"{SHOWN_BY[command]} --json", cwd=prepared) == before


def test_every_command_that_destroys_something_has_a_dry_run() -> None:
    asking = {name for name, command in EVERY.items() if "yes" in {param.name for param in command.params}}
    wanted = asking | {"pipeline restart", "restore", "table compact", "topic alter", "topic lost", "group alter"}
    have = {name for name, command in EVERY.items() if "--dry-run" in {o for p in command.params for o in p.opts}}
    assert wanted <= have, wanted - have


@pytest.mark.parametrize("command", QUESTIONS)
def test_without_a_terminal_nothing_is_destroyed_unless_it_was_confirmed(prepared: Path, command: str) -> None:
    for form in ("", " --json"):
        done = run_tidemill(command + form, cwd=prepared)
        assert done.exit_code == 2 and done.output == "", done
        assert done.errors.startswith("tidemill: nothing was done, because it was not confirmed:"), done.errors
        assert done.errors.endswith("Add --yes.\n")
    if "reset" not in command:  # a second run would have nothing to do
        assert run_tidemill(f"{command} --yes", cwd=prepared).exit_code == 0
