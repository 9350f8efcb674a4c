"""`tidemill table` on a cluster with nothing running: its output, its changes, its refusals."""

from __future__ import annotations

import json
import re
import ssl
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pyarrow.parquet as pq
import pytest

from support.cli.cluster import DAY, Cluster
from support.cli.node import node_answering, server_sending
from support.kafka.security import Authority
from tidemill.base.errors import CorruptError, InvalidError, MissingError, UnavailableError
from tidemill.cli import shape
from tidemill.cli.context import OpenStores, open_stores
from tidemill.cli.table import drop, export
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.compaction import compaction
from tidemill.shards.read import hash_ranges
from tidemill.shards.state.state import input_token
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition_reader import LogPartitionReader


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_shard_is_listed_described_and_its_history_told(cluster: Cluster) -> None:
    assert cluster.json("list") == [] and cluster.command("list") == "no tables\n"
    cluster.append([(1, "a", 1), (2, "b", 1)], [(1, "a", -1), (1, "c", 1)])
    (row,) = cluster.json("list")
    assert (row["shard"], row["batches"], row["parts"], row["updates"], row["schema_version"]) == ("orders", 2, 2, 4, 1)
    heading, _, shown = cluster.command("list").splitlines()
    assert heading.split()[:3] == ["table", "readable", "from"] and shown.split()[:2] == ["orders", "0"]
    reported = cluster.json("history", "orders")
    assert [(r["lower"], r["upper"], r["updates"], r["writer"]) for r in reported] == [
        (0, DAY + 1000, 2, "w1"), (DAY + 1000, DAY + 2000, 2, "w1"),
    ]  # fmt: skip
    assert cluster.json("history", "orders", "--last", "1") == reported[1:]
    *_, newest = cluster.command("history", "orders").splitlines()
    assert newest.split()[-3] == "2" and newest.split()[-1] == "w1"
    described = cluster.json("describe", "orders")
    assert described["columns"] == {"k": "int32", "v": "string"} and described["versions"] == described["holds"] == []
    for command in ("describe", "history", "compact"):
        with pytest.raises(MissingError, match="no such table: table=nothing"):
            cluster.command(command, "nothing")


def test_columns_are_added_and_widened_after_a_question_and_told_with_their_time(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1)])
    cluster.pipeline(PipelineRow("p", {"orders": "topic:orders"}))
    arguments = (
        "evolve",
        "orders",
        "--add",
        "n long default 7",
        "--add",
        "note string default 'it''s'",
        "--widen",
        "k long",
    )
    with pytest.raises(InvalidError, match="nothing was done"):
        cluster.command(*arguments, answer="n\n")
    with pytest.raises(InvalidError, match="nothing was done"):
        cluster.json(*arguments)
    assert cluster.json("describe", "orders")["schema_version"] == 1
    said = cluster.command(*arguments, answer="y\n")
    assert "Written by p" in said and "orders has schema 2: k int64, v string, n int64, note string" in said
    assert cluster.json(*arguments)["schema_version"] == 2, "a repeat is harmless, and asks nothing"
    described = cluster.json("describe", "orders")
    (version,) = described["versions"]
    assert (version["version"], version["upper"]) == (2, DAY + 1000)
    assert version["change"] == "+n int64 default 7, +note string default it's, k int32→int64"
    assert described["defaults"] == {"n": "7", "note": "it's"}
    assert f"schema 2 from {DAY + 1000} (2023-11-14 22:13:21): +n int64" in cluster.command("describe", "orders")
    assert cluster.json("history", "orders")[-1]["version"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no change was given"),
        (("--add", "n"), "column does not parse"),
        (("--add", "n money"), "no such column type"),
        (("--widen", "k short"), None),
        (("--widen", "v long"), "column=v type=string wanted=int64"),
        (("--widen", "x long"), "no such column to widen"),
        (("--add", "k int default 1"), "another default"),
        (("--add", "n int default x"), "not a int32"),
    ],
)
def test_what_cannot_be_is_refused_with_the_column_and_changes_nothing(
    cluster: Cluster, arguments: tuple[str, ...], said: str | None
) -> None:
    cluster.append([(1, "a", 1)])
    if said is None:  # the table has it already: nothing to do
        assert cluster.json("evolve", "orders", *arguments, "--yes")["schema_version"] == 1
        return
    with pytest.raises(InvalidError, match=said):
        cluster.command("evolve", "orders", *arguments, "--yes")
    assert cluster.json("describe", "orders")["schema_version"] == 1


