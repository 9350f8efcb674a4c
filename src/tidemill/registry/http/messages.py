"""Messages of the interface: parts of the path, parameters and body of a request, bodies of responses and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tidemill.base.errors import TidemillError, UnknownOutcomeError
from tidemill.metastore.rows.registry import Reference, SchemaRow, VersionRow
from tidemill.registry.errors import RegistryError, invalid_schema, operation_not_permitted
from tidemill.registry.limits import SUBJECT_BYTES, shorten
from tidemill.registry.protobuf.parse import encode_descriptor
from tidemill.registry.schema import SubmittedSchema

MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
ACCEPTED_MEDIA_TYPES = ("application/json", "application/vnd.schemaregistry", "application/octet-stream")
"""Accepted media types. A page of another origin may send a form, plain text or no type without a preflight request,
but none of these."""

LAST_VERSION = 2**31 - 1
UNSUPPORTED_FIELDS = ("metadata", "ruleSet", "schemaTagsToAdd", "schemaTagsToRemove")
UNSUPPORTED_CONFIG_FIELDS = (
    "alias", "compatibilityGroup", "defaultMetadata", "overrideMetadata", "defaultRuleSet", "overrideRuleSet",
)  # fmt: skip
BODY_TIMEOUT_S = 20.0
"""Time for the body of a request to arrive. A client that sends half of it occupies a connection and one of its
address's slots."""
LIST_MAX = 1_000
"""Largest number of schemas in one response; `offset` gets more."""


def plain_subject(text: str) -> str:
    """Return the unique name of a subject, which may be written with the default context. Code that authorizes a
    request before it is served names its subject by this function. Pure."""
    return text.removeprefix(":.:")


def bool_param(request: Request, name: str) -> bool:
    return request.query_params.get(name, "false").strip().lower() == "true"


def int_param(request: Request, name: str, default: int) -> int:
    """Return an integer parameter. Raises RegistryError if it is not a number."""
    text = request.query_params.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise RegistryError(400, f"The parameter {name} is not a number: {shorten(text)}") from error


def paginate(request: Request, found: list[Any], most: int = 2**31) -> list[Any]:
    """Return the page of a list that `offset` and `limit` select; a negative limit means no limit."""
    start = max(0, int_param(request, "offset", 0))
    limit = int_param(request, "limit", -1)
    return found[start : start + (min(limit, most) if limit >= 0 else most)]


def parse_subject(text: str) -> str:
    """Return the plain name of a subject. Raises RegistryError(42208)."""
    text = plain_subject(text)
    size = len(text.encode(errors="replace"))
    odd = any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in text)
    if not text.strip() or text.startswith(":") or odd or size > SUBJECT_BYTES or text in ("__GLOBAL", "__EMPTY"):
        raise RegistryError(42208, f"The specified subject {shorten(text)} is not a valid subject.")
    return text


def parse_version(text: str) -> int | None:
    """Return the version number; None for the latest. Raises RegistryError(42202)."""
    if text == "latest" or text == "-1":
        return None
    if text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= LAST_VERSION:
        return int(text)
    raise RegistryError(
        42202,
        f"The specified version {shorten(text)} is not a valid version id. "
        'Allowed values are between [1, 2^31-1] and the string "latest"',
    )


async def read_body(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request. Raises RegistryError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith(ACCEPTED_MEDIA_TYPES):
        raise RegistryError(415, "HTTP 415 Unsupported Media Type")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.body()
    except TimeoutError as error:
        raise RegistryError(408, "The body did not arrive in time.") from error
    except ClientDisconnect as error:
        raise RegistryError(413, "The body is too large, or ended early.") from error
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RegistryError(400, f"The body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RegistryError(422, "The body must be a JSON object.")
    return found


def parse_submitted_schema(body: dict[str, Any], *, normalize: bool = False) -> SubmittedSchema:
    """Return the schema that a body submits. Raises RegistryError."""
    text = body.get("schema")
    if not isinstance(text, str) or not text.strip():
        raise invalid_schema("it is empty")
    for name in UNSUPPORTED_FIELDS:
        if body.get(name):
            raise RegistryError(42210, f"{name} is not supported by this registry: register the schema without it.")
    kind = body.get("schemaType") or "AVRO"
    if not isinstance(kind, str):
        raise RegistryError(422, "schemaType must be a string.")
    return SubmittedSchema(kind.upper(), text, _parse_references(body.get("references") or []), normalize)


def _parse_references(value: Any) -> tuple[Reference, ...]:
    if not isinstance(value, list):
        raise RegistryError(422, "references must be an array.")
    found = []
    for one in value:
        fields = one if isinstance(one, dict) else {}
        name, subject, version = fields.get("name"), fields.get("subject"), fields.get("version")
        if not isinstance(name, str) or not name or not isinstance(subject, str) or type(version) is not int:
            raise RegistryError(422, f"A reference needs a name, a subject and a version: {shorten(one)}")
        found.append(Reference(name, parse_subject(subject), version))
    return tuple(dict.fromkeys(found))


def int_field(body: dict[str, Any], name: str) -> int:
    """Return an optional number of a body; 0 if it is absent, 0 or -1."""
    value = body.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= LAST_VERSION:
        raise RegistryError(422, f"{name} must be a number: {shorten(value)}")
    return max(0, value)


def string_field(body: dict[str, Any], *names: str) -> str:
    """Return the first of these fields that is present; "" if all are absent."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise RegistryError(422, f"{name} must be a string: {shorten(value)}")
            return value
    return ""


def refuse_unsupported(body: dict[str, Any]) -> None:
    for name in UNSUPPORTED_CONFIG_FIELDS:
        if body.get(name):
            raise operation_not_permitted(f"{name} is not supported by this registry.")


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
