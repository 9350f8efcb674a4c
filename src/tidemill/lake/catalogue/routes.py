"""Read-only REST catalogue of Iceberg: the published tables of a cluster in one namespace.

    GET /iceberg/v1/config                                       endpoints that exist; `warehouse` is accepted
    GET /iceberg/v1/namespaces[?parent=]                         [["tidemill"]], and nothing below it
    GET, HEAD /iceberg/v1/namespaces/tidemill
    GET /iceberg/v1/namespaces/tidemill/tables                   those that the principal may read; pageToken, pageSize
    GET, HEAD /iceberg/v1/namespaces/tidemill/tables/T           newest publication; snapshots=refs for those with a tag
    POST /iceberg/v1/namespaces/tidemill/tables/T/metrics        accepted and discarded

Every other request is refused with Iceberg's error model: 404 for what does not exist, 403 for a write. A response for
a table has an ETag for its metadata file; `If-None-Match` with it is answered 304 (the specification's `loadTable`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.lake.catalogue.messages import (
    ENDPOINTS,
    NAMESPACE,
    PREFIX,
    error_response,
    json_response,
    split_path,
)
from tidemill.lake.catalogue.storage_access import StorageAccess

METHODS: Final = ("GET", "POST", "PUT", "DELETE")
MAY_READ_SCOPE_KEY: Final = "tidemill.lake.may_read"
"""Key of the ASGI scope: a function that says whether the principal of the request may read a table, for lists of
tables. A request for one table is authorized before it gets here. Without the key there is no authorization."""
PAGE_MAX: Final = 1_000


class PublishedTable(msgspec.Struct, frozen=True):
    """Newest publication of a table: the URL of its metadata file, and the file's JSON."""

    metadata_location: str
    metadata: bytes


class PublishedTables(Protocol):
    """The tables that the catalogue shows."""

    async def list_names(self) -> Sequence[str]:
        """Return the names of all tables that can be loaded. Raises UnavailableError."""

    async def load(self, table: str) -> PublishedTable:
        """Return the newest publication of a table. Publish a table that never was.

        Raises MissingError for an unknown table, InvalidError for one that Iceberg cannot express, and
        UnavailableError.
        """


def catalogue_routes(tables: PublishedTables, access: StorageAccess) -> list[BaseRoute]:
    """Return the routes for one node's application."""
    handlers = _Catalogue(tables, access)
    return [Route(path, handlers.serve, methods=METHODS) for path in (PREFIX, f"{PREFIX}/{{rest:path}}")]


