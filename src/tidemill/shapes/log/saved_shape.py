"""The record that is stored with a shape's log: enough to decide whether the shape can continue, and to continue it.

Records are msgpack maps, so that fields can be added. A shape whose record cannot be decoded ends.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.capture.changes import Relation
from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.definition.planner import ShapeRequest

T = TypeVar("T")


class SavedTableShape(msgspec.Struct, frozen=True):
    """The record of a shape over a table. `relation`: the relation when the record was written."""

    request: ShapeRequest
    definition: ShapeDefinition
    schema_json: bytes
    relation: Relation
    rows_loaded: int

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, record: bytes) -> SavedTableShape:
        """Decode a record. Raises CorruptError."""
        return _decode_record(_DECODER, record)


class SavedShardShape(msgspec.Struct, frozen=True):
    """The record of a shape over a shard.

    `cluster` and `shard_id` identify the shard; `version` is that of its schema; `seen_ms`: all changes of the shape up
    to this time are in the log.
    """

    request: ShapeRequest
    definition: ShapeDefinition
    schema_json: bytes
    cluster: str
    shard_id: str
    version: int
    seen_ms: int
    rows_loaded: int

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, record: bytes) -> SavedShardShape:
        """Decode a record. Raises CorruptError."""
        return _decode_record(_SHARD_DECODER, record)


def _decode_record(decoder: msgspec.msgpack.Decoder[T], record: bytes) -> T:
    try:
        return decoder.decode(record)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"a shape's record cannot be read: error={error}.") from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SavedTableShape)
_SHARD_DECODER = msgspec.msgpack.Decoder(SavedShardShape)
