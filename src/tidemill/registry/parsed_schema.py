"""A schema that was understood: what it means, and the digest by which equal ones are one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidemill.metastore.rows.registry import Reference

KINDS = ("JSON", "PROTOBUF", "AVRO")
"""In the order in which Confluent's registry lists them."""


class Difference(NamedTuple):
    """One reason why a reader cannot read what a writer wrote. `path` is a JSON pointer into the reader's schema."""

    kind: str
    path: str
    told: str

    def message(self) -> str:
        return f'{{errorType:"{self.kind}", description:"{self.told}", path:"{self.path or "/"}"}}'


class Parsed(NamedTuple):
    """`text` is what is stored; `model` what the kind's `compat` module compares. `deep` is the digest with those of
    everything that is referred to: where it is equal, so is everything that follows from the schema."""

    kind: str
    text: str
    references: tuple[Reference, ...]
    model: Any
    digest: str
    descriptor: bytes = b""
    deep: str = ""


class Resolved(NamedTuple):
    """A reference with the schema it leads to."""

    name: str
    parsed: Parsed


def digest_of(kind: str, meaning: bytes, references: Sequence[Reference]) -> str:
    """Hex, 32 digits. `meaning` is the schema's canonical form, without what it refers to."""
    found = hashlib.blake2b(digest_size=16)
    for part in (kind.encode(), meaning, *(f"{r.name}\0{r.subject}\0{r.version}".encode() for r in references)):
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()
