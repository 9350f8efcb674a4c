"""Bodies of responses: a schema in the form that clients read, an error with its number."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from tidemill.base.errors import TidemillError, UnknownOutcomeError
from tidemill.metastore.rows.registry import SchemaRow, VersionRow
from tidemill.registry.errors import RegistryError
from tidemill.registry.http.requests import MEDIA_TYPE
from tidemill.registry.protobuf.parse import encode_descriptor


def json_response(value: Any, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(orjson.dumps(value), status, headers, media_type=MEDIA_TYPE)


def error_response(error: TidemillError) -> Response:
    """Return the error response. A fault of the store is a 500, which clients of the registry know, and may be
    retried."""
    if isinstance(error, RegistryError):
        return json_response({"error_code": error.code, "message": error.message}, error.status)
    code = 50002 if isinstance(error, UnknownOutcomeError) else 50001
    response = json_response({"error_code": code, "message": str(error)}, 500)
    response.headers["retry-after"] = "1"
    return response


def schema_text(row: SchemaRow, form: str) -> str:
    """Return the text of a schema. With `form` "serialized" it is a Protobuf descriptor in base64, for clients
    without a parser for the text."""
    if row.descriptor and (form == "serialized" or not row.text):
        return encode_descriptor(row.descriptor)
    return row.text


def schema_body(row: SchemaRow, form: str) -> dict[str, Any]:
    found: dict[str, Any] = {"schema": schema_text(row, form)}
    if row.kind != "AVRO":
        found["schemaType"] = row.kind
    if row.references:
        found["references"] = [{"name": r.name, "subject": r.subject, "version": r.version} for r in row.references]
    return found


def version_body(version: VersionRow, row: SchemaRow, form: str) -> dict[str, Any]:
    found = {"subject": version.subject, "version": version.version, "id": version.id, **schema_body(row, form)}
    return {**found, "deleted": True} if version.deleted else found
