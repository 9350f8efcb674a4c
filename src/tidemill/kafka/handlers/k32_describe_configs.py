"""Handler of DescribeConfigs (32), versions 1 to 4: topics and groups (their rows over the defaults) and this broker
(its settings).

The source of a config is the topic or group itself, or the default; a group need not exist. Synonyms (on request)
include the broker's config from which the default comes, as in Kafka. Documentation (v3, on request) describes the
meaning of the config here. An empty list of keys means all of them, as in Kafka. The configs of another broker, and all
other resource types, are INVALID_REQUEST.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.broker_configs import BROKER, DEFAULT_BROKER, GROUP, TOPIC, broker_configs, is_this_broker
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.groups import configs as groups
from tidemill.kafka.groups.coordinator import is_group_name
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.config.configs import SETTINGS, parse_topic_config

SOURCE_TOPIC: Final = 1
SOURCE_STATIC_BROKER: Final = 4
SOURCE_DEFAULT: Final = 5
SOURCE_GROUP: Final = 8

_TYPES: Final = {"boolean": 1, "string": 2, "int": 3, "long": 5, "double": 6, "list": 7}
"""Kafka's config type numbers (KIP-569)."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    return {"results": await map_items(body["resources"], partial(_describe_resource, context, body), context.pace)}


async def _describe_resource(context: Context, body: Body, asked: Body) -> Body:
    kind, name, wanted = asked["resource_type"], asked["resource_name"], asked["configuration_keys"]
    if kind == BROKER:
        if name != DEFAULT_BROKER and not is_this_broker(context, name):
            return _answer(
                asked, error_codes.INVALID_REQUEST, f"Send the request to broker {name}; this is {context.own.node_id}."
            )
        # Defaults of all brokers do not exist: settings are in the files of the nodes.
        entries = [] if name == DEFAULT_BROKER else _broker_entries(context)
    elif kind == TOPIC:
        try:
            row = await context.catalogue.get(TopicRow, name)
        except TidemillError as error:
            return _answer(asked, error_codes.REQUEST_TIMED_OUT, str(error))
        if row is None:
            return _answer(asked, error_codes.UNKNOWN_TOPIC_OR_PARTITION, "No such topic.")
        entries = topic_entries(context, row)
    elif kind == GROUP and is_group_name(name):
        try:
            own = await context.group_configs.own_configs(name)
        except TidemillError as error:
            return _answer(asked, error_codes.REQUEST_TIMED_OUT, str(error))
        entries = _group_entries(context, name, own)
    else:
        return _answer(asked, error_codes.INVALID_REQUEST, "Only topics, groups and brokers have configs; name one.")
    configs = [entry for entry in entries if not wanted or entry["name"] in wanted]
    for entry in configs:
        if not body.get("include_synonyms", False):
            entry["synonyms"] = []
        if not body.get("include_documentation", False):
            entry["documentation"] = None
    return {**_answer(asked, error_codes.NONE, None), "configs": configs}


def topic_entries(context: Context, row: TopicRow) -> list[Body]:
    """Return every config of the topic, including those that it does not set."""
    brokers = {config.name: config.value for config in broker_configs(context)}
    entries = []
    for name, setting in SETTINGS.items():
        own = _valid_value(row, name)
        synonyms = [] if own is None else [{"name": name, "value": own, "source": SOURCE_TOPIC}]
        if setting.broker:
            value = brokers[setting.broker]
            source = SOURCE_DEFAULT if value == setting.default else SOURCE_STATIC_BROKER
            synonyms.append({"name": setting.broker, "value": value, "source": source})
        entry = _entry(name, setting.default if own is None else own, setting.kind, setting.says)
        source = SOURCE_DEFAULT if own is None else SOURCE_TOPIC
        entries.append(entry | {"config_source": source, "read_only": False, "synonyms": synonyms})
    return entries


def _valid_value(row: TopicRow, name: str) -> str | None:
    """Return the topic's own value if it is valid: a row may be older than the checks."""
    try:
        parse_topic_config({name: row.config[name]})
    except (KeyError, InvalidError):
        return None
    return row.config[name]


def _group_entries(context: Context, group: str, own: Mapping[str, str]) -> list[Body]:
    """Return every config of a group: its own values, clamped to the node's bounds, and the node's values."""
    entries = []
    limits, node = context.group_configs.limits(group), context.settings.group_limits
    for name, setting in groups.SETTINGS.items():
        is_own, value, default = name in own, groups.value_of(limits, name), groups.value_of(node, name)
        synonyms = [{"name": name, "value": value, "source": SOURCE_GROUP}] if is_own else []
        source = SOURCE_DEFAULT if default == setting.default else SOURCE_STATIC_BROKER
        synonyms.append({"name": setting.broker, "value": default, "source": source})
        entry = _entry(name, value, setting.kind, setting.says)
        entries.append(entry | {"config_source": synonyms[0]["source"], "read_only": False, "synonyms": synonyms})
    return entries


def _broker_entries(context: Context) -> list[Body]:
    entries = []
    for config in broker_configs(context):
        synonym = {"name": config.name, "value": config.value, "source": SOURCE_STATIC_BROKER}
        says = config.says + (f" Set by {config.key} in tidemill.toml." if config.key else "")
        entries.append(_entry(config.name, config.value, config.kind, says) | {"synonyms": [synonym]})
    return entries


def _entry(name: str, value: str, kind: str, documentation: str) -> Body:
    return {
        "name": name,
        "value": value,
        "read_only": True,
        "config_source": SOURCE_STATIC_BROKER,
        "is_sensitive": False,
        "synonyms": [],
        "config_type": _TYPES[kind],
        "documentation": documentation,
    }


def _answer(asked: Body, code: int, message: str | None) -> Body:
    return {
        "error_code": code,
        "error_message": message,
        "resource_type": asked["resource_type"],
        "resource_name": asked["resource_name"],
        "configs": [],
    }


def error_answer(body: Body, code: int) -> Body:
    return {"results": [_answer(asked, code, None) for asked in body["resources"]]}


API = Api(32, "describe_configs", 1, 4, begin_decoded(handle, error_answer))
