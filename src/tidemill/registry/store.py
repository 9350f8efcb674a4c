"""Reads of the registry from the metastore. The first read of a request is fresh, and later reads see at least that
state."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.limits import SCHEMA_REFERENCES_MAX
from tidemill.base.runtime.coop import CoopBudget
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import (
    DIGESTS,
    REFERRERS,
    REGISTRY_CONFIGS,
    REGISTRY_HEADS,
    SCHEMAS,
    USES,
    VERSIONS,
)
from tidemill.metastore.rows.registry import (
    Reference,
    RegistryConfigRow,
    RegistryHeadRow,
    SchemaRow,
    UseRow,
    VersionRow,
)
from tidemill.registry.errors import invalid_schema, schema_not_found
from tidemill.registry.schema_types import Place
from tidemill.registry.transitions import SchemaUsage

HEAD = REGISTRY_HEADS.key("head")


class RegistryStore:
    """Reader of the registry's rows. Reads may raise UnavailableError, ClosedError. `fresh`: see `Metastore`; within
    a request only the first read sets it."""

    def __init__(self, metastore: Metastore, pace: CoopBudget) -> None:
        self._metastore = metastore
        self._pace = pace

    async def head(self) -> tuple[int, RegistryHeadRow]:
        """Return (seqno, row), fresh. Later reads are as of this seqno, or the seqno has changed."""
        found = await self._metastore.get_row(HEAD)
        if found is None or not found.value:
            return (found.seqno if found is not None else 0), RegistryHeadRow("head")
        return found.seqno, REGISTRY_HEADS.decode(HEAD, found.value)

    async def schema(self, schema_id: int) -> SchemaRow:
        """Return a schema by id. A schema that was deleted on another node may still be found for a second. Raises
        RegistryError(40403)."""
        if not 0 < schema_id < 2**32:
            raise schema_not_found(schema_id)
        for fresh in (False, True):
            found = await self._metastore.get(SCHEMAS, schema_id, fresh=fresh)
            if found is not None:
                return found
        raise schema_not_found(schema_id)

    async def versions(self, subject: str, *, fresh: bool = False) -> list[VersionRow]:
        return await self._metastore.rows(VERSIONS, subject, fresh=fresh)

    async def all_versions(self) -> list[VersionRow]:
        """Return all versions by subject and version. There may be many, so the event loop gets turns in between."""
        found: list[VersionRow] = []
        async for keys, values in self._metastore.prefix(VERSIONS.prefix()):
            for key, value in zip(keys, values, strict=True):
                found.append(VERSIONS.decode(key, value))
                if not len(found) % 100 and self._pace.is_used_up:
                    await self._pace.wait_for_turn()
        return found

    async def uses(self, schema_id: int) -> list[UseRow]:
        return await self._metastore.rows(USES, schema_id, fresh=False)

    async def ids_of(self, digest: str) -> tuple[int, ...]:
        """Return the ids of a schema, the one that is assigned first; more than one only after imports."""
        found = await self._metastore.get(DIGESTS, digest, fresh=False)
        return found.ids if found is not None else ()

    async def config(self, subject: str, *, fresh: bool = False) -> RegistryConfigRow | None:
        return await self._metastore.get(REGISTRY_CONFIGS, subject, fresh=fresh)

    async def referrers(self, subject: str, version: int, *, deleted: bool) -> list[int]:
        """Return the ids of the schemas that refer to this version; only those of a live version unless `deleted`."""
        ids = [row.id for row in await self._metastore.rows(REFERRERS, subject, version, fresh=False)]
        if deleted:
            return ids
        return [schema_id for schema_id in ids if any(not row.deleted for row in await self.users(schema_id))]

    async def users(self, schema_id: int) -> list[VersionRow]:
        """Return the versions that use a schema, deleted ones included."""
        found = []
        for use in await self.uses(schema_id):
            row = await self._metastore.get(VERSIONS, use.subject, use.version, fresh=False)
            if row is not None:
                found.append(row)
        return found

    async def schema_usage(self, schema_id: int) -> SchemaUsage:
        row = await self.schema(schema_id)
        return SchemaUsage(row, len(await self.uses(schema_id)), await self.ids_of(row.digest))

    async def referenced_schemas(self, references: Sequence[Reference], *, new: bool) -> dict[Place, SchemaRow]:
        """Return everything that is referred to, directly or not. With `new`, directly referenced versions must be
        live.

        Raises RegistryError.
        """
        found: dict[Place, SchemaRow] = {}
        waiting = [(reference, new) for reference in references]
        while waiting:
            reference, must_live = waiting.pop()
            place = (reference.subject, reference.version)
            if place in found:
                continue
            if len(found) >= SCHEMA_REFERENCES_MAX:
                raise invalid_schema(f"it refers to more than {SCHEMA_REFERENCES_MAX} schemas")
            row = None
            if 0 < reference.version < 2**32:
                row = await self._metastore.get(VERSIONS, reference.subject, reference.version, fresh=False)
            if row is None or (must_live and row.deleted):
                raise invalid_schema(f"no schema for subject {reference.subject!r} and version {reference.version}")
            found[place] = schema = await self.schema(row.id)
            waiting += [(inner, False) for inner in schema.references]
        return found
