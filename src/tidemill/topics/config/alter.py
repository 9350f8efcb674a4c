"""Apply changes to the configs of a topic or a group, as requested by clients and the command line. Pure (KIP-339)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from tidemill.base.errors import InvalidError
from tidemill.topics.config.configs import (
    COMPACTION_LAGS,
    SETTINGS,
    Setting,
    check_consistency,
    parse_stored_config,
    parse_topic_config,
    split_list,
)


class AlterOp(IntEnum):
    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class InvalidConfigRequestError(InvalidError):
    """The request is invalid for any config (Kafka INVALID_REQUEST)."""


ConfigChange = tuple[str, int, str | None]
"""One change: (name, op, value)."""


class ConfigKind(NamedTuple):
    """Kind of a resource with configs. `check` raises InvalidError for a config that is unknown or not supported."""

    settings: Mapping[str, Setting]
    check: Callable[[Mapping[str, str]], object]


TOPIC: Final = ConfigKind(SETTINGS, parse_topic_config)


def apply_changes(
    config: Mapping[str, str], changes: Sequence[ConfigChange], kind: ConfigKind = TOPIC, *, typed: bool = False
) -> dict[str, str]:
    """Return the config after all changes.

    Raises InvalidConfigRequestError, or InvalidError for an unsupported config. Configs that are not changed are not
    checked: they may be older than the checks.

    As in Kafka, deleting a config that is not set changes nothing, even if the name is unknown: tools that copy configs
    from another cluster delete those that have their default there.
    `typed`: the names come from a person, and an unknown one raises InvalidError.
    """
    twice = [name for name, count in Counter(name for name, _, _ in changes).items() if count > 1]
    if twice:
        raise InvalidConfigRequestError(f"a config is repeated: name={twice[0]}.")
    new = dict(config)
    for name, op, value in changes:
        if op == AlterOp.DELETE:
            if typed and name not in kind.settings and name not in config:
                kind.check({name: ""})
            new.pop(name, None)
            continue
        if op not in tuple(AlterOp):
            raise InvalidConfigRequestError(
                f"unknown operation: name={name} op={op}.", fix="Use SET, DELETE, APPEND or SUBTRACT."
            )
        if value is None:
            raise InvalidConfigRequestError(
                f"a value is required: name={name}.", fix="Use DELETE to restore the default."
            )
        wanted = value if op == AlterOp.SET else _change_list(name, config, op, value, kind)
        kind.check({name: wanted})
        new[name] = wanted
    if any(name in COMPACTION_LAGS for name, _, _ in changes):
        check_consistency(parse_stored_config(new))
    return new


def _change_list(name: str, config: Mapping[str, str], op: int, value: str, kind: ConfigKind) -> str:
    setting = kind.settings.get(name)
    if setting is None:
        kind.check({name: value})
    if setting is None or setting.kind != "list":
        raise InvalidError(f"only a list config has items: name={name}.", fix="SET the whole value.")
    items = list(split_list(config.get(name, setting.default)))
    asked = split_list(value)
    if op == AlterOp.APPEND:
        items += [item for item in asked if item not in items]
    else:
        items = [item for item in items if item not in asked]
    return ",".join(items)