def test_compact_merges_what_is_due_and_leaves_contents_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "FAN_IN", 4)
    cluster.append(*[[(n, "a", 1)] for n in range(5)])
    assert "merged 5 batches: 5 → 5 updates" in cluster.command("compact", "orders")
    assert cluster.command("compact", "orders") == "nothing to merge\n"
    cluster.append(*[[(n, "b", 1)] for n in range(5, 8)])
    done = cluster.json("compact", "orders")
    assert (done["merges"], done["lost"], done["updates"]) == (1, 0, [8, 8])
    assert cluster.json("describe", "orders")["batches"] == 1


def test_an_export_is_one_time_whole_or_not_at_all(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_ranges, "RANGE_ROWS", 50)
    cluster.append([(n, "a", 1) for n in range(300)], [(n, "a", -1) for n in range(100)])
    cluster.command("evolve", "orders", "--add", "n long default 7", "--yes")
    early = cluster.json("export", "orders", str(tmp_path / "early"), "--as-of", "2023-11-14T22:13:21Z")
    assert (early["rows"], early["as_of_ms"], early["shard"]) == (300, DAY + 1000, "orders") and early["files"] > 3
    assert "200 rows" in cluster.command("export", "orders", str(tmp_path / "now"))
    for name, first in (("early", 0), ("now", 100)):
        found = pq.read_table(tmp_path / name)  # like other engines, it skips names that begin with _
        assert sorted(found.column("k").to_pylist()) == list(range(first, 300))
        assert set(found.column("n").to_pylist()) == {7} and found.schema.names == ["k", "v", "n"]
    assert json.loads((tmp_path / "now" / "_tidemill.json").read_text())["rows"] == 200
    assert cluster.json("describe", "orders")["holds"] == []
    with pytest.raises(InvalidError, match="exists already"):
        cluster.command("export", "orders", str(tmp_path / "now"))
    with pytest.raises(InvalidError, match="not readable yet"):
        cluster.command("export", "orders", str(tmp_path / "later"), "--as-of", str(DAY * 2))
    assert not (tmp_path / "later").exists() and not list(tmp_path.glob("*.partial"))


def test_an_export_that_is_cut_off_shows_nothing_and_the_next_one_is_whole(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_ranges, "RANGE_ROWS", 50)
    cluster.append([(n, "a", 1) for n in range(300)])
    plain, done = export._write_range, list[Path]()

    def full(path: Path, *more: Any) -> int:
        if done:
            raise OSError("no space left on device")
        done.append(path)
        return plain(path, *more)

    monkeypatch.setattr(export, "_write_range", full)
    with pytest.raises(UnavailableError, match="no space left"):
        cluster.command("export", "orders", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    assert cluster.json("describe", "orders")["holds"] == []
    monkeypatch.setattr(export, "_write_range", plain)
    cluster.command("export", "orders", str(tmp_path / "out"))
    assert pq.read_table(tmp_path / "out").num_rows == 300 and not (tmp_path / "out.partial").exists()


def test_a_shard_that_was_emptied_exports_its_columns(cluster: Cluster, tmp_path: Path) -> None:
    cluster.append([(1, "a", 1)], [(1, "a", -1)])
    assert cluster.json("export", "orders", str(tmp_path / "out"))["rows"] == 0
    assert pq.read_table(tmp_path / "out").schema.names == ["k", "v"]


def test_a_shard_that_is_used_is_dropped_only_when_told_twice(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1)])
    cluster.topic("orders", 1)
    cluster.pipeline(PipelineRow("p", {"orders": "topic:orders"}))
    with open_stores(cluster.config, create=True) as opened:
        shard = opened.shard("orders")
        opened.portal.call(shard.set_hold("read/someone", DAY + 999, 60_000))
        opened.portal.call(shard.aclose())
    with pytest.raises(InvalidError, match="the table is in use: table=orders by=pipeline:p, hold:read/someone"):
        cluster.command("drop", "orders", "--yes")
    assert len(cluster.json("list")) == 1
    said = cluster.command("drop", "orders", "--force")
    assert "pipeline p re-creates it" in said and "tidemill pipeline delete p" in said
    assert cluster.json("list") == []
    cluster.append([(1, "a", 1)], name="other")
    with pytest.raises(InvalidError, match="nothing was done"):
        cluster.command("drop", "other", answer="n\n")
    assert cluster.json("drop", "other", "--yes")["pipelines"] == []
    with pytest.raises(MissingError):
        cluster.command("drop", "other", "--yes")


