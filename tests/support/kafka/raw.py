"""A client that speaks Kafka by hand, through kio's writers and readers: what real clients never do."""

from __future__ import annotations

import datetime
import io
import socket
import struct
import uuid
from typing import Any

from kio import index
from kio.index import load_request_schema
from kio.serial import entity_reader, entity_writer

from support.kafka.harness import FakeBroker
from tidemill.topics.batch import Record, encode_batch

ZERO = datetime.timedelta(0)
LATEST = {18: 4}
"""The newest version that kio knows, where a newer one is served: of ApiVersions 5 it reads the answer as of 4."""


def request_schema(key: int, version: int) -> Any:
    return index.load_request_schema(key, min(version, LATEST.get(key, version)))


def response_schema(key: int, version: int) -> Any:
    return index.load_response_schema(key, min(version, LATEST.get(key, version)))


def batch(
    values: list[bytes], *, producer: tuple[int, int, int] = (-1, -1, -1), codec: str = "none", base_ms: int = 1_000
) -> bytes:
    """One record batch v2; producer = (id, epoch, first sequence)."""
    producer_id, epoch, sequence = producer
    records = [Record(None, value, timestamp_ms=base_ms + i) for i, value in enumerate(values)]
    return encode_batch(
        records, compression=codec, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
    )


def request_frame(key: int, version: int, correlation_id: int, body: bytes, client_id: str | None = "raw") -> bytes:
    flexible = request_schema(key, version).__flexible__
    name = b"\xff\xff" if client_id is None else struct.pack(">h", len(client_id)) + client_id.encode()
    head = struct.pack(">hhi", key, version, correlation_id) + name + (b"\x00" if flexible else b"")
    return struct.pack(">i", len(head) + len(body)) + head + body


def encode(entity: Any) -> bytes:
    with io.BytesIO() as buffer:
        entity_writer(type(entity))(buffer, entity)
        return buffer.getvalue()


def produce_body(topic: str, parts: list[tuple[int, bytes | None]], *, acks: int = -1, transaction: str = "") -> bytes:
    """Produce v3 to v8."""
    out = struct.pack(">h", len(transaction)) + transaction.encode() if transaction else b"\xff\xff"
    out += struct.pack(">hii", acks, 1000, 1) + struct.pack(">h", len(topic)) + topic.encode()
    out += struct.pack(">i", len(parts))
    for partition, records in parts:
        out += struct.pack(">ii", partition, -1 if records is None else len(records)) + (records or b"")
    return out


def fetch_body(
    topic: str, partition: int, offset: int, *, max_wait_ms: int = 500, min_bytes: int = 1, max_bytes: int = 1 << 20
) -> bytes:
    """Fetch v4."""
    out = struct.pack(">iiiib", -1, max_wait_ms, min_bytes, max_bytes, 0)
    out += struct.pack(">i", 1) + struct.pack(">h", len(topic)) + topic.encode()
    return out + struct.pack(">iiqi", 1, partition, offset, max_bytes)


def fields(schema: Any, **values: Any) -> Any:
    """An entity from those of `values` that this version has; times and flags default to nothing."""
    known = schema.__dataclass_fields__
    filled = {name: value for name, value in values.items() if name in known}
    for name in known:
        if name in ("timeout", "max_wait", "transaction_timeout", "retention_time"):
            filled.setdefault(name, ZERO)
        if name.startswith("include_"):
            filled.setdefault(name, False)
    return schema(**filled)


def nested(schema: Any, field: str) -> Any:
    """The element type of an array of entities."""
    kind = schema.__dataclass_fields__[field].type
    for candidate in (kind, *getattr(kind, "__args__", ())):
        for inner in (candidate, *getattr(candidate, "__args__", ())):
            if hasattr(inner, "__dataclass_fields__"):
                return inner
    raise KeyError(field)


