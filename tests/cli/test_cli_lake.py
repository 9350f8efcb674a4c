"""`tidemill lake` on a cluster with nothing running."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from support.cli.cluster import DAY, Cluster
from tidemill.base.errors import MissingError, UnavailableError
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards import handle
from tidemill.shards.registry import tombstones_name


class LakeCluster(Cluster):
    group = "lake"


def test_a_table_is_published_listed_and_described(tmp_path: Path) -> None:
    cluster = LakeCluster(tmp_path)
    assert cluster.command("list") == "no tables\n"
    cluster.append([(1, "a", 1), (2, "b", 1)])
    cluster.append([(3, "c", 1)], name=tombstones_name("orders", str(uuid.UUID(int=1))))  # never published
    assert cluster.json("list") == [
        {"table": "orders", "time_ms": None, "published_ms": None, "rows": None, "behind_s": None}
    ]
    with pytest.raises(MissingError, match="never published"):
        cluster.command("describe", "orders")
    published = cluster.json("publish", "orders")
    path = Path(published["location"].removeprefix("file://"))
    assert json.loads(path.read_bytes())["format-version"] == 3
    assert (published["rows"], published["time_ms"]) == (2, DAY + 999)
    cluster.append([(1, "a", -1)])
    (row,) = cluster.json("list")
    assert (row["rows"], row["behind_s"]) == (2, 1.0)
    assert "never" not in cluster.command("list") and "1.0 s" in cluster.command("list")
    cluster.command("publish", "orders")
    described = cluster.json("describe", "orders")
    assert [(s["time_ms"], s["rows"], s["tags"]) for s in described["snapshots"]] == [
        (DAY + 999, 2, [f"t{DAY + 999}"]),
        (DAY + 1999, 1, [f"t{DAY + 1999}"]),
    ]
    assert described["location"] in cluster.command("describe", "orders")
    assert cluster.json("list")[0]["behind_s"] == 0.0


def test_a_table_whose_default_iceberg_lacks_is_published_after_the_command_that_the_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "INLINE_PART_BYTES", 0)
    cluster = LakeCluster(tmp_path)
    table = Cluster.of(cluster.config)
    cluster.append([(n, "a", 1) for n in range(100)])
    table.command("evolve", "orders", "--add", "tags array<string> default {x}", "--yes")
    with pytest.raises(UnavailableError, match="or run `tidemill table compact orders`"):
        cluster.command("publish", "orders")
    assert "merge 1 batches of orders first" in table.command("compact", "orders", "--dry-run")
    assert table.json("compact", "orders")["merges"] == 1
    assert cluster.json("publish", "orders")["rows"] == 100
    assert table.json("compact", "orders")["merges"] == 0


def test_a_table_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    cluster = LakeCluster(tmp_path)
    cluster.pipeline(PipelineRow("p", {"orders": "topic:orders"}))
    for command in ("describe", "publish"):
        with pytest.raises(MissingError, match="no such table: table=nothing"):
            cluster.command(command, "nothing")
