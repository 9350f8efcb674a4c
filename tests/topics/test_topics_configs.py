"""Topic configs: the table against Kafka's, changes during the life of a topic, and append time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from support.topics.world import World, batch, fetch
from support.waiting import until
from tidemill.base.errors import InvalidError
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import BatchTooLargeError, InvalidTimestampError
from tidemill.topics.batch import decode_batch
from tidemill.topics.batch.compression import CODECS, codec_number
from tidemill.topics.batch.encode import recompress_batch
from tidemill.topics.batch.header import parse_header
from tidemill.topics.batch.validation import check_batch, check_body, check_records
from tidemill.topics.config.alter import AlterOp, apply_changes
from tidemill.topics.config.configs import (
    SETTINGS,
    VALUE_CHARS_MAX,
    TopicConfig,
    parse_stored_config,
    parse_topic_config,
)

KAFKA_4 = re.findall(
    r"\S+",
    """
cleanup.policy compression.gzip.level compression.lz4.level compression.type compression.zstd.level
delete.retention.ms file.delete.delay.ms flush.messages flush.ms follower.replication.throttled.replicas
index.interval.bytes leader.replication.throttled.replicas local.retention.bytes local.retention.ms
max.compaction.lag.ms max.message.bytes message.timestamp.after.max.ms message.timestamp.before.max.ms
message.timestamp.type min.cleanable.dirty.ratio min.compaction.lag.ms min.insync.replicas preallocate
remote.log.copy.disable remote.log.delete.on.disable remote.storage.enable retention.bytes retention.ms
segment.bytes segment.index.bytes segment.jitter.ms segment.ms unclean.leader.election.enable
""",
)
"""https://kafka.apache.org/41/configuration/topic-configs/"""


def test_every_config_of_kafka_has_a_meaning_here_and_takes_its_own_default() -> None:
    assert sorted(SETTINGS) == KAFKA_4
    for name, setting in SETTINGS.items():
        assert parse_topic_config({name: setting.default}) == TopicConfig(), name
        assert setting.says.endswith(".")
        assert bool(setting.fix) == setting.single, "what is refused says what to do instead"


def _refused(config: dict[str, str]) -> str:
    try:
        parse_topic_config(config)
    except InvalidError as error:
        return error.message
    return ""


@given(st.dictionaries(st.sampled_from([*KAFKA_4, "no.such"]), st.text(max_size=12) | st.integers().map(str)))
def test_any_config_is_taken_or_refused_and_one_that_is_stored_is_read_whatever_it_holds(
    config: dict[str, str],
) -> None:
    stored = parse_stored_config(config)
    singly = [name for name, value in config.items() if _refused({name: value})]
    contradict = stored.compaction_lag_ms > stored.compaction_lag_max_ms
    assert bool(_refused(config)) == bool(singly or contradict)
    assert all(name in _refused({name: config[name]}) for name in singly)
    if not singly and not contradict:
        assert parse_topic_config(config) == stored


@given(st.integers(0, 9), st.integers(1, 9))
def test_what_would_have_to_be_compacted_before_it_may_be_is_refused(least: int, most: int) -> None:
    lags = {"min.compaction.lag.ms": str(least), "max.compaction.lag.ms": str(most)}
    assert bool(_refused(lags)) == (least > most)
    assert parse_stored_config(lags).compaction_lag_ms == least, "what stands is read"
    for name, value in lags.items():
        others = {key: text for key, text in lags.items() if key != name}
        if least > most:
            with pytest.raises(InvalidError, match=name):
                apply_changes(others, [(name, AlterOp.SET, value)])
        else:
            assert apply_changes(others, [(name, AlterOp.SET, value)]) == lags
        assert apply_changes(lags, [(name, AlterOp.DELETE, None)]) == others, "either may go"
    assert apply_changes(lags, [("retention.ms", AlterOp.SET, "1")])["retention.ms"] == "1", (
        "what is not touched is not judged"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "1.5"), ("retention.ms", "٣"), ("retention.ms", ""), ("segment.bytes", "13"),
        ("min.cleanable.dirty.ratio", "nan"), ("min.cleanable.dirty.ratio", "1.1"), ("preallocate", "yes"),
        ("message.timestamp.type", "createtime"), ("compression.type", "none"), ("cleanup.policy", "none"),
        ("remote.storage.enable", "true"), ("max.message.bytes", "9" * 30), ("message.format.version", "3.0"),
        ("leader.replication.throttled.replicas", "0:1," * VALUE_CHARS_MAX),
    ],
)  # fmt: skip
def test_a_value_that_is_not_served_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidError, match=name) as refused:
        parse_topic_config({name: value})
    assert refused.value.fix
    assert len(str(refused.value)) < 2000