def test_rows_whose_records_have_expired_are_lost_only_after_a_question_that_names_them(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1)])
    cluster.pipeline(PipelineRow("p", {"orders": "topic:clicks", "other": "topic:unread"}))
    cluster.pipeline(PipelineRow("q", {"orders": "topic:more", "sums": "derived"}))
    with open_stores(cluster.config, create=True) as opened:
        opened.portal.call(trim(opened, "clicks", 2, 5, 3))
        opened.portal.call(trim(opened, "more", 1, 2, 0))
        opened.portal.call(trim(opened, "unread", 1, 2, 1))
    loss = "Topic clicks no longer has its 6 oldest records: rows that only they contain are lost for good."
    dry = cluster.json("drop", "orders", "--force", "--dry-run")
    assert dry["expired_records"] == {"clicks": 6}
    assert cluster.command("drop", "orders", "--force", "--dry-run").endswith(f"{loss}\n")
    with pytest.raises(InvalidError, match=f"nothing was done, .*{re.escape(loss)}"):
        cluster.command("drop", "orders", "--force")
    with pytest.raises(InvalidError, match="nothing was done"):
        cluster.command("drop", "orders", "--force", answer="n\n")
    with pytest.raises(InvalidError, match="the table is in use"):
        cluster.command("drop", "orders", "--yes")
    assert len(cluster.json("list")) == 1
    assert cluster.json("drop", "orders", "--force", "--yes")["dropped"] == "orders"


def test_the_loss_of_a_topic_that_is_gone_is_named(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1)])
    cluster.pipeline(PipelineRow("p", {"orders": "topic:clicks"}))
    with pytest.raises(
        InvalidError, match=r"Topic clicks no longer exists or cannot be read: all rows from it are lost for good\."
    ):
        cluster.command("drop", "orders", "--force")
    assert cluster.json("drop", "orders", "--force", "--dry-run")["expired_records"] == {"clicks": None}


def test_the_earlier_versions_of_a_history_are_lost_only_after_a_question(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1)], token=input_token("id-of-orders", "1a"))
    assert "versions are in no other table" in cluster.command("drop", "orders", "--force", "--dry-run")
    with pytest.raises(InvalidError, match=r"nothing was done, .*earlier versions"):
        cluster.command("drop", "orders", "--force")
    assert cluster.json("drop", "orders", "--force", "--yes")["dropped"] == "orders"


