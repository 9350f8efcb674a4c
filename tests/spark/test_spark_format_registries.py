"""Schemas from a foreign registry: this project's own, behind HTTP, and one that fails in every way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from support.registry.world import Rest
from support.spark.formats import avro, framed
from support.spark.sinks import topic_sink
from support.waiting import eventually
from tidemill.base.errors import UnavailableError
from tidemill.spark.formats.schemas.foreign_registry import ForeignRegistry
from tidemill.spark.formats.schemas.writer_schema import WriterSchema

MONEY = json.dumps({"type": "record", "name": "Money", "fields": [{"name": "cents", "type": "long"}]})
ORDER: dict[str, Any] = {
    "type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}, {"name": "n", "type": "int"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def rest() -> Iterator[Rest]:
    found = Rest()
    yield found
    found.close()


@pytest.mark.processes  # protoc
async def test_schemas_with_what_they_refer_to_and_an_id_that_is_unknown(rest: Rest) -> None:
    plain = rest.register("plain", json.dumps(ORDER))
    rest.register("a/money", MONEY)
    paid = {"type": "record", "name": "Paid", "fields": [{"name": "by", "type": "Money"}]}
    refers = [{"name": "Money", "subject": "a/money", "version": 1}]
    with_reference = rest.register("paid", json.dumps(paid), references=refers)
    text = 'syntax = "proto3"; message Line { string sku = 1; }'
    line = rest.register("line", text, "PROTOBUF")
    outer = 'syntax = "proto3"; import "line.proto"; message Order { Line line = 1; }'
    order = rest.register(
        "order", outer, "PROTOBUF", references=[{"name": "line.proto", "subject": "line", "version": 1}]
    )
    found = await ForeignRegistry(rest.url).load([plain, with_reference, line, order, 999])
    assert found[999] == WriterSchema(999)
    assert (found[plain].kind, json.loads(found[plain].text)) == ("AVRO", ORDER)
    (money,) = found[with_reference].references
    assert (money.name, json.loads(money.text)) == ("Money", json.loads(MONEY))
    for one, name in ((found[line], "Line"), (found[order], "Order")):
        described = descriptor_pb2.FileDescriptorProto.FromString(one.descriptor)
        assert one.kind == "PROTOBUF" and [kind.name for kind in described.message_type] == [name]
    assert [one.name for one in found[order].references] == ["line.proto"] and found[order].references[0].descriptor


class Odd:
    """A registry that answers as `answer` says: (status, body)."""

    def __init__(self) -> None:
        self.answer: tuple[int, Any] = (200, {})
        self.asked: list[tuple[str, str | None]] = []
        odd = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                odd.asked.append((self.path, self.headers["authorization"]))
                status, body = odd.answer
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://me:se%40cret@127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def odd() -> Iterator[Odd]:
    found = Odd()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, {"error_code": 50001, "message": "no store"}, "status=500"),
        (401, {"message": "who are you"}, "message=[who are you]"),
        (404, b"<html>no such page</html>", "no JSON"),
        (302, {"message": "elsewhere"}, "status=302"),
        (404, {"message": "HTTP 404 Not Found"}, "status=404"),
        (200, b"[]", "no object"),
        (200, {"schemaType": "AVRO"}, "has no schema"),
        (200, {"schemaType": "PROTOBUF", "schema": 'syntax = "proto3";'}, "format=serialized"),
    ],
)
async def test_an_answer_that_is_not_the_registrys_is_no_unknown_id(
    odd: Odd, status: int, body: Any, reason: str
) -> None:
    odd.answer = (status, body)
    with pytest.raises(UnavailableError) as raised:
        await ForeignRegistry(odd.url).load([5])
    assert reason in str(raised.value) and "cret" not in str(raised.value)
    assert odd.asked == [("/schemas/ids/5?format=serialized", "Basic bWU6c2VAY3JldA==")]


def test_a_table_waits_for_a_registry_that_does_not_answer_and_asks_once_for_each_schema(
    harbour: Any, odd: Odd, tmp_path: Path
) -> None:
    topic = harbour.create_topic("clicks")
    declared = {"key": "id", "schema": "id string, n long", "format": "avro"}
    odd.answer = (503, {"message": "starting"})
    sink = topic_sink(harbour, tmp_path / "s", "clicks", registry=odd.url, **declared)
    harbour.produce(topic, [(None, avro(ORDER, {"id": "a", "n": 1}, 5))])
    harbour.mint("topic/clicks", 1000, topic)
    (seat,) = sink.seats._seats.values()
    said: list[tuple[str, bool]] = []
    seat.on_failure = lambda error, left: said.append((str(error), left))
    sink.process(sink.latest())
    assert {left for _, left in said} == {False} and "status=503" in said[0][0] and harbour.upper("clicks") == 0
    odd.answer = (200, {"schema": json.dumps(ORDER)})
    eventually(lambda: sink.process(sink.latest()) or harbour.upper("clicks") == 1001)
    before = len(odd.asked)
    harbour.produce(topic, [(None, avro(ORDER, {"id": "b", "n": 2}, 5))])
    harbour.mint("topic/clicks", 2000, topic)
    sink.process(sink.latest())
    assert len(odd.asked) == before and [r["id"] for r in harbour.contents("clicks")] == ["a", "b"]
    odd.answer = (404, {"error_code": 40403, "message": "Schema 6 not found"})
    harbour.produce(topic, [(None, framed(6, b"x"))])
    harbour.mint("topic/clicks", 3000, topic)
    sink.process(sink.latest())
    assert harbour.upper("clicks") == 3001
    assert [r["reason"] for r in harbour.contents("p.dead_letters")] == ["the registry has no schema 6"]


async def test_nothing_that_listens_is_a_registry_that_does_not_answer(odd: Odd) -> None:
    url = odd.url
    odd.close()
    with pytest.raises(UnavailableError, match=r"does not answer: registry=http://127\.0\.0\.1:"):
        await ForeignRegistry(url).load([5])
