"""Paths and bodies of Iceberg's REST catalogue (`rest-catalog-open-api.yaml` of apache/iceberg).

The tables of a cluster are in one namespace. A namespace of several levels is one part of the path, its levels joined
by the unit separator (%1F).
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from starlette.responses import Response

from tidemill.base.address import split_url_path

PREFIX: Final = "/iceberg"
NAMESPACE: Final = "tidemill"
ENDPOINTS: Final = (
    "GET /v1/{prefix}/namespaces",
    "GET /v1/{prefix}/namespaces/{namespace}",
    "HEAD /v1/{prefix}/namespaces/{namespace}",
    "GET /v1/{prefix}/namespaces/{namespace}/tables",
    "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "HEAD /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "POST /v1/{prefix}/namespaces/{namespace}/tables/{table}/metrics",
)
"""Endpoints that a client may use, as templates that clients compare; this catalogue has no prefix. With this list,
Spark and pyiceberg refuse to create a table before they write a file of it."""

ERROR_TYPES: Final = {
    400: "BadRequestException",
    401: "NotAuthorizedException",
    403: "ForbiddenException",
    404: "NoSuchTableException",
    406: "UnsupportedOperationException",
    500: "InternalServerError",
    503: "ServiceUnavailableException",
}


def split_path(raw_path: bytes) -> list[str]:
    """Return the parts of the path below /iceberg/v1; [] for any other path. Pure."""
    parts = split_url_path(raw_path)
    return parts[2:] if parts[:2] == [PREFIX.strip("/"), "v1"] else []


def is_catalogue_path(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def named_table(raw_path: bytes) -> str | None:
    """Return the table that a request is about; None if it is about no single table. Pure."""
    parts = split_path(raw_path)
    return parts[3] if len(parts) >= 4 and parts[0] == "namespaces" and parts[2] == "tables" else None


def error_body(status: int, message: str, kind: str = "") -> bytes:
    """Return Iceberg's error model. `kind`: type of the error, by default that of the status."""
    kind = kind or ERROR_TYPES.get(status, ERROR_TYPES[400 if status < 500 else 500])
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


def error_response(status: int, message: str, kind: str = "") -> Response:
    headers = {"cache-control": "no-store"} | ({"retry-after": "1"} if status == 503 else {})
    return Response(error_body(status, message, kind), status, headers, media_type="application/json")


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), 200, {"cache-control": "no-store"} | (headers or {}), "application/json")
