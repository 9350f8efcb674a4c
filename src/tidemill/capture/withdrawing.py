"""REPLICA IDENTITY FULL is taken back where a publication of somebody else makes it a fault of the application.

The other publication may be made, or altered, at any time, and from then on each UPDATE and DELETE of the table fails
(others.py). So the identity that the table had before (publication.py, P5) is given back at once, whatever the table's
state is; where that one would not do either, the default. A table that flows is parked behind that, one that is copied
is refused, and each is taken in again once nobody objects.

    W1  A copy reads under a lock that keeps the identity from being altered. It is refused and its session ended: the
        next one gives the identity back before it takes any lock, and goes on with the other copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from tidemill.base.errors import Invalid
from tidemill.capture.config import CaptureConfig
from tidemill.capture.others import Objections
from tidemill.capture.publication import Needed, give_back, published_tables, unpublish
from tidemill.capture.wire.connection import Wire
from tidemill.capture.wire.errors import SqlError
from tidemill.metastore.catalogue import CaptureTableRow

log = structlog.get_logger()


async def withdraw(
    wire: Wire, config: CaptureConfig, rows: Iterable[CaptureTableRow], objections: Objections
) -> list[str]:
    """The tables that have FULL by the capture, though they must not, and whose lock could not be had just now."""
    must_not = {oid for each in objections.values() for oid in each.relations}
    noted = {
        oid: (row, relation, before)
        for row in rows
        for oid, (relation, before) in row.identities.items()
        if oid in must_not
    }
    if not noted or config.manual:
        return []
    oids = ", ".join(str(int(oid)) for oid in noted)
    whole = await wire.query(f"SELECT oid FROM pg_class WHERE relreplident = 'f' AND oid IN ({oids}) ORDER BY oid")
    left = []
    for (oid,) in whole:
        row, relation, before = noted[int(oid or 0)]
        if not await _withdrawn(wire, config, row, int(oid or 0), relation, before):
            left.append(row.table)
    return left


async def _withdrawn(
    wire: Wire, config: CaptureConfig, row: CaptureTableRow, oid: int, relation: str, before: str
) -> bool:
    why = ""
    for identity in dict.fromkeys((before, "DEFAULT")):
        try:
            try:
                await give_back(wire, oid, identity, attempts=1)
            except Needed as needed:
                # While only the capture's own publication asks for another one, the table goes out of that.
                if needed.publications != {config.publication} or not await _unpublished(wire, config, row):
                    raise
                await give_back(wire, oid, identity, attempts=1)
        except (SqlError, Invalid) as error:
            why = str(error)
            continue
        log.warning("a whole identity is taken back", capture=config.name, relation=relation, has=identity)
        return True
    log.warning("a whole identity is not taken back yet", capture=config.name, relation=relation, cause=why)
    return False


async def _unpublished(wire: Wire, config: CaptureConfig, row: CaptureTableRow) -> bool:
    published = await published_tables(wire, config.publication) or {}
    return row.oid in published and await unpublish(wire, config, published[row.oid])
