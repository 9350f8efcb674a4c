"""Check whether data written with one Protobuf file can be read with another. Sources: Protobuf's rules for updating a
message type, and Confluent's documented rules where these leave it open.

Fields are identified by number. Packages, options, services and the names of fields and enum constants do not matter;
an unknown enum constant is preserved as a number.
"""

from __future__ import annotations

from tidemill.registry.limits import StepBudget
from tidemill.registry.protobuf.model import REPEATED, REQUIRED, SCALAR_GROUPS, Message, MessageField, ProtobufModel
from tidemill.registry.recursion import SchemaComparison
from tidemill.registry.schema import Difference


def find_differences(reader: ProtobufModel, writer: ProtobufModel, steps: StepBudget) -> list[Difference]:
    """Return why `reader` cannot read what `writer` wrote; empty when it can."""
    walk = _ProtobufComparison(steps)
    walk.compare_messages(reader.messages, writer.messages, "")
    return walk.found


class _ProtobufComparison(SchemaComparison):
    def compare_messages(self, reader: dict[str, Message], writer: dict[str, Message], path: str) -> None:
        for name, was in writer.items():
            now = reader.get(name)
            if now is not None:
                self.compare_message(now, was)
            elif not was.map_entry:
                self.add("MESSAGE_REMOVED", f"#{path}/{name}", f"the message {was.name} was removed")

    def compare_message(self, reader: Message, writer: Message) -> None:
        self.compare_once(reader, writer, lambda: self._compare_contents(reader, writer, f"#/{writer.name}"))

    def _compare_contents(self, reader: Message, writer: Message, path: str) -> None:
        moved = self._compare_oneofs(reader, writer, path)
        for number in sorted(reader.fields.keys() | writer.fields.keys()):
            at = f"{path}/{number}"
            now, was = reader.fields.get(number), writer.fields.get(number)
            if now is not None and was is not None:
                self._compare_field(now, was, at)
            elif now is not None and now.label == REQUIRED:
                self.add("REQUIRED_FIELD_ADDED", at, f"the required field {now.name} was added")
            elif was is not None and was.label == REQUIRED and number not in moved:
                self.add("REQUIRED_FIELD_REMOVED", at, f"the required field {was.name} was removed")
        self.compare_messages(reader.nested, writer.nested, path.removeprefix("#"))

    def _compare_oneofs(self, reader: Message, writer: Message, path: str) -> set[int]:
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

    def _compare_field(self, reader: MessageField, writer: MessageField, path: str) -> None:
        self.steps.count_step()
        if reader.label == REQUIRED and writer.label != REQUIRED:
            self.add("REQUIRED_FIELD_ADDED", path, f"the field {reader.name} became required")
        if reader.of is not None and writer.of is not None:
            if reader.of.map_entry != writer.of.map_entry or reader.type != writer.type:
                self.add("FIELD_KIND_CHANGED", path, f"{_field_kind(writer)} became {_field_kind(reader)}")
            elif not reader.of.map_entry and reader.of.name != writer.of.name:
                self.add("FIELD_NAMED_TYPE_CHANGED", path, f"{writer.of.name} became {reader.of.name}")
            else:
                self.compare_message(reader.of, writer.of)
        elif reader.of is not None or writer.of is not None or "message" in (reader.type, writer.type):
            self.add("FIELD_KIND_CHANGED", path, f"{_field_kind(writer)} became {_field_kind(reader)}")
        else:
            self._compare_scalars(reader, writer, path)

    def _compare_scalars(self, reader: MessageField, writer: MessageField, path: str) -> None:
        group = SCALAR_GROUPS.get(reader.type)
        if group is None or group != SCALAR_GROUPS.get(writer.type):
            self.add("FIELD_SCALAR_KIND_CHANGED", path, f"{writer.type} became {reader.type}")
        elif group != "bytes" and (reader.label == REPEATED) != (writer.label == REPEATED):
            self.add("FIELD_NUMERIC_LABEL_CHANGED", path, "repeated numbers are packed, single ones are not")


def _field_kind(field: MessageField) -> str:
    if field.of is not None and field.of.map_entry:
        return "map"
    return field.type
