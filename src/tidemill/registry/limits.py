"""Limits of the registry. A request beyond a limit is refused with the number and the limit.

`RegistrySection` of the configuration has the configurable ones. The work on an untrusted schema is limited in the
depth and size of its text and in the steps of a comparison: a thread cannot be ended from outside, so the code counts
its own work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from tidemill.base.limits import METASTORE_VALUE_BYTES
from tidemill.registry.errors import invalid_schema

SUBJECT_BYTES = 512
"""Bytes of a subject's name in UTF-8. The metastore's keys contain it, with every zero byte doubled."""

SCHEMA_BYTES_MAX = METASTORE_VALUE_BYTES - (16 << 10)
"""Bytes of a schema. One row holds it with its references."""

WRITE_BUDGET_S = 20.0
"""Time for which a write is retried when it meets other writers and changes of leadership."""

DEPTH = 100
"""Levels of nesting in a schema's JSON. Code that walks it recurses a few frames per level, far below Python's
limit."""

NODES = 50_000
"""Number of values in a schema's JSON."""

STEPS = 50_000
"""Number of pairs of types in one comparison, which takes some seconds."""

PARSED_BYTES = 4 << 20
"""Bytes of the texts of schemas whose models are cached; a model is some ten times as large."""

MESSAGES = 100
"""Number of differences in one response."""

T = TypeVar("T")


class StepBudget:
    """Countdown of one comparison. Raises RegistryError once it has taken too many steps."""

    def __init__(self, limit: int = STEPS) -> None:
        self._left = limit

    def count_step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise invalid_schema("comparing it with an earlier version takes too many steps")


def load_json(text: str) -> Any:
    """Parse the JSON of a schema. Raises RegistryError when it is not JSON, too deep or too large."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid_schema(f"it is not JSON: {error}") from error
    nodes = 0
    level = [value]
    for _ in range(DEPTH):
        nodes += len(level)
        if nodes > NODES:
            raise invalid_schema(f"it contains more than {NODES} values")
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise invalid_schema(f"it is nested more than {DEPTH} levels deep")


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def run_bounded(work: Callable[[], T]) -> T:
    """Run `work()`. A recursion beyond Python's limit is an error of the schema."""
    try:
        return work()
    except RecursionError as error:
        raise invalid_schema("it is nested too deeply") from error


def shorten(value: object) -> str:
    """Format an untrusted value for a message."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
