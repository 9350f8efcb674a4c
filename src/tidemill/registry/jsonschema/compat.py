"""Check whether every document that is valid for one JSON Schema is valid for another. Source: Confluent's rules, by
content model.

A schema that does not restrict other properties is open: documents may contain any. So a property may be removed from
an open reader only, and may be added where the writer was closed. In some cases Confluent's registry stops although the
answer is certain (one part of allOf already fits; every branch of anyOf fits); this module continues there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tidemill.registry.jsonschema.model import (
    ALL,
    ANY,
    ARRAY,
    COMBINED,
    ENUM,
    EVERYTHING,
    NOT,
    NOTHING,
    NUMBER,
    OBJECT,
    ONE,
    STRING,
    Node,
    Shape,
)
from tidemill.registry.limits import StepBudget
from tidemill.registry.recursion import SchemaComparison
from tidemill.registry.schema import Difference

UPPER = ("maxLength", "maximum", "exclusiveMaximum", "maxProperties", "maxItems")
LOWER = ("minLength", "minimum", "exclusiveMinimum", "minProperties", "minItems")


def find_differences(reader: Node, writer: Node, steps: StepBudget) -> list[Difference]:
    """Return why a document that `writer` allows may be invalid for `reader`; empty when it is always valid."""
    walk = _JsonSchemaComparison(steps)
    walk.compare(reader, writer, "")
    return walk.found


class _JsonSchemaComparison(SchemaComparison):
    def compare(self, reader: Node, writer: Node, path: str) -> None:
        if reader is writer:
            return
        self.compare_once(reader, writer, lambda: self._compare_nodes(reader, writer, path))

    def _compare_nodes(self, reader: Node, writer: Node, path: str) -> None:
        if writer.kind == NOTHING or reader.kind == EVERYTHING:
            return
        if writer.kind in COMBINED and reader.kind in COMBINED:
            self._compare_combined(reader, writer, path)
        elif reader.kind in COMBINED:
            self._compare_with_combined_reader(reader, writer, path)
        elif writer.kind in COMBINED:
            self._compare_with_combined_writer(reader, writer, path)
        elif reader.kind != writer.kind:
            self.add("TYPE_CHANGED", path, f"{writer.kind} is not valid as {reader.kind}")
        elif reader.kind == ENUM:
            self._compare_enum(reader, writer, path)
        elif reader.kind == NOT:
            if not self.fits(lambda: self.compare(writer.parts[0], reader.parts[0], path)):
                self.add("NOT_TYPE_EXTENDED", f"{path}/not", "it excludes more than before")
        else:
            self._compare_limits(reader, writer, path)
            if reader.shape is not None and writer.shape is not None:
                if reader.kind == OBJECT:
                    self._compare_objects(reader.shape, writer.shape, path)
                elif reader.kind == ARRAY:
                    self._compare_arrays(reader.shape, writer.shape, path)

    # combined schemas ------------------------------------------------------------------------------

    def _compare_with_combined_reader(self, reader: Node, writer: Node, path: str) -> None:
        if reader.kind == ALL:
            for index, part in enumerate(reader.parts):
                self.compare(part, writer, f"{path}/allOf/{index}")
        elif not any(self.fits(_bind_comparison(self.compare, part, writer)) for part in reader.parts):
            self.add("TYPE_CHANGED", path, f"{writer.kind} fits no part of {reader.kind}")

    def _compare_with_combined_writer(self, reader: Node, writer: Node, path: str) -> None:
        if writer.kind == ALL:
            if not any(self.fits(_bind_comparison(self.compare, reader, part)) for part in writer.parts):
                self.add("TYPE_CHANGED", path, f"no part of allOf is valid as {reader.kind}")
            return
        for index, part in enumerate(writer.parts):
            self.compare(reader, part, f"{path}/{writer.kind}/{index}")

    def _compare_combined(self, reader: Node, writer: Node, path: str) -> None:
        fits = [[self.fits(_bind_comparison(self.compare, part, one)) for part in reader.parts] for one in writer.parts]
        if reader.kind == ALL:
            # Each part of the reader must hold. One part of the writer's allOf implies it, or every alternative does.
            enough = any if writer.kind == ALL else all
            for place in range(len(reader.parts)):
                if not enough(row[place] for row in fits):
                    self.add("PRODUCT_TYPE_EXTENDED", f"{path}/allOf/{place}", "it was not required before")
        elif writer.kind == ALL:
            if not any(any(row) for row in fits) or (reader.kind == ONE and len(reader.parts) > 1):
                self.add("COMBINED_TYPE_CHANGED", path, f"allOf became {reader.kind}")
        elif reader.kind == ANY:
            for place, row in enumerate(fits):
                if not any(row):
                    self.add("SUM_TYPE_NARROWED", f"{path}/{writer.kind}/{place}", "this alternative was removed")
        elif writer.kind == ANY and len(writer.parts) > 1:
            self.add(
                "COMBINED_TYPE_CHANGED", path, "anyOf became oneOf: a document that matches twice is no longer valid"
            )
        elif _maximum_matching([[place for place, fit in enumerate(row) if fit] for row in fits]) < len(writer.parts):
            self.add("SUM_TYPE_NARROWED", path, "the alternatives do not match one to one")

    # plain keywords -------------------------------------------------------------------------------

    def _compare_enum(self, reader: Node, writer: Node, path: str) -> None:
        missing = sorted(writer.values - reader.values)
        if missing:
            values = b", ".join(missing[:5]).decode().replace('"', "'")[:200]
            self.add("ENUM_ARRAY_NARROWED", f"{path}/enum", f"these values are no longer valid: {values}")

    def _compare_limits(self, reader: Node, writer: Node, path: str) -> None:
        ours, theirs = reader.limits, writer.limits
        for words, tighter in ((UPPER, operator.lt), (LOWER, operator.gt)):
            for word in words:
                if word in ours and word not in theirs:
                    if not self._is_implied(word, reader, writer):
                        self.add(f"{_upper_snake(word)}_ADDED", f"{path}/{word}", f"{word} was added")
                elif word in ours and tighter(ours[word], theirs[word]):
                    self.add(f"{_upper_snake(word)}_TIGHTENED", f"{path}/{word}", f"{theirs[word]} became {ours[word]}")
        if reader.kind == STRING and "pattern" in ours and ours["pattern"] != theirs.get("pattern"):
            kind = "PATTERN_CHANGED" if "pattern" in theirs else "PATTERN_ADDED"
            self.add(kind, f"{path}/pattern", "a different pattern must match")
        if reader.kind == NUMBER:
            if ours["integer"] and not theirs["integer"]:
                self.add("TYPE_NARROWED", path, "number became integer")
            self._compare_multiple_of(ours.get("multipleOf"), theirs.get("multipleOf"), path)
        if ours.get("uniqueItems") and not theirs.get("uniqueItems"):
            self.add("UNIQUE_ITEMS_ADDED", f"{path}/uniqueItems", "items must be unique now")

    @staticmethod
    def _is_implied(word: str, reader: Node, writer: Node) -> bool:
        """Return whether the writer has a bound of the other kind (inclusive, exclusive) that is as tight."""
        other = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(word)
        if other is None or other not in writer.limits:
            return False
        new, old = reader.limits[word], writer.limits[other]
        return bool(new <= old if word == "minimum" else new >= old)

    def _compare_multiple_of(self, new: Any, old: Any, path: str) -> None:
        if new is None or new == old:
            return
        if old is None:
            self.add("MULTIPLE_OF_ADDED", f"{path}/multipleOf", "multipleOf was added")
        elif Fraction(str(old)) % Fraction(str(new)):
            self.add("MULTIPLE_OF_CHANGED", f"{path}/multipleOf", f"{old} is not a multiple of {new}")

    # objects --------------------------------------------------------------------------------------

    def _compare_objects(self, reader: Shape, writer: Shape, path: str) -> None:
        for name in sorted(reader.named.keys() | writer.named.keys()):
            at = f"{path}/properties/{_pointer(name)}"
            if name not in reader.named:
                self._check_removed(name, reader, writer.named[name], at, "PROPERTY")
            elif name not in writer.named:
                self._check_added(name, reader, writer, at)
            else:
                self.compare(reader.named[name], writer.named[name], at)
                if name in reader.required - writer.required and not reader.named[name].default:
                    self.add("REQUIRED_ATTRIBUTE_ADDED", f"{path}/required", f"{name} is required now")
        for name, needed in reader.needs.items():
            if not needed <= writer.needs.get(name, frozenset()):
                kind = "DEPENDENCY_ARRAY_EXTENDED" if name in writer.needs else "DEPENDENCY_ARRAY_ADDED"
                self.add(kind, f"{path}/dependencies/{_pointer(name)}", "it requires more properties")
        for name, schema in reader.needs_schema.items():
            at = f"{path}/dependencies/{_pointer(name)}"
            if name in writer.needs_schema:
                self.compare(schema, writer.needs_schema[name], at)
            else:
                self.add("DEPENDENCY_SCHEMA_ADDED", at, "it requires a schema")
        self._compare_patterns(reader, writer, f"{path}/patternProperties")
        self._compare_rest(reader, writer, f"{path}/additionalProperties", "ADDITIONAL_PROPERTIES")

    def _compare_patterns(self, reader: Shape, writer: Shape, path: str) -> None:
        """Compare patterns. A pattern that only one side has is compared with the other side's rest. Overlaps of two
        patterns are not considered."""
        for pattern in sorted(reader.patterns.keys() | writer.patterns.keys()):
            at = f"{path}/{_pointer(pattern)}"
            now = reader.patterns.get(pattern, reader.rest)
            was = writer.patterns.get(pattern, writer.rest)
            if now is None or (was is not None and was.kind == NOTHING):
                continue
            if was is None:
                if now.kind != EVERYTHING:
                    self.add("PATTERN_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL", at, "any value was allowed before")
            elif now.kind == NOTHING:
                self.add("PATTERN_PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL", at, "it is no longer allowed")
            else:
                self.compare(now, was, at)

    def _check_removed(self, name: str | None, reader: Shape, was: Node, at: str, what: str) -> None:
        """Compare a property or item that the writer names with the rest of the reader."""
        if reader.is_open or was.kind == NOTHING:
            return
        covering = self._covering_schema(name, reader, unsure=False)
        if covering is None or covering.kind == NOTHING:
            self.add(f"{what}_REMOVED_FROM_CLOSED_CONTENT_MODEL", at, "it is no longer allowed")
        elif not self.fits(lambda: self.compare(covering, was, at)):
            description = "its earlier schema is not valid for the schema that covers it now"
            self.add(f"{what}_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", at, description)

    def _check_added(self, name: str, reader: Shape, writer: Shape, at: str) -> None:
        new = reader.named[name]
        if writer.is_open:
            if new.kind != EVERYTHING:
                self.add("PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL", at, "earlier documents may contain any value there")
            return
        covering = self._covering_schema(name, writer, unsure=True)
        if covering is not None and not self.fits(_bind_comparison(self.compare, new, covering)):
            description = "values that earlier documents may contain there are not valid for it"
            self.add("PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", at, description)
        if name in reader.required and not new.default:
            self.add("REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL", at, "it is required and has no default")

    def _covering_schema(self, name: str | None, shape: Shape, *, unsure: bool) -> Node | None:
        """Return the schema of an unnamed property: that of the first matching pattern, else the rest. `unsure` is
        the result for a pattern that cannot be evaluated."""
        if name is not None:
            for pattern, node in shape.patterns.items():
                self.steps.count_step()
                if _pattern_matches(pattern, name, unsure):
                    return node
        return shape.rest

    def _compare_rest(self, reader: Shape, writer: Shape, at: str, what: str) -> None:
        if reader.rest is None or writer.is_closed:
            return
        if writer.rest is None:
            kind = f"{what}_REMOVED" if reader.is_closed else f"{what}_NARROWED"
            self.add(kind, at, "any value was allowed before")
        elif reader.is_closed:
            self.add(f"{what}_REMOVED", at, "no others are allowed")
        else:
            self.compare(reader.rest, writer.rest, at)

    # arrays ---------------------------------------------------------------------------------------

    def _compare_arrays(self, reader: Shape, writer: Shape, path: str) -> None:
        for place, node in enumerate(reader.places):
            at = f"{path}/items/{place}"
            if place < len(writer.places):
                self.compare(node, writer.places[place], at)
            elif writer.rest is None:
                if node.kind != EVERYTHING:
                    self.add("ITEM_ADDED_TO_OPEN_CONTENT_MODEL", at, "earlier documents may contain any value there")
            elif not self.fits(_bind_comparison(self.compare, node, writer.rest)):
                description = "values that earlier documents may contain there are not valid for it"
                self.add("ITEM_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", at, description)
        for place in range(len(reader.places), len(writer.places)):
            self._check_removed(None, reader, writer.places[place], f"{path}/items/{place}", "ITEM")
        self._compare_rest(reader, writer, f"{path}/items", "ADDITIONAL_ITEMS")


def _bind_comparison(compare: Callable[[Node, Node, str], None], reader: Node, writer: Node) -> Callable[[], None]:
    return lambda: compare(reader, writer, "")


def _maximum_matching(pairs: list[list[int]]) -> int:
    """Return the size of the largest matching of a bipartite graph. pairs[left] are the right nodes that it may be
    paired with."""
    taken: dict[int, int] = {}

    def place(left: int, tried: set[int]) -> bool:
        for right in pairs[left]:
            if right not in tried:
                tried.add(right)
                if right not in taken or place(taken[right], tried):
                    taken[right] = left
                    return True
        return False

    return sum(place(left, set()) for left in range(len(pairs)))


def _pattern_matches(pattern: str, name: str, unsure: bool) -> bool:
    """Return whether a pattern, which is untrusted, occurs in a name. RE2 evaluates it in linear time; the result is
    `unsure` for a pattern that RE2 does not support (a back reference, a look-around)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return bool(pc.match_substring_regex(pa.array([name]), pattern)[0].as_py())
    except pa.ArrowInvalid:
        return unsure


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1").replace('"', "'")[:100]


def _upper_snake(word: str) -> str:
    """Convert a keyword to upper case: maxLength → MAX_LENGTH."""
    return "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in word)
