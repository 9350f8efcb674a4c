"""docs/guides/topics-into-tables.md: each pipeline is valid, and the first one runs on what its producer writes."""

from __future__ import annotations

import datetime
import json
import re
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic
from starlette.applications import Starlette

from support.docs.examples import blocks
from support.kafka.harness import RealBroker
from support.spark.harbour import Harbour
from support.spark.running import pipeline
from support.waiting import eventually
from tidemill.metastore.catalogue import TopicRow
from tidemill.node.http.server import HttpServer
from tidemill.registry.http import registry_routes
from tidemill.registry.registry import Registry
from tidemill.shards.api import run_on_pool
from tidemill.spark.check import check_file
from tidemill.spark.formats.record_format import ENVELOPES, FORMATS, METADATA, TopicOptions

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "topics-into-tables.md"
TEXT = PAGE.read_text()
BLOCKS = [code for language, code in blocks(TEXT) if language == "python"]
JANUARY = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
CLICKS = [
    {"click_id": "a", "product_id": 1, "price": Decimal("1.50"), "at": JANUARY},
    {"click_id": "b", "product_id": 2, "price": None, "at": JANUARY},
]


def test_every_pipeline_is_valid_and_every_option_has_its_row(tmp_path: Path) -> None:
    pipelines = [code for code in BLOCKS if "def build(p)" in code]
    assert len(pipelines) == len(BLOCKS) - 1 >= 5
    for code in pipelines:
        (tmp_path / "p.py").write_text(code)
        found = check_file(tmp_path / "p.py", "p")
        assert not found.problems, (code, found.problems)
    rows = re.search(r"\| option \| meaning \|\n(.*?)\n\n", TEXT, re.DOTALL)
    assert rows is not None
    named = {name for row in rows[1].splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {"key", "schema", *TopicOptions.__annotations__}
    assert all(f"`{name}`" in TEXT for name in (*FORMATS, *ENVELOPES, *METADATA))


def test_the_table_of_the_first_pipeline_has_what_its_producer_wrote(tmp_path: Path) -> None:
    """A Kafka client with Confluent's serializers, this registry, and a pipeline without Spark's part."""
    producer, built = BLOCKS[:2]
    root = tmp_path / "data"
    root.mkdir()
    urls = (f"file://{root}/objects", f"sqlite://{root}/consensus.db")
    end = _produce(producer, RealBroker(*urls))
    harbour = Harbour(root)
    try:
        topic = harbour.portal.call(harbour.stores.catalogue.get(TopicRow, "clicks"))
        assert topic is not None
        harbour.heads[topic.topic_id] = [end]
        harbour.mint("topic/clicks", 1000, topic)
        with pipeline(harbour, tmp_path / "pipeline", built):
            eventually(lambda: harbour.upper("clicks") > 1000)
        assert harbour.contents("clicks") == CLICKS
        assert harbour.upper("p.dead_letters") == 0
    finally:
        harbour.close()


def test_the_table_in_the_order_of_a_sequence_has_the_row_that_the_page_names(tmp_path: Path) -> None:
    """The records of the page, in that order and in the opposite one."""
    (built,) = (code for code in BLOCKS if "sequence_by=" in code)
    (shown,) = (code for language, code in blocks(TEXT) if language == "json" and '"version"' in code)
    records = [(str(row["id"]).encode(), row) for row in map(json.loads, shown.splitlines())]
    (tmp_path / "data").mkdir()
    harbour = Harbour(tmp_path / "data")
    try:
        topic = harbour.create_topic("accounts")
        harbour.mint("topic/accounts", 1000, topic)
        with pipeline(harbour, tmp_path / "pipeline", built):
            for time_ms, some in ((2000, records), (3000, records[::-1])):
                for at in range(len(some)):
                    harbour.produce(topic, some[at : at + 1])
                    harbour.mint("topic/accounts", time_ms + at, topic)
                eventually(lambda end=time_ms + len(some): harbour.upper("accounts") >= end)
                assert harbour.contents("accounts") == [{"id": 1, "version": 3, "plan": "team"}]
        assert harbour.upper("p.dead_letters") == 0
    finally:
        harbour.close()


def _produce(code: str, broker: RealBroker) -> int:
    """Run the page's producer; return the next offset of the topic."""
    pool = ThreadPoolExecutor(1)
    failures: list[BaseException] = []

    async def serve() -> HttpServer:
        registry = Registry(broker.metastore, broker.clock, broker.rand, run_on_pool(pool))
        server = HttpServer(Starlette(routes=registry_routes(registry)), on_failure=lambda _, e: failures.append(e))
        await server.start()
        return server

    server = broker.portal.call(serve())
    try:
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic("clicks", 1, 1)])["clicks"].result(30)
        for shown, actual in (("127.0.0.1:8600", f"127.0.0.1:{server.port}"), ("127.0.0.1:9092", broker.address)):
            assert shown in code
            code = code.replace(shown, actual)
        scope: dict[str, Any] = {}
        exec(compile(code, str(PAGE), "exec"), scope)
        for click in CLICKS:
            scope["send"](click)
        assert scope["producer"].flush(30) == 0
        scope.clear()  # the clients end before their broker
        del admin
    finally:
        broker.portal.call(server.aclose())
        broker.close()
        pool.shutdown()
    assert not failures
    return len(CLICKS)
