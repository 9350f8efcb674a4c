"""Paths of Confluent's REST interface.

/subjects                                GET
/subjects/{s}                            POST (look up) DELETE
/subjects/{s}/versions                   GET POST (register)
/subjects/{s}/versions/{v}               GET DELETE       {v}: 1… or latest
/subjects/{s}/versions/{v}/schema        GET
/subjects/{s}/versions/{v}/referencedby  GET
/schemas  /schemas/types                 GET
/schemas/ids/{id}[/schema /subjects /versions]            GET
/config  /config/{s}                     GET PUT DELETE
/mode  /mode/{s}                         GET PUT DELETE
/compatibility/subjects/{s}/versions[/{v}]                POST
/contexts                                GET
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from tidemill.base.errors import TidemillError
from tidemill.registry.errors import RegistryError, schema_not_found, subject_not_found
from tidemill.registry.http.messages import (
    LIST_MAX,
    bool_param,
    error_response,
    int_field,
    json_response,
    paginate,
    parse_subject,
    parse_submitted_schema,
    parse_version,
    read_body,
    refuse_unsupported,
    schema_body,
    schema_text,
    split_path,
    string_field,
    version_body,
)
from tidemill.registry.parsed_schema import SCHEMA_TYPES
from tidemill.registry.registry import GLOBAL_SUBJECT, Registry
from tidemill.registry.schema_types import DEFAULT

METHODS = ("GET", "POST", "PUT", "DELETE")
TOPS = ("subjects", "schemas", "config", "mode", "compatibility", "contexts")
Handler = Callable[..., Awaitable[Response]]


def registry_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes for one node's application."""
    rest = RegistryApi(registry)
    return [Route(path, rest.serve, methods=METHODS) for top in TOPS for path in (f"/{top}", f"/{top}/{{rest:path}}")]


