"""The stage of the checkpoint for what small registers of consensus hold: committed group offsets, and node ids.

kafka/group/<group>/offsets  ─►  group offset rows       read before the partitions are: no offset is beyond its
cluster/nodes                ─►  node rows               partition's end in the rows
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from tidemill.base.errors import Corrupt, TidemillError
from tidemill.consensus.api import Consensus
from tidemill.metastore.checkpoint import Unit
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_OFFSETS, NODES
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.metastore.rows.nodes import NodeRow
from tidemill.topics.group_offsets import Offsets, all_groups, decode_offsets
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
        self._topics: dict[str, Set[str]] = {}
        """group → ids of the topics in what was gathered last"""
        self.unreadable: dict[str, TidemillError] = {}

    async def load(self) -> None:
        self._versions.clear()
        self._rows = {"": {}}
        async for keys, values in self._metastore.prefix(GROUP_OFFSETS.prefix()):
            for key, value in zip(keys, values, strict=True):
                self._rows.setdefault(str(GROUP_OFFSETS.decode_key(key)[0]), {})[key] = value
        async for keys, values in self._metastore.prefix(NODES.prefix()):
            self._rows[""].update(zip(keys, values, strict=True))

    async def gather(self) -> dict[str, Unit]:
        """By `group <name>`, `group ` for the nodes. Registers whose version did not change are not looked at again.

        Raises Unavailable.
        """
        self._next, self._next_versions = {}, {}
        self._topics, self.unreadable = {}, {}
        for group, (seq, data) in (await all_groups(self._consensus)).items():
            if self._versions.get(group) == seq:
                continue
            try:
                offsets = decode_offsets(data, group)
            except Corrupt as error:
                self.unreadable[thing(group)] = error
                continue
            self._next[group], self._next_versions[group] = group_rows(group, offsets), seq
            self._topics[group] = set(offsets)
        found = await self._consensus.head(NODES_REGISTER)
        if found is not None and self._versions.get("") != found.seq:
            try:
                ids = msgspec.msgpack.decode(found.data, type=dict[str, int])
            except msgspec.DecodeError as error:
                text = f"The register of node ids is unreadable: register={NODES_REGISTER} cause={error}."
                self.unreadable[thing("")] = Corrupt(text)
            else:
                rows = [NODES.encode(NodeRow(name, node_id=node_id)) for name, node_id in ids.items()]
                self._next[""], self._next_versions[""] = dict(rows), found.seq
        return {thing(name): difference(self._rows.get(name, {}), rows) for name, rows in self._next.items()}

    def late(self, before: Set[str]) -> set[str]:
        """Groups whose register is unreadable, or which have offsets of a topic that is late."""
        late = {thing(group) for group, topics in self._topics.items() if not before.isdisjoint(topics)}
        return late | self.unreadable.keys()

    def written(self, late: Set[str]) -> None:
        for name in self._next:
            if thing(name) not in late:
                self._rows[name], self._versions[name] = self._next[name], self._next_versions[name]
        self._next, self._next_versions = {}, {}


def thing(group: str) -> str:
    return f"group {group}"


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
