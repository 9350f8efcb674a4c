"""The block that `up` prints once: when it appears, and its lines for each kind of cluster."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tidemill.base.config.config import parse
from tidemill.base.status.status import StageStatus, StatusReport
from tidemill.cli.cluster.ready_block import ready_block

NOW_MS = 1_800_000_000_000
NODE = StageStatus("node:node-1", 0, 0)


def report(*marks: StageStatus, **facts: object) -> StatusReport:
    return StatusReport("node:node-1", NOW_MS, marks, facts, pid=1, host="h")


def block(configuration: dict[str, Any], *reports: StatusReport, path: str = "") -> str:
    return ready_block(parse(configuration, origin="/x/tidemill.toml"), path, reports, NOW_MS, 12.4)


def lines_of(text: str) -> dict[str, str]:
    return {line.split()[0]: line.strip().partition(" ")[2].strip() for line in text.splitlines()[1:]}


def test_a_table_of_a_pipeline_is_announced_with_every_way_to_read_it() -> None:
    pipeline = {"pipeline": {"shop": {"file": "shop.py"}}}
    empty = report(NODE, StageStatus("shard:orders", 0, 1), StageStatus("shard:shop.dead_letters", 7, 7))
    assert block(pipeline, empty) == "" and block(pipeline) == ""
    filled = report(NODE, *(StageStatus(f"shard:{name}", 7, 9) for name in ("orders", "clicks", "shop.dead_letters")))
    text = block(pipeline, filled)
    assert text.startswith("ready after 12 s: table clicks is readable, and 1 more\n")
    lines = lines_of(text)
    assert list(lines) == ["page", "curl", "Python", "PySpark", "SQL"]
    assert shlex.split(lines["curl"]) == ["curl", "http://127.0.0.1:8600/v1/shape?table=tidemill.clicks&offset=-1"]
    assert shlex.split(lines["SQL"])[-1] == 'SELECT count(*) FROM "clicks"'
    named = lines_of(block(pipeline, filled, path="shop/tidemill.toml"))
    assert named["Python"].startswith('tidemill.connect("shop/tidemill.toml")')
    assert shlex.split(named["SQL"])[:3] == ["tidemill", "-c", "shop/tidemill.toml"]


def test_a_captured_table_is_announced_when_its_first_copy_is_done() -> None:
    capture = {"capture": {"shop": {"dsn": "postgresql://h/d"}}, "http": {"authenticate": True}}
    copying: dict[str, object] = {"capture:shop": {"snapshot_done": False, "first_table": "public.orders"}}
    assert block(capture, report(NODE, **copying)) == ""
    assert block(capture, report(NODE, **{"capture:shop": {"phase": "starting"}})) == ""
    text = block(capture, report(NODE, **{"capture:shop": {"snapshot_done": True, "first_table": "public.orders"}}))
    assert text.startswith("ready after 12 s: table public.orders is readable")
    assert 'Authorization: Bearer $TOKEN" "http' in lines_of(text)["curl"]


def test_a_node_that_fails_is_not_announced_however_short_the_time() -> None:
    error = "the bucket has another cluster"
    for moment_ms in (NOW_MS, NOW_MS - 10_000, NOW_MS - 60_000):
        failing = StageStatus("node:node-1", 0, 1, error=error, failing_since_ms=moment_ms, since_ms=moment_ms)
        assert block({}, report(failing)) == ""
    assert block({}, report(NODE)).startswith("ready after 12 s: the node accepts clients")


def test_a_wildcard_address_is_shown_as_one_that_a_client_can_connect_to() -> None:
    text = block({"node": {"http": "0.0.0.0:8600", "kafka": "[::]:9092"}}, report(NODE))
    assert "http://127.0.0.1:8600/" in text and "bootstrap.servers=[::1]:9092" in text


@pytest.mark.parametrize("state", ["stuck", "ready"])
def test_a_cluster_of_topics_alone_is_announced_when_its_node_works(state: str) -> None:
    node = StageStatus("node:node-1", 0, 1, error="no port", parked=True) if state == "stuck" else NODE
    text = block({}, report(node))
    assert text == "" if state == "stuck" else "bootstrap.servers=127.0.0.1:9092" in text
