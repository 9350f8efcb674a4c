"""The stage of the checkpoint for what small registers of consensus hold: committed group offsets, and node ids.

kafka/group/<group>/offsets  ─►  group offset rows       read before the partitions are: no offset is beyond its
cluster/nodes                ─►  node rows               partition's end in the rows
"""

from __future__ import annotations

import msgspec

from tidemill.consensus.api import Consensus
from tidemill.kafka.group_offsets import Offsets, all_groups
from tidemill.metastore.checkpoint import Unit
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_OFFSETS, NODES
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.metastore.rows.nodes import NodeRow
from tidemill.topics.leadership import NODES_REGISTER

Rows = dict[bytes, bytes]


class RegistersStage:
    """Implements `metastore.checkpoint.Stage`."""

    name = "registers"

    def __init__(self, consensus: Consensus, metastore: Metastore) -> None:
        self._consensus = consensus
        self._metastore = metastore
        self._rows: dict[str, Rows] = {}
        """group → its rows as they stand; "" → the node rows"""
        self._versions: dict[str, int] = {}
        self._next: dict[str, Rows] = {}
        self._next_versions: dict[str, int] = {}

    async def load(self) -> None:
        self._versions.clear()
        self._rows = {"": {}}
        async for keys, values in self._metastore.prefix(GROUP_OFFSETS.prefix()):
            for key, value in zip(keys, values, strict=True):
                self._rows.setdefault(str(GROUP_OFFSETS.decode_key(key)[0]), {})[key] = value
        async for keys, values in self._metastore.prefix(NODES.prefix()):
            self._rows[""].update(zip(keys, values, strict=True))

    async def gather(self) -> list[Unit]:
        """Registers whose version did not change are not looked at again. Raises Unavailable."""
        self._next, self._next_versions = {}, {}
        for group, (seq, offsets) in (await all_groups(self._consensus)).items():
            if self._versions.get(group) != seq:
                self._next[group], self._next_versions[group] = group_rows(group, offsets), seq
        found = await self._consensus.head(NODES_REGISTER)
        if found is not None and self._versions.get("") != found.seq:
            ids = msgspec.msgpack.decode(found.data, type=dict[str, int])
            rows = [NODES.encode(NodeRow(name, node_id=node_id)) for name, node_id in ids.items()]
            self._next[""], self._next_versions[""] = dict(rows), found.seq
        units = [difference(self._rows.get(name, {}), rows) for name, rows in self._next.items()]
        return [unit for unit in units if unit]

    def written(self) -> None:
        self._rows |= self._next
        self._versions |= self._next_versions
        self._next, self._next_versions = {}, {}


def group_rows(group: str, offsets: Offsets) -> Rows:
    return dict(
        GROUP_OFFSETS.encode(GroupOffsetRow(group, topic_id, p, c.offset, c.leader_epoch, c.metadata))
        for topic_id, partitions in offsets.items()
        for p, c in partitions.items()
    )


def difference(old: Rows, new: Rows) -> Unit:
    """One group of rows: what changed, and deletions of what is gone; [] when nothing did."""
    changed = [(key, value) for key, value in new.items() if old.get(key) != value]
    changed += [(key, b"") for key in old if key not in new]
    return [changed] if changed else []
