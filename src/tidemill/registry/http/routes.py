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
from tidemill.registry.compat_levels import DEFAULT
from tidemill.registry.errors import RegistryError, no_schema, no_subject
from tidemill.registry.http.requests import (
    LIST_MOST,
    body_of,
    flag,
    given_in,
    page,
    parts_of,
    refuse_unserved,
    subject_of,
    text_in,
    version_of,
    whole,
)
from tidemill.registry.http.responses import answer, refusal, schema_body, text_of, version_body
from tidemill.registry.parsed_schema import KINDS
from tidemill.registry.registry import EVERY, Registry

METHODS = ("GET", "POST", "PUT", "DELETE")
TOPS = ("subjects", "schemas", "config", "mode", "compatibility", "contexts")
Handler = Callable[..., Awaitable[Response]]


def registry_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes for one node's application."""
    rest = Rest(registry)
    return [Route(path, rest.serve, methods=METHODS) for top in TOPS for path in (f"/{top}", f"/{top}/{{rest:path}}")]


class Rest:
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
            parts = parts_of(request.scope.get("raw_path") or request.scope["path"].encode())
            fitting = [(method, pattern, handler) for method, pattern, handler in self._table if _fits(pattern, parts)]
            if not fitting:
                raise RegistryError(404, "HTTP 404 Not Found")
            method = "GET" if request.method == "HEAD" else request.method
            for offered, pattern, handler in fitting:
                if offered == method:
                    return await handler(request, *(p for p, w in zip(parts, pattern, strict=True) if w == "*"))
            raise RegistryError(405, "HTTP 405 Method Not Allowed")
        except TidemillError as error:
            return refusal(error)

    # subjects -------------------------------------------------------------------------------------

    async def _subjects(self, request: Request) -> Response:
        prefix = request.query_params.get("subjectPrefix", "").removeprefix(":*:").removeprefix(":.:")
        deleted, only = flag(request, "deleted"), flag(request, "deletedOnly")
        found: dict[str, bool] = {}
        """Subject → whether it has a live version."""
        for row in await self._registry.book.all_versions():
            if row.subject.startswith(prefix):
                found[row.subject] = found.get(row.subject, False) or not row.deleted
        names = [name for name, alive in found.items() if (not alive if only else alive or deleted)]
        return answer(page(request, names))

    async def _lookup(self, request: Request, subject: str) -> Response:
        subject = subject_of(subject)
        given = given_in(await body_of(request), normalize=flag(request, "normalize"))
        found = await self._registry.lookup(subject, given, deleted=flag(request, "deleted"))
        return answer(version_body(found.version, found.schema, request.query_params.get("format", "")))

    async def _delete_subject(self, request: Request, subject: str) -> Response:
        return answer(await self._registry.delete(subject_of(subject), None, permanent=flag(request, "permanent")))

    async def _versions(self, request: Request, subject: str) -> Response:
        subject = subject_of(subject)
        deleted, only = flag(request, "deleted"), flag(request, "deletedOnly")
        rows = await self._registry.book.versions(subject, fresh=True)
        found = [row.version for row in rows if (row.deleted if only else deleted or not row.deleted)]
        if not found:
            raise no_subject(subject)
        return answer(page(request, found))

    async def _register(self, request: Request, subject: str) -> Response:
        subject = subject_of(subject)
        body = await body_of(request)
        given = given_in(body, normalize=flag(request, "normalize"))
        wanted_id, version = whole(body, "id"), whole(body, "version")
        found = await self._registry.register(subject, given, wanted_id=wanted_id, version=version)
        return answer({"id": found.version.id, "version": found.version.version})

    async def _version(self, request: Request, subject: str, version: str) -> Response:
        wanted = version_of(version)
        found = await self._registry.find(subject_of(subject), wanted, deleted=flag(request, "deleted"))
        return answer(version_body(found.version, found.schema, request.query_params.get("format", "")))

    async def _version_schema(self, request: Request, subject: str, version: str) -> Response:
        wanted = version_of(version)
        found = await self._registry.find(subject_of(subject), wanted, deleted=flag(request, "deleted"))
        return PlainTextResponse(text_of(found.schema, request.query_params.get("format", "")))

    async def _delete_version(self, request: Request, subject: str, version: str) -> Response:
        subject, wanted = subject_of(subject), version_of(version)
        permanent = flag(request, "permanent")
        numbers = await self._registry.delete(subject, wanted, permanent=permanent, latest=wanted is None)
        return answer(numbers[0])

    async def _referrers(self, request: Request, subject: str, version: str) -> Response:
        found = await self._registry.find(subject_of(subject), version_of(version), deleted=True)
        row = found.version
        ids = await self._registry.book.referrers(row.subject, row.version, deleted=flag(request, "deleted"))
        return answer(page(request, ids))

    # schemas --------------------------------------------------------------------------------------

    async def _schemas(self, request: Request) -> Response:
        prefix = request.query_params.get("subjectPrefix", "").removeprefix(":*:").removeprefix(":.:")
        deleted, latest = flag(request, "deleted"), flag(request, "latestOnly")
        rows = [row for row in await self._registry.book.all_versions() if deleted or not row.deleted]
        rows = [row for row in rows if row.subject.startswith(prefix)]
        if latest:
            rows = list({row.subject: row for row in rows}.values())
        form = request.query_params.get("format", "")
        found = []
        for row in page(request, rows, LIST_MOST):
            found.append(version_body(row, await self._registry.book.schema(row.id), form))
        return answer(found)

    async def _types(self, _: Request) -> Response:
        return answer(KINDS)

    async def _by_id(self, request: Request, schema_id: str) -> Response:
        row = await self._registry.book.schema(_id(schema_id))
        found = schema_body(row, request.query_params.get("format", ""))
        if flag(request, "fetchMaxId"):
            _, head = await self._registry.book.head()
            found["maxId"] = head.next_id - 1
        return answer(found)

    async def _by_id_schema(self, request: Request, schema_id: str) -> Response:
        row = await self._registry.book.schema(_id(schema_id))
        return PlainTextResponse(text_of(row, request.query_params.get("format", "")))

    async def _by_id_subjects(self, request: Request, schema_id: str) -> Response:
        return answer(
            page(request, list(dict.fromkeys(row["subject"] for row in await self._used(request, schema_id))))
        )

    async def _by_id_versions(self, request: Request, schema_id: str) -> Response:
        return answer(page(request, await self._used(request, schema_id)))

    async def _used(self, request: Request, text: str) -> list[dict[str, Any]]:
        schema_id = _id(text)
        await self._registry.book.head()  # a fresh read: the reads after it are at least as new
        await self._registry.book.schema(schema_id)
        deleted, subject = flag(request, "deleted"), request.query_params.get("subject", "")
        return [
            {"subject": row.subject, "version": row.version}
            for row in await self._registry.book.users(schema_id)
            if (deleted or not row.deleted) and subject in ("", row.subject)
        ]

    # configuration --------------------------------------------------------------------------------

    async def _get_config(self, request: Request, subject: str = EVERY) -> Response:
        subject = subject_of(subject) if subject else EVERY
        row = await self._registry.book.config(subject, fresh=True)
        own = row.compatibility if row is not None else ""
        if subject and not own and not flag(request, "defaultToGlobal"):
            raise RegistryError(40408, f"Subject '{subject}' does not have subject-level compatibility configured")
        found: dict[str, Any] = {"compatibilityLevel": own or await self._registry.level(EVERY)}
        if row is not None and row.normalize is not None:
            found["normalize"] = row.normalize
        return answer(found)

    async def _put_config(self, request: Request, subject: str = EVERY) -> Response:
        subject = subject_of(subject) if subject else EVERY
        body = await body_of(request)
        refuse_unserved(body)
        level = text_in(body, "compatibility", "compatibilityLevel").upper()
        normalize = body.get("normalize")
        if normalize is not None and not isinstance(normalize, bool):
            raise RegistryError(422, "normalize must be true or false.")
        if not level and normalize is None:
            raise RegistryError(42203, "Invalid compatibility level: the body names none.")
        await self._registry.set_level(subject, level, normalize)
        said = {"compatibility": level or None, "normalize": normalize}
        return answer({name: value for name, value in said.items() if value is not None})

    async def _delete_config(self, _: Request, subject: str = EVERY) -> Response:
        subject = subject_of(subject) if subject else EVERY
        row = await self._registry.book.config(subject, fresh=True)
        own = row.compatibility if row is not None else ""
        if subject and row is None:
            raise no_subject(subject)
        await self._registry.set_level(subject, "", clear=True)
        return answer({"compatibilityLevel": own or DEFAULT})

    async def _get_mode(self, request: Request, subject: str = EVERY) -> Response:
        subject = subject_of(subject) if subject else EVERY
        row = await self._registry.book.config(subject, fresh=True)
        own = row.mode if row is not None else ""
        if subject and not own and not flag(request, "defaultToGlobal"):
            raise RegistryError(40409, f"Subject '{subject}' does not have subject-level mode configured")
        return answer({"mode": own or await self._registry.mode(EVERY)})

    async def _put_mode(self, request: Request, subject: str = EVERY) -> Response:
        subject = subject_of(subject) if subject else EVERY
        mode = text_in(await body_of(request), "mode").upper()
        await self._registry.set_mode(subject, mode or "?", force=flag(request, "force"))
        return answer({"mode": mode})

    async def _delete_mode(self, _: Request, subject: str = EVERY) -> Response:
        subject = subject_of(subject) if subject else EVERY
        row = await self._registry.book.config(subject, fresh=True)
        own = row.mode if row is not None else ""
        if subject and not own:
            raise no_subject(subject)
        await self._registry.set_mode(subject, "")
        return answer({"mode": own or "READWRITE"})

    # compatibility --------------------------------------------------------------------------------

    async def _check(self, request: Request, subject: str, version: str | None = None) -> Response:
        subject = subject_of(subject)
        wanted = version_of(version) if version is not None else None
        given = given_in(await body_of(request), normalize=flag(request, "normalize"))
        found = await self._registry.check(subject, given, wanted, all_versions=version is None)
        body: dict[str, Any] = {"is_compatible": not found}
        if flag(request, "verbose"):
            body["messages"] = found
        return answer(body)

    async def _contexts(self, _: Request) -> Response:
        return answer(["."])


def _fits(pattern: tuple[str, ...], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(want in ("*", part) for want, part in zip(pattern, parts, strict=True))


def _id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise RegistryError(404, "HTTP 404 Not Found")
    found = int(text)
    if found > 2**31 - 1:
        raise no_schema(found)
    return found
