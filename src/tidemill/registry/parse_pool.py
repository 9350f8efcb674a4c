"""Parsing and comparison of schemas off the event loop, with caches of recent results.

A parsed schema weighs its text and the texts that it refers to, a verdict weighs one and its problems. At most
`registry.waiting` requests wait; a further one is rejected, since parsing takes longer than sending a schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tidemill.base.config.sections import RegistrySection
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.memory_budget import RecentCache
from tidemill.metastore.rows.registry import SchemaRow
from tidemill.registry.limits import PARSED_BYTES, StepBudget
from tidemill.registry.schema import ParsedSchema, SubmittedSchema
from tidemill.registry.schema_types import Place, find_problems, parse_schema
from tidemill.shards.api import RunCpuWork

CACHED_RESULTS = 10_000
T = TypeVar("T")


class ParsePool:
    """Pool that parses and compares on `cpu`. Raises RegistryError; UnavailableError when too many requests wait."""

    def __init__(self, cpu: RunCpuWork, settings: RegistrySection) -> None:
        self._cpu = cpu
        self._settings = settings
        self._parsed: RecentCache[object, ParsedSchema] = RecentCache(PARSED_BYTES)
        self._verdicts: RecentCache[tuple[str, str, str], tuple[str, ...]] = RecentCache(CACHED_RESULTS)
        self.under_way = 0
        self.refused = 0

    async def parse(self, given: SubmittedSchema, places: Mapping[Place, SchemaRow]) -> ParsedSchema:
        """Return the parsed schema. `places` has everything that it refers to."""
        key = (given, tuple(sorted((place, row.id, row.digest) for place, row in places.items())))
        found = self._parsed.get(key)
        if found is None:
            found = await self._run_on_cpu(lambda: parse_schema(given, places))
            weight = len(given.text) + sum(len(row.text) + len(row.descriptor) for row in places.values())
            self._parsed.put(key, found, weight + 1_000)
        return found

    async def problems(self, level: str, new: ParsedSchema, old: ParsedSchema) -> tuple[str, ...]:
        """Return why two schemas are not compatible at a level."""
        key = (level, new.deep, old.deep)
        found = self._verdicts.get(key)
        if found is None:
            found = tuple(await self._run_on_cpu(lambda: find_problems(level, new, old, StepBudget())))
            self._verdicts.put(key, found, 1 + len(found))
        return found

    async def _run_on_cpu(self, work: Callable[[], T]) -> T:
        if self.under_way >= self._settings.waiting:
            self.refused += 1
            raise UnavailableError(f"too many schemas wait to be parsed: waiting={self.under_way}.", fix="Retry.")
        self.under_way += 1
        try:
            return await self._cpu(work)
        finally:
            self.under_way -= 1
