"""An S3 server that flips bits of the objects read by a node that just started: the effect on consumers and the
operator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest

from support.faults.faulty_stores import FaultyS3
from support.faults.served import PROMISED_S, Served, World, running
from support.objects.moto_access import start_server
from support.waiting import eventually, slowness

WRITTEN = [f"value {n}" for n in range(50)]


@contextmanager
def bucket(world: World) -> Iterator[FaultyS3]:
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = start_server()
    host, port = moto.get_host_and_port()
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **keys)
    client.create_bucket(Bucket="flipped")
    s3 = world.run(FaultyS3(f"http://{host}:{port}").__aenter__())
    try:
        yield s3
    finally:
        world.run(s3.__aexit__())
        moto.stop()


def node(directory: Path, s3: FaultyS3) -> Served:
    stores: dict[str, Any] = {
        "objects": {"url": f"s3://flipped/{directory.name}?endpoint={s3.endpoint}&access_key_id=k&secret_access_key=s"},
        "consensus": {"url": f"sqlite://{directory}/c.db"},
    }
    return Served(directory, {**stores, "topics": {"clicks": {"partitions": 1}, "kept": {"partitions": 1}}})


def consumed(served: Served, until: Callable[[list[str]], bool], checks: bool = True) -> list[str]:
    consumer = ck.Consumer(
        {"bootstrap.servers": served.kafka, "group.id": "g", "check.crcs": checks, "log_level": 0}
    )  # fmt: skip
    consumer.assign([ck.TopicPartition("kept", 0, 0)])
    found: list[str] = []

    def enough() -> bool:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            found.append((message.value() or b"").decode(errors="replace"))
        return until(found)

    try:
        eventually(enough, lambda: found)
    finally:
        consumer.close()
    return found


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip-once", "answered a read with damaged bytes, and then with valid ones"),
        ("flip", "an object is damaged, or the object store damages its answers"),
    ],
)
def test_f620_a_store_that_flips_bits_is_named_everywhere_and_a_single_flip_reaches_no_consumer(
    tmp_path: Path, fault: str, words: str
) -> None:
    world = World()
    try:
        with bucket(world) as s3:
            first = node(tmp_path, s3)
            with running(first, world):
                producer = ck.Producer({"bootstrap.servers": first.kafka, "log_level": 0})
                for value in WRITTEN:
                    producer.produce("kept", value)
                assert producer.flush(60) == 0
            served = node(tmp_path, s3)  # no written record is in its memory
            with running(served, world):
                world.call(lambda: s3.switch(fault))
                if fault == "flip-once":
                    assert consumed(served, lambda found: len(found) >= len(WRITTEN)) == WRITTEN
                else:
                    consumed(served, lambda _: words in served.get("/readyz")[1])
                seen = served.reported("objects@node:n1", words, ready=200)
                world.call(lambda: s3.switch(""))
                assert consumed(served, lambda found: len(found) >= len(WRITTEN)) == WRITTEN
            assert max(seen.values()) < PROMISED_S * slowness(), seen
    finally:
        world.close()
