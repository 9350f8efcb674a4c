"""What a shape takes in memory besides its rows. Pure."""

from __future__ import annotations

from tidemill.shapes.definition.definition import ShapeDefinition

SHAPE_BYTES = 24 << 10
"""What a shape takes beside its rows: definition, plan, compiled clause, task (measured: docs/shapes.md) …"""

SMALL_CLAUSE_BYTES = 100
CLAUSE_FACTOR = 200
"""… and for each further byte of its clause and values: 600 terms of 11 bytes take 1.0 MiB, an array of 14 kB as a
value 1.7 MiB, and a plan may be kept beside it."""


def size_of(definition: ShapeDefinition) -> int:
    """Bytes that a shape takes beside its rows."""
    return SHAPE_BYTES + CLAUSE_FACTOR * max(0, clause_bytes(definition) - SMALL_CLAUSE_BYTES)


def clause_bytes(definition: ShapeDefinition) -> int:
    """Of all that is compiled."""
    return len(definition.within) + len(definition.where) + sum(map(len, definition.params))
