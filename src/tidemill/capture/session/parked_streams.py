"""Streams of paused tables that shapes still follow (unaffected_columns.py): queries to the database, and notice to the
taps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from tidemill.capture.catalog.columns import attributes_of
from tidemill.capture.changes import NEVER
from tidemill.capture.config import CaptureConfig
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.delivery.taps import Taps
from tidemill.capture.postgres.control_connection import Control
from tidemill.capture.session.bootstrap import Prepared
from tidemill.capture.setup.publication import published_tables
from tidemill.capture.tables.table_states import TableStates

AT_ONCE = 200
"""Number of tables per query."""


async def parked_streams(
    control: Control, config: CaptureConfig, desk: TableStates, prepared: Prepared
) -> dict[int, frozenset[str]]:
    """Return the unaffected columns of followed tables, as Following.begin does, for a prepared session."""
    following = desk.following
    rows = [*desk.rows.values()]
    published: dict[int, tuple[int, ...]] = {}
    if following.oids:
        found = await control.ask(lambda wire: published_tables(wire, config.publication, manual=config.manual))
        published = {oid: entry.rows for oid, entry in (found or {}).items()}
    return following.begin(rows, prepared.attributes, published, prepared.slot.confirmed_lsn - 1)


def carry_on(
    taps: Taps,
    converter: TransactionBuilder,
    desk: TableStates,
    prepared: Prepared,
    goes_on: dict[int, frozenset[str]],
    whole: Callable[[int], bool],
) -> None:
    """Report to the taps which relations the session carries, and which paused ones only for shapes of unaffected
    columns.
    """
    left_out = {*prepared.fresh, *prepared.aside}
    flowing = {t.oid for t in prepared.captured if t.name not in left_out and t.parked_lsn == NEVER}
    taps.carried(flowing | goes_on.keys())
    for oid, columns in goes_on.items():
        if not taps.lose(oid, "its table's definition changed", columns):
            desk.following.end(oid)
    for relation in prepared.relations.values():
        converter.learn(relation if whole(relation.oid) else replace(relation, old_rows="key"))
    followed = desk.following.oids
    for oid in followed:
        converter.follow_on(oid)
    for table in prepared.captured:
        if table.parked_lsn < NEVER and table.oid not in followed:
            converter.park(table.oid, table.parked_lsn)


async def describe_copied(control: Control, desk: TableStates, oids: Collection[int]) -> None:
    """Store the descriptions of tables whose first copy is complete. Later changes of these tables are compared with
    them.
    """
    rows = {row.oid: row for row in desk.rows.values()}
    known = [oid for oid in oids if oid in rows]
    for first in range(0, len(known), AT_ONCE):
        some = known[first : first + AT_ONCE]
        for oid, found in (await control.ask(lambda wire, some=some: attributes_of(wire, some))).items():  # type: ignore[misc]
            desk.following.describe(rows[oid], found)
