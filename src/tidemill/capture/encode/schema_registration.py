"""Register the schemas of a capture's topics: a schema is registered before the first record that names its id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.avro import ColumnDescription
from tidemill.capture.encode.avro_schemas import schemas_of, subjects_of


class SchemaRegistrar(Protocol):
    async def register(self, subject: str, schema: str) -> int:
        """Register an Avro schema for the subject and return its id. A repeated registration returns the same id.

        Raises InvalidError if it is rejected, UnavailableError, UnknownOutcomeError.
        """
        ...


class NoSchemaRegistrar:
    """Implementation for a cluster without a registry."""

    async def register(self, subject: str, schema: str) -> int:
        raise InvalidError(
            f"the schema of a topic cannot be registered because the registry is disabled: subject={subject}.",
            fix="Set registry.enabled = true, or use another envelope.",
        )


async def register_schemas(
    schemas: SchemaRegistrar, topic: str, columns: Sequence[ColumnDescription]
) -> tuple[int, int]:
    """Register the schemas of the key and the value of a table's topic, and return their ids. Raises the errors of
    `SchemaRegistrar.register`.
    """
    ids = []
    for subject, schema in zip(subjects_of(topic), schemas_of(topic, columns), strict=True):
        try:
            ids.append(await schemas.register(subject, schema))
        except InvalidError as error:
            raise InvalidError(
                f"the registry rejected the schema of a topic: subject={subject} cause={error.message}",
                fix=error.fix or f"Give the subject {subject} a compatibility that allows it (NONE), or delete it.",
            ) from error
    return ids[0], ids[1]
