"""Handlers of IncrementalAlterConfigs (44), versions 0 and 1: SET, DELETE, APPEND and SUBTRACT configs of topics and
groups; and of AlterConfigs (33), versions 0 to 2: replaces all configs of one, the others become defaults.

Kafka recommends the first, because AlterConfigs removes the configs that others have set.

All changes of one topic or group are made together or not at all, in one write of its row. This node applies them
before it answers, the others within two seconds. Deleting a config that is not set succeeds, even under an unknown
name. Broker configs are set in the node's file: INVALID_REQUEST, with the key to set there. The configs of a captured
table's topic are fixed (POLICY_VIOLATION), because its writer relies on them. Other resources are INVALID_REQUEST.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.broker_configs import BROKER, GROUP, TOPIC, reject_config_change
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.groups import configs
from tidemill.kafka.groups.coordinator import is_group_name
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.config.alter import TOPIC as TOPIC_CONFIGS
from tidemill.topics.config.alter import AlterOp, ConfigKind, InvalidConfigRequestError, apply_changes

log = structlog.get_logger()


class _FixedConfigsError(InvalidError):
    """The topic is a captured table's."""


Altered = Callable[[Mapping[str, str], Body, ConfigKind], dict[str, str]]
"""Function of the current config, the request's resource and its kind; returns the new config. Raises InvalidError."""


async def alter_incrementally(context: Context, request: Request, body: Body) -> Body:
    def change(config: Mapping[str, str], asked: Body, kind: ConfigKind) -> dict[str, str]:
        return apply_changes(config, [(c["name"], c["config_operation"], c["value"]) for c in asked["configs"]], kind)

    return {"responses": await _alter_all(context, body, change)}


async def replace_all(context: Context, request: Request, body: Body) -> Body:
    def change(_: Mapping[str, str], asked: Body, kind: ConfigKind) -> dict[str, str]:
        return apply_changes({}, [(config["name"], AlterOp.SET, config["value"]) for config in asked["configs"]], kind)

    return {"responses": await _alter_all(context, body, change)}


async def _alter_all(context: Context, body: Body, change: Altered) -> list[Body]:
    named = Counter((asked["resource_type"], asked["resource_name"]) for asked in body["resources"])
    one = partial(_alter, context, named, change, validate_only=body["validate_only"])
    answers = await map_items(body["resources"], one, context.pace)
    if not body["validate_only"] and any(answer["error_code"] == error_codes.NONE for answer in answers):
        try:
            await context.topics.refresh()
        except TidemillError as error:
            log.warning("kafka.configs_followed_later", error=str(error))
    return answers


async def _alter(
    context: Context, named: Counter[tuple[int, str]], change: Altered, asked: Body, *, validate_only: bool
) -> Body:
    kind, name = asked["resource_type"], asked["resource_name"]

    def topic(config: Mapping[str, str]) -> dict[str, str]:
        return change(config, asked, TOPIC_CONFIGS)

    def group(config: Mapping[str, str]) -> dict[str, str]:
        return change(config, asked, configs.GROUP)

    try:
        if named[kind, name] > 1:
            raise InvalidConfigRequestError("the request names the resource twice.")
        if kind == BROKER:
            kept = [c["name"] for c in asked["configs"] if c.get("config_operation") != AlterOp.DELETE]
            reject_config_change(context, name, kept)
        elif kind not in (TOPIC, GROUP) or not name:
            raise InvalidConfigRequestError(
                f"only topics, groups and brokers have configs: resource_type={kind} name={name!r}."
            )
        elif kind == GROUP:
            if not is_group_name(name):
                raise InvalidConfigRequestError(f"the group's name is too long: bytes={len(name.encode())}.")
            await context.group_configs.change(name, group, validate_only=validate_only)
        else:
            code, message = await _topic(context, name, topic, validate_only=validate_only)
            return _answer(asked, code, message)
    except InvalidConfigRequestError as error:
        return _answer(asked, error_codes.INVALID_REQUEST, str(error))
    except MissingError:
        return _answer(asked, error_codes.UNKNOWN_TOPIC_OR_PARTITION, "No such topic.")
    except InvalidError as error:
        return _answer(asked, error_codes.INVALID_CONFIG, str(error))
    except TidemillError as error:
        return _answer(asked, error_codes.REQUEST_TIMED_OUT, str(error))
    return _answer(asked, error_codes.NONE, None)


async def _topic(
    context: Context, name: str, change: Callable[[Mapping[str, str]], dict[str, str]], *, validate_only: bool
) -> tuple[int, str | None]:
    def altered(row: TopicRow) -> TopicRow:
        new = replace(row, config=change(row.config))
        if row.kind == "capture" and new != row:
            raise _FixedConfigsError(f"the configs of a captured table's topic are fixed: topic={name}.")
        return new

    row = await context.catalogue.get(TopicRow, name)
    if row is None:
        raise MissingError(f"no such topic: topic={name}.")
    try:
        altered(row)
        if not validate_only:
            context.cache.add(await context.catalogue.change_topic(name, altered))
    except _FixedConfigsError as error:
        return error_codes.POLICY_VIOLATION, error.message
    return error_codes.NONE, None


def _answer(asked: Body, code: int, message: str | None) -> Body:
    return {
        "error_code": code,
        "error_message": message,
        "resource_type": asked["resource_type"],
        "resource_name": asked["resource_name"],
    }


def _error_answer(body: Body, code: int) -> Body:
    return {"responses": [_answer(asked, code, None) for asked in body["resources"]]}


APIS: Final = (
    Api(33, "alter_configs", 0, 2, begin_decoded(replace_all, _error_answer), barrier=True),
    Api(44, "incremental_alter_configs", 0, 1, begin_decoded(alter_incrementally, _error_answer), barrier=True),
)
