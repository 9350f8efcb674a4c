"""Confluent's own serializers and deserializers through the endpoint, with the schemas in this registry."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, message_factory, struct_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from starlette.applications import Starlette

from support.kafka.harness import RealBroker
from tidemill.node.http.server import HttpServer
from tidemill.registry.http import registry_routes
from tidemill.registry.registry import Registry
from tidemill.shards.api import run_on_pool

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None}],
    }
)
AVRO_MORE = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [*json.loads(AVRO)["fields"], {"name": "price", "type": "double", "default": 1.5}],
    }
)
JSON = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Order",
        "type": "object",
        "properties": {"id": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["id"],
        "additionalProperties": False,
    }
)


class Shop:
    """A broker, a registry, and clients of both."""

    def __init__(self) -> None:
        self.broker = RealBroker()
        self._pool = ThreadPoolExecutor(1)
        self._failures: list[BaseException] = []
        self.broker.portal.call(self._up())
        self.client = SchemaRegistryClient({"url": f"http://127.0.0.1:{self._http.port}"})
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": self.broker.address})
        for future in admin.create_topics([NewTopic(self.topic, 1, 1)]).values():
            future.result(30)

    async def _up(self) -> None:
        broker = self.broker
        registry = Registry(broker.metastore, broker.clock, broker.rand, run_on_pool(self._pool))
        app = Starlette(routes=registry_routes(registry))
        self._http = HttpServer(app, on_failure=lambda _, error: self._failures.append(error))
        await self._http.start()

    def through(self, serializer: Any, deserializer: Any, value: Any) -> Any:
        """Send `value` through the topic and return the value that is consumed."""
        context = SerializationContext(self.topic, MessageField.VALUE)
        producer = Producer({"bootstrap.servers": self.broker.address})
        at: list[int] = []
        producer.produce(self.topic, serializer(value, context), on_delivery=lambda _, m: at.append(m.offset()))
        assert producer.flush(30) == 0
        consumer = Consumer({"bootstrap.servers": self.broker.address, "group.id": "none", "enable.auto.commit": False})
        try:
            consumer.assign([TopicPartition(self.topic, 0, at[0])])
            message = next(found for found in iter(lambda: consumer.poll(1.0), 0) if found is not None)
            assert message.error() is None
            return deserializer(message.value(), context)
        finally:
            consumer.close()

    def close(self) -> None:
        self.broker.portal.call(self._http.aclose())
        self.broker.close()
        self._pool.shutdown()
        assert not self._failures


@pytest.fixture
def shop() -> Iterator[Shop]:
    found = Shop()
    yield found
    found.close()


def test_avro_goes_through_and_a_newer_reader_reads_what_an_older_writer_wrote(shop: Shop) -> None:
    value = {"id": 7, "note": "ahoy"}
    writes = AvroSerializer(shop.client, AVRO)
    assert shop.through(writes, AvroDeserializer(shop.client), value) == value
    assert shop.through(writes, AvroDeserializer(shop.client, AVRO_MORE), value) == {**value, "price": 1.5}
    assert shop.client.get_versions(f"{shop.topic}-value") == [1]
    assert (
        shop.through(
            AvroSerializer(shop.client, AVRO_MORE), AvroDeserializer(shop.client, AVRO), {**value, "price": 2.0}
        )
        == value
    )
    assert shop.client.get_versions(f"{shop.topic}-value") == [1, 2]
    bad = AVRO.replace('"long"', '"string"')
    with pytest.raises(SchemaRegistryError) as refused:
        shop.through(AvroSerializer(shop.client, bad), None, {"id": "x", "note": None})
    assert (refused.value.http_status_code, refused.value.error_code) == (409, 409)


def test_json_goes_through(shop: Shop) -> None:
    value = {"id": 7, "note": "ahoy"}
    serializer = JSONSerializer(JSON, shop.client)
    assert shop.through(serializer, JSONDeserializer(JSON, schema_registry_client=shop.client), value) == value
    assert shop.through(serializer, JSONDeserializer(None, schema_registry_client=shop.client), value) == value


def test_protobuf_goes_through_with_what_it_imports(shop: Shop) -> None:
    inner = descriptor_pb2.FileDescriptorProto(name="inner.proto", package="shop", syntax="proto3")
    inner.message_type.add(name="Line").field.add(name="sku", number=1, type=9, label=1)
    outer = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    outer.dependency.extend(["inner.proto", "google/protobuf/struct.proto"])
    order = outer.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=3, label=1)
    order.field.add(name="lines", number=2, type=11, label=3, type_name=".shop.Line")
    order.field.add(name="more", number=3, type=11, label=1, type_name=".google.protobuf.Struct")
    pool = DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(inner)
    pool.Add(outer)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    line = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Line"))
    value = kind(id=7, lines=[line(sku="a"), line(sku="b")])
    value.more["x"] = 1.5
    serializer = ProtobufSerializer(kind, shop.client)
    found = shop.through(serializer, ProtobufDeserializer(kind, schema_registry_client=shop.client), value)
    assert found.SerializeToString(deterministic=True) == value.SerializeToString(deterministic=True)
    assert sorted(shop.client.get_subjects()) == ["inner.proto", f"{shop.topic}-value"]
    stored = shop.client.get_latest_version(f"{shop.topic}-value").schema
    assert [reference.name for reference in stored.references or []] == ["inner.proto"]


@pytest.mark.processes
def test_a_text_of_protobuf_is_the_schema_that_its_descriptor_is(shop: Shop) -> None:
    text = 'syntax = "proto3"; package shop; message Line { string sku = 1; }'
    first = shop.client.register_schema("text", Schema(text, "PROTOBUF"))
    assert shop.client.get_schema(first).schema_str == text
    other = SchemaRegistryClient(shop.client.config())
    serialized = other.get_schema(first, fmt="serialized").schema_str
    assert serialized is not None and serialized != text
    assert other.register_schema("serialized", Schema(serialized, "PROTOBUF")) == first
    importing = 'syntax = "proto3"; import "line.proto"; message Order { repeated shop.Line lines = 1; }'
    schema = Schema(importing, "PROTOBUF", [SchemaReference("line.proto", "text", 1)])
    assert shop.client.register_schema("importing", schema) == first + 1
    assert not shop.client.test_compatibility("text", Schema(text.replace("string", "int64"), "PROTOBUF"))
    assert shop.client.test_compatibility("text", Schema(text.replace("sku", "name"), "PROTOBUF"))


def test_the_client_asks_for_everything_else(shop: Shop) -> None:
    client = shop.client
    assert client.get_schema_types() == ["JSON", "PROTOBUF", "AVRO"]
    schema_id = client.register_schema("s", Schema(AVRO, "AVRO"), normalize_schemas=True)
    assert client.lookup_schema("s", Schema(AVRO, "AVRO"), normalize_schemas=True).schema_id == schema_id
    assert client.get_version("s", 1).schema_id == schema_id
    assert client.get_subjects_by_schema_id(schema_id) == ["s"]
    assert [(one.subject, one.version) for one in client.get_schema_versions(schema_id)] == [("s", 1)]
    client.set_compatibility("s", "FULL_TRANSITIVE")
    assert client.get_compatibility("s") == "FULL_TRANSITIVE"
    assert client.get_compatibility() == "BACKWARD"
    assert client.get_global_mode() == "READWRITE"
    assert client.delete_version("s", 1) == 1
    assert client.delete_subject("s", permanent=True) == [1]
    with pytest.raises(SchemaRegistryError, match="not found"):
        client.get_latest_version("s")