class _Catalogue:
    def __init__(self, tables: PublishedTables, access: StorageAccess) -> None:
        self._tables = tables
        self._access = access

    async def serve(self, request: Request) -> Response:
        """Serve any request under the prefix. The path is split here, since a name may contain a slash."""
        raw = request.scope.get("raw_path") or request.scope["path"].encode()
        parts = split_path(raw)
        handler = self._handler(parts, request.method)
        if handler is None:
            if request.method in ("GET", "HEAD"):
                return error_response(404, "There is nothing at this path.", _missing_type(parts))
            return error_response(
                403, f"The catalogue is read-only: {request.method} is refused. Write tables through tidemill."
            )
        try:
            return await handler(request, parts)
        except MissingError as error:
            return error_response(404, str(error), _missing_type(parts))
        except InvalidError as error:
            return error_response(400, str(error))
        except TidemillError as error:
            return error_response(503, str(error))

    def _handler(self, parts: list[str], method: str) -> Callable[[Request, list[str]], Awaitable[Response]] | None:
        reads = method in ("GET", "HEAD")
        match parts:
            case ["config"] if reads:
                return self._config
            case ["namespaces"] if reads:
                return self._namespaces
            case ["namespaces", _] if reads:
                return self._namespace
            case ["namespaces", _, "tables"] if reads:
                return self._list_tables
            case ["namespaces", _, "tables", _] if reads:
                return self._table
            case ["namespaces", _, "tables", _, "metrics"] if method == "POST":
                return self._metrics
        return None

    async def _config(self, request: Request, parts: list[str]) -> Response:
        return json_response({"defaults": self._access.config, "overrides": {}, "endpoints": ENDPOINTS})

    async def _namespaces(self, request: Request, parts: list[str]) -> Response:
        parent = request.query_params.get("parent", "")
        if parent:
            _check_namespace(parent)
        return json_response({"namespaces": [] if parent else [[NAMESPACE]]})

    async def _namespace(self, request: Request, parts: list[str]) -> Response:
        _check_namespace(parts[1])
        if request.method == "HEAD":
            return Response(status_code=204)
        return json_response({"namespace": [NAMESPACE], "properties": {}})

    async def _list_tables(self, request: Request, parts: list[str]) -> Response:
        _check_namespace(parts[1])
        may_read = _may_read(request)
        names = sorted(name for name in await self._tables.list_names() if may_read(name))
        size = _page_size(request)
        after = request.query_params.get("pageToken", "")
        page = [name for name in names if name > after][: size or None]
        body: dict[str, Any] = {"identifiers": [{"namespace": [NAMESPACE], "name": name} for name in page]}
        if page and page[-1] != names[-1]:
            body["next-page-token"] = page[-1]
        return json_response(body)

    async def _table(self, request: Request, parts: list[str]) -> Response:
        _check_namespace(parts[1])
        found = await self._tables.load(parts[3])
        if request.method == "HEAD":
            return Response(status_code=204)
        refs_only = request.query_params.get("snapshots") == "refs"
        etag = _etag(found.metadata_location, refs_only)
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"etag": etag})
        # Metadata may be megabytes: they are copied into the response, and parsed only on a thread.
        metadata: Any = orjson.Fragment(found.metadata)
        if refs_only:
            metadata = await asyncio.to_thread(_with_referenced_snapshots, found.metadata)
        body = {"metadata-location": found.metadata_location, "metadata": metadata, "config": self._access.config}
        if self._access.keys:
            settings = self._access.config | self._access.keys
            body["config"] = settings
            body["storage-credentials"] = [{"prefix": each, "config": settings} for each in self._access.prefixes]
        return json_response(body, {"etag": etag})

    async def _metrics(self, request: Request, parts: list[str]) -> Response:
        _check_namespace(parts[1])
        return Response(status_code=204)


def _check_namespace(name: str) -> None:
    if name != NAMESPACE:
        shown = ".".join(name.split("\x1f"))[:100]
        raise MissingError(f"the namespace does not exist: namespace={shown}. All tables are in {NAMESPACE}.")


def _may_read(request: Request) -> Callable[[str], bool]:
    allowed: Callable[[str], bool] = request.scope.get(MAY_READ_SCOPE_KEY, lambda table: True)
    return allowed


def _page_size(request: Request) -> int:
    """Return the size of a page; 0 for no limit, which is what a request without `pageToken` gets (specification of
    the parameter)."""
    if "pageToken" not in request.query_params and "pageSize" not in request.query_params:
        return 0
    text = request.query_params.get("pageSize") or str(PAGE_MAX)
    if not (text.isascii() and text.isdigit()) or int(text[:10]) < 1:
        raise InvalidError(f"pageSize is not a positive number: pageSize={text[:20]}.")
    return min(int(text[:10]), PAGE_MAX)


def _with_referenced_snapshots(data: bytes) -> orjson.Fragment:
    """Return the metadata with only the snapshots that a branch or tag names. Pure."""
    metadata = orjson.loads(data)
    named = {ref["snapshot-id"] for ref in metadata.get("refs", {}).values()}
    kept = [each for each in metadata.get("snapshots", []) if each["snapshot-id"] in named]
    return orjson.Fragment(orjson.dumps(metadata | {"snapshots": kept}))


def _etag(location: str, refs_only: bool) -> str:
    digest = hashlib.sha256(f"{location} {refs_only}".encode()).hexdigest()[:32]
    return f'"{digest}"'


def _missing_type(parts: list[str]) -> str:
    """Return the type of a 404: clients tell a missing namespace from a missing table by it."""
    if len(parts) <= 2 or parts[0] != "namespaces" or parts[1] != NAMESPACE:
        return "NoSuchNamespaceException"
    return "NoSuchViewException" if parts[2] == "views" else "NoSuchTableException"
