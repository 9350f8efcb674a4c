"""Schemas of writers by id, as a decoder needs them: without a connection to a registry."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec


class ReferencedSchema(msgspec.Struct, frozen=True):
    """Schema that another one refers to as `name`."""

    name: str
    text: str
    descriptor: bytes = b""


class WriterSchema(msgspec.Struct, frozen=True):
    """A schema. `kind`: AVRO, PROTOBUF or JSON; "" = the registry has no such id. `descriptor`: a Protobuf schema's
    FileDescriptorProto. `references`: all that it refers to, each after those that it refers to itself."""

    id: int
    kind: str = ""
    text: str = ""
    descriptor: bytes = b""
    references: tuple[ReferencedSchema, ...] = ()


class MissingSchemasError(Exception):
    """Ids whose schemas have to be looked up before records can be decoded."""

    def __init__(self, ids: Collection[int]) -> None:
        super().__init__(f"schemas are not known here: ids={sorted(ids)[:10]}")
        self.ids = frozenset(ids)


class SchemaLookup(Protocol):
    def find(self, ids: Collection[int]) -> Mapping[int, WriterSchema]:
        """Return every schema. Raises MissingSchemasError where a registry cannot be asked, otherwise as asking it."""
        ...


class KnownSchemas:
    """Schemas that were looked up before, for a process that asks no registry."""

    def __init__(self, known: Collection[WriterSchema] = ()) -> None:
        self._known = {schema.id: schema for schema in known}

    def find(self, ids: Collection[int]) -> Mapping[int, WriterSchema]:
        missing = set(ids) - self._known.keys()
        if missing:
            raise MissingSchemasError(missing)
        return self._known


NO_SCHEMAS = KnownSchemas()
