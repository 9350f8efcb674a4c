"""Effects of a request on the rows, decided from the rows as they were read. Pure: each function checks everything and
then returns what to write. The caller writes it together with the head, if the head is unchanged.

- An id is assigned to one schema only, forever. Equal schemas have one id, except for ids that an import brings.
- The number of a new version is above every number that its subject has, deleted versions included.
- The rows of a schema are deleted with the last version that uses it. A version that is referred to is not deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from tidemill.base.config.sections import RegistrySection
from tidemill.metastore.rows import (
    DIGESTS,
    REFERRERS,
    REGISTRY_CONFIGS,
    SCHEMAS,
    USES,
    VERSIONS,
)
from tidemill.metastore.rows.registry import (
    DigestRow,
    ReferrerRow,
    RegistryConfigRow,
    RegistryHeadRow,
    SchemaRow,
    UseRow,
    VersionRow,
)
from tidemill.registry.errors import (
    RegistryError,
    operation_not_permitted,
    subject_deleted,
    subject_not_deleted,
    subject_not_found,
    version_deleted,
    version_not_deleted,
    version_not_found,
)
from tidemill.registry.schema import ParsedSchema

MODES = ("READWRITE", "READONLY", "IMPORT")
LAST_ID = 2**31 - 1
Rows = list[tuple[bytes, bytes]]
T = TypeVar("T")


class Change(NamedTuple, Generic[T]):
    """Decided change. Without rows there is nothing to do; otherwise `head` is written with them."""

    rows: Rows
    head: RegistryHeadRow
    answer: T


class SchemaUsage(NamedTuple):
    """Rows that the caller reads of a schema that is about to lose a version."""

    row: SchemaRow
    uses: int
    ids: tuple[int, ...]
    """All ids of its digest."""


def live_versions(versions: Sequence[VersionRow]) -> list[VersionRow]:
    return [row for row in versions if not row.deleted]


def next_version(versions: Sequence[VersionRow]) -> int:
    return max((row.version for row in versions), default=0) + 1


def require_writable(subject: str, mode: str) -> None:
    """Raise RegistryError if the subject must not change."""
    if mode == "READONLY":
        raise operation_not_permitted(f"Subject {subject or 'registry'} is in read-only mode")


def require_registrable(subject: str, mode: str, wanted_id: int) -> None:
    """Raise RegistryError if the subject's mode forbids this registration or import."""
    require_writable(subject, mode)
    if wanted_id > 0 and mode != "IMPORT":
        raise operation_not_permitted(f"Subject {subject} is not in import mode")
    if wanted_id <= 0 and mode == "IMPORT":
        raise operation_not_permitted(f"Subject {subject} is not in read-write mode")


def register(
    head: RegistryHeadRow,
    subject: str,
    versions: Sequence[VersionRow],
    parsed: ParsedSchema,
    ids: tuple[int, ...],
    now_ms: int,
    limits: RegistrySection,
) -> Change[VersionRow]:
    """Register a new version. `ids` are those that this schema already has."""
    _check_limits(head, versions, not ids, limits)
    rows: Rows = []
    schema_id = ids[0] if ids else head.next_id
    if not ids:
        if schema_id > LAST_ID:
            raise RegistryError(50001, f"No id is left: next={schema_id}")
        rows += [SCHEMAS.encode(_schema_row(schema_id, parsed)), DIGESTS.encode(DigestRow(parsed.digest, schema_id))]
        rows += _referrer_rows(schema_id, parsed)
    version = VersionRow(subject, next_version(versions), schema_id, created_ms=now_ms)
    rows += _version_rows(version)
    return Change(rows, _grown_head(head, versions, not ids, schema_id), version)


class ImportedSchema(NamedTuple):
    """Schema to import with a given id, and what the registry has of it."""

    parsed: ParsedSchema
    schema_id: int
    version: int
    """Number of the version; 0 for the next one."""
    there: SchemaRow | None
    """Stored schema with this id."""
    ids: tuple[int, ...]
    """Ids of equal schemas."""


def import_version(
    head: RegistryHeadRow,
    subject: str,
    versions: Sequence[VersionRow],
    imported: ImportedSchema,
    now_ms: int,
    limits: RegistrySection,
) -> Change[VersionRow]:
    """Import a version with the id and number that it had elsewhere."""
    parsed, schema_id, number, there, ids = imported
    if there is not None and there.digest != parsed.digest:
        raise RegistryError(42207, f"Overwrite schema with id {schema_id} is not permitted.")
    found = next((row for row in versions if row.version == number), None) if number > 0 else None
    found = found or next((row for row in versions if row.id == schema_id and number <= 0 and not row.deleted), None)
    if found is not None:
        if found.id != schema_id or found.deleted:
            raise RegistryError(42207, f"Version {found.version} of subject {subject} has the id {found.id}.")
        return Change([], head, found)
    _check_limits(head, versions, there is None, limits)
    rows: Rows = []
    if there is None:
        first, *others = (*ids, schema_id)
        digest = DigestRow(parsed.digest, first, tuple(others))
        rows += [SCHEMAS.encode(_schema_row(schema_id, parsed)), DIGESTS.encode(digest)]
        rows += _referrer_rows(schema_id, parsed)
    version = VersionRow(subject, number if number > 0 else next_version(versions), schema_id, created_ms=now_ms)
    rows += _version_rows(version)
    return Change(rows, _grown_head(head, versions, there is None, schema_id), version)


