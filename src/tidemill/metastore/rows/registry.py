"""Schema registry: schemas by id, their uses, subjects, and configuration. One entity, one domain: a batch
may change all of them, and every batch changes the head.

schema          70 | "" | id u32
                kind, text, references array of [name, subject, version], digest, descriptor
digest          71 | "" | digest text
                id, others array
version         72 | "" | subject text | version u32
                id, deleted, created_ms
use             73 | "" | id u32 | subject text | version u32
                (empty value: the version's row has the details)
referrer        74 | "" | subject text | version u32 | id u32
                (empty value: schema `id` refers to this version)
registry config 75 | "" | subject text, "" for all subjects
                compatibility, mode, normalize
registry head   76 | "" | name text, always "head"
                next_id, schemas, subjects, versions, configs, changes, attempts array
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Reference of a schema. `name`: how the schema's text calls it: a full name (Avro), a URI (JSON), an imported file
    (Protobuf)."""

    name: str
    subject: str
    version: int


class SchemaRow(msgspec.Struct, frozen=True):
    """A schema. kind: AVRO, JSON or PROTOBUF. digest: of the schema's meaning with its references, the same for equal
    schemas. descriptor: a Protobuf schema's serialized FileDescriptorProto; its `text` is "" if it was registered in
    that form and has no textual equivalent."""

    id: int
    kind: str
    text: str
    references: tuple[Reference, ...] = ()
    digest: str = ""
    descriptor: bytes = b""


class DigestRow(msgspec.Struct, frozen=True):
    """Ids of equal schemas. `id` is the one returned to clients; others: further ids, created by imports."""

    digest: str
    id: int
    others: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        return (self.id, *self.others)


class VersionRow(msgspec.Struct, frozen=True):
    subject: str
    version: int
    id: int
    deleted: bool = False
    created_ms: int = 0


class UseRow(msgspec.Struct, frozen=True):
    id: int
    subject: str
    version: int


class ReferrerRow(msgspec.Struct, frozen=True):
    subject: str
    version: int
    id: int


class RegistryConfigRow(msgspec.Struct, frozen=True):
    """Configuration of a subject, or the global one. "" = not configured here."""

    subject: str
    compatibility: str = ""
    mode: str = ""
    normalize: bool | None = None


class RegistryHeadRow(msgspec.Struct, frozen=True):
    """Head row. next_id only grows, so that no id is assigned twice. subjects: number of those with a version,
    including deleted ones. attempts: nonces of the newest `changes`, so that a writer that did not learn the outcome
    finds its own."""

    name: str
    next_id: int = 1
    schemas: int = 0
    subjects: int = 0
    versions: int = 0
    configs: int = 0
    changes: int = 0
    attempts: tuple[str, ...] = ()


_ID = Column("id", Kind.U32)
_SUBJECT = Column("subject", Kind.TEXT)
_VERSION = Column("version", Kind.U32)

SCHEMAS = Family(0x70, "schema", SchemaRow, _ID, own_entity=False)
DIGESTS = Family(0x71, "schema digest", DigestRow, Column("digest", Kind.TEXT), own_entity=False)
VERSIONS = Family(0x72, "schema version", VersionRow, _SUBJECT, _VERSION, own_entity=False)
USES = Family(0x73, "schema use", UseRow, _ID, _SUBJECT, _VERSION, own_entity=False)
REFERRERS = Family(0x74, "schema referrer", ReferrerRow, _SUBJECT, _VERSION, _ID, own_entity=False)
REGISTRY_CONFIGS = Family(0x75, "registry config", RegistryConfigRow, _SUBJECT, own_entity=False)
REGISTRY_HEADS = Family(0x76, "registry head", RegistryHeadRow, Column("name", Kind.TEXT), own_entity=False)
