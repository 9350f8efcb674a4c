"""The registry of one process: reads for requests, and decisions on changes. Any number of processes may have one;
they share nothing but rows. `LocalSchemaRegistrar` registers a process's own schemas, for capture
(capture/encode/avro_schemas.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.config.sections import RegistrySection
from tidemill.base.runtime.coop import CoopBudget
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows.registry import RegistryConfigRow, RegistryHeadRow, SchemaRow, VersionRow
from tidemill.registry import transitions
from tidemill.registry.errors import (
    RegistryError,
    operation_not_permitted,
    schema_not_found,
    schema_too_large,
    subject_not_found,
    version_not_found,
)
from tidemill.registry.limits import SCHEMA_BYTES_MAX
from tidemill.registry.parse_pool import ParsePool
from tidemill.registry.schema import ParsedSchema, SubmittedSchema
from tidemill.registry.schema_types import DEFAULT, LEVELS, submitted_from_row, versions_to_compare
from tidemill.registry.store import RegistryStore
from tidemill.registry.transitions import Change, live_versions
from tidemill.registry.writer import RegistryWriter
from tidemill.shards.api import RunCpuWork

GLOBAL_SUBJECT = ""
"""Subject under which the global configuration is stored."""


class RegisteredVersion(NamedTuple):
    """Version of a subject together with its schema."""

    version: VersionRow
    schema: SchemaRow


class Registry:
    """Registry. Raises RegistryError; UnavailableError, ClosedError; writes also UnknownOutcomeError."""

    def __init__(
        self, metastore: Metastore, clock: Clock, rand: Rand, cpu: RunCpuWork, settings: RegistrySection | None = None
    ) -> None:
        self.book = RegistryStore(metastore, CoopBudget(clock))
        self._clock = clock
        self._settings = settings or RegistrySection()
        self._understanding = ParsePool(cpu, self._settings)
        self._changes = RegistryWriter(metastore, self.book, clock, rand)

    def facts(self) -> dict[str, object]:
        """Return counts as of the last read of the head, with their limits."""
        return {
            "schemas": self._changes.head.schemas,
            "schemas_limit": self._settings.schemas,
            "subjects": self._changes.head.subjects,
            "subjects_limit": self._settings.subjects,
            "versions": self._changes.head.versions,
            "versions_limit": self._settings.versions,
            "versions_per_subject_limit": self._settings.versions_per_subject,
            "waiting": self._understanding.under_way,
            "waiting_limit": self._settings.waiting,
            "turned_away": self._understanding.refused,
        }

    # reading --------------------------------------------------------------------------------------

    async def find(self, subject: str, version: int | None, *, deleted: bool = False) -> RegisteredVersion:
        """Return one version of a subject; the latest without a `version`."""
        versions = await self.book.versions(subject, fresh=True)
        shown = versions if deleted else live_versions(versions)
        if not shown:
            raise subject_not_found(subject)
        if version is None:
            row = shown[-1]
        else:
            match = [one for one in shown if one.version == version]
            if not match:
                raise version_not_found(version)
            row = match[0]
        return RegisteredVersion(row, await self.book.schema(row.id))

    async def lookup(self, subject: str, given: SubmittedSchema, *, deleted: bool = False) -> RegisteredVersion:
        """Return the version under which the subject has this schema."""
        self._check_size(given)
        versions = await self.book.versions(subject, fresh=True)
        shown = versions if deleted else live_versions(versions)
        if not shown:
            raise subject_not_found(subject)
        parsed = await self._parse_submitted(given, subject)
        ids = await self.book.ids_of(parsed.digest)
        for row in reversed(shown):
            if row.id in ids:
                return RegisteredVersion(row, await self.book.schema(row.id))
        raise schema_not_found()

    async def level(self, subject: str) -> str:
        row, every = await self._configs(subject)
        return (row.compatibility if row else "") or (every.compatibility if every else "") or DEFAULT

    async def mode(self, subject: str) -> str:
        row, every = await self._configs(subject)
        return (row.mode if row else "") or (every.mode if every else "") or "READWRITE"

    async def check_compatibility(
        self, subject: str, given: SubmittedSchema, version: int | None, *, all_versions: bool = False
    ) -> list[str]:
        """Return why the schema is not compatible at the subject's level, with one version (None is the latest) or
        with those that the level selects. A subject without versions is compatible with any schema."""
        self._check_size(given)
        versions = live_versions(await self.book.versions(subject, fresh=True))
        if not versions and version is not None:
            raise subject_not_found(subject)
        level = await self.level(subject)
        parsed = await self._parse_submitted(given, subject, new=True)
        if all_versions:
            wanted = list(versions_to_compare(level, [row.version for row in versions]))
        else:
            wanted = [versions[-1].version if versions else 0] if version is None else [version]
        by_number = {row.version: row for row in versions}
        if version is not None and version not in by_number:
            raise version_not_found(version)
        return await self._compatibility_problems(
            level, parsed, [by_number[number] for number in wanted if number in by_number]
        )

    # writing --------------------------------------------------------------------------------------

    async def register(
        self, subject: str, given: SubmittedSchema, *, wanted_id: int = 0, version: int = 0
    ) -> RegisteredVersion:
        """Return the version under which the subject has this schema now. `wanted_id` and `version` are given by an
        import."""
        self._check_size(given)
        found = await self._find_registered(subject, given, wanted_id)
        if found is not None:
            return found
        parsed_of: list[ParsedSchema] = []

        async def decide(head: RegistryHeadRow) -> Change[VersionRow]:
            parsed = await self._parse_submitted(given, subject, new=True)
            parsed_of[:] = [parsed]
            versions = await self.book.versions(subject)
            ids = await self.book.ids_of(parsed.digest)
            same = next((row for row in reversed(live_versions(versions)) if row.id in ids), None)
            if same is not None and not wanted_id:
                return Change([], head, same)
            transitions.require_registrable(subject, await self.mode(subject), wanted_id)
            now_ms = self._clock.now_ms()
            if wanted_id:
                there = await self._find_schema(wanted_id)
                imported = transitions.ImportedSchema(parsed, wanted_id, version, there, ids)
                return transitions.import_version(head, subject, versions, imported, now_ms, self._settings)
            if version and version != transitions.next_version(versions):
                raise RegistryError(42201, f"Invalid schema: version {version} is not one more than the latest")
            await self._require_compatible(subject, parsed, live_versions(versions))
            return transitions.register(head, subject, versions, parsed, ids, now_ms, self._settings)

        # The slow work runs once without the lock, so that other changes do not wait; under the lock it is cached. A
        # refusal here is ignored, because the attempt under the lock decides it on a consistent state.
        with contextlib.suppress(RegistryError):
            await decide((await self._changes.read_head())[1])
        row = await self._changes.apply_change(decide)
        return RegisteredVersion(
            row, SchemaRow(row.id, parsed_of[0].kind, parsed_of[0].text, digest=parsed_of[0].digest)
        )

    async def delete(
        self, subject: str, version: int | None, *, permanent: bool = False, latest: bool = False
    ) -> list[int]:
        """Hide or purge one version (`latest`: the latest live one) or all versions. Return their numbers."""

        async def decide(head: RegistryHeadRow) -> Change[list[int]]:
            versions = await self.book.versions(subject)
            numbers = await self._choose_versions(subject, versions, version, permanent=permanent, latest=latest)
            if not permanent:
                configured = await self.book.config(subject) is not None
                return transitions.delete_versions(head, subject, versions, numbers, configured)
            ids = {row.id for row in versions if row.version in numbers}
            schemas = {one: await self.book.schema_usage(one) for one in sorted(ids)}
            return transitions.purge_versions(head, subject, versions, numbers, schemas)

        return await self._changes.apply_change(decide)

    async def versions_to_delete(
        self, subject: str, version: int | None, *, permanent: bool = False, latest: bool = False
    ) -> list[int]:
        """Return the versions that `delete` would hide or purge. Raises the same errors, and changes nothing."""
        versions = await self.book.versions(subject)
        return await self._choose_versions(subject, versions, version, permanent=permanent, latest=latest)

    async def _choose_versions(
        self, subject: str, versions: Sequence[VersionRow], version: int | None, *, permanent: bool, latest: bool
    ) -> list[int]:
        transitions.require_writable(subject, await self.mode(subject))
        if latest:
            shown = versions if permanent else live_versions(versions)
            if not shown:
                raise subject_not_found(subject)
            version = shown[-1].version
        numbers = transitions.versions_to_delete(subject, versions, version, permanent)
        for one in numbers:
            await self._require_unreferenced(subject, one, permanent)
        return numbers

    async def set_level(self, subject: str, level: str, normalize: bool | None = None, *, clear: bool = False) -> None:
        """Change the level and normalization. An omitted value is unchanged; `clear` removes both first."""
        if level and level not in LEVELS:
            raise RegistryError(42203, f"Invalid compatibility level. Valid values are {', '.join(LEVELS)}.")

        async def decide(head: RegistryHeadRow) -> Change[RegistryConfigRow]:
            transitions.require_writable(subject, await self.mode(subject))
            row = await self.book.config(subject)
            old = row or RegistryConfigRow(subject)
            if clear:
                old = replace(old, compatibility="", normalize=None)
            said = old.normalize if normalize is None else normalize
            new = replace(old, compatibility=level or old.compatibility, normalize=said)
            return transitions.configure(head, new, row is not None, self._settings)

        await self._changes.apply_change(decide)

    async def set_mode(self, subject: str, mode: str, *, force: bool = False) -> None:
        """Change the mode; "" restores the global one."""
        if mode and mode not in transitions.MODES:
            raise RegistryError(42204, f"Invalid mode. Valid values are {', '.join(transitions.MODES)}.")

        async def decide(head: RegistryHeadRow) -> Change[RegistryConfigRow]:
            if mode == "IMPORT" and not force:
                there = bool(live_versions(await self.book.versions(subject))) if subject else head.subjects > 0
                if there:
                    raise operation_not_permitted("Cannot import since found existing subjects")
            row = await self.book.config(subject)
            new = replace(row or RegistryConfigRow(subject), mode=mode)
            return transitions.configure(head, new, row is not None, self._settings)

        await self._changes.apply_change(decide)

    # ----------------------------------------------------------------------------------------------

    def _check_size(self, given: SubmittedSchema) -> None:
        limit = min(self._settings.schema_kb << 10, SCHEMA_BYTES_MAX)
        size = len(given.text.encode(errors="surrogatepass"))
        if size > limit:
            raise schema_too_large("bytes", size, limit)

    async def _parse_submitted(self, given: SubmittedSchema, subject: str, *, new: bool = False) -> ParsedSchema:
        if not given.normalize:
            row, every = await self._configs(subject)
            asked = row.normalize if row is not None and row.normalize is not None else every and every.normalize
            given = given._replace(normalize=bool(asked))
        parsed = await self._understanding.parse(given, await self.book.referenced_schemas(given.references, new=new))
        size = len(parsed.text.encode()) + len(parsed.descriptor)
        if size > SCHEMA_BYTES_MAX:
            raise schema_too_large("bytes with its descriptor", size, SCHEMA_BYTES_MAX)
        return parsed

    async def _parse_stored(self, row: SchemaRow) -> ParsedSchema:
        return await self._understanding.parse(
            submitted_from_row(row), await self.book.referenced_schemas(row.references, new=False)
        )

    async def _configs(self, subject: str) -> tuple[RegistryConfigRow | None, RegistryConfigRow | None]:
        return await self.book.config(subject) if subject else None, await self.book.config(GLOBAL_SUBJECT)

    async def _find_registered(self, subject: str, given: SubmittedSchema, wanted_id: int) -> RegisteredVersion | None:
        """Look up a schema without a lock or a write: most clients that start ask for a schema that exists."""
        if wanted_id:
            return None
        try:
            return await self.lookup(subject, given)
        except RegistryError as error:
            if error.code not in (40401, 40403):
                raise
            return None

    async def _find_schema(self, schema_id: int) -> SchemaRow | None:
        try:
            return await self.book.schema(schema_id)
        except RegistryError:
            return None

    async def _require_compatible(self, subject: str, parsed: ParsedSchema, versions: list[VersionRow]) -> None:
        level = await self.level(subject)
        numbers = versions_to_compare(level, [row.version for row in versions])
        by_number = {row.version: row for row in versions}
        found = await self._compatibility_problems(level, parsed, [by_number[number] for number in numbers])
        if found:
            details = ", ".join(found)[:8_000]
            raise RegistryError(
                409,
                "Schema being registered is incompatible with an earlier schema for subject "
                f'"{subject}", details: [{details}]',
            )

    async def _compatibility_problems(self, level: str, parsed: ParsedSchema, versions: list[VersionRow]) -> list[str]:
        """Return the differences from the first version that does not fit."""
        for row in versions:
            old = await self._parse_stored(await self.book.schema(row.id))
            found = await self._understanding.problems(level, parsed, old)
            if found:
                return [*found, f"{{oldSchemaVersion: {row.version}}}", f"{{compatibility: '{level}'}}"]
        return []

    async def _require_unreferenced(self, subject: str, version: int, permanent: bool) -> None:
        ids = await self.book.referrers(subject, version, deleted=permanent)
        if ids:
            raise RegistryError(
                42206,
                f"One or more references exist to the schema {{subject={subject}, version={version}}}: "
                f"ids={sorted(ids)[:20]}.",
            )


class LocalSchemaRegistrar:
    """Registrar of schemas for other parts of this process."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def register(self, subject: str, schema: str) -> int:
        """Return the id under which the subject has this Avro schema now. Raises the errors of Registry."""
        return (await self._registry.register(subject, SubmittedSchema("AVRO", schema))).version.id
