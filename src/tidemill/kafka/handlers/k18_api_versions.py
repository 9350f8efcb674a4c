"""ApiVersions (18), versions 0 to 4.

The body of the request is not read: nothing in it matters, and a client that speaks a newer version must get an
answer it can read. Any other version is answered with UNSUPPORTED_VERSION in a body of version 0 that still
lists the ranges, and the response header is v0 always (both KIP-511). No features are finalised, so clients do
not try transactions of version 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import API_VERSIONS, Api, Reply, Request
from tidemill.kafka.schema.compiled import Body, encode_response

_ranges: list[Body] = []


def advertise(apis: Iterable[Api]) -> None:
    """Called once, when the table of handlers is complete."""
    _ranges[:] = [
        {"api_key": api.key, "min_version": api.lowest_advertised, "max_version": api.max_version}
        for api in sorted(apis, key=lambda api: api.key)
    ]


async def begin(context: Context, request: Request) -> Reply:
    return [_answer(request.version)]


@cache
def _answer(version: int) -> bytes:
    return bytes(encode_response(API_VERSIONS, version, {"error_code": 0, "api_keys": _ranges}))


def unsupported_version() -> bytearray:
    return encode_response(API_VERSIONS, 0, {"error_code": errors.UNSUPPORTED_VERSION, "api_keys": _ranges})


API = Api(API_VERSIONS, "api_versions", 0, 4, begin)
