"""rows: the row families; each module draws the layouts of its keys and values.

    01 topic      02 topic id   03 capture    04 pipeline                    entity "": the catalogue itself
    05 node       06 name       07 captured table                            entity ""
    0A user       0B rule       0C quota      0D group config                entity ""
    10 partition  11 extent     12 aborted transaction                       entity: topic id
    13 l1 partition  14 l1 extent  15 l1 term  16 l1 object  17 l1 cleaned   entity: topic id
    30 group offset                31 group      32 group member             entity: group
    33 group partitions                                                      entity: group
    40 shard      41 batch                                                   entity: shard name
    42 binding                                                               entity: source
    60 checkpoint                                                            entity: slot
    70 schema     71 digest     72 version    73 use                         entity ""
    74 referrer   75 registry config          76 registry head               entity ""

A tag is never reassigned to another family. 20 and 50 were assigned once, but no row of them was ever written.
"""

from __future__ import annotations

from typing import Any

from tidemill.metastore.rows.captures import CAPTURE_TABLES, CAPTURES
from tidemill.metastore.rows.catalogue import NAMES, NODES, PIPELINES, TOPIC_IDS, TOPICS
from tidemill.metastore.rows.checkpoints import CHECKPOINTS
from tidemill.metastore.rows.groups import GROUP_CONFIGS, GROUP_MEMBERS, GROUP_OFFSETS, GROUP_PARTITIONS, GROUPS
from tidemill.metastore.rows.l1 import L1_CLEANED, L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS, L1_TERMS
from tidemill.metastore.rows.partitions import ABORTED, EXTENTS, PARTITIONS
from tidemill.metastore.rows.registry import (
    DIGESTS,
    REFERRERS,
    REGISTRY_CONFIGS,
    REGISTRY_HEADS,
    SCHEMAS,
    USES,
    VERSIONS,
)
from tidemill.metastore.rows.row_family import Family
from tidemill.metastore.rows.security import ACLS, QUOTAS, USERS
from tidemill.metastore.rows.shards import BINDINGS, SHARD_BATCHES, SHARDS

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
    ABORTED,
    L1_PARTITIONS,
    L1_EXTENTS,
    L1_TERMS,
    L1_OBJECTS,
    L1_CLEANED,
    GROUP_OFFSETS,
    GROUPS,
    GROUP_MEMBERS,
    GROUP_PARTITIONS,
    SHARDS,
    SHARD_BATCHES,
    BINDINGS,
    CHECKPOINTS,
    USERS,
    ACLS,
    QUOTAS,
    GROUP_CONFIGS,
    SCHEMAS,
    DIGESTS,
    VERSIONS,
    USES,
    REFERRERS,
    REGISTRY_CONFIGS,
    REGISTRY_HEADS,
)
BY_TAG: dict[int, Family[Any]] = {family.tag: family for family in ALL}


__all__ = [
    "ABORTED",
    "ACLS",
    "ALL",
    "BINDINGS",
    "BY_TAG",
    "CAPTURES",
    "CAPTURE_TABLES",
    "CHECKPOINTS",
    "DIGESTS",
    "EXTENTS",
    "GROUPS",
    "GROUP_CONFIGS",
    "GROUP_MEMBERS",
    "GROUP_OFFSETS",
    "GROUP_PARTITIONS",
    "L1_CLEANED",
    "L1_EXTENTS",
    "L1_OBJECTS",
    "L1_PARTITIONS",
    "L1_TERMS",
    "NAMES",
    "NODES",
    "PARTITIONS",
    "PIPELINES",
    "QUOTAS",
    "REFERRERS",
    "REGISTRY_CONFIGS",
    "REGISTRY_HEADS",
    "SCHEMAS",
    "SHARDS",
    "SHARD_BATCHES",
    "TOPICS",
    "TOPIC_IDS",
    "USERS",
    "USES",
    "VERSIONS",
    "Family",
]
