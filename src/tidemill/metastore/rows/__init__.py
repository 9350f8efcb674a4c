"""rows: one module per row family; each draws the layout of its keys and values.

    01 topic      02 topic id   03 capture    04 pipeline                    entity "": the catalogue itself
    05 node       06 name       07 captured table                            entity "" as well
    10 partition  11 extent                                                  entity: topic id
    20 object                                                                entity: object key
    30 group offset                                                          entity: group
    40 shard      41 batch                                                   entity: shard name
    42 binding                                                               entity: source
    50 shape                                                                 entity: shape id
    60 checkpoint                                                            entity: slot

A tag is never given to another family.
"""

from __future__ import annotations

from typing import Any

from tidemill.metastore.rows.bindings import BINDINGS
from tidemill.metastore.rows.captures import CAPTURE_TABLES, CAPTURES
from tidemill.metastore.rows.checkpoints import CHECKPOINTS
from tidemill.metastore.rows.extents import EXTENTS
from tidemill.metastore.rows.family import Family
from tidemill.metastore.rows.groups import GROUP_OFFSETS
from tidemill.metastore.rows.names import NAMES
from tidemill.metastore.rows.nodes import NODES
from tidemill.metastore.rows.objects import OBJECTS
from tidemill.metastore.rows.partitions import PARTITIONS
from tidemill.metastore.rows.pipelines import PIPELINES
from tidemill.metastore.rows.shapes import SHAPES
from tidemill.metastore.rows.shards import SHARD_BATCHES, SHARDS
from tidemill.metastore.rows.topics import TOPIC_IDS, TOPICS

ALL: tuple[Family[Any], ...] = (
    TOPICS,
    TOPIC_IDS,
    CAPTURES,
    CAPTURE_TABLES,
    PIPELINES,
    NODES,
    NAMES,
    PARTITIONS,
    EXTENTS,
    OBJECTS,
    GROUP_OFFSETS,
    SHARDS,
    SHARD_BATCHES,
    BINDINGS,
    SHAPES,
    CHECKPOINTS,
)
BY_TAG: dict[int, Family[Any]] = {family.tag: family for family in ALL}


__all__ = [
    "ALL",
    "BINDINGS",
    "BY_TAG",
    "CAPTURES",
    "CAPTURE_TABLES",
    "CHECKPOINTS",
    "EXTENTS",
    "GROUP_OFFSETS",
    "NAMES",
    "NODES",
    "OBJECTS",
    "PARTITIONS",
    "PIPELINES",
    "SHAPES",
    "SHARDS",
    "SHARD_BATCHES",
    "TOPICS",
    "TOPIC_IDS",
    "Family",
]
