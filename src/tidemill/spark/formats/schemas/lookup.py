"""Lookup of writers' schemas: in the rows of the cluster's registry, or in a foreign registry (foreign_registry.py).

A schema is immutable, so it is cached for the life of the process. An id that the registry does not know is asked again
for every block that has it: a producer registers a schema before it writes with it, but another may have written that
id by mistake before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Protocol

from tidemill.base.limits import SCHEMA_REFERENCES_MAX
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import REGISTRY_HEADS, SCHEMAS, VERSIONS
from tidemill.metastore.rows.registry import Reference, SchemaRow
from tidemill.spark.formats.record_format import RecordFormat
from tidemill.spark.formats.schemas.foreign_registry import ForeignRegistry
from tidemill.spark.formats.schemas.writer_schema import ReferencedSchema, WriterSchema
from tidemill.spark.stores import Stores


class SchemaSource(Protocol):
    async def load(self, ids: Collection[int]) -> dict[int, WriterSchema]:
        """Return each schema; of kind "" for an id that the registry does not have. Raises UnavailableError."""
        ...


class SchemaCache:
    """Cache of one source. `known` only grows, and any thread may read it."""

    def __init__(self, source: SchemaSource) -> None:
        self.known: dict[int, WriterSchema] = {}
        self._source = source

    async def load(self, ids: Collection[int]) -> dict[int, WriterSchema]:
        """Return each schema, from the source if it is not cached. Raises as the source."""
        found = await self._source.load([one for one in ids if one not in self.known])
        # Replaced, never modified: other threads iterate over it.
        self.known = {**self.known, **{one: schema for one, schema in found.items() if schema.kind}}
        return found | {one: self.known[one] for one in ids if one in self.known}

    def through(self, portal: BlockingPortal) -> PortalLookup:
        """Return a lookup for threads other than the portal's."""
        return PortalLookup(self, portal)


class PortalLookup:
    """Lookup that asks the source through a portal."""

    def __init__(self, cache: SchemaCache, portal: BlockingPortal) -> None:
        self._cache = cache
        self._portal = portal

    @property
    def known_schemas(self) -> tuple[WriterSchema, ...]:
        """Schemas that were found so far."""
        return tuple(self._cache.known.values())

    def find(self, ids: Collection[int]) -> Mapping[int, WriterSchema]:
        known = self._cache.known
        if all(one in known for one in ids):
            return known
        return self._portal.call(partial(self._cache.load, ids)())


def writer_schemas(portal: BlockingPortal, stores: Stores, record_format: RecordFormat) -> PortalLookup:
    """Return the schemas of a topic's writers."""
    return SchemaCache(schema_source(stores.metastore, record_format)).through(portal)


def schema_source(metastore: Metastore, record_format: RecordFormat) -> SchemaSource:
    """Return the registry that a topic's writers use."""
    return ForeignRegistry(record_format.registry) if record_format.registry else ClusterRegistry(metastore)


class ClusterRegistry:
    """The registry of the cluster itself, in the metastore."""

    def __init__(self, metastore: Metastore) -> None:
        self._metastore = metastore

    async def load(self, ids: Collection[int]) -> dict[int, WriterSchema]:
        if not ids:
            return {}
        head = await self._metastore.get(REGISTRY_HEADS, "head")  # fresh: reads below are at least as new
        end = head.next_id if head is not None else 1
        out = {}
        for one in ids:
            row = await self._metastore.get(SCHEMAS, one, fresh=False) if 0 < one < end else None
            out[one] = WriterSchema(one) if row is None else await self._schema_of(row)
        return out

    async def _schema_of(self, row: SchemaRow) -> WriterSchema:
        found: dict[str, ReferencedSchema] = {}
        await self._add_references(row.references, found, {row.id})
        return WriterSchema(row.id, row.kind, row.text, row.descriptor, tuple(found.values()))

    async def _add_references(
        self, references: Collection[Reference], found: dict[str, ReferencedSchema], seen: set[int]
    ) -> None:
        for reference in references:
            version = await self._metastore.get(VERSIONS, reference.subject, reference.version, fresh=False)
            row = await self._metastore.get(SCHEMAS, version.id, fresh=False) if version is not None else None
            if row is None or row.id in seen or len(seen) > SCHEMA_REFERENCES_MAX:
                continue  # a reader of the format reports what it lacks
            seen.add(row.id)
            await self._add_references(row.references, found, seen)
            found[reference.name] = ReferencedSchema(reference.name, row.text, row.descriptor)