def test_a_topic_of_no_cleanup_policy_keeps_all_of_it() -> None:
    """KIP-1161."""
    config = parse_topic_config({"cleanup.policy": " ", "retention.ms": "1", "retention.bytes": "1"})
    assert (config.cleanup, config.has_retention, config.is_compacted) == ((), False, False)
    assert parse_topic_config({"cleanup.policy": "delete", "retention.ms": "1"}).has_retention


@pytest.mark.parametrize("frozen", [True, False])
async def test_with_append_time_records_get_the_time_at_which_they_are_stored(frozen: bool) -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1, config={"message.timestamp.type": "LogAppendTime"})
    node = world.node()
    before_ms = world.clock.now_ms()
    sent = batch("a", "b", timestamp_ms=5, compression="gzip", pid=7, seq=0)
    result = await node.produce_nowait(row.topic_id, 0, sent if frozen else bytearray(sent))
    assert before_ms <= result.append_time_ms <= world.clock.now_ms()
    (stored,) = (await fetch(node, row.topic_id, 0, 0)).batches
    assert [r.timestamp_ms for r in decode_batch(stored).records] == [result.append_time_ms] * 2
    header = parse_header(stored)
    check_body(header, stored)  # raises where the checksum is wrong
    assert await node.offset_for_time(row.topic_id, 0, 6) == (0, result.append_time_ms)
    assert await node.offset_for_time(row.topic_id, 0, result.append_time_ms + 1) is None
    again = await node.produce_nowait(row.topic_id, 0, sent)
    assert (again.duplicate, again.base_offset) == (True, 0)
    await world.aclose()


@pytest.mark.parametrize("sent_as", CODECS)
@pytest.mark.parametrize("kept_as", ["uncompressed", "gzip", "snappy", "lz4", "zstd", "producer"])
async def test_a_topic_that_says_by_what_it_is_compressed_keeps_every_batch_so(sent_as: str, kept_as: str) -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1, config={"compression.type": kept_as})
    node = world.node()
    values = ["a" * 3000, "", "b"]
    sent = batch(*values, compression=sent_as, pid=7, seq=3, timestamp_ms=5)
    early = node.produce_nowait(row.topic_id, 0, sent)  # before the partition is open and its config is known
    later = node.produce_nowait(row.topic_id, 0, batch(*values, compression=sent_as, pid=7, seq=6, timestamp_ms=9))
    assert [(await each).base_offset for each in (early, later)] == [0, 3]
    again = await node.produce_nowait(row.topic_id, 0, sent)
    assert (again.duplicate, again.base_offset) == (True, 0)
    for stored in (await fetch(node, row.topic_id, 0, 0)).batches:
        header = check_batch(stored)
        wanted = sent_as if kept_as == "producer" else "none" if kept_as == "uncompressed" else kept_as
        assert header.codec == codec_number(wanted)
        assert (header.producer_id, header.record_count, header.last_offset_delta) == (7, 3, 2)
        records = decode_batch(stored).records
        assert [(r.value or b"").decode() for r in records] == values
        assert len({r.timestamp_ms for r in records}) == 1
    assert await node.offset_for_time(row.topic_id, 0, 6) == (3, 9)
    await world.aclose()


