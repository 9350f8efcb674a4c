"""REPLICA IDENTITY FULL is taken back where a publication of somebody else makes it a fault of the application.

The other publication may be made, or altered, at any time, and from then on each UPDATE and DELETE of the table fails
(foreign_publications.py). So the identity that the table had before (publication.py, P5) is given back at once,
whatever the table's state is; where that one would not do either, the default. A table that flows is parked behind
that, one that is copied is refused, and each is taken in again once nobody objects.

    W1  A copy reads under a lock that keeps the identity from being altered. It is refused and its session ended: the
        next one gives the identity back before it takes any lock, and goes on with the other copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog

from tidemill.base.errors import InvalidError
from tidemill.capture.catalog.foreign_publications import Objections
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.setup.publication import IdentityRequiredError, give_back, published_tables, unpublish
from tidemill.metastore.catalogue import CaptureTableRow

log = structlog.get_logger()


class Withheld(msgspec.Struct, frozen=True):
    """A table or partition that has FULL by the capture, though it must not."""

    row: CaptureTableRow
    oid: int
    relation: str
    before: str


async def withheld(
    wire: Wire, config: CaptureConfig, rows: Iterable[CaptureTableRow], objections: Objections
) -> list[Withheld]:
    """Of all that was noted (publication.py, P5); nothing of a capture that is manual."""
    must_not = {oid for each in objections.values() for oid in each.relations}
    noted = {
        oid: Withheld(row, oid, relation, before)
        for row in rows
        for oid, (relation, before) in row.identities.items()
        if oid in must_not
    }
    if not noted or config.manual:
        return []
    oids = ", ".join(str(int(oid)) for oid in noted)
    whole = await wire.query(f"SELECT oid FROM pg_class WHERE relreplident = 'f' AND oid IN ({oids}) ORDER BY oid")
    return [noted[int(oid or 0)] for (oid,) in whole]


async def withdraw(wire: Wire, config: CaptureConfig, one: Withheld) -> bool:
    """Give it the identity that it must have; False when its lock could not be had just now, or none would do."""
    why = ""
    for identity in dict.fromkeys((one.before, "DEFAULT")):
        try:
            try:
                await give_back(wire, one.oid, identity, attempts=1)
            except IdentityRequiredError as needed:
                # While only the capture's own publication asks for another one, the table goes out of that.
                if needed.publications != {config.publication} or not await _unpublished(wire, config, one.row):
                    raise
                await give_back(wire, one.oid, identity, attempts=1)
        except (SqlError, InvalidError) as error:
            why = str(error)
            continue
        log.warning("a whole identity is taken back", capture=config.name, relation=one.relation, has=identity)
        return True
    log.warning("a whole identity is not taken back yet", capture=config.name, relation=one.relation, cause=why)
    return False


async def _unpublished(wire: Wire, config: CaptureConfig, row: CaptureTableRow) -> bool:
    published = await published_tables(wire, config.publication) or {}
    return row.oid in published and await unpublish(wire, config, published[row.oid].name)
