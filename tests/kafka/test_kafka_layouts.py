"""Cached encodings of partitions in Metadata: they equal a fresh encoding, within their limit of memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kafka import error_codes
from tidemill.kafka.handlers import APIS
from tidemill.kafka.metadata.encoded_partitions import LARGE_PARTITIONS, NO_LEADER, EncodedPartitions
from tidemill.kafka.schema.codec_compiler import encode_response

VERSIONS = range(APIS[3].min_version, APIS[3].max_version + 1)
TOPIC_ID = "00000000-0000-0000-0000-000000000001"
leaders_of = st.lists(st.integers(NO_LEADER, 3), max_size=6).map(tuple)


def answer(partitions: Any) -> dict[str, Any]:
    topic = {"error_code": 0, "name": "t", "topic_id": TOPIC_ID, "partitions": partitions}
    brokers = [{"node_id": 1, "host": "h", "port": 1}]
    return {"brokers": brokers, "cluster_id": "c", "controller_id": 1, "topics": [topic, topic], "error_code": 0}


@pytest.mark.parametrize("version", VERSIONS)
@given(leaders_of)
@settings(max_examples=20, deadline=None)
def test_what_is_kept_is_what_would_be_written(version: int, leaders: tuple[int, ...]) -> None:
    layouts = EncodedPartitions()
    plain = []
    for index, leader in enumerate(leaders):
        nodes = [leader] if leader >= 0 else []
        code = 0 if leader >= 0 else error_codes.LEADER_NOT_AVAILABLE
        plain.append(
            {
                "error_code": code,
                "partition_index": index,
                "leader_id": leader,
                "replica_nodes": nodes,
                "isr_nodes": nodes,
            }
        )
    for _ in range(2):
        kept = asyncio.run(layouts.partitions(version, leaders))
        assert encode_response(3, version, answer(kept)) == encode_response(3, version, answer(plain))


async def test_topics_with_equal_leaders_share_one_and_what_is_kept_has_a_bound() -> None:
    layouts = EncodedPartitions(bytes_max=4_000)
    assert await layouts.partitions(12, (1, 1)) is await layouts.partitions(12, (1, 1))
    for number in range(100):
        await layouts.partitions(12, (number,) * 10)
        assert layouts.used_bytes <= 4_000
    many = await layouts.partitions(12, (1,) * (LARGE_PARTITIONS + 1))
    assert many is await layouts.partitions(12, (1,) * (LARGE_PARTITIONS + 1)), "the last one is kept, however large"
    await layouts.partitions(12, (1,))
    assert layouts.used_bytes <= 4_000
