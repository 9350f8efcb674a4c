"""kcat (an old librdkafka) against the endpoint over the real topics room."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from support.kafka.harness import RealBroker
from support.waiting import DEADLINE_S

pytestmark = [
    pytest.mark.kcat,
    pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (Debian: apt-get install kcat)"),
]


def kcat(*arguments: str, send: bytes = b"") -> bytes:
    done = subprocess.run(["kcat", *arguments], input=send, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_lines_go_in_and_come_out(broker: RealBroker, codec: str) -> None:
    lines = b"".join(b"%d:line %d\n" % (i % 3, i) for i in range(200))
    kcat(
        "-b",
        broker.address,
        "-P",
        "-t",
        "lines",
        "-K",
        ":",
        "-z",
        codec,
        "-X",
        "enable.idempotence=true",
        send=lines,
    )
    out = kcat("-b", broker.address, "-C", "-t", "lines", "-o", "beginning", "-e", "-q", "-K", ":")
    assert sorted(out.splitlines()) == sorted(lines.splitlines())


def test_it_still_compresses(broker: RealBroker) -> None:
    broker.create_topic("small", 1)
    lines = b"the same line again and again\n" * 2000
    kcat("-b", broker.address, "-P", "-t", "small", "-z", "lz4", "-X", "linger.ms=50", send=lines)
    topic_id = broker.portal.call(_topic_id(broker, "small"))
    fetched = broker.portal.call(_bytes(broker, topic_id))
    assert 0 < fetched < len(lines) / 4


async def _topic_id(broker: RealBroker, name: str) -> str:
    from tidemill.metastore.catalogue import TopicRow

    row = await broker.catalogue.get(TopicRow, name)
    assert row is not None
    return row.topic_id


async def _bytes(broker: RealBroker, topic_id: str) -> int:
    from tidemill.topics.api import FetchRead

    (got,) = await broker.topics.fetch(
        [FetchRead(topic_id, 0, 0, 1 << 30)], max_wait_s=0, min_bytes=0, max_bytes=1 << 30
    )
    return sum(map(len, got.batches))


def test_metadata_and_one_partition_from_an_offset(broker: RealBroker) -> None:
    broker.create_topic("one", 1)
    kcat("-b", broker.address, "-P", "-t", "one", "-p", "0", send=b"a\nb\nc\n")
    listing = kcat("-b", broker.address, "-L").decode()
    assert 'topic "one" with 1 partitions' in listing
    assert "1 brokers" in listing
    assert kcat("-b", broker.address, "-C", "-t", "one", "-p", "0", "-o", "1", "-e", "-q") == b"b\nc\n"
    assert kcat("-b", broker.address, "-C", "-t", "one", "-p", "0", "-o", "-1", "-e", "-q") == b"c\n"
