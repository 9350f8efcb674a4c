"""Checkpoint stage for a small register of consensus: the ids of nodes.

cluster/nodes  ─►  node rows
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from tidemill.base.errors import CorruptError, TidemillError
from tidemill.consensus.api import Consensus
from tidemill.metastore.backup.checkpoint import Unit
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import NODES
from tidemill.metastore.rows.catalogue import NodeRow
from tidemill.topics.membership import NODES_REGISTER

Rows = dict[bytes, bytes]
UNIT_NAME = "nodes"


class RegistersStage:
    """Stage of the checkpoint; implements `metastore.backup.checkpoint.Stage`."""

    name = "registers"

    def __init__(self, consensus: Consensus, metastore: Metastore) -> None:
        self._consensus = consensus
        self._metastore = metastore
        self._rows: Rows = {}
        self._version = 0
        self._next: tuple[Rows, int] | None = None
        self.unreadable: dict[str, TidemillError] = {}

    async def load(self) -> None:
        self._version = 0
        self._rows = {}
        async for keys, values in self._metastore.prefix(NODES.prefix()):
            self._rows.update(zip(keys, values, strict=True))

    async def gather(self) -> dict[str, Unit]:
        """Return the changed rows. A register whose version did not change is not decoded again. Raises
        UnavailableError."""
        self._next, self.unreadable = None, {}
        found = await self._consensus.head(NODES_REGISTER)
        if found is None or self._version == found.seq:
            return {}
        try:
            ids = msgspec.msgpack.decode(found.data, type=dict[str, int])
        except msgspec.DecodeError as error:
            text = f"the register of node ids is unreadable: register={NODES_REGISTER} cause={error}."
            self.unreadable[UNIT_NAME] = CorruptError(text)
            return {}
        rows = dict(NODES.encode(NodeRow(name, node_id=node_id)) for name, node_id in ids.items())
        self._next = rows, found.seq
        return {UNIT_NAME: changed_rows(self._rows, rows)}

    def late_things(self, before: Set[str]) -> set[str]:
        """Return the nodes if their register cannot be read."""
        return set(self.unreadable)

    def mark_written(self, late: Set[str]) -> None:
        if self._next is not None and UNIT_NAME not in late:
            self._rows, self._version = self._next
        self._next = None


def changed_rows(old: Rows, new: Rows) -> Unit:
    """Return one group of rows: changed rows, and deletions of rows that are gone; [] when nothing changed."""
    changed = [(key, value) for key, value in new.items() if old.get(key) != value]
    changed += [(key, b"") for key in old if key not in new]
    return [changed] if changed else []
