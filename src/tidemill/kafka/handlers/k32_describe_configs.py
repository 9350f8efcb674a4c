"""DescribeConfigs (32), versions 1 to 4: topics (their row over the defaults) and this broker (its settings).

All other resource types: INVALID_REQUEST. Synonyms and documentation are empty.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body
from tidemill.kafka.topic_configs import INT, STRING, TOPIC_CONFIGS
from tidemill.metastore.catalogue import TopicRow

TOPIC: Final = 2
BROKER: Final = 4
_SOURCE_TOPIC: Final = 1
_SOURCE_STATIC_BROKER: Final = 4
_SOURCE_DEFAULT: Final = 5


async def handle(context: Context, request: Request, body: Body) -> Body:
    return {"results": [await _resource(context, resource) for resource in body["resources"]]}


async def _resource(context: Context, asked: Body) -> Body:
    answer: Body = {
        "error_code": 0,
        "error_message": None,
        "resource_type": asked["resource_type"],
        "resource_name": asked["resource_name"],
        "configs": [],
    }
    wanted = asked["configuration_keys"]
    if asked["resource_type"] == BROKER:
        return {**answer, "configs": [c for c in _broker(context) if wanted is None or c["name"] in wanted]}
    if asked["resource_type"] != TOPIC:
        return {**answer, "error_code": errors.INVALID_REQUEST, "error_message": "Only topics and brokers."}
    try:
        row = await context.catalogue.get(TopicRow, asked["resource_name"])
    except TidemillError as error:
        return {**answer, "error_code": errors.REQUEST_TIMED_OUT, "error_message": str(error)}
    if row is None:
        return {**answer, "error_code": errors.UNKNOWN_TOPIC_OR_PARTITION, "error_message": "No such topic."}
    configs = []
    for name, config in TOPIC_CONFIGS.items():
        if wanted is None or name in wanted:
            source = _SOURCE_TOPIC if name in row.config else _SOURCE_DEFAULT
            configs.append(_entry(name, row.config.get(name, config.default), source, config.type))
    return {**answer, "configs": configs}


def _broker(context: Context) -> list[Body]:
    settings = context.settings
    return [
        _entry("auto.create.topics.enable", str(settings.auto_create_topics).lower(), _SOURCE_STATIC_BROKER, 1),
        _entry("broker.id", str(context.own.node_id), _SOURCE_STATIC_BROKER, INT),
        _entry("cluster.id", settings.cluster_id, _SOURCE_STATIC_BROKER, STRING),
        _entry("num.partitions", str(settings.default_partitions), _SOURCE_STATIC_BROKER, INT),
        _entry("socket.request.max.bytes", str(settings.request_bytes_max), _SOURCE_STATIC_BROKER, INT),
    ]


def _entry(name: str, value: str, source: int, config_type: int) -> Body:
    return {
        "name": name,
        "value": value,
        "read_only": source == _SOURCE_STATIC_BROKER,
        "config_source": source,
        "is_sensitive": False,
        "synonyms": [],
        "config_type": config_type,
        "documentation": None,
    }


API = Api(32, "describe_configs", 1, 4, cold(handle))
