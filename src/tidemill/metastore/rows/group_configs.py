"""Configs of consumer groups. They belong to the administrator, so a group without members may have some.

group config    0D | "" | group text
                config

A group without configs has no row.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class GroupConfigRow(msgspec.Struct, frozen=True):
    """Configs of one group. config: name → value, in Kafka's names and notation."""

    group: str
    config: dict[str, str] = {}


GROUP_CONFIGS = Family(0x0D, "group config", GroupConfigRow, Column("group", Kind.TEXT), own_entity=False)
