"""What a store keeps of a shape besides its log: enough to find out whether it can go on, and to follow on.

Encoded as msgpack maps, so that a field may be added; one that cannot be read ends the shape.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.capture.changes import Relation
from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.definition.planner import ShapeRequest

T = TypeVar("T")


class SavedDefinition(msgspec.Struct, frozen=True):
    """`relation`: as of its newest change."""

    request: ShapeRequest
    definition: ShapeDefinition
    schema_json: bytes
    relation: Relation
    rows_loaded: int

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, record: bytes) -> SavedDefinition:
        """Raises CorruptError."""
        return _decoded(_DECODER, record)


class KeptShard(msgspec.Struct, frozen=True):
    """Of a shape over a shard. `cluster` and `shard_id`: which shard that is; `version`: of its schema; `seen_ms`:
    every change up to this time that is the shape's is in the log."""

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
    def decode(cls, record: bytes) -> KeptShard:
        """Raises CorruptError."""
        return _decoded(_SHARD_DECODER, record)


def _decoded(decoder: msgspec.msgpack.Decoder[T], record: bytes) -> T:
    try:
        return decoder.decode(record)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"a shape's record cannot be read: error={error}.") from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SavedDefinition)
_SHARD_DECODER = msgspec.msgpack.Decoder(KeptShard)