def test_a_log_that_cannot_be_read_does_not_prevent_a_drop(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.append([(1, "a", 1)])
    cluster.pipeline(PipelineRow("p", {"orders": "topic:clicks"}))

    async def damaged(*_: object) -> int:
        raise CorruptError("a rollup is damaged.")

    with open_stores(cluster.config, create=True) as opened:
        opened.portal.call(trim(opened, "clicks", 1, 1, 0))
    monkeypatch.setattr(LogPartitionReader, "log_start", damaged)
    with pytest.raises(InvalidError, match="Topic clicks no longer exists or cannot be read"):
        cluster.command("drop", "orders", "--force")
    assert cluster.json("drop", "orders", "--force", "--yes")["dropped"] == "orders"


async def trim(opened: OpenStores, name: str, partitions: int, records: int, start: int) -> None:
    """Create a topic whose partitions have this many records, and delete those below `start`."""
    row = await opened.catalogue.create_topic(name, partitions)
    topics = LocalTopics(opened.consensus, opened.objects, opened.catalogue, clock=opened.clock, rand=opened.rand)
    for partition in range(partitions):
        await topics.produce_nowait(row.topic_id, partition, bytearray(encode_batch([Record(None, b"v")] * records)))
        await topics.delete_records(row.topic_id, partition, start)
    await topics.aclose()


def test_a_shard_that_a_derived_table_reads_is_dropped_only_when_told_twice(cluster: Cluster) -> None:
    """The refusal also protects a reader in a pipeline other than the writer's, while neither pipeline runs."""
    cluster.append([(1, "a", 1)])
    cluster.pipeline(PipelineRow("b", {"sums": "derived"}, derived={"sums": {"orders": ("k",), "names": ()}}))
    cluster.pipeline(PipelineRow("c", {"other": "derived"}, derived={"other": {"names": ()}}))
    with pytest.raises(InvalidError, match="the table is in use: table=orders by=shard:sums"):
        cluster.command("drop", "orders", "--yes")
    assert len(cluster.json("list")) == 1
    assert cluster.json("drop", "orders", "--force")["dropped"] == "orders"


def test_a_table_of_which_the_node_has_shapes_is_dropped_only_when_told_twice(cluster: Cluster) -> None:
    cluster.append([(1, "a", 1)])
    node, shapes = (
        cluster.config.read_text(),
        '[{"handle": "h1", "source": "shard:orders"}, {"handle": "h2", "source": ""}]',
    )
    with node_answering(200, shapes, secret="s3cret") as address:
        cluster.config.write_text(f'{node}http = "{address}"\n[shapes]\nsecret = "s3cret"\n')
        with pytest.raises(InvalidError, match="the table is in use: table=orders by=shape:h1"):
            cluster.command("drop", "orders", "--yes")
        cluster.config.write_text(f'{node}http = "{address}"\n')
        with pytest.raises(InvalidError, match=r"unknown whether the node has shapes of the table: .* 401") as refused:
            cluster.command("drop", "orders", "--yes")
        assert "TIDEMILL_TOKEN" in refused.value.fix and refused.value.fix.endswith("anyway: --force")
        assert len(cluster.json("list")) == 1
    for unclear in (
        lambda: server_sending(b""),
        lambda: node_answering(503, ""),
        lambda: node_answering(200, "<html>"),
    ):
        with unclear() as address:
            cluster.config.write_text(f'{node}http = "{address}"\n')
            with pytest.raises(UnavailableError, match="it is unknown whether the node has shapes"):
                cluster.command("drop", "orders", "--yes")
    with node_answering(401, "") as address:
        cluster.config.write_text(f'{node}http = "{address}"\n')
        assert cluster.json("drop", "orders", "--force")["dropped"] == "orders"
    cluster.append([(1, "a", 1)])
    with node_answering(404, "") as address:
        cluster.config.write_text(f'{node}http = "{address}"\n')
        assert cluster.json("drop", "orders", "--yes")["dropped"] == "orders"


def test_a_table_is_not_dropped_while_the_certificate_of_its_node_is_not_trusted(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.append([(1, "a", 1)])
    certificate, key = Authority(tmp_path / "ca").server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    node = cluster.config.read_text()
    with node_answering(200, "[]", context) as address:
        tls = f'[http]\ntls = true\n[security.tls]\ncertificate = "{certificate}"\nkey = "{key}"\n'
        cluster.config.write_text(f'{node}http = "{address}"\n{tls}')
        with pytest.raises(UnavailableError, match="it is unknown whether the node has shapes") as unknown:
            cluster.command("drop", "orders", "--yes")
    assert unknown.value.fix.startswith("Name the authority of its certificate in SSL_CERT_FILE")


def test_a_table_is_dropped_whatever_host_the_certificate_of_the_local_node_names(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "ca")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    certificate, key = authority.server(host="node.example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    tls = f'[http]\ntls = true\n[security.tls]\ncertificate = "{certificate}"\nkey = "{key}"\n'
    node = cluster.config.read_text()
    with node_answering(200, "[]", context) as address:
        port = address.rpartition(":")[2]
        for host in ("127.0.0.1", "0.0.0.0"):
            cluster.append([(1, "a", 1)])
            cluster.config.write_text(f'{node}http = "{host}:{port}"\n{tls}')
            assert cluster.json("drop", "orders", "--yes")["dropped"] == "orders"
        cluster.append([(1, "a", 1)])
        cluster.config.write_text(f'{node}http = "127.1:{port}"\n{tls}')  # a host that is not known to be local
        with pytest.raises(UnavailableError, match="it is unknown whether the node has shapes") as other:
            cluster.command("drop", "orders", "--yes")
    assert other.value.fix.startswith("Use a certificate that names 127.1, or set node.http")


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_tls_that_is_none_of_the_certificate_says_what_to_check(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    """The error occurs while reading: a server asks for a certificate after the handshake (TLS 1.3)."""
    cluster.append([(1, "a", 1)])
    error = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")

    def refuse(*_: object) -> None:
        raise URLError(error) if wrapped else error

    monkeypatch.setattr(shape, "open_node", refuse)
    with pytest.raises(UnavailableError, match="alert certificate required") as refused:
        cluster.command("drop", "orders", "--yes")
    assert refused.value.fix.startswith("Check http.tls, and whether security.tls.client_auth requires a certificate")


def test_a_table_that_is_dropped_and_created_again_during_the_question_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.append([(1, "a", 1)])

    def agree(*_: object, **__: object) -> None:
        monkeypatch.undo()
        cluster.json("drop", "orders", "--yes")
        cluster.append([(2, "b", 1)])

    monkeypatch.setattr(drop, "confirm", agree)
    with pytest.raises(MissingError, match="already dropped"):
        cluster.command("drop", "orders")
    (row,) = cluster.json("list")
    assert (row["shard"], row["updates"]) == ("orders", 1)


def test_a_drop_that_was_cut_off_is_finished(cluster: Cluster) -> None:
    """DS1: the shard was marked as deleted, and its name was not free yet."""
    cluster.append([(1, "a", 1)])
    with open_stores(cluster.config, create=True) as opened:
        shard = opened.shard("orders")
        opened.portal.call(shard.drop())
        opened.portal.call(shard.aclose())
    assert cluster.json("drop", "orders", "--yes")["dropped"] == "orders"
    cluster.append([(1, "b", 1)])
    assert len(cluster.json("list")) == 1
