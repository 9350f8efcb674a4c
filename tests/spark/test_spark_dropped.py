"""A pipeline whose shard was dropped under it: that table leaves, and made again it equals its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.spark.sinks import clicks_sink
from tidemill.base.errors import MissingError
from tidemill.maintenance.shards.drop import drop_shard
from tidemill.metastore.catalogue import PipelineRow


def test_a_dropped_table_is_made_again_from_its_topic(harbour: Any, tmp_path: Path) -> None:
    s, call = harbour.stores, harbour.portal.call
    topic = harbour.create_topic("clicks")
    call(s.catalogue.put(PipelineRow("p", {"clicks": "topic:clicks"})))

    def say(time: int, *keys: str) -> None:
        harbour.produce(topic, [(k.encode(), {"click_id": k, "product_id": time}) for k in keys])
        harbour.mint("topic/clicks", time, topic)

    sink = clicks_sink(harbour, tmp_path / "s")
    for time in (10, 20, 30):
        say(time, "a", f"k{time}")
        sink.process(sink.latest())
    before = harbour.contents("clicks")
    assert len(before) == 4
    done = call(drop_shard(s.consensus, s.objects, s.metastore, s.clock, s.rand, "clicks"))
    assert done.pipelines == ("p",) and done.rows == 8
    say(40, "after")
    sink.process(sink.latest())
    assert isinstance(sink.seats.failed["clicks"], MissingError) and sink.seats.tables == []
    remap = call(s.remap("topic/clicks"))
    call(remap.truncate_before(30))  # even if bindings are truncated: the rest covers all earlier records
    again = clicks_sink(harbour, tmp_path / "s")
    again.process(again.latest())
    found = harbour.contents("clicks")
    key = lambda row: row["click_id"]  # noqa: E731
    assert sorted(found, key=key) == sorted([*before, {"click_id": "after", "product_id": 40}], key=key)
    assert again.seats.tables[0].shard.shard_id != done.shard_id
