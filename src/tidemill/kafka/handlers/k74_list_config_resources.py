"""Handler of ListConfigResources (74), versions 0 and 1: topics, brokers and groups that have configs (KIP-1142).

Groups are listed if they have configs of their own. Version 0 requests client metrics alone, which do not exist here,
like all other types.
"""

from __future__ import annotations

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.broker_configs import BROKER, GROUP, TOPIC
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    if request.version == 0:
        return {"error_code": error_codes.NONE, "config_resources": []}
    asked = body["resource_types"]
    found: list[tuple[int, str]] = []
    try:
        if not asked or TOPIC in asked:
            await context.cache.refresh()
            found += sorted((TOPIC, row.name) for row in context.cache.rows())
        if not asked or GROUP in asked:
            found += [(GROUP, name) for name in await context.group_configs.names()]
    except TidemillError as error:
        return error_answer(body, error_codes.code_of(error))
    if not asked or BROKER in asked:
        found += [(BROKER, str(broker.node_id)) for broker in context.brokers()]
    resources = [{"resource_type": kind, "resource_name": name} for kind, name in found]
    return {"error_code": error_codes.NONE, "config_resources": resources}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "config_resources": []}


API = Api(74, "list_config_resources", 0, 1, begin_decoded(handle, error_answer))
