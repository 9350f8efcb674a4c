"""Commands in situations that are not the usual one: the exit code, the first words, and nothing created.

situation        a directory without a cluster; a configuration whose cluster was never started; a missing file; a
                 missing variable; a cluster of which no process runs; a consensus server that is away
exit code        2 for bad input and for no cluster, 4 for unavailable
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli.cluster import Cluster, create_stores
from support.cli.process import run_tidemill
from support.ports import free_port
from tidemill.cli.context import open_stores
from tidemill.kafka.groups.offline_admin import OfflineGroupAdmin
from tidemill.metastore.catalogue import PipelineRow, TopicRow
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.security.scram import SCRAM_SHA_256, derive_credential
from tidemill.security.users import Users

READING = (
    "status", "status --latency", "why", "why orders", "verify", "verify orders", "capture list", "topic list",
    "topic describe clicks", "topic lost clicks", "group list", "group describe g", "txn list", "user list",
    "acl list", "schema list", "schema show s", "pipeline list", "pipeline describe shop", "dead-letters",
    "table list", "table describe orders", "table history orders", "table export orders out",
)  # fmt: skip
CHANGING = (
    "topic create clicks", "topic alter clicks --partitions 8", "topic delete clicks", "group delete g",
    "group reset g --to earliest", "txn abort t", "acl add User:a read topic:t", "acl delete User:a read topic:t",
    "user delete alice", "pipeline delete shop", "pipeline restart shop", "table compact orders", "table drop orders",
    "table evolve orders --add 'a int'", "capture resnapshot public.t", "capture accept public.t", "capture drop shop",
    "schema delete s",
)  # fmt: skip
PREPARING = ("topic create clicks", "acl add User:a read topic:t")
"""Commands that may prepare a cluster before its first start, if a configuration is present."""


def entries(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("command", [*READING, *CHANGING])
def test_in_a_directory_without_a_cluster(tmp_path: Path, command: str) -> None:
    done = run_tidemill(command, cwd=tmp_path)
    assert done.exit_code == 2
    assert done.errors.startswith(f"tidemill: no cluster here: directory={tmp_path} has neither"), done.errors
    assert len(done.errors.splitlines()) == 1 and done.output == ""
    assert entries(tmp_path) == []


@pytest.mark.parametrize("command", sorted({*READING, *CHANGING} - set(PREPARING)))
def test_of_a_cluster_that_was_never_started(tmp_path: Path, command: str) -> None:
    (tmp_path / "tidemill.toml").write_text('[node]\nname = "n"\n')
    done = run_tidemill(command, cwd=tmp_path)
    assert done.exit_code == 2
    assert done.errors.startswith("tidemill: the cluster of tidemill.toml was never started"), done.errors
    assert "Start it: tidemill up" in done.errors
    assert entries(tmp_path) == ["tidemill.toml"]


@pytest.mark.parametrize("command", PREPARING)
def test_a_cluster_is_prepared_before_its_first_start(tmp_path: Path, command: str) -> None:
    (tmp_path / "tidemill.toml").touch()
    assert run_tidemill(command, cwd=tmp_path).exit_code == 0
    assert run_tidemill("topic list", cwd=tmp_path).exit_code == 0


@pytest.mark.parametrize("command", ["status", "up", "topic create clicks", "doctor", "pipeline run shop"])
def test_with_a_file_that_is_not_there(tmp_path: Path, command: str) -> None:
    done = run_tidemill(f"{command} --config nope.toml", cwd=tmp_path)
    assert (done.exit_code, done.output) == (2, "")
    assert done.errors.startswith("tidemill: no such configuration file: path=nope.toml"), done.errors
    assert run_tidemill(f"-c nope.toml {command}", cwd=tmp_path).errors == done.errors
    named = run_tidemill(command, cwd=tmp_path, environ={"TIDEMILL_CONFIG": "nope.toml"})
    assert named.exit_code == 2 and "TIDEMILL_CONFIG=nope.toml" in named.errors
    assert entries(tmp_path) == []


@pytest.mark.parametrize("command", ["status", "up", "doctor"])
def test_with_a_variable_that_is_not_set(tmp_path: Path, command: str) -> None:
    (tmp_path / "tidemill.toml").write_text('[capture.shop]\ndsn = "${NO_SUCH_VARIABLE}"\n')
    done = run_tidemill(command, cwd=tmp_path)
    assert done.exit_code == 2 and "${NO_SUCH_VARIABLE}, which is not set. Export NO_SUCH_VARIABLE" in done.errors
    assert entries(tmp_path) == ["tidemill.toml"]


@pytest.mark.parametrize("command", ["status", "why", "why orders", "status --json"])
def test_of_a_cluster_without_a_process(tmp_path: Path, command: str) -> None:
    (tmp_path / "tidemill.toml").write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    create_stores(tmp_path / "tidemill.toml")
    done = run_tidemill(command, cwd=tmp_path)
    assert (done.exit_code, done.output) == (4, "")
    assert done.errors == "tidemill: no process of the cluster is running. Start one: tidemill up.\n"


@pytest.mark.parametrize("command", ["status", "topic list", "topic create clicks"])
def test_with_a_consensus_server_that_is_away(tmp_path: Path, command: str) -> None:
    url = f"postgresql://u@127.0.0.1:{free_port()}/x"
    (tmp_path / "tidemill.toml").write_text(f'[consensus]\nurl = "{url}"\n')
    done = run_tidemill(command, cwd=tmp_path)
    assert done.exit_code == 4 and done.errors.count("\n") == 1, done.errors


@pytest.mark.parametrize("line", ["stats", "table lst", "status --jsn", "why a b", "topic", "topic create"])
def test_a_mistyped_line_is_a_usage_error(tmp_path: Path, line: str) -> None:
    done = run_tidemill(line, cwd=tmp_path)
    assert done.exit_code == 2 and "Usage: tidemill" in done.errors + done.output
    assert entries(tmp_path) == []
    if line == "stats":
        assert "Did you mean 'status'?" in done.errors


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
        opened.portal.call(OfflineGroupAdmin(opened.metastore, opened.clock, opened.rand).reset("g", [offset]))
    return directory


@pytest.mark.parametrize(
    "command",
    [
        "group reset g --to latest", "group delete g", "topic delete clicks", "user delete alice",
        "acl delete User:a read topic:t", "schema delete s --permanent", "pipeline delete shop",
        "table evolve orders --add 'more int'", "table drop orders",
    ],
)  # fmt: skip
def test_without_a_terminal_nothing_is_destroyed_unless_it_was_confirmed(prepared: Path, command: str) -> None:
    for form in ("", " --json"):
        done = run_tidemill(command + form, cwd=prepared)
        assert done.exit_code == 2 and done.output == "", done
        assert done.errors.startswith("tidemill: nothing was done, because it was not confirmed:"), done.errors
        assert done.errors.endswith("Add --yes.\n")
    if "reset" not in command:  # a second run would have nothing to do
        assert run_tidemill(f"{command} --yes", cwd=prepared).exit_code == 0
