"""Types of schemas: for each, how a schema is parsed with everything it refers to, and how two are compared. Pure and
bounded; the caller runs it on a thread.

A level of compatibility says which earlier versions a schema is compared with, and in which direction:

    BACKWARD      the new schema reads what the previous one wrote    FORWARD  the reverse    FULL  both
    …_TRANSITIVE  the same with every earlier version                 NONE     nothing is compared
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from tidemill.metastore.rows.registry import Reference, SchemaRow
from tidemill.registry.avro.compat import find_differences as avro_differences
from tidemill.registry.avro.parse import parse as parse_avro
from tidemill.registry.errors import invalid_schema
from tidemill.registry.jsonschema.compat import find_differences as json_differences
from tidemill.registry.jsonschema.parse import parse as parse_json
from tidemill.registry.limits import StepBudget, run_bounded
from tidemill.registry.protobuf.compat import find_differences as protobuf_differences
from tidemill.registry.protobuf.parse import encode_descriptor
from tidemill.registry.protobuf.parse import parse as parse_protobuf
from tidemill.registry.schema import Difference, ParsedSchema, ResolvedReference, SubmittedSchema

Place = tuple[str, int]
"""Subject and version that a reference names."""

Parse = Callable[[str, Sequence[Reference], Sequence[ResolvedReference], bool], ParsedSchema]
_PARSE: dict[str, Parse] = {"AVRO": parse_avro, "JSON": parse_json, "PROTOBUF": parse_protobuf}

LEVELS = ("BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE", "NONE")
DEFAULT = "BACKWARD"

_DIFFERENCES: dict[str, Callable[[Any, Any, StepBudget], list[Difference]]] = {
    "AVRO": avro_differences,
    "JSON": json_differences,
    "PROTOBUF": protobuf_differences,
}


def submitted_from_row(row: SchemaRow) -> SubmittedSchema:
    """Return a stored schema for parsing. A Protobuf schema uses its descriptor: its text is never compiled again."""
    text = encode_descriptor(row.descriptor) if row.descriptor else row.text
    return SubmittedSchema(row.kind, text, row.references)


def parse_schema(given: SubmittedSchema, places: Mapping[Place, SchemaRow]) -> ParsedSchema:
    """Parse a schema. `places` holds every schema that is referred to, directly or not. Raises RegistryError."""
    return _SchemaParser(places).parse(given)


class _SchemaParser:
    """Parser that parses each place once, so that two schemas that refer to the same place share its model."""

    def __init__(self, places: Mapping[Place, SchemaRow]) -> None:
        self._places = places
        self._parsed: dict[Place, ParsedSchema] = {}

    def parse(self, given: SubmittedSchema) -> ParsedSchema:
        parse = _PARSE.get(given.kind)
        if parse is None:
            raise invalid_schema(f"schemaType {given.kind!r} is not AVRO, JSON or PROTOBUF")
        resolved: dict[str, ResolvedReference] = {}
        self._resolve(given.references, resolved, {})
        found = run_bounded(lambda: parse(given.text, given.references, list(resolved.values()), given.normalize))
        parts = (found.digest, *(other.parsed.deep for other in resolved.values()))
        return found._replace(deep=blake2b("\0".join(parts).encode(), digest_size=16).hexdigest())

    def _resolve(
        self, references: Sequence[Reference], found: dict[str, ResolvedReference], places: dict[str, Place]
    ) -> None:
        """Resolve references, referenced schemas before those that refer to them."""
        for reference in references:
            place = (reference.subject, reference.version)
            if reference.name in places:
                if places[reference.name] != place:
                    raise invalid_schema(f"the reference {reference.name!r} refers to two different schemas")
                continue
            places[reference.name] = place
            row = self._places[place]
            self._resolve(row.references, found, places)
            if place not in self._parsed:
                self._parsed[place] = self.parse(submitted_from_row(row))
            found[reference.name] = ResolvedReference(reference.name, self._parsed[place])


def versions_to_compare(level: str, versions: Sequence[int]) -> Sequence[int]:
    """Return those of the live versions, given in ascending order, with which `level` compares, the newest first."""
    if level == "NONE":
        return ()
    newest_first = list(reversed(versions))
    return newest_first if level.endswith("_TRANSITIVE") else newest_first[:1]


def find_problems(level: str, new: ParsedSchema, old: ParsedSchema, steps: StepBudget) -> list[str]:
    """Return why the two are not compatible at this level, one sentence each; empty when they are. Raises
    RegistryError."""
    if level == "NONE":
        return []
    if new.kind != old.kind:
        return [f'{{errorType:"TYPE_CHANGED", description:"{old.kind} became {new.kind}", path:"/"}}']
    if new.digest == old.digest:
        return []
    found: list[Difference] = []
    compare = _DIFFERENCES[new.kind]
    if not level.startswith("FORWARD"):
        found += run_bounded(lambda: compare(new.model, old.model, steps))
    if not level.startswith("BACKWARD"):
        found += run_bounded(lambda: compare(old.model, new.model, steps))
    return [difference.message() for difference in dict.fromkeys(found)]
