"""A node at [::1]: HTTP responds there, and three clients follow the address in Kafka's metadata."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from confluent_kafka import Consumer, Producer

from support.ports import free_port
from support.waiting import until
from tidemill.base.config.config import Config
from tidemill.console.app import console_routes
from tidemill.node import node as assembly

WAIT_S = 60


def free_address() -> str:
    return f"[::1]:{free_port()}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Run a node on a separate thread and yield its addresses for HTTP and Kafka."""
    http, kafka = free_address(), free_address()
    config = Config.model_validate(
        {
            "node": {"name": "n1", "data": str(tmp_path_factory.mktemp("node")), "http": http, "kafka": kafka},
            "objects": {"url": "memory://"},
            "topics": {"clicks": {"partitions": 1}},
        }
    )
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    failed: list[BaseException] = []

    async def run() -> None:
        node = assembly.Node(config, console_routes)
        running = asyncio.ensure_future(node.run(stop))
        await until(lambda: running.done() or (not node.not_ready_reason() and can_connect(kafka)))
        ready.set()
        await running

    def main() -> None:
        try:
            loop.run_until_complete(run())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=main)
    thread.start()
    assert ready.wait(WAIT_S)
    assert not failed, failed
    yield http, kafka
    loop.call_soon_threadsafe(stop.set)
    thread.join(WAIT_S)


def can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 1).close()
    except OSError:
        return False
    return True


def test_http_answers_at_an_ipv6_address(served: tuple[str, str]) -> None:
    with urlopen(f"http://{served[0]}/healthz", timeout=WAIT_S) as answer:
        assert answer.status == 200


def test_librdkafka_produces_and_consumes_at_an_ipv6_address(served: tuple[str, str]) -> None:
    producer = Producer({"bootstrap.servers": served[1]})
    assert producer.list_topics(timeout=WAIT_S).brokers[1].host == "::1"
    producer.produce("clicks", b"librdkafka")
    assert producer.flush(WAIT_S) == 0
    consumer = Consumer({"bootstrap.servers": served[1], "group.id": "g", "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe(["clicks"])
        message = consumer.consume(1, timeout=WAIT_S)[0]
        assert message.error() is None
    finally:
        consumer.close()


CLIENTS = {
    "aiokafka": """
import asyncio, sys
from aiokafka import AIOKafkaProducer
async def main():
    producer = AIOKafkaProducer(bootstrap_servers=sys.argv[1])
    await producer.start()
    print((await producer.send_and_wait("clicks", b"aiokafka")).offset >= 0)
    await producer.stop()
asyncio.run(main())
""",
    "kafka-python": """
import sys
from kafka import KafkaProducer
producer = KafkaProducer(bootstrap_servers=sys.argv[1])
print(producer.send("clicks", b"kafka-python").get(60).offset >= 0)
producer.close()
""",
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_produces_at_an_ipv6_address(served: tuple[str, str], client: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENTS[client], served[1]], capture_output=True, text=True, timeout=2 * WAIT_S
    )
    assert done.stdout.strip() == "True", json.dumps([done.stdout[-2000:], done.stderr[-2000:]])
