"""A shard has one source, even if several pipelines name it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.spark.running import error_of, mark, pipeline
from support.waiting import eventually
from tidemill.base.errors import UnavailableError
from tidemill.metastore.catalogue import Catalogue, PipelineRow
from tidemill.shards.registry import REGISTER_PREFIX
from tidemill.spark.ingest.table_ownership import find_refused, row_without_refused
from tidemill.spark.pipeline import runner as runner_module

ONE = """
def build(p):
    p.table("clicks", p.topic("{topic}", key="click_id", schema="click_id string"))
"""
REFUSAL = "pipeline:p:table/clicks"
FEEDS = st.sampled_from(["topic:a", "topic:b", "derived"])
TABLES = st.dictionaries(st.sampled_from(["x", "y"]), FEEDS, min_size=1)


def say(harbour: Any, topic: Any, time: int, *keys: str) -> None:
    harbour.produce(topic, [(k.encode(), {"click_id": k}) for k in keys])
    harbour.mint(f"topic/{topic.name}", time, topic)


def keys(harbour: Any) -> list[str]:
    return [row["click_id"] for row in harbour.contents("clicks")]


def test_f318_a_table_that_another_pipeline_keeps_from_something_else_is_refused_until_that_gives_it_up(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "REFUSAL_CHECK_S", 0.1)
    here, there = harbour.create_topic("here"), harbour.create_topic("there")
    say(harbour, here, 10, "h")
    say(harbour, there, 10, "t")
    call, catalogue = harbour.portal.call, harbour.stores.catalogue
    other = PipelineRow("other", {"clicks": "topic:there"})
    call(catalogue.put(other))
    with pipeline(harbour, tmp_path / "p", ONE.format(topic="here")):
        assert "pipeline=other from=topic:there here=topic:here" in eventually(lambda: error_of(harbour, REFUSAL))
        eventually(lambda: (m := mark(harbour, "pipeline:p")) and m.held_by == REFUSAL)
        assert mark(harbour, "shard:clicks") is None, "whoever keeps it tells how it is"
        assert call(catalogue.get(PipelineRow, "p")).tables == {}
        assert harbour.upper("clicks") == 0
        call(catalogue.delete(PipelineRow, "other"))
        eventually(lambda: harbour.upper("clicks") == 11)
        eventually(lambda: mark(harbour, REFUSAL) is None)
    assert keys(harbour) == ["h"]


def test_f318_a_table_whose_source_was_changed_in_the_file_is_refused_until_its_shard_is_dropped(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "REFUSAL_CHECK_S", 0.1)
    here, there = harbour.create_topic("here"), harbour.create_topic("there")
    say(harbour, here, 10, "h")
    say(harbour, there, 5, "t")
    with pipeline(harbour, tmp_path / "p", ONE.format(topic="here")):
        eventually(lambda: harbour.upper("clicks") == 11)
    with pipeline(harbour, tmp_path / "p", ONE.format(topic="there")):
        found = eventually(lambda: error_of(harbour, REFUSAL))
        assert "before=topic:here now=topic:there" in found and "tidemill table drop clicks --force" in found
        assert (harbour.upper("clicks"), keys(harbour)) == (11, ["h"])
        harbour.drop_shard("clicks")
        eventually(lambda: harbour.upper("clicks") == 6)
    assert keys(harbour) == ["t"]


def test_a_table_that_waits_for_the_catalogue_is_held_by_it(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("here")
    say(harbour, topic, 10, "h")
    away = threading.Event()
    away.set()
    put = Catalogue.put

    async def refuses(self: Catalogue, row: Any) -> None:
        if away.is_set() and isinstance(row, PipelineRow):
            raise UnavailableError("the catalogue is away.")
        await put(self, row)

    monkeypatch.setattr(Catalogue, "put", refuses)
    with pipeline(harbour, tmp_path / "p", ONE.format(topic="here")):
        eventually(lambda: (m := mark(harbour, "shard:clicks")) and m.held_by == "pipeline:p:catalogue")
        assert "away" in error_of(harbour, "pipeline:p:catalogue")
        assert harbour.upper("clicks") == 0, "nothing begins before its row is there"
        away.clear()
        eventually(lambda: harbour.upper("clicks") == 11)


def test_a_register_that_cannot_be_read_keeps_no_other_table_waiting(harbour: Any, tmp_path: Path) -> None:
    """The register looks as if a newer version had written it."""
    topic = harbour.create_topic("here")
    say(harbour, topic, 10, "h")
    harbour.portal.call(harbour.stores.consensus.cas(f"{REGISTER_PREFIX}other", 0, b"newer", "nonce"))
    for upper in (11, 12):
        with pipeline(harbour, tmp_path / "p", ONE.format(topic="here")):
            eventually(lambda upper=upper: harbour.upper("clicks") == upper)
        if upper == 11:
            say(harbour, topic, 11, "i")


@given(TABLES, TABLES, TABLES, st.booleans())
def test_no_two_rows_name_one_table_for_two_sources(
    before: dict[str, str], wanted: dict[str, str], theirs: dict[str, str], there: bool
) -> None:
    own, want, other = PipelineRow("p", before), PipelineRow("p", wanted), PipelineRow("q", theirs)
    shards = {"x", "y"} if there else set[str]()
    found = find_refused(want, own, [own, other], shards)
    row = row_without_refused(want, own, found, shards)
    for table in wanted.keys() - found.keys():
        assert theirs.get(table, wanted[table]) == wanted[table]
        assert not there or wanted[table] in (before.get(table, wanted[table]), "derived")
        assert row.tables[table] == wanted[table]
    for table in row.tables.keys() & found.keys():
        assert there and row.tables[table] == before[table], "what the shard there was made of"
    assert not find_refused(want, row, [row, PipelineRow("q")], set()), "free, once the other and the shards are gone"
