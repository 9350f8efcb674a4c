"""Check whether data written with one Avro schema can be read with another. Source: schema resolution of the Avro
specification 1.12.

Names are compared without their namespaces, as the specification says; a reader's aliases count. Logical types do not
count: Avro's own implementations resolve the underlying types.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tidemill.registry.avro.model import Array, AvroModel, Enum, Fixed, Map, Named, Primitive, Record, Union
from tidemill.registry.limits import StepBudget
from tidemill.registry.recursion import SchemaComparison
from tidemill.registry.schema import Difference

PROMOTED = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
"""Promotions: writer's type → further types that read it."""


def find_differences(reader: AvroModel, writer: AvroModel, steps: StepBudget) -> list[Difference]:
    """Return why `reader` cannot read what `writer` wrote; empty when it can."""
    walk = _AvroComparison(steps)
    walk.compare(reader.root, writer.root, "")
    return walk.found


class _AvroComparison(SchemaComparison):
    def compare(self, reader: Any, writer: Any, path: str) -> None:
        self.steps.count_step()
        if isinstance(writer, Union):
            self._compare_branches(reader, writer, path)
        elif isinstance(reader, Union):
            if not self._is_readable_by(reader, writer):
                self.add("MISSING_UNION_BRANCH", path, f"no branch of the union can read {_type_name(writer)}")
        elif isinstance(reader, Primitive) or isinstance(writer, Primitive):
            self._compare_primitive(reader, writer, path)
        elif type(reader) is not type(writer):
            self.add("TYPE_MISMATCH", path, f"{_type_name(writer)} cannot be read as {_type_name(reader)}")
        elif isinstance(reader, Array):
            self.compare(reader.items, writer.items, f"{path}/items")
        elif isinstance(reader, Map):
            self.compare(reader.values, writer.values, f"{path}/values")
        else:
            self.compare_once(reader, writer, lambda: self._compare_named(reader, writer, path))

    def _compare_branches(self, reader: Any, writer: Union, path: str) -> None:
        for index, branch in enumerate(writer.branches):
            if not isinstance(reader, Union):
                self.compare(reader, branch, f"{path}/{index}")
            elif not self._is_readable_by(reader, branch):
                self.add(
                    "MISSING_UNION_BRANCH", f"{path}/{index}", f"no branch of the union can read {_type_name(branch)}"
                )

    def _is_readable_by(self, reader: Union, writer: Any) -> bool:
        return any(self.fits(partial(self.compare, mine, writer, "")) for mine in reader.branches)

    def _compare_primitive(self, reader: Any, writer: Any, path: str) -> None:
        named = isinstance(reader, Primitive) and isinstance(writer, Primitive)
        if named and (reader.name == writer.name or reader.name in PROMOTED.get(writer.name, ())):
            return
        self.add("TYPE_MISMATCH", path, f"{_type_name(writer)} cannot be read as {_type_name(reader)}")

    def _compare_named(self, reader: Named, writer: Named, path: str) -> None:
        if reader.short != writer.short and writer.name not in reader.aliases:
            self.add("NAME_MISMATCH", f"{path}/name", f"{writer.name} cannot be read as {reader.name}")
        if isinstance(reader, Fixed) and isinstance(writer, Fixed):
            if reader.size != writer.size:
                self.add("FIXED_SIZE_MISMATCH", f"{path}/size", f"{writer.size} bytes cannot be read as {reader.size}")
        elif isinstance(reader, Enum) and isinstance(writer, Enum):
            missing = sorted(set(writer.symbols) - set(reader.symbols))
            if missing and reader.default is None:
                description = f"the reader lacks {', '.join(missing[:10])} and has no default"
                self.add("MISSING_ENUM_SYMBOLS", f"{path}/symbols", description)
        elif isinstance(reader, Record) and isinstance(writer, Record):
            self._compare_fields(reader, writer, path)

    def _compare_fields(self, reader: Record, writer: Record, path: str) -> None:
        for index, field in enumerate(reader.fields.values()):
            at = f"{path}/fields/{index}"
            written = writer.fields.get(field.name)
            if written is None:
                written = next((writer.fields[name] for name in sorted(field.aliases) if name in writer.fields), None)
            if written is not None:
                self.compare(field.type, written.type, f"{at}/type")
            elif not field.has_default:
                description = f"the field {field.name} is missing in the writer's schema and has no default"
                self.add("READER_FIELD_MISSING_DEFAULT_VALUE", at, description)


def _type_name(node: Any) -> str:
    if isinstance(node, Primitive | Named):
        return node.name
    return type(node).__name__.lower()
