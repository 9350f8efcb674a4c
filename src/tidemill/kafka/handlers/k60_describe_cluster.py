"""Handler of DescribeCluster (60), versions 0 to 2: the nodes, with the answering one as controller.

Every node accepts admin requests, and the client reaches this one. Controllers as endpoint type are INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

BROKERS: Final = 1


async def handle(context: Context, request: Request, body: Body) -> Body:
    brokers = context.brokers()
    answer: Body = {
        "error_code": 0,
        "cluster_id": context.settings.cluster_id,
        "controller_id": context.own.node_id,
        "brokers": [{"broker_id": b.node_id, "host": b.host, "port": b.port, "is_fenced": False} for b in brokers],
    }
    if body.get("endpoint_type", BROKERS) != BROKERS:
        answer |= {
            "error_code": error_codes.INVALID_REQUEST,
            "error_message": "Only broker endpoints are supported.",
            "brokers": [],
        }
    return answer


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "cluster_id": "", "controller_id": -1, "brokers": []}


API = Api(60, "describe_cluster", 0, 2, begin_decoded(handle, error_answer))
