"""Handlers of /config and /mode: the compatibility level and the mode, of one subject or of all."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tidemill.registry.errors import RegistryError, no_subject_compatibility, no_subject_mode, subject_not_found
from tidemill.registry.http.messages import (
    bool_param,
    json_response,
    parse_subject,
    read_body,
    refuse_unsupported,
    string_field,
)
from tidemill.registry.registry import GLOBAL_SUBJECT, Registry
from tidemill.registry.schema_types import DEFAULT


class SettingsHandlers:
    """Handlers of the settings of a subject, or of all subjects without one in the path."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get_config(self, request: Request, subject: str = "") -> Response:
        subject = _parse_subject(subject)
        row = await self._registry.book.config(subject, fresh=True)
        own = row.compatibility if row is not None else ""
        if subject and not own and not bool_param(request, "defaultToGlobal"):
            raise no_subject_compatibility(subject)
        found: dict[str, Any] = {"compatibilityLevel": own or await self._registry.level(GLOBAL_SUBJECT)}
        if row is not None and row.normalize is not None:
            found["normalize"] = row.normalize
        return json_response(found)

    async def put_config(self, request: Request, subject: str = "") -> Response:
        subject = _parse_subject(subject)
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

    async def delete_config(self, _: Request, subject: str = "") -> Response:
        subject = _parse_subject(subject)
        row = await self._registry.book.config(subject, fresh=True)
        own = row.compatibility if row is not None else ""
        if subject and row is None:
            raise subject_not_found(subject)
        await self._registry.set_level(subject, "", clear=True)
        return json_response({"compatibilityLevel": own or DEFAULT})

    async def get_mode(self, request: Request, subject: str = "") -> Response:
        subject = _parse_subject(subject)
        row = await self._registry.book.config(subject, fresh=True)
        own = row.mode if row is not None else ""
        if subject and not own and not bool_param(request, "defaultToGlobal"):
            raise no_subject_mode(subject)
        return json_response({"mode": own or await self._registry.mode(GLOBAL_SUBJECT)})

    async def put_mode(self, request: Request, subject: str = "") -> Response:
        subject = _parse_subject(subject)
        mode = string_field(await read_body(request), "mode").upper()
        await self._registry.set_mode(subject, mode or "?", force=bool_param(request, "force"))
        return json_response({"mode": mode})

    async def delete_mode(self, _: Request, subject: str = "") -> Response:
        subject = _parse_subject(subject)
        row = await self._registry.book.config(subject, fresh=True)
        own = row.mode if row is not None else ""
        if subject and not own:
            raise subject_not_found(subject)
        await self._registry.set_mode(subject, "")
        return json_response({"mode": own or "READWRITE"})


def _parse_subject(subject: str) -> str:
    return parse_subject(subject) if subject else GLOBAL_SUBJECT
