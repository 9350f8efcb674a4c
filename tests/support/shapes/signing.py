"""Signed shape requests."""

from __future__ import annotations

from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.signed_urls import canonical_request, signed_url_params

KEYS = {"old": "the former key, of thirty-two bytes or more", "new": "the key in use, of thirty-two bytes or more"}


def query_of(request: ShapeRequest, expires_s: int, key: str = "new") -> list[tuple[str, str]]:
    return signed_url_params(canonical_request(request), expires_s, key, KEYS[key])
