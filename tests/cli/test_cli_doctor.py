"""`tidemill doctor`: every check runs, also after another one failed, and pipelines are checked before they run."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from support.cli.cluster import Cluster
from support.cli.node import node_answering
from support.cli.process import run_tidemill
from tidemill.base.config.config import load
from tidemill.base.errors import InvalidError, TidemillError
from tidemill.base.status.status import StatusReport
from tidemill.cli.cluster import doctor
from tidemill.cli.context import open_stores
from tidemill.cli.topic.records import kafka_address
from tidemill.consensus.status.board import StatusBoard

VALID = """
def build(p):
    clicks = p.topic("clicks", key="id", schema="id int, n int")
    p.table("clicks", clicks)

    @p.derived("sums", key="id", inputs=["clicks"])
    def sums(spark, clicks):
        return clicks
"""
CAPTURED = 'p.capture("db").table("public.clicks")'
CHECKS = [
    "python",
    "spark",
    "java",
    "bash",
    "disk",
    "node.http",
    "node.kafka",
    "exposure",
    "advertised",
    "consensus.url",
]


def checked(directory: Path, code: int) -> dict[str, list[dict[str, Any]]]:
    """Return the results by check."""
    done = run_tidemill("doctor --json", cwd=directory)
    assert done.exit_code == code, done
    found: dict[str, list[dict[str, Any]]] = {}
    for result in json.loads(done.output):
        found.setdefault(result["check"], []).append(result)
    return found


def configure(directory: Path, **pipelines: str) -> None:
    """Write a configuration with these pipelines: name → text of its file."""
    # Free ports: a node that runs on this machine is not the one of this configuration.
    lines = [f'[node]\ndata = "{directory}/data"\nhttp = "127.0.0.1:0"\nkafka = "127.0.0.1:0"\n']
    for name, text in pipelines.items():
        (directory / f"{name}.py").write_text(text)
        lines.append(f'[pipeline.{name}]\nfile = "{name}.py"\n')
    (directory / "tidemill.toml").write_text("".join(lines))


def test_a_check_that_fails_in_any_way_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("out of order")

    for name in ("_check_python", "_check_consensus", "_check_objects", "check_capture"):
        monkeypatch.setattr(doctor, name, broken)
    configure(tmp_path, shop=VALID)
    with (tmp_path / "tidemill.toml").open("a") as file:
        file.write('[capture.shop]\ndsn = "postgresql://u@127.0.0.1:1/x"\n')
    found = checked(tmp_path, 1)
    assert [*found] == [*CHECKS, "objects.url", "capture.shop", "pipeline.shop"]
    for name in ("python", "consensus.url", "objects.url", "capture.shop"):
        assert not found[name][0]["ok"] and "RuntimeError: out of order" in found[name][0]["found"]
    assert found["pipeline.shop"][0]["ok"]


def test_every_problem_of_every_pipeline_is_found_before_the_first_start(tmp_path: Path) -> None:
    configure(
        tmp_path,
        valid=VALID,
        parse="def build(p:\n",
        imports="import no_such_module\n",
        wrong=VALID.replace('"id int, n int"', '"id int, n money"').replace('["clicks"]', '["nothing"]'),
        gone="",
        loud="print('a line')\nraise SystemExit(3)\n",
    )
    (tmp_path / "gone.py").unlink()
    found = checked(tmp_path, 1)
    assert found["pipeline.valid"] == [
        {
            "check": "pipeline.valid",
            "ok": True,
            "found": "valid: clicks, sums; topics and captured tables were not looked up: there is no cluster yet",
            "fix": "",
        }
    ]
    assert "does not parse" in found["pipeline.parse"][0]["found"]
    assert "ModuleNotFoundError" in found["pipeline.imports"][0]["found"]
    assert (
        "raises" in found["pipeline.loud"][0]["found"] and "no such pipeline file" in found["pipeline.gone"][0]["found"]
    )
    wrong = [result["found"] for result in found["pipeline.wrong"]]
    assert len(wrong) == 2 and wrong[0] == "line 3: no such type: type='money'."
    assert "no such table: table=sums input=nothing" in wrong[1]
    assert not (tmp_path / "data").exists()


def test_inputs_of_pipelines_are_looked_up_on_the_cluster(tmp_path: Path) -> None:
    Cluster(tmp_path)
    configure(tmp_path, shop=VALID)
    (result,) = checked(tmp_path, 1)["pipeline.shop"]
    assert "there is no such topic: table=clicks topic=clicks" in result["found"] and "topic create" in result["fix"]
    with open_stores(tmp_path / "tidemill.toml") as opened:
        opened.portal.call(opened.catalogue.create_topic("clicks", 1))
    assert checked(tmp_path, 0)["pipeline.shop"][0]["found"] == "valid: clicks, sums"


def test_a_capture_that_has_not_started_is_no_problem_of_its_pipeline(tmp_path: Path) -> None:
    Cluster(tmp_path)
    configure(tmp_path, shop=VALID.replace('p.topic("clicks", key="id", schema="id int, n int")', CAPTURED))
    (result,) = checked(tmp_path, 1)["pipeline.shop"]
    assert "there is no such capture: table=clicks capture=db" in result["found"]
    assert result["fix"] == "Configure it: [capture.db]"
    with (tmp_path / "tidemill.toml").open("a") as file:
        file.write('[capture.db]\ndsn = "postgresql://localhost:1/db"\n')
    found = checked(tmp_path, 1)
    assert not found["capture.db"][0]["ok"] and found["pipeline.shop"][0]["found"] == "valid: clicks, sums"


def test_the_node_of_another_cluster_at_the_same_address_is_not_its_own(tmp_path: Path) -> None:
    Cluster(tmp_path)
    with node_answering(200, json.dumps({"processes": {"node:node-1": 123}})) as address:
        (tmp_path / "tidemill.toml").write_text(f'[node]\ndata = "{tmp_path}/data"\nhttp = "{address}"\n')
        config = load(tmp_path / "tidemill.toml")
        with pytest.raises(TidemillError, match="cannot be bound"):
            doctor._check_port(config, config.node.http, "node.http")
        with open_stores(tmp_path / "tidemill.toml") as opened:
            report = StatusReport("node:node-1", opened.clock.now_ms(), (), {}, pid=123, host="h")
            opened.portal.call(StatusBoard(opened.consensus, opened.rand).publish(report))
        assert doctor._check_port(config, config.node.http, "node.http").endswith("running: pid=123")


def test_a_pipeline_without_spark_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setattr("tidemill.base.libraries.find_spec", lambda name: None)
    configure(tmp_path, shop=VALID, needs="import pyspark.sql\n" + VALID)
    found = checked(tmp_path, 1)
    assert found["spark"][0]["found"] == "pyspark is not installed."
    for name in ("spark", "pipeline.needs"):
        assert found[name][0]["fix"] == "Install it: pip install 'tidemill[spark]'", found
    assert found["java"][0]["ok"] and found["pipeline.shop"][0]["ok"]


def test_java_bash_and_pyspark_with_a_jvm_are_required_only_by_pipelines_that_use_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise InvalidError("it is missing.", fix="Install it.")

    for needed in ("java.find_java", "java.find_bash", "requirements.check_has_jvm"):
        monkeypatch.setattr(f"tidemill.spark.session.{needed}", missing)
    tables = VALID.partition("    @p.derived")[0]
    for without in ({}, {"shop": tables}):
        configure(tmp_path, **without)
        found = checked(tmp_path, 0)
        for name in ("java", "bash"):
            assert found[name][0]["found"] == "not found, and not needed: no pipeline uses Spark"
        assert found["spark"][0]["found"].startswith("pyspark 4.")
    for more in (VALID, "import nothing_of_that_name"):
        configure(tmp_path, shop=tables, more=more)
        found = checked(tmp_path, 1)
        assert [found[name][0]["ok"] for name in ("spark", "java", "bash")] == [False] * 3


@pytest.mark.parametrize("above", [False, True], ids=["mount point", "above it"])
def test_f508_an_unmounted_bucket_fails_and_neither_the_check_nor_another_command_prepares_it(
    tmp_path: Path, above: bool
) -> None:
    mount = tmp_path / "mount"
    configure(tmp_path)
    with (tmp_path / "tidemill.toml").open("a") as file:
        file.write(f'[objects]\nurl = "file://{mount}/bucket"\n')
    assert checked(tmp_path, 0)["objects open"][0]["ok"] and not mount.exists(), "there is no cluster yet"
    assert run_tidemill("topic create clicks", cwd=tmp_path).exit_code == 0
    assert checked(tmp_path, 0)["objects delete"][0]["ok"]

    moved = mount if above else mount / "bucket"
    moved.rename(tmp_path / "aside")
    moved.mkdir()
    [result] = checked(tmp_path, 1)["objects open"]
    assert not result["ok"] and str(mount / "bucket") in result["found"] and "mounted" in result["fix"]
    for command in ("topic list", "user list", "doctor --deep", "topic create clicks2"):
        done = run_tidemill(command, cwd=tmp_path)
        assert done.exit_code not in (0, 1) and "mounted" in done.errors + done.output, (command, done)
    assert list(moved.iterdir()) == []

    moved.rmdir()
    (tmp_path / "aside").rename(moved)
    assert "clicks" in run_tidemill("topic list", cwd=tmp_path).output


def test_f524_a_command_with_the_url_of_another_bucket_is_refused_and_does_not_claim_it(tmp_path: Path) -> None:
    configure(tmp_path)
    assert run_tidemill("topic create clicks", cwd=tmp_path).exit_code == 0
    other = tmp_path / "other"
    (other / ".tmp").mkdir(parents=True)  # of an earlier process
    own = (tmp_path / "tidemill.toml").read_text()
    (tmp_path / "tidemill.toml").write_text(f'{own}[objects]\nurl = "file://{other}"\n')
    for command in ("user list", "topic list", "topic create clicks2"):
        done = run_tidemill(command, cwd=tmp_path)
        assert done.exit_code == 2 and "this bucket is not that of the cluster" in done.errors, (command, done)
        assert "objects.url" in done.errors and "Restore the object" not in done.errors
    assert [path.name for path in other.rglob("*") if path.is_file()] == [".id"], "no object"
    (tmp_path / "tidemill.toml").write_text(own)
    assert "clicks" in run_tidemill("topic list", cwd=tmp_path).output


def test_a_restore_that_is_only_planned_does_not_make_a_store_of_an_empty_mount_point(tmp_path: Path) -> None:
    configure(tmp_path)
    (tmp_path / "mount").mkdir()
    done = run_tidemill(f"restore --dry-run --from file://{tmp_path}/mount", cwd=tmp_path)
    assert done.exit_code != 0 and "the object directory is empty" in done.errors and "mounted" in done.errors
    assert list((tmp_path / "mount").iterdir()) == []


def test_the_addresses_that_clients_are_sent_to_are_shown_and_a_wildcard_that_stays_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners = '[kafka.listeners.out]\naddress = "0.0.0.0:9094"\nadvertised = "out.example.com:19094"\n'
    (tmp_path / "tidemill.toml").write_text(f'[node]\nhttp = "127.0.0.1:0"\nkafka = "0.0.0.0:9092"\n{listeners}')
    config = load(tmp_path / "tidemill.toml")
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    found = doctor._check_advertised(config)
    assert "node.kafka=box:9092" in found and "WARNING" not in found
    assert "node.http=127.0.0.1:0" in found and "kafka.listeners.out.address=out.example.com:19094" in found
    assert kafka_address(config) == "box:9092"

    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    found = doctor._check_advertised(config)
    assert found.startswith("WARNING") and "node.kafka=0.0.0.0:9092" in found and "node.advertised_host" in found
    (tmp_path / "tidemill.toml").write_text('[node]\nkafka = "[::]:9092"\nadvertised_host = "[2001:db8::1]"\n')
    found = doctor._check_advertised(load(tmp_path / "tidemill.toml"))
    assert "WARNING" not in found and "node.kafka=[2001:db8::1]:9092" in found
