"""ApiVersions (18), versions 0 to 4.

The body of the request is not read: nothing in it matters, and a client that speaks a newer version must get an
answer it can read. Any other version is answered with UNSUPPORTED_VERSION in a body of version 0 that still
lists the ranges, and the response header is v0 always (both KIP-511). From version 3 on it names the features that
clients may count on (KIP-584): the consumer protocol (KIP-848) and transactions of version 2 (KIP-890).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Final

from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import API_VERSIONS, Api, Reply, Request
from tidemill.kafka.schema.compiled import Body, encode_response

_ranges: list[Body] = []
FEATURES: Final = {"group.version": 1, "transaction.version": 2}
"""Finalised, from version 3 on (KIP-584): none of them ever changes while a cluster runs."""


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
    body: Body = {"error_code": 0, "api_keys": _ranges}
    body["supported_features"] = [{"name": name, "min_version": 1, "max_version": v} for name, v in FEATURES.items()]
    body["finalized_features_epoch"] = 0
    body["finalized_features"] = [
        {"name": name, "min_version_level": v, "max_version_level": v} for name, v in FEATURES.items()
    ]
    return bytes(encode_response(API_VERSIONS, version, body))


def unsupported_version() -> bytearray:
    return encode_response(API_VERSIONS, 0, {"error_code": errors.UNSUPPORTED_VERSION, "api_keys": _ranges})


API = Api(API_VERSIONS, "api_versions", 0, 4, begin)
