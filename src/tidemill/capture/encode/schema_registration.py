"""The registry of schemas, as a capture needs it: a schema is registered before the first record that names its id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.avro import Described
from tidemill.capture.encode.avro_schemas import schemas_of, subjects_of


class Schemas(Protocol):
    async def register(self, subject: str, schema: str) -> int:
        """The id of an Avro schema, which the subject has from now on. Registered again it is the same one.

        Raises InvalidError where it is refused, Unavailable, Unknown."""
        ...


class NoSchemas:
    """Where there is no registry."""

    async def register(self, subject: str, schema: str) -> int:
        raise InvalidError(
            f"the schema of a topic cannot be registered, for the registry is off: subject={subject}.",
            fix="Write registry.enabled = true, or another envelope.",
        )


async def registered(schemas: Schemas, topic: str, columns: Sequence[Described]) -> tuple[int, int]:
    """The ids of the key's and the value's schema of a table's topic. Raises as `Schemas.register`."""
    ids = []
    for subject, schema in zip(subjects_of(topic), schemas_of(topic, columns), strict=True):
        try:
            ids.append(await schemas.register(subject, schema))
        except InvalidError as error:
            raise InvalidError(
                f"the registry refuses the schema of a topic: subject={subject} cause={error.message}",
                fix=error.fix or f"Give the subject {subject} a compatibility that allows it (NONE), or delete it.",
            ) from error
    return ids[0], ids[1]
