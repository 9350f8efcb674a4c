"""What registers the schemas of its own topics in this process, as capture does
(capture/encode/schema_registration.py)."""

from __future__ import annotations

from tidemill.registry.registry import Registry
from tidemill.registry.schema_types import SubmittedSchema


class Registrar:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def register(self, subject: str, schema: str) -> int:
        """The id of an Avro schema under which the subject has it now. Raises as Registry does."""
        return (await self._registry.register(subject, SubmittedSchema("AVRO", schema))).version.id
