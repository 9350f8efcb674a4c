"""`tidemill group`: committed offsets of groups and their lag, with no node up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from tidemill.base.errors import InvalidError
from tidemill.cli.context import OpenStores, open_stores
from tidemill.cli.main import build_application
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_OFFSETS, GROUPS
from tidemill.metastore.rows.groups import ConsumerMember, GroupMemberRow, GroupOffsetRow, GroupRow
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.local_topics import LocalTopics


def run(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(build_application(), ["group", *arguments, "--config", str(directory / "tidemill.toml")])


def reported(directory: Path, *arguments: str) -> Any:
    done = run(directory, *arguments, "--json")
    assert done.exit_code == 0, done.exception
    return json.loads(done.stdout.splitlines()[-1])


async def fill(opened: OpenStores) -> None:
    """A topic of two partitions with ten records in the first; a group that is empty and one with a member."""
    row = await opened.catalogue.create_topic("t", 2)
    topics = LocalTopics(
        opened.consensus, opened.objects, opened.catalogue, clock=opened.clock, rand=opened.rand
    )  # fmt: skip
    await topics.produce_nowait(row.topic_id, 0, encode_batch([Record(None, b"v", (), 1_000)] * 10))
    await topics.aclose()
    assignment = b"\x00\x01" + b"\x00\x00\x00\x01" + b"\x00\x01t" + b"\x00\x00\x00\x01" + b"\x00\x00\x00\x00"
    member = GroupMemberRow("busy", "m1", None, "c", "/h", 1, 1, (("range", b""),), assignment)
    head = GroupRow("busy", "classic", "n1/x", "consumer", "range", 3, "m1", 1)
    await opened.metastore.commit([GROUPS.encode(head), GROUP_MEMBERS.encode(member)])
    await opened.metastore.commit([GROUPS.encode(GroupRow("free"))])
    consumer = ConsumerMember(2, 1, topics=("t",), held={row.topic_id: (1,), "gone": (0,)})
    member = GroupMemberRow("next", "m2", None, "c", "/h", consumer=consumer)
    head = GroupRow("next", "consumer", "n1/x", "consumer", "uniform", 2, members=1, target_epoch=2)
    await opened.metastore.commit([GROUPS.encode(head), GROUP_MEMBERS.encode(member)])
    await opened.metastore.commit([GROUP_OFFSETS.encode(GroupOffsetRow("next", row.topic_id, 1, 0))])
    for name in ("busy", "free"):
        rows = [GroupOffsetRow(name, row.topic_id, 0, 4), GroupOffsetRow(name, "gone", 0, 4)]
        await opened.metastore.commit([GROUP_OFFSETS.encode(offset) for offset in rows])


def test_groups_are_listed_described_reset_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.toml"
    path.write_text(f'[node]\ndata = "{tmp_path}/.tidemill"\n')
    with open_stores(path, create=True) as opened:
        opened.portal.call(fill(opened))
    assert {r["group"]: (r["kind"], r["state"], r["members"], r["lag"]) for r in reported(tmp_path, "list")} == {
        "busy": ("classic", "Stable", 1, 6),
        "free": ("classic", "Empty", 0, 6),
        "next": ("consumer", "Stable", 1, 0),
    }
    with_patterns = reported(tmp_path, "describe", "next")
    assert with_patterns["offsets"][0]["member"] == "m2"
    assert (with_patterns["members"][0]["epoch"], with_patterns["members"][0]["topics"]) == (2, ["t"])
    assert "next  consumer  Stable  consumer uniform  generation=2" in run(tmp_path, "describe", "next").stdout
    busy = reported(tmp_path, "describe", "busy")
    assert busy["generation"] == 3
    (offset,) = busy["offsets"]
    assert (offset["topic"], offset["offset"], offset["end"], offset["lag"], offset["member"]) == ("t", 4, 10, 6, "m1")

    assert reported(tmp_path, "reset", "free", "--by", "-2", "--dry-run")[0]["offset"] == 2
    assert reported(tmp_path, "reset", "free", "--yes", "--to", "99", "--topic", "t") == [
        {"topic": "t", "partition": 0, "before": 4, "offset": 10},
        {"topic": "t", "partition": 1, "before": None, "offset": 0},
    ]
    assert reported(tmp_path, "reset", "new", "--yes", "--to", "earliest", "--topic", "t:0")[0]["offset"] == 0
    assert [row["offset"] for row in reported(tmp_path, "describe", "free")["offsets"]] == [10, 0]
    for refused in (
        ("reset", "busy", "--yes", "--to", "latest"),
        ("delete", "busy", "--yes"),
        ("delete", "next", "--yes"),
        ("reset", "next", "--yes", "--to", "latest"),
        ("delete", "nobody", "--yes"),
        ("describe", "nobody"),
        ("describe", ""),
        ("reset", "nobody", "--yes", "--to", "latest"),
        ("reset", "free", "--yes"),
        ("reset", "free", "--yes", "--to", "sometime"),
        ("reset", "free", "--yes", "--to", "1", "--by", "1"),
        ("reset", "free", "--yes", "--to", "1", "--topic", "missing"),
        ("reset", "free", "--yes", "--to", "1", "--topic", "t:2"),
    ):
        error = run(tmp_path, *refused).exception
        assert isinstance(error, InvalidError), refused
        if refused[0] != "describe":
            dry = [each for each in refused if each != "--yes"] + ["--dry-run"]
            assert str(run(tmp_path, *dry).exception) == str(error), "a dry run is refused for the same reason"
            asked = run(tmp_path, *dry[:-1]).exception
            assert str(asked) == str(error), "nothing is asked that is refused after the answer"
    assert reported(tmp_path, "delete", "free", "--yes") == {"deleted": "free"}
    assert {row["group"] for row in reported(tmp_path, "list")} == {"busy", "new", "next"}


def test_a_group_gets_configs_of_its_own_before_anybody_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.toml"
    path.write_text(f'[node]\ndata = "{tmp_path}/.tidemill"\n')
    with open_stores(path, create=True) as opened:
        opened.portal.call(fill(opened))
    session, heartbeat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    set_both = ("--set", f"{session}=60000", "--set", f"{heartbeat}=6000")
    assert reported(tmp_path, "alter", "free", *set_both, "--dry-run")["configs"] == {
        session: "60000",
        heartbeat: "6000",
    }
    assert reported(tmp_path, "describe", "free")["configs"] == {}
    assert reported(tmp_path, "alter", "free", *set_both)["configs"] == {session: "60000", heartbeat: "6000"}
    assert reported(tmp_path, "alter", "free", "--unset", heartbeat) == {"group": "free", "configs": {session: "60000"}}
    assert reported(tmp_path, "describe", "free")["configs"] == {session: "60000"}
    assert f"{session}=60000" in run(tmp_path, "describe", "free").stdout
    assert reported(tmp_path, "alter", "later", "--set", f"{session}=50000")["configs"] == {session: "50000"}
    for refused in (
        ("free",),
        ("", "--unset", session),
        ("free", "--set", session),
        ("free", "--set", f"{session}=1"),
        ("free", "--set", "share.session.timeout.ms=45000"),
        ("free", "--unset", "no.such"),
    ):
        assert isinstance(run(tmp_path, "alter", *refused).exception, InvalidError), refused
    assert reported(tmp_path, "describe", "free")["configs"] == {session: "60000"}
