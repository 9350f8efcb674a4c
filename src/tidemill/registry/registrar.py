"""Registration of a process's own schemas, for capture (capture/encode/avro_schemas.py)."""

from __future__ import annotations

from tidemill.registry.registry import Registry
from tidemill.registry.schema_types import SubmittedSchema


class LocalSchemaRegistrar:
    """Registrar of schemas for other parts of this process."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def register(self, subject: str, schema: str) -> int:
        """Return the id under which the subject has this Avro schema now. Raises the errors of Registry."""
        return (await self._registry.register(subject, SubmittedSchema("AVRO", schema))).version.id
