"""Withdraw REPLICA IDENTITY FULL from a table if another publication would make statements of the application fail
with it.

The other publication may be created or altered at any time, and from then on each UPDATE and DELETE of the table fails
(foreign_publications.py). So the identity that the table had before (publication.py) is restored immediately, in every
state of the table; if that one fails too, the default. A table that flows is paused after that, a table that is
being copied is refused, and both are added again once no publication objects.

A copy reads under a lock that prevents the identity from being altered. So such a copy is refused and its session ends.
The next session restores the identity before it takes any lock, and resumes the other copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog

from tidemill.base.errors import InvalidError
from tidemill.capture.catalog.foreign_publications import Objections
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.setup.publication import (
    IdentityRequiredError,
    read_published_tables,
    restore_identity,
    unpublish_table,
)
from tidemill.metastore.catalogue import CaptureTableRow

log = structlog.get_logger()


class UnwantedFullIdentity(msgspec.Struct, frozen=True):
    """A table or partition that the capture set to FULL, although it must not be."""

    row: CaptureTableRow
    oid: int
    relation: str
    before: str


async def find_unwanted_full_identities(
    wire: PgConnection, config: CaptureConfig, rows: Iterable[CaptureTableRow], objections: Objections
) -> list[UnwantedFullIdentity]:
    """Return the relations that are FULL although a publication objects, of all whose earlier identity was noted
    (publication.py). Empty for a manual capture.
    """
    must_not = {oid for each in objections.values() for oid in each.relations}
    noted = {
        oid: UnwantedFullIdentity(row, oid, relation, before)
        for row in rows
        for oid, (relation, before) in row.identities.items()
        if oid in must_not
    }
    if not noted or config.manual:
        return []
    oids = ", ".join(str(int(oid)) for oid in noted)
    whole = await wire.query(f"SELECT oid FROM pg_class WHERE relreplident = 'f' AND oid IN ({oids}) ORDER BY oid")
    return [noted[int(oid or 0)] for (oid,) in whole]


async def withdraw_identity(wire: PgConnection, config: CaptureConfig, one: UnwantedFullIdentity) -> bool:
    """Restore an identity that causes no failure. Returns False if the table's lock is not available now, or if no
    identity works.
    """
    why = ""
    for identity in dict.fromkeys((one.before, "DEFAULT")):
        try:
            try:
                await restore_identity(wire, one.oid, identity, attempts=1)
            except IdentityRequiredError as needed:
                # While only the capture's own publication requires another identity, the table is removed from that
                # publication.
                if needed.publications != {config.publication} or not await _unpublish(wire, config, one.row):
                    raise
                await restore_identity(wire, one.oid, identity, attempts=1)
        except (SqlError, InvalidError) as error:
            why = str(error)
            continue
        log.warning("a full replica identity is withdrawn", capture=config.name, relation=one.relation, has=identity)
        return True
    log.warning("a full replica identity is not withdrawn yet", capture=config.name, relation=one.relation, cause=why)
    return False


async def _unpublish(wire: PgConnection, config: CaptureConfig, row: CaptureTableRow) -> bool:
    published = await read_published_tables(wire, config.publication) or {}
    return row.oid in published and await unpublish_table(wire, config, published[row.oid].name)