def example(key: int, version: int, topic: str, topic_id: uuid.UUID) -> bytes:
    """A request of this version that names `topic` where the API takes topics."""
    if (key, version) == (18, 5):  # then come a cluster id and a node id (KIP-1242), and tags
        return example(18, 4, topic, topic_id)[:-1] + b"\x00" + struct.pack(">i", -1) + b"\x00"
    schema = request_schema(key, version)

    def topics(field: str, partitions_field: str = "partitions", **partition: Any) -> tuple[Any, ...]:
        element = nested(schema, field)
        filled: dict[str, Any] = {"name": topic, "topic": topic, "topic_id": topic_id}
        if partition:
            filled[partitions_field] = (fields(nested(element, partitions_field), **partition),)
        return (fields(element, **filled),)

    values: dict[str, Any] = {"replica_id": -1, "isolation_level": 0}
    match key:
        case 0:
            values |= {"acks": -1, "topic_data": topics("topic_data", "partition_data", index=0, records=batch([b"v"]))}
        case 1:
            values |= {"min_bytes": 0, "topics": topics("topics", partition=0, fetch_offset=0, partition_max_bytes=9)}
            values |= {"forgotten_topics_data": (), "rack_id": ""}
        case 2:
            values["topics"] = topics("topics", partition_index=0, timestamp=-1)
        case 3:
            values["topics"] = topics("topics")
        case 8:
            partition = {"partition_index": 0, "committed_offset": 1, "committed_metadata": "m"}
            values |= {"group_id": "g", "member_id": "", "topics": topics("topics", **partition)}
            values |= {"generation_id_or_member_epoch": -1}
        case 9 if version >= 8:
            group = nested(schema, "groups")
            asked = fields(nested(group, "topics"), name=topic, topic_id=topic_id, partition_indexes=(0,))
            values["groups"] = (fields(group, group_id="g", topics=(asked,)),)
        case 9:
            values |= {"group_id": "g", "topics": (nested(schema, "topics")(name=topic, partition_indexes=(0,)),)}
        case 10:
            values |= {"key": "g", "key_type": 0, "coordinator_keys": ("g",)}
        case 11:
            spoken = (nested(schema, "protocols")(name="range", metadata=b"m"),)
            values |= {"group_id": topic, "member_id": "", "protocol_type": "consumer", "protocols": spoken}
            values |= {"session_timeout": datetime.timedelta(seconds=10)}
            values |= {"rebalance_timeout": datetime.timedelta(seconds=10)}
        case 12 | 14:
            values |= {"group_id": topic, "member_id": "nobody", "generation_id": 1, "assignments": ()}
            values |= {"protocol_type": "consumer", "protocol_name": "range"}
        case 13 if version >= 3:
            values |= {"group_id": topic, "members": (fields(nested(schema, "members"), member_id="nobody"),)}
        case 13:
            values |= {"group_id": topic, "member_id": "nobody"}
        case 15:
            values["groups"] = (topic,)
        case 68:
            values |= {"group_id": topic, "member_id": "m", "member_epoch": 0, "subscribed_topic_names": (topic,)}
            values |= {"rebalance_timeout": datetime.timedelta(seconds=1), "topic_partitions": ()}
        case 69:
            values["group_ids"] = (topic,)
        case 16:
            values |= {"states_filter": (), "types_filter": ()}
        case 42:
            values["groups_names"] = (topic,)
        case 47:
            values |= {"group_id": topic, "topics": topics("topics", partition_index=0)}
        case 18:
            values |= {"client_software_name": "x", "client_software_version": "1"}
        case 19:
            made = {"name": "made", "num_partitions": 1, "replication_factor": 1, "assignments": (), "configs": ()}
            values["topics"] = (fields(nested(schema, "topics"), **made),)
        case 20 if version >= 6:
            values["topics"] = topics("topics")
        case 20:
            values["topic_names"] = (topic,)
        case 22:
            values["transactional_id"] = None
        case 29:
            values |= {"resource_type_filter": 1, "resource_name_filter": None, "pattern_type_filter": 1}
            values |= {"principal_filter": None, "host_filter": None, "operation": 1, "permission_type": 1}
        case 30:
            rule = {"resource_type": 2, "resource_name": topic, "resource_pattern_type": 3, "principal": "User:a"}
            rule |= {"host": "*", "operation": 3, "permission_type": 3}
            values["creations"] = (fields(nested(schema, "creations"), **rule),)
        case 31:
            wanted = {"resource_type_filter": 2, "resource_name_filter": topic, "pattern_type_filter": 3}
            wanted |= {"principal_filter": None, "host_filter": None, "operation": 1, "permission_type": 1}
            values["filters"] = (fields(nested(schema, "filters"), **wanted),)
        case 48:
            values |= {"components": (), "strict": False}
        case 49:
            entry = nested(schema, "entries")
            entity = fields(nested(entry, "entity"), entity_type="user", entity_name=topic)
            op = fields(nested(entry, "ops"), key="producer_byte_rate", value=1e9, remove=False)
            values |= {"entries": (fields(entry, entity=(entity,), ops=(op,)),), "validate_only": True}
        case 60:
            values["endpoint_type"] = 1
        case 50:
            values["users"] = None
        case 51:
            put = {"name": "u", "mechanism": 1, "iterations": 4096, "salt": b"salt", "salted_password": bytes(32)}
            values |= {"deletions": (), "upsertions": (fields(nested(schema, "upsertions"), **put),)}
        case 23:
            values["topics"] = topics("topics", partition=0, leader_epoch=3)
        case 24:
            new = nested(schema, "v3_and_below_topics")(name=topic, partitions=(0,))
            values |= {"v3_and_below_transactional_id": "x", "v3_and_below_producer_id": 1}
            values |= {"v3_and_below_producer_epoch": 0, "v3_and_below_topics": (new,)}
        case 25 | 26:
            values |= {"transactional_id": "x", "producer_id": 1, "producer_epoch": 0}
            values |= {"group_id": "g", "committed": True}
        case 27:
            marker = nested(schema, "markers")
            places = (nested(marker, "topics")(name=topic, partition_indexes=(0,)),)
            values["markers"] = (
                fields(
                    marker, producer_id=1, producer_epoch=0, transaction_result=False, coordinator_epoch=0,
                    transaction_version=0, topics=places,
                ),
            )  # fmt: skip
        case 28:
            values |= {"transactional_id": "x", "group_id": "g", "producer_id": 1, "producer_epoch": 0}
            values |= {"generation_id": -1, "member_id": "", "group_instance_id": None}
            values["topics"] = topics(
                "topics", partition_index=0, committed_offset=1, committed_leader_epoch=-1, committed_metadata=""
            )
        case 61:
            values["topics"] = (nested(schema, "topics")(name=topic, partition_indexes=(0,)),)
        case 65:
            values["transactional_ids"] = ("x",)
        case 66:
            values |= {"state_filters": (), "producer_id_filters": (), "duration_filter": -1}
            values["transactional_id_pattern"] = None
        case 32:
            resource = nested(schema, "resources")
            values["resources"] = (resource(resource_type=2, resource_name=topic, configuration_keys=None),)
        case 33 | 44:
            resource = nested(schema, "resources")
            value = fields(nested(resource, "configs"), name="retention.ms", value="1000", config_operation=0)
            values |= {"resources": (resource(resource_type=2, resource_name=topic, configs=(value,)),)}
            values["validate_only"] = False
        case 21:
            values["topics"] = topics("topics", partition_index=0, offset=0)
        case 34:
            directory = nested(schema, "dirs")
            moved = nested(directory, "topics")(name=topic, partitions=(0,))
            values["dirs"] = (directory(path="/elsewhere", topics=(moved,)),)
        case 35:
            values["topics"] = (nested(schema, "topics")(topic=topic, partitions=(0,)),)
        case 43:
            values["election_type"] = 0
            values["topic_partitions"] = (nested(schema, "topic_partitions")(topic=topic, partitions=(0,)),)
        case 45:
            values["topics"] = ()
        case 46:
            values["topics"] = None
        case 74 if version >= 1:
            values["resource_types"] = ()
        case 75:
            values |= {"topics": (nested(schema, "topics")(name=topic),), "response_partition_limit": 9, "cursor": None}
        case 37:
            values |= {"topics": (nested(schema, "topics")(name=topic, count=3, assignments=None),)}
            values["validate_only"] = False
    return encode(fields(schema, **values))


