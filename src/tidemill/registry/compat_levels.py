"""Levels of compatibility: which earlier versions a schema is compared with, and in which direction.

BACKWARD      the new schema reads what the previous one wrote    FORWARD  the reverse    FULL  both
…_TRANSITIVE  the same with every earlier version                 NONE     nothing is compared
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidemill.registry.avro.compat import find_differences as avro_differences
from tidemill.registry.jsonschema.compat import find_differences as json_differences
from tidemill.registry.limits import StepBudget, run_bounded
from tidemill.registry.parsed_schema import Difference, ParsedSchema
from tidemill.registry.protobuf.compat import find_differences as protobuf_differences

LEVELS = ("BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE", "NONE")
DEFAULT = "BACKWARD"

_DIFFERENCES: dict[str, Callable[[Any, Any, StepBudget], list[Difference]]] = {
    "AVRO": avro_differences,
    "JSON": json_differences,
    "PROTOBUF": protobuf_differences,
}


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