class RegistryApi:
    """Handlers of the REST interface over one registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._table: list[tuple[str, tuple[str, ...], Handler]] = [
            ("GET", ("subjects",), self._subjects),
            ("POST", ("subjects", "*"), self._lookup),
            ("DELETE", ("subjects", "*"), self._delete_subject),
            ("GET", ("subjects", "*", "versions"), self._versions),
            ("POST", ("subjects", "*", "versions"), self._register),
            ("GET", ("subjects", "*", "versions", "*"), self._version),
            ("DELETE", ("subjects", "*", "versions", "*"), self._delete_version),
            ("GET", ("subjects", "*", "versions", "*", "schema"), self._version_schema),
            ("GET", ("subjects", "*", "versions", "*", "referencedby"), self._referrers),
            ("GET", ("schemas",), self._schemas),
            ("GET", ("schemas", "types"), self._types),
            ("GET", ("schemas", "ids", "*"), self._by_id),
            ("GET", ("schemas", "ids", "*", "schema"), self._by_id_schema),
            ("GET", ("schemas", "ids", "*", "subjects"), self._by_id_subjects),
            ("GET", ("schemas", "ids", "*", "versions"), self._by_id_versions),
            ("GET", ("config",), self._get_config),
            ("PUT", ("config",), self._put_config),
            ("DELETE", ("config",), self._delete_config),
            ("GET", ("config", "*"), self._get_config),
            ("PUT", ("config", "*"), self._put_config),
            ("DELETE", ("config", "*"), self._delete_config),
            ("GET", ("mode",), self._get_mode),
            ("PUT", ("mode",), self._put_mode),
            ("DELETE", ("mode",), self._delete_mode),
            ("GET", ("mode", "*"), self._get_mode),
            ("PUT", ("mode", "*"), self._put_mode),
            ("DELETE", ("mode", "*"), self._delete_mode),
            ("POST", ("compatibility", "subjects", "*", "versions"), self._check),
            ("POST", ("compatibility", "subjects", "*", "versions", "*"), self._check),
            ("GET", ("contexts",), self._contexts),
        ]

    async def serve(self, request: Request) -> Response:
        """Dispatch a request by its path and method; errors become responses with Confluent's codes."""
        try:
            parts = split_path(request.scope.get("raw_path") or request.scope["path"].encode())
            fitting = [
                (method, pattern, handler) for method, pattern, handler in self._table if _matches(pattern, parts)
            ]
            if not fitting:
                raise RegistryError(404, "HTTP 404 Not Found")
            method = "GET" if request.method == "HEAD" else request.method
            for offered, pattern, handler in fitting:
                if offered == method:
                    return await handler(request, *(p for p, w in zip(parts, pattern, strict=True) if w == "*"))
            raise RegistryError(405, "HTTP 405 Method Not Allowed")
        except TidemillError as error:
            return error_response(error)

    # subjects -------------------------------------------------------------------------------------

    async def _subjects(self, request: Request) -> Response:
        prefix = request.query_params.get("subjectPrefix", "").removeprefix(":*:").removeprefix(":.:")
        deleted, only = bool_param(request, "deleted"), bool_param(request, "deletedOnly")
        found: dict[str, bool] = {}
        """Subject → whether it has a live version."""
        for row in await self._registry.book.all_versions():
            if row.subject.startswith(prefix):
                found[row.subject] = found.get(row.subject, False) or not row.deleted
        names = [name for name, alive in found.items() if (not alive if only else alive or deleted)]
        return json_response(paginate(request, names))

    async def _lookup(self, request: Request, subject: str) -> Response:
        subject = parse_subject(subject)
        given = parse_submitted_schema(await read_body(request), normalize=bool_param(request, "normalize"))
        found = await self._registry.lookup(subject, given, deleted=bool_param(request, "deleted"))
        return json_response(version_body(found.version, found.schema, request.query_params.get("format", "")))

    async def _delete_subject(self, request: Request, subject: str) -> Response:
        return json_response(
            await self._registry.delete(parse_subject(subject), None, permanent=bool_param(request, "permanent"))
        )

    async def _versions(self, request: Request, subject: str) -> Response:
        subject = parse_subject(subject)
        deleted, only = bool_param(request, "deleted"), bool_param(request, "deletedOnly")
        rows = await self._registry.book.versions(subject, fresh=True)
        found = [row.version for row in rows if (row.deleted if only else deleted or not row.deleted)]
        if not found:
            raise subject_not_found(subject)
        return json_response(paginate(request, found))

    async def _register(self, request: Request, subject: str) -> Response:
        subject = parse_subject(subject)
        body = await read_body(request)
        given = parse_submitted_schema(body, normalize=bool_param(request, "normalize"))
        wanted_id, version = int_field(body, "id"), int_field(body, "version")
        found = await self._registry.register(subject, given, wanted_id=wanted_id, version=version)
        return json_response({"id": found.version.id, "version": found.version.version})

    async def _version(self, request: Request, subject: str, version: str) -> Response:
        wanted = parse_version(version)
        found = await self._registry.find(parse_subject(subject), wanted, deleted=bool_param(request, "deleted"))
        return json_response(version_body(found.version, found.schema, request.query_params.get("format", "")))

    async def _version_schema(self, request: Request, subject: str, version: str) -> Response:
        wanted = parse_version(version)
        found = await self._registry.find(parse_subject(subject), wanted, deleted=bool_param(request, "deleted"))
        return PlainTextResponse(schema_text(found.schema, request.query_params.get("format", "")))

    async def _delete_version(self, request: Request, subject: str, version: str) -> Response:
        subject, wanted = parse_subject(subject), parse_version(version)
        permanent = bool_param(request, "permanent")
        numbers = await self._registry.delete(subject, wanted, permanent=permanent, latest=wanted is None)
        return json_response(numbers[0])

    async def _referrers(self, request: Request, subject: str, version: str) -> Response:
        found = await self._registry.find(parse_subject(subject), parse_version(version), deleted=True)
        row = found.version
        ids = await self._registry.book.referrers(row.subject, row.version, deleted=bool_param(request, "deleted"))
        return json_response(paginate(request, ids))

    # schemas --------------------------------------------------------------------------------------

    async def _schemas(self, request: Request) -> Response:
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

    async def _types(self, _: Request) -> Response:
        return json_response(SCHEMA_TYPES)

    async def _by_id(self, request: Request, schema_id: str) -> Response:
        row = await self._registry.book.schema(_parse_id(schema_id))
        found = schema_body(row, request.query_params.get("format", ""))
        if bool_param(request, "fetchMaxId"):
            _, head = await self._registry.book.head()
            found["maxId"] = head.next_id - 1
        return json_response(found)

    async def _by_id_schema(self, request: Request, schema_id: str) -> Response:
        row = await self._registry.book.schema(_parse_id(schema_id))
        return PlainTextResponse(schema_text(row, request.query_params.get("format", "")))

    async def _by_id_subjects(self, request: Request, schema_id: str) -> Response:
        return json_response(
            paginate(
                request, list(dict.fromkeys(row["subject"] for row in await self._versions_using(request, schema_id)))
            )
        )

    async def _by_id_versions(self, request: Request, schema_id: str) -> Response:
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

    # configuration --------------------------------------------------------------------------------

    async def _get_config(self, request: Request, subject: str = GLOBAL_SUBJECT) -> Response:
        subject = parse_subject(subject) if subject else GLOBAL_SUBJECT
        row = await self._registry.book.config(subject, fresh=True)
        own = row.compatibility if row is not None else ""
        if subject and not own and not bool_param(request, "defaultToGlobal"):
            raise RegistryError(40408, f"Subject '{subject}' does not have subject-level compatibility configured")
        found: dict[str, Any] = {"compatibilityLevel": own or await self._registry.level(GLOBAL_SUBJECT)}
        if row is not None and row.normalize is not None:
            found["normalize"] = row.normalize
        return json_response(found)

    async def _put_config(self, request: Request, subject: str = GLOBAL_SUBJECT) -> Response:
        subject = parse_subject(subject) if subject else GLOBAL_SUBJECT
        body = await read_body(request)
        refuse_unsupported(body)
        level = string_field(body, "compatibility", "compatibilityLevel").upper()
        normalize = body.get("normalize")
        if normalize is not None and not isinstance(normalize, bool):
            raise RegistryError(422, "normalize must be true or false.")
        if not level and normalize is None:
            raise RegistryError(42203, "Invalid compatibility level: the body names none.")
        await self._registry.set_level(subject, level, normalize)
        said = {"compatibility": level or None, "normalize": normalize}
        return json_response({name: value for name, value in said.items() if value is not None})

    async def _delete_config(self, _: Request, subject: str = GLOBAL_SUBJECT) -> Response:
        subject = parse_subject(subject) if subject else GLOBAL_SUBJECT
        row = await self._registry.book.config(subject, fresh=True)
        own = row.compatibility if row is not None else ""
        if subject and row is None:
            raise subject_not_found(subject)
        await self._registry.set_level(subject, "", clear=True)
        return json_response({"compatibilityLevel": own or DEFAULT})

    async def _get_mode(self, request: Request, subject: str = GLOBAL_SUBJECT) -> Response:
        subject = parse_subject(subject) if subject else GLOBAL_SUBJECT
        row = await self._registry.book.config(subject, fresh=True)
        own = row.mode if row is not None else ""
        if subject and not own and not bool_param(request, "defaultToGlobal"):
            raise RegistryError(40409, f"Subject '{subject}' does not have subject-level mode configured")
        return json_response({"mode": own or await self._registry.mode(GLOBAL_SUBJECT)})

    async def _put_mode(self, request: Request, subject: str = GLOBAL_SUBJECT) -> Response:
        subject = parse_subject(subject) if subject else GLOBAL_SUBJECT
        mode = string_field(await read_body(request), "mode").upper()
        await self._registry.set_mode(subject, mode or "?", force=bool_param(request, "force"))
        return json_response({"mode": mode})

    async def _delete_mode(self, _: Request, subject: str = GLOBAL_SUBJECT) -> Response:
        subject = parse_subject(subject) if subject else GLOBAL_SUBJECT
        row = await self._registry.book.config(subject, fresh=True)
        own = row.mode if row is not None else ""
        if subject and not own:
            raise subject_not_found(subject)
        await self._registry.set_mode(subject, "")
        return json_response({"mode": own or "READWRITE"})

    # compatibility --------------------------------------------------------------------------------

    async def _check(self, request: Request, subject: str, version: str | None = None) -> Response:
        subject = parse_subject(subject)
        wanted = parse_version(version) if version is not None else None
        given = parse_submitted_schema(await read_body(request), normalize=bool_param(request, "normalize"))
        found = await self._registry.check_compatibility(subject, given, wanted, all_versions=version is None)
        body: dict[str, Any] = {"is_compatible": not found}
        if bool_param(request, "verbose"):
            body["messages"] = found
        return json_response(body)

    async def _contexts(self, _: Request) -> Response:
        return json_response(["."])


def _matches(pattern: tuple[str, ...], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(want in ("*", part) for want, part in zip(pattern, parts, strict=True))


def _parse_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise RegistryError(404, "HTTP 404 Not Found")
    found = int(text)
    if found > 2**31 - 1:
        raise schema_not_found(found)
    return found
