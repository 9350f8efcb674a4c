"""Requests of the consumer protocol."""

from __future__ import annotations

import datetime
from typing import Any

from kio.index import load_request_schema

from support.kafka.raw import RawClient, encode, fields

SECOND = datetime.timedelta(seconds=1)

SAME = datetime.timedelta(milliseconds=-1)


def ask(client: RawClient, key: int, version: int, **values: Any) -> Any:
    return client.ask(key, version, encode(fields(load_request_schema(key, version), **values)))


def beat(client: RawClient, group: str, member: str, epoch: int, version: int = 1, **values: Any) -> Any:
    asked: dict[str, Any] = {"rebalance_timeout": SAME, "topic_partitions": None, **values}
    if epoch == 0:
        joins = {"rebalance_timeout": SECOND, "topic_partitions": ()}
        asked = {**asked, **joins, **values}
        if not values.keys() & {"subscribed_topic_names", "subscribed_topic_regex"}:
            asked["subscribed_topic_names"] = ("t",)
    return ask(client, 68, version, group_id=group, member_id=member, member_epoch=epoch, **asked)
