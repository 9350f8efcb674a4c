"""DescribeConfigs (32), versions 1 to 4: topics (their row over the defaults) and this broker (its settings).

All other resource types: INVALID_REQUEST. Synonyms and documentation are empty.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from tidemill.base.errors import Invalid, TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold, each
from tidemill.kafka.schema.compiled import Body
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.configs import SETTINGS, topic_config

TOPIC: Final = 2
BROKER: Final = 4
_SOURCE_TOPIC: Final = 1
_SOURCE_STATIC_BROKER: Final = 4
_SOURCE_DEFAULT: Final = 5

STRING: Final = 2
INT: Final = 3
_TYPES: Final = {"string": STRING, "int": INT, "long": 5, "list": 7}
"""Kafka's config type numbers (KIP-569)."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    return {"results": await each(body["resources"], partial(_resource, context), context.pace)}


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
    for name, setting in SETTINGS.items():
        if wanted is None or name in wanted:
            own = _honoured(row, name)
            source = _SOURCE_DEFAULT if own is None else _SOURCE_TOPIC
            configs.append(_entry(name, setting.default if own is None else own, source, _TYPES[setting.kind]))
    return {**answer, "configs": configs}


def _honoured(row: TopicRow, name: str) -> str | None:
    """The topic's own value, if it is one that is honoured: a row may be older than the checks."""
    try:
        topic_config({name: row.config[name]})
    except (KeyError, Invalid):
        return None
    return row.config[name]


def failed(body: Body, code: int) -> Body:
    return {
        "results": [
            {
                "error_code": code,
                "error_message": None,
                "resource_type": asked["resource_type"],
                "resource_name": asked["resource_name"],
                "configs": [],
            }
            for asked in body["resources"]
        ]
    }


def _broker(context: Context) -> list[Body]:
    settings = context.settings
    return [
        _entry("auto.create.topics.enable", str(settings.auto_create_topics).lower(), _SOURCE_STATIC_BROKER, 1),
        _entry("broker.id", str(context.own.node_id), _SOURCE_STATIC_BROKER, INT),
        _entry("cluster.id", settings.cluster_id, _SOURCE_STATIC_BROKER, STRING),
        _entry("max.connections", str(settings.connections_max), _SOURCE_STATIC_BROKER, INT),
        _entry("max.connections.per.ip", str(settings.connections_per_address_max), _SOURCE_STATIC_BROKER, INT),
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


API = Api(32, "describe_configs", 1, 4, cold(handle, failed))
