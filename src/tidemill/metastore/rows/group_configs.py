"""Configs of consumer groups, also of groups that nobody has joined yet: they are an administrator's, not the group's.

group config    0D | "" | group text
                config

A group without configs of its own has no row.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class GroupConfigRow(msgspec.Struct, frozen=True):
    """config: name → value, as Kafka names and writes them."""

    group: str
    config: dict[str, str] = {}


GROUP_CONFIGS = Family(0x0D, "group config", GroupConfigRow, Column("group", Kind.TEXT), own_entity=False)
