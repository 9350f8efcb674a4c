"""Check whether data written with one Protobuf file can be read with another. Sources: Protobuf's rules for updating a
message type, and Confluent's documented rules where these leave it open.

Fields are identified by number. Packages, options, services and the names of fields and enum constants do not matter;
an unknown enum constant is preserved as a number.
"""

from __future__ import annotations

from tidemill.registry.limits import Steps
from tidemill.registry.parsed_schema import Difference
from tidemill.registry.protobuf.model import REPEATED, REQUIRED, SCALAR_GROUPS, Field, Message, Proto
from tidemill.registry.recursion import Walk


def differences(reader: Proto, writer: Proto, steps: Steps) -> list[Difference]:
    """Return why `reader` cannot read what `writer` wrote; empty when it can."""
    walk = _Walk(steps)
    walk.messages(reader.messages, writer.messages, "")
    return walk.found


class _Walk(Walk):
    def messages(self, reader: dict[str, Message], writer: dict[str, Message], path: str) -> None:
        for name, was in writer.items():
            now = reader.get(name)
            if now is not None:
                self.message(now, was)
            elif not was.map_entry:
                self.add("MESSAGE_REMOVED", f"#{path}/{name}", f"the message {was.name} was removed")

    def message(self, reader: Message, writer: Message) -> None:
        self.once(reader, writer, lambda: self._message(reader, writer, f"#/{writer.name}"))

    def _message(self, reader: Message, writer: Message, path: str) -> None:
        moved = self._oneofs(reader, writer, path)
        for number in sorted(reader.fields.keys() | writer.fields.keys()):
            at = f"{path}/{number}"
            now, was = reader.fields.get(number), writer.fields.get(number)
            if now is not None and was is not None:
                self._field(now, was, at)
            elif now is not None and now.label == REQUIRED:
                self.add("REQUIRED_FIELD_ADDED", at, f"the required field {now.name} was added")
            elif was is not None and was.label == REQUIRED and number not in moved:
                self.add("REQUIRED_FIELD_REMOVED", at, f"the required field {was.name} was removed")
        self.messages(reader.nested, writer.nested, path.removeprefix("#"))

    def _oneofs(self, reader: Message, writer: Message, path: str) -> set[int]:
        """Compare oneofs, and return the fields that moved into one. Only one field at a time may move: of two that
        were set, the reader would keep only the last."""
        in_oneof = {number for numbers in writer.oneofs.values() for number in numbers}
        moved_all: set[int] = set()
        for name, numbers in reader.oneofs.items():
            moved = {number for number in numbers if number in writer.fields and number not in in_oneof}
            moved_all |= moved
            if len(moved) > 1:
                self.add("MULTIPLE_FIELDS_MOVED_TO_ONEOF", f"{path}/{name}", f"{len(moved)} fields became one oneof")
            elif moved and not in_oneof.isdisjoint(numbers):
                self.add("FIELD_MOVED_TO_EXISTING_ONEOF", f"{path}/{name}", "a field moved into an existing oneof")
        for name, numbers in writer.oneofs.items():
            gone = sorted(numbers - reader.fields.keys()) if name in reader.oneofs else []
            for number in gone:
                self.add("ONEOF_FIELD_REMOVED", f"{path}/{name}/{number}", "a field of a oneof was removed")
        return moved_all

    def _field(self, reader: Field, writer: Field, path: str) -> None:
        self.steps.take()
        if reader.label == REQUIRED and writer.label != REQUIRED:
            self.add("REQUIRED_FIELD_ADDED", path, f"the field {reader.name} became required")
        if reader.of is not None and writer.of is not None:
            if reader.of.map_entry != writer.of.map_entry or reader.type != writer.type:
                self.add("FIELD_KIND_CHANGED", path, f"{_kind(writer)} became {_kind(reader)}")
            elif not reader.of.map_entry and reader.of.name != writer.of.name:
                self.add("FIELD_NAMED_TYPE_CHANGED", path, f"{writer.of.name} became {reader.of.name}")
            else:
                self.message(reader.of, writer.of)
        elif reader.of is not None or writer.of is not None or "message" in (reader.type, writer.type):
            self.add("FIELD_KIND_CHANGED", path, f"{_kind(writer)} became {_kind(reader)}")
        else:
            self._scalars(reader, writer, path)

    def _scalars(self, reader: Field, writer: Field, path: str) -> None:
        group = SCALAR_GROUPS.get(reader.type)
        if group is None or group != SCALAR_GROUPS.get(writer.type):
            self.add("FIELD_SCALAR_KIND_CHANGED", path, f"{writer.type} became {reader.type}")
        elif group != "bytes" and (reader.label == REPEATED) != (writer.label == REPEATED):
            self.add("FIELD_NUMERIC_LABEL_CHANGED", path, "repeated numbers are packed, single ones are not")


def _kind(field: Field) -> str:
    if field.of is not None and field.of.map_entry:
        return "map"
    return field.type
