"""Handlers of /subjects and /compatibility: the versions of a subject, and whether a schema would be a next one."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tidemill.registry.errors import subject_not_found
from tidemill.registry.http.messages import (
    bool_param,
    int_field,
    json_response,
    paginate,
    parse_subject,
    parse_submitted_schema,
    parse_version,
    read_body,
    schema_text,
    version_body,
)
from tidemill.registry.registry import Registry


class SubjectHandlers:
    """Handlers of subjects and their versions."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def list_subjects(self, request: Request) -> Response:
        prefix = request.query_params.get("subjectPrefix", "").removeprefix(":*:").removeprefix(":.:")
        deleted, only = bool_param(request, "deleted"), bool_param(request, "deletedOnly")
        found: dict[str, bool] = {}
        """Subject → whether it has a live version."""
        for row in await self._registry.book.all_versions():
            if row.subject.startswith(prefix):
                found[row.subject] = found.get(row.subject, False) or not row.deleted
        names = [name for name, alive in found.items() if (not alive if only else alive or deleted)]
        return json_response(paginate(request, names))

    async def lookup(self, request: Request, subject: str) -> Response:
        subject = parse_subject(subject)
        given = parse_submitted_schema(await read_body(request), normalize=bool_param(request, "normalize"))
        found = await self._registry.lookup(subject, given, deleted=bool_param(request, "deleted"))
        return json_response(version_body(found.version, found.schema, request.query_params.get("format", "")))

    async def delete_subject(self, request: Request, subject: str) -> Response:
        return json_response(
            await self._registry.delete(parse_subject(subject), None, permanent=bool_param(request, "permanent"))
        )

    async def list_versions(self, request: Request, subject: str) -> Response:
        subject = parse_subject(subject)
        deleted, only = bool_param(request, "deleted"), bool_param(request, "deletedOnly")
        rows = await self._registry.book.versions(subject, fresh=True)
        found = [row.version for row in rows if (row.deleted if only else deleted or not row.deleted)]
        if not found:
            raise subject_not_found(subject)
        return json_response(paginate(request, found))

    async def register(self, request: Request, subject: str) -> Response:
        subject = parse_subject(subject)
        body = await read_body(request)
        given = parse_submitted_schema(body, normalize=bool_param(request, "normalize"))
        wanted_id, version = int_field(body, "id"), int_field(body, "version")
        found = await self._registry.register(subject, given, wanted_id=wanted_id, version=version)
        return json_response({"id": found.version.id, "version": found.version.version})

    async def version(self, request: Request, subject: str, version: str) -> Response:
        wanted = parse_version(version)
        found = await self._registry.find(parse_subject(subject), wanted, deleted=bool_param(request, "deleted"))
        return json_response(version_body(found.version, found.schema, request.query_params.get("format", "")))

    async def version_schema(self, request: Request, subject: str, version: str) -> Response:
        wanted = parse_version(version)
        found = await self._registry.find(parse_subject(subject), wanted, deleted=bool_param(request, "deleted"))
        return PlainTextResponse(schema_text(found.schema, request.query_params.get("format", "")))

    async def delete_version(self, request: Request, subject: str, version: str) -> Response:
        subject, wanted = parse_subject(subject), parse_version(version)
        permanent = bool_param(request, "permanent")
        numbers = await self._registry.delete(subject, wanted, permanent=permanent, latest=wanted is None)
        return json_response(numbers[0])

    async def referrers(self, request: Request, subject: str, version: str) -> Response:
        found = await self._registry.find(parse_subject(subject), parse_version(version), deleted=True)
        row = found.version
        ids = await self._registry.book.referrers(row.subject, row.version, deleted=bool_param(request, "deleted"))
        return json_response(paginate(request, ids))

    async def check_compatibility(self, request: Request, subject: str, version: str | None = None) -> Response:
        subject = parse_subject(subject)
        wanted = parse_version(version) if version is not None else None
        given = parse_submitted_schema(await read_body(request), normalize=bool_param(request, "normalize"))
        found = await self._registry.check_compatibility(subject, given, wanted, all_versions=version is None)
        body: dict[str, Any] = {"is_compatible": not found}
        if bool_param(request, "verbose"):
            body["messages"] = found
        return json_response(body)
