"""Handler of ApiVersions (18), versions 0 to 5.

Only the cluster id and the node id of version 5 are read from the body (KIP-1242): a client that was routed to another
cluster or node gets REBOOTSTRAP_REQUIRED, and one that specifies only one of the two gets INVALID_REQUEST. An
unsupported version is answered with UNSUPPORTED_VERSION in a body of version 0 that still lists the ranges, and the
response header is always v0 (both KIP-511). From version 3 on the answer lists the finalized features (KIP-584): the
consumer protocol (KIP-848) and transactions of version 2 (KIP-890).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import API_VERSIONS, Api, Reply, Request
from tidemill.kafka.schema.codec_compiler import Body, encode_response
from tidemill.kafka.schema.primitives import read_i32, read_string

FIRST_WITH_CLUSTER: Final = 5
NO_NODE: Final = -1

_ranges: list[Body] = []
FEATURES: Final = {"group.version": 1, "transaction.version": 2}
"""Finalized features, from version 3 on (KIP-584). None of them changes while a cluster runs."""


def set_advertised_ranges(apis: Iterable[Api]) -> None:
    """Store the version ranges. Called once, when the table of handlers is complete."""
    _ranges[:] = [
        {"api_key": api.key, "min_version": api.lowest_advertised, "max_version": api.max_version}
        for api in sorted(apis, key=lambda api: api.key)
    ]


async def begin_api_versions(context: Context, request: Request) -> Reply:
    code = _routing_error(context, request) if request.version >= FIRST_WITH_CLUSTER else error_codes.NONE
    return [_answer(request.version, code)]


def _routing_error(context: Context, request: Request) -> int:
    """Return the error code for the cluster and node that the client expects. Raises MalformedFrameError."""
    _, position = read_string(request.view, request.position, compact=True)
    _, position = read_string(request.view, position, compact=True)
    cluster_id, position = read_string(request.view, position, compact=True)
    node_id, _ = read_i32(request.view, position)
    if cluster_id is None and node_id == NO_NODE:
        return error_codes.NONE
    if cluster_id is None or node_id == NO_NODE:
        return error_codes.INVALID_REQUEST
    is_here = (cluster_id, node_id) == (context.settings.cluster_id, context.own.node_id)
    return error_codes.NONE if is_here else error_codes.REBOOTSTRAP_REQUIRED


@cache
def _answer(version: int, code: int) -> bytes:
    """Encode the answer. A response of version 5 has the layout of version 4."""
    body: Body = {"error_code": code, "api_keys": _ranges}
    body["supported_features"] = [{"name": name, "min_version": 1, "max_version": v} for name, v in FEATURES.items()]
    body["finalized_features_epoch"] = 0
    body["finalized_features"] = [
        {"name": name, "min_version_level": v, "max_version_level": v} for name, v in FEATURES.items()
    ]
    return bytes(encode_response(API_VERSIONS, min(version, FIRST_WITH_CLUSTER - 1), body))


def unsupported_version() -> bytearray:
    return encode_response(API_VERSIONS, 0, {"error_code": error_codes.UNSUPPORTED_VERSION, "api_keys": _ranges})


API = Api(API_VERSIONS, "api_versions", 0, FIRST_WITH_CLUSTER, begin_api_versions)
