"""Nodes that ever ran under a name. Leases show which are alive; these rows do not.

node       05 | "" | name text
           host, kafka_port, http_url, node_id, started_ms
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class NodeRow(msgspec.Struct, frozen=True):
    """A node. `node_id` is Kafka's broker id, permanent for a name. `started_ms`: its last start."""

    name: str
    host: str = ""
    kafka_port: int = 0
    http_url: str = ""
    node_id: int = -1
    started_ms: int = 0


NODES = Family(0x05, "node", NodeRow, Column("name", Kind.TEXT), own_entity=False)
