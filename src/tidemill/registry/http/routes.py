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

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tidemill.base.address import split_url_path
from tidemill.base.errors import TidemillError
from tidemill.registry.errors import RegistryError
from tidemill.registry.http.messages import error_response, json_response
from tidemill.registry.http.schemas import SchemaHandlers
from tidemill.registry.http.subject_settings import SettingsHandlers
from tidemill.registry.http.subjects import SubjectHandlers
from tidemill.registry.registry import Registry

METHODS = ("GET", "POST", "PUT", "DELETE")
TOPS = ("subjects", "schemas", "config", "mode", "compatibility", "contexts")
PathRow = tuple[str, tuple[str, ...], Callable[..., Awaitable[Response]]]


def registry_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes for one node's application."""
    router = RegistryRouter(path_table(registry))
    return [Route(path, router.serve, methods=METHODS) for top in TOPS for path in (f"/{top}", f"/{top}/{{rest:path}}")]


def path_table(registry: Registry) -> list[PathRow]:
    """Return the handler of each method and path. A handler gets the parts of the path that `*` matches."""
    subjects, schemas, settings = SubjectHandlers(registry), SchemaHandlers(registry), SettingsHandlers(registry)
    return [
        ("GET", ("subjects",), subjects.list_subjects),
        ("POST", ("subjects", "*"), subjects.lookup),
        ("DELETE", ("subjects", "*"), subjects.delete_subject),
        ("GET", ("subjects", "*", "versions"), subjects.list_versions),
        ("POST", ("subjects", "*", "versions"), subjects.register),
        ("GET", ("subjects", "*", "versions", "*"), subjects.version),
        ("DELETE", ("subjects", "*", "versions", "*"), subjects.delete_version),
        ("GET", ("subjects", "*", "versions", "*", "schema"), subjects.version_schema),
        ("GET", ("subjects", "*", "versions", "*", "referencedby"), subjects.referrers),
        ("GET", ("schemas",), schemas.list_schemas),
        ("GET", ("schemas", "types"), schemas.types),
        ("GET", ("schemas", "ids", "*"), schemas.by_id),
        ("GET", ("schemas", "ids", "*", "schema"), schemas.schema_of_id),
        ("GET", ("schemas", "ids", "*", "subjects"), schemas.subjects_of_id),
        ("GET", ("schemas", "ids", "*", "versions"), schemas.versions_of_id),
        ("GET", ("config",), settings.get_config),
        ("PUT", ("config",), settings.put_config),
        ("DELETE", ("config",), settings.delete_config),
        ("GET", ("config", "*"), settings.get_config),
        ("PUT", ("config", "*"), settings.put_config),
        ("DELETE", ("config", "*"), settings.delete_config),
        ("GET", ("mode",), settings.get_mode),
        ("PUT", ("mode",), settings.put_mode),
        ("DELETE", ("mode",), settings.delete_mode),
        ("GET", ("mode", "*"), settings.get_mode),
        ("PUT", ("mode", "*"), settings.put_mode),
        ("DELETE", ("mode", "*"), settings.delete_mode),
        ("POST", ("compatibility", "subjects", "*", "versions"), subjects.check_compatibility),
        ("POST", ("compatibility", "subjects", "*", "versions", "*"), subjects.check_compatibility),
        ("GET", ("contexts",), _contexts),
    ]


class RegistryRouter:
    """Dispatch of requests by their path, whose parts are decoded separately, and their method."""

    def __init__(self, table: Sequence[PathRow]) -> None:
        self._table = table

    async def serve(self, request: Request) -> Response:
        """Dispatch a request by its path and method; errors become responses with Confluent's codes."""
        try:
            parts = split_url_path(request.scope.get("raw_path") or request.scope["path"].encode())
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


async def _contexts(_: Request) -> Response:
    return json_response(["."])


def _matches(pattern: tuple[str, ...], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(want in ("*", part) for want, part in zip(pattern, parts, strict=True))
