"""Schemas as submitted and as parsed: the meaning, and the digest that identifies equal schemas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidemill.metastore.rows.registry import Reference

SCHEMA_TYPES = ("JSON", "PROTOBUF", "AVRO")
"""Schema types, in the order in which Confluent's registry lists them."""


class SubmittedSchema(NamedTuple):
    """Schema submitted by a client, or stored."""

    kind: str
    text: str
    references: tuple[Reference, ...] = ()
    normalize: bool = False


class ParsedSchema(NamedTuple):
    """Parsed schema. `text` is what is stored; `model` is what the `compat` module of its kind compares. `deep` is a
    digest over the schema and everything it refers to: schemas with equal `deep` have the same meaning."""

    kind: str
    text: str
    references: tuple[Reference, ...]
    model: Any
    digest: str
    descriptor: bytes = b""
    deep: str = ""


class ResolvedReference(NamedTuple):
    """Reference together with the schema it refers to."""

    name: str
    parsed: ParsedSchema


def schema_digest(kind: str, meaning: bytes, references: Sequence[Reference]) -> str:
    """Return the digest, 32 hex digits. `meaning` is the schema's canonical form, without the schemas that it refers
    to."""
    found = hashlib.blake2b(digest_size=16)
    for part in (kind.encode(), meaning, *(f"{r.name}\0{r.subject}\0{r.version}".encode() for r in references)):
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


class Difference(NamedTuple):
    """One reason why a reader cannot read what a writer wrote. `path` is a JSON pointer into the reader's schema."""

    kind: str
    path: str
    description: str

    def message(self) -> str:
        return f'{{errorType:"{self.kind}", description:"{self.description}", path:"{self.path or "/"}"}}'
