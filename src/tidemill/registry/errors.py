"""Errors with the numbers and texts of Confluent's registry. The HTTP status is the first three digits of the code.

40401 subject · 40402 version · 40403 schema · 40404, 40406 already deleted · 40405, 40407 not deleted yet ·
40408 no compatibility of its subject · 40409 no mode of its subject · 409 incompatible · 42201 schema ·
42202 version · 42203 compatibility level · 42204 mode · 42205 not permitted · 42206 referred to ·
42207 id does not match · 42208 subject's name · 42209 too large · 50001 store · 50002 time-out
"""

from __future__ import annotations

from tidemill.base.errors import InvalidError


class RegistryError(InvalidError):
    """Refused request, which changed nothing. Clients branch on `code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def status(self) -> int:
        return int(str(self.code)[:3])


def subject_not_found(subject: str) -> RegistryError:
    return RegistryError(40401, f"Subject '{subject}' not found.")


def version_not_found(version: int | str) -> RegistryError:
    return RegistryError(40402, f"Version {version} not found.")


def schema_not_found(schema_id: int | None = None) -> RegistryError:
    return RegistryError(40403, "Schema not found" if schema_id is None else f"Schema {schema_id} not found")


def version_not_deleted(subject: str, version: int) -> RegistryError:
    """A version is deleted permanently only after it was deleted."""
    message = f"Subject '{subject}' Version {version} was not deleted first before being permanently deleted"
    return RegistryError(40407, message)


def version_deleted(subject: str, version: int) -> RegistryError:
    message = f"Subject '{subject}' Version {version} was soft deleted.Set permanent=true to delete permanently"
    return RegistryError(40406, message)


def subject_not_deleted(subject: str) -> RegistryError:
    return RegistryError(40405, f"Subject '{subject}' was not deleted first before being permanently deleted")


def subject_deleted(subject: str) -> RegistryError:
    return RegistryError(40404, f"Subject '{subject}' was soft deleted.Set permanent=true to delete permanently")


def no_subject_compatibility(subject: str) -> RegistryError:
    return RegistryError(40408, f"Subject '{subject}' does not have subject-level compatibility configured")


def no_subject_mode(subject: str) -> RegistryError:
    return RegistryError(40409, f"Subject '{subject}' does not have subject-level mode configured")


def invalid_schema(reason: str) -> RegistryError:
    return RegistryError(42201, f"Invalid schema: {reason}")


def schema_too_large(what: str, size: int, limit: int) -> RegistryError:
    return RegistryError(42209, f"Schema too large: {what}={size} limit={limit}")


def operation_not_permitted(reason: str) -> RegistryError:
    return RegistryError(42205, reason)