class RawClient:
    def __init__(self, port: int, timeout_s: float = 30.0, source: str = "127.0.0.1") -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout_s, source_address=(source, 0))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def send(self, key: int, version: int, correlation_id: int, body: bytes) -> None:
        self.sock.sendall(request_frame(key, version, correlation_id, body))

    def receive(self) -> tuple[int, bytes]:
        """(correlation id, the rest of the response)."""
        (size,) = struct.unpack(">i", self._exactly(4))
        data = self._exactly(size)
        return struct.unpack_from(">i", data)[0], data[4:]

    def ask(self, key: int, version: int, body: bytes, correlation_id: int = 7) -> Any:
        """The response as kio reads it."""
        self.send(key, version, correlation_id, body)
        got, data = self.receive()
        assert got == correlation_id
        return decode(key, version, data)

    def is_closed(self) -> bool:
        """True when the broker has closed this connection; waits for it."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            if not piece:
                raise EOFError("the broker closed the connection")
            data += piece
        return data


def decode(key: int, version: int, data: bytes) -> Any:
    """A response after its correlation id."""
    schema = response_schema(key, version)
    if schema.__header_schema__.__version__ == 1:
        assert data[0] == 0
        data = data[1:]
    entity, size = entity_reader(schema)(memoryview(data).toreadonly(), 0)
    assert size == len(data)
    return entity


def code(answer: Any) -> int:
    """The first non-zero error code found anywhere in a response."""
    if hasattr(answer, "__dataclass_fields__"):
        found = [int(getattr(answer, name, 0)) for name in ("error_code", "partition_error_code")]
        found += [code(getattr(answer, name)) for name in answer.__dataclass_fields__]
        return next((c for c in found if c), 0)
    if isinstance(answer, tuple):
        return next((c for c in map(code, answer) if c), 0)
    return 0


TOPIC, BROKER = 2, 4


def alter(
    broker: FakeBroker, changes: list[tuple[str, int, str | None]], *, key: int = 44, version: int = 1,
    kind: int = TOPIC, name: str = "t", validate_only: bool = False, times: int = 1,
) -> int:  # fmt: skip
    schema = load_request_schema(key, version)
    resource = nested(schema, "resources")
    config = nested(resource, "configs")
    more = [{"config_operation": op} if key == 44 else {} for _, op, _ in changes]
    configs = tuple(config(name=n, value=v, **m) for (n, _, v), m in zip(changes, more, strict=True))
    resources = (resource(resource_type=kind, resource_name=name, configs=configs),) * times
    with RawClient(broker.port) as client:
        answer = client.ask(key, version, encode(schema(resources=resources, validate_only=validate_only)))
    codes = {int(r.error_code) for r in answer.responses}
    assert len(codes) == 1
    assert all(bool(r.error_message) == bool(r.error_code) for r in answer.responses)
    return codes.pop()


def described(broker: FakeBroker, kind: int, name: str, keys: tuple[str, ...] | None = None) -> Any:
    schema = load_request_schema(32, 4)
    resource = nested(schema, "resources")(resource_type=kind, resource_name=name, configuration_keys=keys)
    body = encode(schema(resources=(resource,), include_synonyms=True, include_documentation=True))
    with RawClient(broker.port) as client:
        return client.ask(32, 4, body).results[0]
