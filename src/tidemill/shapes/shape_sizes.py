"""Memory of a shape apart from its rows. Pure."""

from __future__ import annotations

from tidemill.shapes.definition.definition import ShapeDefinition

SHAPE_BYTES = 24 << 10
"""Memory of a shape apart from its rows: definition, plan, compiled clause, task (measured: docs/shapes.md)."""

SMALL_CLAUSE_BYTES = 100
CLAUSE_FACTOR = 200
"""Memory for each further byte of the clause and its values, including a cached plan. Measured: 600 terms of 11 bytes
take 1.0 MiB, an array of 14 kB as a value 1.7 MiB."""


def fixed_bytes(definition: ShapeDefinition) -> int:
    """Return the bytes that a shape uses apart from its rows."""
    return SHAPE_BYTES + CLAUSE_FACTOR * max(0, clause_bytes(definition) - SMALL_CLAUSE_BYTES)


def clause_bytes(definition: ShapeDefinition) -> int:
    """Return the bytes of everything that is compiled for the definition."""
    return len(definition.within) + len(definition.where) + sum(map(len, definition.params))
