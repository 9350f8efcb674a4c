"""Which of its tables a pipeline may keep: a shard has one source, whoever writes it.

Two writers of one shard are one writer as long as they are fed by the same (any number of identical drivers). Fed by
different things, each passes over what the other has written. So a table is refused, and told, where

    another pipeline's row in the catalogue keeps the shard from something else
    this pipeline's own row says that the shard, which is there, was fed by something else: the file was changed

and is looked at again: it is free when the other pipeline's row goes or changes, or the shard is dropped.

CL1  A row names no table that was refused, but what its shard was fed by before.
CL2  Before a table begins, its row was put and the others were read after it: of two that begin at once, whoever put
     its row last sees the other's and leaves the table to it; both may, and then one is first the next time.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.registry import is_created
from tidemill.spark.stores import Stores

DERIVED = "derived"


class TableOwnership:
    """`refused`: {table: a sentence}; of none before `looked`. `look` is called by one thread, `may_keep` by any."""

    def __init__(self, wanted: PipelineRow) -> None:
        self.wanted = wanted
        self.refused: dict[str, str] = {}
        self.looked = threading.Event()

    def may_keep(self, table: str, ending: threading.Event, pause_s: float = 0.2) -> bool:
        """Wait until the table is this pipeline's; False when the end came first."""
        while not self.looked.is_set() or table in self.refused:
            if ending.wait(pause_s):
                return False
        return True

    def look(self, portal: BlockingPortal, stores: Stores) -> None:
        """Put this pipeline's row where it is not there, and say what is refused. Raises as storage does."""
        catalogue = stores.catalogue
        if self.looked.is_set() and not self.refused:
            if portal.call(catalogue.get(PipelineRow, self.wanted.name)) is None:
                portal.call(catalogue.put(self.wanted))
            return
        begun = self.wanted.tables.keys() - self.refused.keys() if self.looked.is_set() else set[str]()
        rows = portal.call(catalogue.list(PipelineRow))
        own = next((row for row in rows if row.name == self.wanted.name), None)
        changed = sorted(self.wanted.tables.items() - own.tables.items()) if own is not None else []
        shards = {table for table, _ in changed if portal.call(is_created(stores.consensus, table))}
        found = refused(self.wanted, own, rows, shards, begun)
        portal.call(catalogue.put(granted(self.wanted, own, found, shards)))  # an equal row is left alone
        rows = portal.call(catalogue.list(PipelineRow))
        late = refused(self.wanted, None, rows, shards, begun)
        if late.keys() - found.keys():
            found |= late
            portal.call(catalogue.put(granted(self.wanted, own, found, shards)))
        self.refused = found
        self.looked.set()


def refused(
    wanted: PipelineRow,
    own: PipelineRow | None,
    rows: Sequence[PipelineRow],
    shards: Collection[str],
    begun: Collection[str] = (),
) -> dict[str, str]:
    """{table: why it may not be kept}. `own`: the row that an earlier life of this pipeline left; `shards`: those that
    are there, of tables that it says otherwise; `begun`: tables that this process keeps already."""
    out = {}
    for table in wanted.tables.keys() - begun:
        other = next((row for row in rows if row.name != wanted.name and _differs(wanted, row, table)), None)
        before = own.tables.get(table) if own is not None else None
        if other is not None:
            out[table] = (
                f"another pipeline keeps this table from something else: table={table} pipeline={other.name}"
                f" from={other.tables[table]} here={wanted.tables[table]}. Name it otherwise; or take it out of the"
                f" file of {other.name} and restart that: tidemill pipeline restart {other.name}; if it was stopped"
                f" for good: tidemill pipeline delete {other.name}."
            )
        elif before is not None and table in shards and wanted.tables[table] not in (before, DERIVED):
            out[table] = (
                f"the table was made from something else: table={table} before={before} now={wanted.tables[table]}."
                f" Name it otherwise, or have it made anew: tidemill shard drop {table}."
            )
    return out


def granted(
    wanted: PipelineRow, own: PipelineRow | None, refused: Mapping[str, str], shards: Collection[str]
) -> PipelineRow:
    """The row of a pipeline that may not keep what is refused (CL1)."""
    tables = {}
    for table, fed_by in wanted.tables.items():
        before = own.tables.get(table, fed_by) if own is not None and table in shards else fed_by
        if table not in refused:
            tables[table] = fed_by
        elif before != fed_by:
            tables[table] = before
    derived = {table: inputs for table, inputs in wanted.derived.items() if table not in refused}
    return replace(wanted, tables=tables, derived=derived)


def _differs(wanted: PipelineRow, other: PipelineRow, table: str) -> bool:
    """Is the table kept there too, from something else? Of derived ones what their inputs are tells."""
    if table not in other.tables:
        return False
    if wanted.tables[table] != other.tables[table]:
        return True
    here, there = wanted.derived.get(table), other.derived.get(table)
    return here is not None and there is not None and here != there