async def test_what_a_batch_is_as_it_is_stored_decides_whether_it_is_too_large() -> None:
    world = World()
    config = {
        "compression.type": "uncompressed",
        "max.message.bytes": "2000",
        "message.timestamp.type": "LogAppendTime",
    }
    row = await world.catalogue.create_topic("t", 1, config=config)
    node = world.node()
    with pytest.raises(BatchTooLargeError):
        await node.produce_nowait(row.topic_id, 0, batch("x" * 3000, compression="zstd"))
    result = await node.produce_nowait(row.topic_id, 0, batch("x" * 1000, compression="zstd"))
    (stored,) = (await fetch(node, row.topic_id, 0, 0)).batches
    assert [r.timestamp_ms for r in decode_batch(stored).records] == [result.append_time_ms]
    check_body(parse_header(stored), stored)
    await world.catalogue.change_topic("t", lambda row: replace(row, config={"compression.type": "zstd"}))
    await node.refresh()
    await node.produce_nowait(row.topic_id, 0, batch("x" * 3000))
    assert (await fetch(node, row.topic_id, 0, 1)).high_watermark == 2
    await world.aclose()


@given(st.lists(st.text(max_size=200), min_size=1, max_size=20), st.sampled_from(list(CODECS)), st.integers(0, 4))
def test_a_batch_that_is_compressed_anew_holds_the_same_records(
    values: list[str], compression: str, codec: int
) -> None:
    sent = batch(*values, compression=compression, pid=3, epoch=2, seq=2**31 - 2)
    header = parse_header(sent)
    again = recompress_batch(header, check_records(header, sent)[1], codec)
    new = check_batch(again)
    assert new.codec == codec
    assert decode_batch(again).records == decode_batch(sent).records
    kept = {"attributes": 0, "crc": 0, "size_bytes": 0}
    assert replace(new, **kept) == replace(header, **kept)


async def test_open_partitions_follow_a_changed_config_without_a_restart() -> None:
    world = World()
    row = await world.topic(partitions=1)
    node = world.node(catalogue_poll_s=0.01)
    await node.start()
    now_ms = world.clock.now_ms()
    first = await node.produce_nowait(row.topic_id, 0, batch("x" * 3000, timestamp_ms=now_ms + 10**6))
    assert first.append_time_ms == -1
    led = node._led[row.topic_id, 0]

    async def change(**config: str) -> None:
        new = {name.replace("_", "."): value for name, value in config.items()}
        await world.catalogue.change_topic("t", lambda row: TopicRow(row.name, row.topic_id, 1, config=new))
        await until(lambda: led.config == parse_topic_config(new))

    await change(max_message_bytes="2000")
    with pytest.raises(BatchTooLargeError):
        await node.produce_nowait(row.topic_id, 0, batch("x" * 3000))
    await change(message_timestamp_after_max_ms="60000")
    with pytest.raises(InvalidTimestampError):
        await node.produce_nowait(row.topic_id, 0, batch("later", timestamp_ms=now_ms + 10**9))
    await node.produce_nowait(row.topic_id, 0, batch("soon", timestamp_ms=now_ms + 30_000))
    await change(message_timestamp_type="LogAppendTime")
    assert (await node.produce_nowait(row.topic_id, 0, batch("y"))).append_time_ms >= now_ms
    await change()
    assert (await node.produce_nowait(row.topic_id, 0, batch("y"))).append_time_ms == -1
    assert (await node.offsets(row.topic_id, 0)).high_watermark == 4
    await world.aclose()


async def test_an_idle_partition_that_retention_had_looked_at_follows_a_changed_config() -> None:
    world = World()
    row = await world.catalogue.create_topic("t", 1, config={"retention.ms": str(10**13)})
    writer = world.node()
    await writer.produce_nowait(row.topic_id, 0, batch("old", timestamp_ms=1000))
    await writer.aclose()
    node = world.node(catalogue_poll_s=0.01, retention_check_s=0.01)
    await node.start()
    await until(lambda: bool(node.retainer._due_ms))
    await world.catalogue.change_topic("t", lambda row: replace(row, config={"retention.ms": "1000"}))
    await until(lambda: (row.topic_id, 0) in node._led and node._led[row.topic_id, 0].state.log_start == 1)
    await world.aclose()
