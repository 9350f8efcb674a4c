"""Changes of configs, a topic's or a group's: what clients and the command line ask for. Pure (KIP-339)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from tidemill.base.errors import InvalidError
from tidemill.topics.config.configs import (
    LAGS,
    SETTINGS,
    Setting,
    check_together,
    split_list,
    stored_config,
    topic_config,
)


class Op(IntEnum):
    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class InvalidConfigRequestError(InvalidError):
    """INVALID_REQUEST: what is asked for makes no sense, whatever the config."""


Change = tuple[str, int, str | None]
"""(name, op, value)"""


class Kind(NamedTuple):
    """What has configs. `check` raises InvalidError for one that is unknown or not served so."""

    settings: Mapping[str, Setting]
    check: Callable[[Mapping[str, str]], object]


TOPIC: Final = Kind(SETTINGS, topic_config)


def altered(
    config: Mapping[str, str], changes: Sequence[Change], kind: Kind = TOPIC, *, typed: bool = False
) -> dict[str, str]:
    """The config after all changes. Raises InvalidConfigRequestError, or InvalidError for a config that is not served
    so; a config that stands and is not touched is not judged: it may be older than the checks.

    To delete what is not set changes nothing, as in Kafka, also where nobody knows the name: who copies the configs of
    another cluster deletes what has its default there. `typed`: by a person, who is told of an unknown name.
    """
    twice = [name for name, count in Counter(name for name, _, _ in changes).items() if count > 1]
    if twice:
        raise InvalidConfigRequestError(f"a config is named twice: name={twice[0]}.")
    new = dict(config)
    for name, op, value in changes:
        if op == Op.DELETE:
            if typed and name not in kind.settings and name not in config:
                kind.check({name: ""})
            new.pop(name, None)
            continue
        if op not in tuple(Op):
            raise InvalidConfigRequestError(
                f"unknown operation: name={name} op={op}.", fix="Use SET, DELETE, APPEND or SUBTRACT."
            )
        if value is None:
            raise InvalidConfigRequestError(
                f"a value is needed: name={name}.", fix="To go back to the default: DELETE."
            )
        wanted = value if op == Op.SET else _with_items(name, config, op, value, kind)
        kind.check({name: wanted})
        new[name] = wanted
    if any(name in LAGS for name, _, _ in changes):
        check_together(stored_config(new))
    return new


def _with_items(name: str, config: Mapping[str, str], op: int, value: str, kind: Kind) -> str:
    setting = kind.settings.get(name)
    if setting is None:
        kind.check({name: value})
    if setting is None or setting.kind != "list":
        raise InvalidError(f"only lists take items: name={name}.", fix="SET the whole value.")
    items = list(split_list(config.get(name, setting.default)))
    asked = split_list(value)
    if op == Op.APPEND:
        items += [item for item in asked if item not in items]
    else:
        items = [item for item in items if item not in asked]
    return ",".join(items)
