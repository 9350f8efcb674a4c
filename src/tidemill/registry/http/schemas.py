"""Handlers of /schemas: schemas by id, and the versions that use them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tidemill.registry.errors import RegistryError, schema_not_found
from tidemill.registry.http.messages import (
    LIST_MAX,
    bool_param,
    json_response,
    paginate,
    schema_body,
    schema_text,
    version_body,
)
from tidemill.registry.registry import Registry
from tidemill.registry.schema import SCHEMA_TYPES


class SchemaHandlers:
    """Handlers of schemas."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def list_schemas(self, request: Request) -> Response:
        prefix = request.query_params.get("subjectPrefix", "").removeprefix(":*:").removeprefix(":.:")
        deleted, latest = bool_param(request, "deleted"), bool_param(request, "latestOnly")
        rows = [row for row in await self._registry.book.all_versions() if deleted or not row.deleted]
        rows = [row for row in rows if row.subject.startswith(prefix)]
        if latest:
            rows = list({row.subject: row for row in rows}.values())
        form = request.query_params.get("format", "")
        found = []
        for row in paginate(request, rows, LIST_MAX):
            found.append(version_body(row, await self._registry.book.schema(row.id), form))
        return json_response(found)

    async def types(self, _: Request) -> Response:
        return json_response(SCHEMA_TYPES)

    async def by_id(self, request: Request, schema_id: str) -> Response:
        row = await self._registry.book.schema(_parse_id(schema_id))
        found = schema_body(row, request.query_params.get("format", ""))
        if bool_param(request, "fetchMaxId"):
            _, head = await self._registry.book.head()
            found["maxId"] = head.next_id - 1
        return json_response(found)

    async def schema_of_id(self, request: Request, schema_id: str) -> Response:
        row = await self._registry.book.schema(_parse_id(schema_id))
        return PlainTextResponse(schema_text(row, request.query_params.get("format", "")))

    async def subjects_of_id(self, request: Request, schema_id: str) -> Response:
        return json_response(
            paginate(
                request, list(dict.fromkeys(row["subject"] for row in await self._versions_using(request, schema_id)))
            )
        )

    async def versions_of_id(self, request: Request, schema_id: str) -> Response:
        return json_response(paginate(request, await self._versions_using(request, schema_id)))

    async def _versions_using(self, request: Request, text: str) -> list[dict[str, Any]]:
        schema_id = _parse_id(text)
        await self._registry.book.head()  # a fresh read: the reads after it are at least as new
        await self._registry.book.schema(schema_id)
        deleted, subject = bool_param(request, "deleted"), request.query_params.get("subject", "")
        return [
            {"subject": row.subject, "version": row.version}
            for row in await self._registry.book.users(schema_id)
            if (deleted or not row.deleted) and subject in ("", row.subject)
        ]


def _parse_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise RegistryError(404, "HTTP 404 Not Found")
    found = int(text)
    if found > 2**31 - 1:
        raise schema_not_found(found)
    return found
