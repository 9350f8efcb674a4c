"""Streams of paused tables that shapes still follow (unaffected_columns.py): queries to the database, and notice to the
taps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from tidemill.capture.catalog.columns import read_attributes
from tidemill.capture.changes import LSN_NEVER
from tidemill.capture.config import CaptureConfig
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.delivery.consumers import TapRegistry
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.session.set_up_context import PreparedSession
from tidemill.capture.setup.publication import read_published_tables
from tidemill.capture.tables.table_states import TableStates

TABLES_PER_QUERY = 200
"""Number of tables per query."""


async def find_continuing_streams(
    control: ControlConnection, config: CaptureConfig, states: TableStates, prepared: PreparedSession
) -> dict[int, frozenset[str]]:
    """Return the unaffected columns of followed tables for a prepared session, see `FollowedTables.begin_session`."""
    following = states.following
    rows = [*states.rows.values()]
    published: dict[int, tuple[int, ...]] = {}
    if following.oids:
        found = await control.run(lambda wire: read_published_tables(wire, config.publication, manual=config.manual))
        published = {oid: entry.rows for oid, entry in (found or {}).items()}
    return following.begin_session(rows, prepared.attributes, published, prepared.slot.confirmed_lsn - 1)


def set_carried_relations(
    taps: TapRegistry,
    converter: TransactionBuilder,
    states: TableStates,
    prepared: PreparedSession,
    goes_on: dict[int, frozenset[str]],
    whole: Callable[[int], bool],
) -> None:
    """Report to the taps which relations the session carries, and which paused ones only for shapes of unaffected
    columns.
    """
    left_out = {*prepared.fresh, *prepared.side_topics}
    flowing = {t.oid for t in prepared.captured if t.name not in left_out and t.paused_lsn == LSN_NEVER}
    taps.set_carried_relations(flowing | goes_on.keys())
    for oid, columns in goes_on.items():
        if not taps.lose_relation(oid, "its table's definition changed", columns):
            states.following.end(oid)
    for relation in prepared.relations.values():
        converter.set_relation(relation if whole(relation.oid) else replace(relation, old_rows="key"))
    followed = states.following.oids
    for oid in followed:
        converter.continue_for_followers(oid)
    for table in prepared.captured:
        if table.paused_lsn < LSN_NEVER and table.oid not in followed:
            converter.pause_relation(table.oid, table.paused_lsn)


async def store_descriptions(control: ControlConnection, states: TableStates, oids: Collection[int]) -> None:
    """Store the descriptions of tables whose first copy is complete. Later changes of these tables are compared with
    them.
    """
    rows = {row.oid: row for row in states.rows.values()}
    known = [oid for oid in oids if oid in rows]
    for first in range(0, len(known), TABLES_PER_QUERY):
        some = known[first : first + TABLES_PER_QUERY]
        for oid, found in (await control.run(lambda wire, some=some: read_attributes(wire, some))).items():  # type: ignore[misc]
            states.following.store_baseline(rows[oid], found)
