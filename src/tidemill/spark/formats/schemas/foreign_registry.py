"""Schemas from another registry with Confluent's REST interface: GET /schemas/ids/ID, and
GET /subjects/SUBJECT/versions/VERSION for a schema's references.

`format=serialized` asks for a Protobuf schema as its descriptor; registries ignore it for other types. A registry that
does not answer, refuses the credentials or fails makes a table wait; only its own answer that it has no such schema
(404 with error_code 40403) is final.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from tidemill.base.errors import UnavailableError
from tidemill.base.limits import SCHEMA_REFERENCES_MAX
from tidemill.base.runtime.daemon_threads import call_in_daemon_thread
from tidemill.spark.formats.schemas.writer_schema import ReferencedSchema, WriterSchema

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 8 << 20
SCHEMA_NOT_FOUND = 40403
_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirect: it would take the password to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class ForeignRegistry:
    """A registry at a URL, which may have a user and a password. No message names them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        self._url = urlunsplit(parts._replace(netloc=host)).rstrip("/")
        self._headers = {"accept": _ACCEPT}
        if user:
            token = base64.b64encode(unquote(user).encode()).decode()
            self._headers["authorization"] = f"Basic {token}"

    async def load(self, ids: Collection[int]) -> dict[int, WriterSchema]:
        return {one: await self._load_schema(one) for one in ids}

    async def _load_schema(self, schema_id: int) -> WriterSchema:
        found = await self._get(f"/schemas/ids/{schema_id}?format=serialized", may_be_absent=True)
        if found is None:
            return WriterSchema(schema_id)
        references: dict[str, ReferencedSchema] = {}
        await self._add_references(found, references, set())
        kind = str(found.get("schemaType") or "AVRO")
        text, descriptor = self._contents(found, kind)
        return WriterSchema(schema_id, kind, text, descriptor, tuple(references.values()))

    async def _add_references(
        self, schema: Mapping[str, Any], found: dict[str, ReferencedSchema], seen: set[tuple[str, int]]
    ) -> None:
        for reference in schema.get("references") or ():
            name, place = str(reference["name"]), (str(reference["subject"]), int(reference["version"]))
            if place in seen or len(seen) >= SCHEMA_REFERENCES_MAX:
                continue
            seen.add(place)
            subject, version = quote(place[0], safe=""), place[1]
            # A deleted version still describes records that were written with it.
            path = f"/subjects/{subject}/versions/{version}?format=serialized&deleted=true"
            other = await self._get(path)
            assert other is not None
            await self._add_references(other, found, seen)
            found[name] = ReferencedSchema(name, *self._contents(other, str(other.get("schemaType") or "AVRO")))

    def _contents(self, schema: Mapping[str, Any], kind: str) -> tuple[str, bytes]:
        """Return (text, descriptor). Raises UnavailableError for a Protobuf schema that is not a descriptor."""
        text = schema.get("schema")
        if not isinstance(text, str):
            raise self._unusable("its answer has no schema")
        if kind != "PROTOBUF":
            return text, b""
        try:
            return "", base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise self._unusable("it does not serve Protobuf schemas as descriptors (format=serialized)") from error

    async def _get(self, path: str, *, may_be_absent: bool = False) -> Mapping[str, Any] | None:
        """Return the answer; None if the registry says that there is no such schema. Raises UnavailableError."""
        status, body = await call_in_daemon_thread(partial(self._request, path), "registry")
        try:
            found = json.loads(body)
        except ValueError as error:
            raise self._unusable(f"its answer is no JSON: status={status} path={path}") from error
        if not isinstance(found, dict):
            raise self._unusable(f"its answer is no object: status={status} path={path}")
        if status == 200:
            return found
        if status == 404 and found.get("error_code") == SCHEMA_NOT_FOUND and may_be_absent:
            return None
        said = " ".join(str(found.get("message", "")).split())[:200]
        raise self._unusable(f"it refused: status={status} path={path} message=[{said}]")

    def _request(self, path: str) -> tuple[int, bytes]:
        request = urllib.request.Request(f"{self._url}{path}", headers=self._headers)
        try:
            try:
                with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
                    return answer.status, self._body(answer)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, self._body(error)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = " ".join(str(getattr(error, "reason", None) or error).split())[:200]
            raise UnavailableError(
                f"the schema registry does not answer: registry={self._url} error={reason}.",
                fix="Start it, or correct registry= in the pipeline's file.",
            ) from error

    def _body(self, answer: Any) -> bytes:
        found: bytes = answer.read(ANSWER_BYTES_MAX + 1)
        if len(found) > ANSWER_BYTES_MAX:
            raise self._unusable(f"its answer exceeds {ANSWER_BYTES_MAX} bytes")
        return found

    def _unusable(self, reason: str) -> UnavailableError:
        return UnavailableError(
            f"the schema registry cannot be used, {reason}: registry={self._url}.",
            fix="Correct the registry, or registry= in the pipeline's file.",
        )