def delete_versions(
    head: RegistryHeadRow, subject: str, versions: Sequence[VersionRow], numbers: Sequence[int], configured: bool
) -> Change[list[int]]:
    """Hide these live versions. With the last one the configuration of the subject is deleted."""
    wanted = set(numbers)
    rows: Rows = [VERSIONS.encode(replace(row, deleted=True)) for row in versions if row.version in wanted]
    if configured and all(row.version in wanted for row in live_versions(versions)):
        rows.append((REGISTRY_CONFIGS.key(subject), b""))
        head = replace(head, configs=head.configs - 1)
    return Change(rows, head, sorted(wanted))


def purge_versions(
    head: RegistryHeadRow,
    subject: str,
    versions: Sequence[VersionRow],
    numbers: Sequence[int],
    schemas: Mapping[int, SchemaUsage],
) -> Change[list[int]]:
    """Purge these deleted versions, and the schemas that no other version uses."""
    wanted = set(numbers)
    gone = [row for row in versions if row.version in wanted]
    rows: Rows = []
    left = {schema_id: used.uses for schema_id, used in schemas.items()}
    for row in gone:
        rows += [(VERSIONS.key(subject, row.version), b""), (USES.key(row.id, subject, row.version), b"")]
        left[row.id] -= 1
    purged = [schema_id for schema_id, count in left.items() if not count]
    for schema_id in purged:
        used = schemas[schema_id]
        rows.append((SCHEMAS.key(schema_id), b""))
        kept = [one for one in used.ids if one not in purged]
        key = DIGESTS.key(used.row.digest)
        rows.append(DIGESTS.encode(DigestRow(used.row.digest, kept[0], tuple(kept[1:]))) if kept else (key, b""))
        rows += [(REFERRERS.key(r.subject, r.version, schema_id), b"") for r in used.row.references]
    after = replace(
        head,
        schemas=head.schemas - len(purged),
        versions=head.versions - len(gone),
        subjects=head.subjects - (len(gone) == len(versions)),
    )
    return Change(rows, after, sorted(wanted))


def versions_to_delete(subject: str, versions: Sequence[VersionRow], number: int | None, permanent: bool) -> list[int]:
    """Return the versions that a DELETE of one (`number`) or of all refers to. Raises RegistryError."""
    if number is not None:
        row = next((row for row in versions if row.version == number), None)
        if row is None:
            raise version_not_found(number) if versions else subject_not_found(subject)
        if row.deleted == permanent:
            return [number]
        raise version_not_deleted(subject, number) if permanent else version_deleted(subject, number)
    if not versions:
        raise subject_not_found(subject)
    if permanent:
        if live_versions(versions):
            raise subject_not_deleted(subject)
        return [row.version for row in versions]
    if not live_versions(versions):
        raise subject_deleted(subject)
    return [row.version for row in live_versions(versions)]


def configure(
    head: RegistryHeadRow, row: RegistryConfigRow, there: bool, limits: RegistrySection
) -> Change[RegistryConfigRow]:
    """Store a configuration; an empty row is deleted. `there` says whether one is stored."""
    key, value = REGISTRY_CONFIGS.encode(row)
    empty = row == RegistryConfigRow(row.subject)
    if not there and not empty:
        _check_limit("configured subjects", head.configs, limits.subjects)
    after = replace(head, configs=head.configs + (not empty) - there)
    return Change([(key, b"" if empty else value)], after, row)


# ----------------------------------------------------------------------------------------------------


def _next_version(versions: Sequence[VersionRow]) -> int:
    return max((row.version for row in versions), default=0) + 1


def _schema_row(schema_id: int, parsed: ParsedSchema) -> SchemaRow:
    return SchemaRow(schema_id, parsed.kind, parsed.text, parsed.references, parsed.digest, parsed.descriptor)


def _referrer_rows(schema_id: int, parsed: ParsedSchema) -> Rows:
    return [REFERRERS.encode(ReferrerRow(r.subject, r.version, schema_id)) for r in parsed.references]


def _version_rows(version: VersionRow) -> Rows:
    return [VERSIONS.encode(version), USES.encode(UseRow(version.id, version.subject, version.version))]


def _grown_head(
    head: RegistryHeadRow, versions: Sequence[VersionRow], new_schema: bool, schema_id: int
) -> RegistryHeadRow:
    return replace(
        head,
        next_id=max(head.next_id, schema_id + 1),
        schemas=head.schemas + new_schema,
        subjects=head.subjects + (not versions),
        versions=head.versions + 1,
    )


def _check_limits(
    head: RegistryHeadRow, versions: Sequence[VersionRow], new_schema: bool, limits: RegistrySection
) -> None:
    _check_limit("versions of the subject", len(versions), limits.versions_per_subject)
    _check_limit("versions", head.versions, limits.versions)
    if not versions:
        _check_limit("subjects", head.subjects, limits.subjects)
    if new_schema:
        _check_limit("schemas", head.schemas, limits.schemas)


def _check_limit(what: str, have: int, limit: int) -> None:
    if have >= limit:
        raise operation_not_permitted(f"The registry is full: {what}={have} limit={limit}. Delete some permanently.")
