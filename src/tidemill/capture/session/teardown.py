"""`capture drop`: everything that a capture made or changed, in PostgreSQL and here, is taken back.

    slot             dropped first: PostgreSQL keeps no WAL for it any more
    publication      dropped before any identity is altered: without it no statement needs one (publication.py, P1).
                     One that was there when the capture began, as a manual one, or that its role may not drop, is left
    identities       each table and partition has the one that was written down before it was given FULL (P5), unless
                     another publication needs FULL, or the role may not alter it: then its statement is handed over
    topics, rows     deleted, the capture's own row last: what dies in between is done again by the next `drop`

Refused, and nothing changed: while a session captures (its advisory lock is held), and while a pipeline reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from tidemill.base.errors import ConflictError, InvalidError, MissingError, TidemillError
from tidemill.capture.catalog.foreign_publications import failing
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire, identifier, literal
from tidemill.capture.setup.blockers import lock_holder
from tidemill.capture.setup.publication import LOCK_ATTEMPTS, give_back
from tidemill.capture.setup.server_checks import ADVISORY_CLASS, lock_key, slot_state, try_lock
from tidemill.capture.tables.table_setup import delete_topics
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, PipelineRow

ENDED_ATTEMPTS = 10
ENDED_POLL_S = 0.2


class TakenBack(msgspec.Struct):
    """`publication_left`: it is not the capture's. `identities`: relation → what it has again. `for_administrator`:
    statement → why it is not the capture's to run. `left`: statement → why it could not be carried out; while there is
    one, the capture's rows stay, and `drop` may be asked again."""

    publication: bool = False
    publication_left: bool = False
    slot: bool = False
    identities: dict[str, str] = {}
    for_administrator: dict[str, str] = {}
    topics: list[str] = []
    left: dict[str, str] = {}


async def readers(catalogue: Catalogue, capture: str) -> list[str]:
    """The pipelines that read tables of the capture, by name."""
    source = f"capture:{capture}:"
    rows = await catalogue.list(PipelineRow)
    return sorted(row.name for row in rows if any(each.startswith(source) for each in row.tables.values()))


async def take_back(config: CaptureConfig, catalogue: Catalogue, *, really: bool = False) -> TakenBack:
    """See above. `really`: though pipelines read it, or its cluster is gone and this is another one.

    Raises MissingError for a capture that never was, ConflictError while it runs, InvalidError while it is read or at
    another cluster, Unavailable.
    """
    tables = await catalogue.tables(config.name)
    row = await catalogue.get(CaptureRow, config.name)
    if not tables and row is None:
        raise MissingError(f"no such capture: capture={config.name}.", fix="See tidemill capture list.")
    read_by = await readers(catalogue, config.name)
    if read_by and not really:
        raise InvalidError(
            f"the capture is in use: capture={config.name} by={','.join(read_by)}.",
            fix="End those pipelines first; their shards keep what they have. To drop it all the same: --yes-really",
        )
    wire = await Wire.connect(config.dsn, purpose="drop", capture=config.name)
    try:
        if not await _ended(lambda: try_lock(wire, config)):
            holder = await lock_holder(wire, ADVISORY_CLASS, lock_key(config))
            raise ConflictError(
                f"the capture runs: capture={config.name} {holder or 'pid=gone'}.",
                fix=f"Take [capture.{config.name}] out of tidemill.toml and start its node again, then drop it.",
            )
        await _check_cluster(wire, config, row, really)
        done = TakenBack()
        await _from_postgres(wire, config, tables, done, given=row is not None and row.given_publication)
        if not done.left:
            # With the lock: a session that waits for it would make anew what is deleted here by its name.
            await _from_here(catalogue, config, tables, done)
    finally:
        await wire.aclose()
    return done


async def _ended(done: Callable[[], Awaitable[bool]]) -> bool:
    """Whether it is done within ENDED_ATTEMPTS: PostgreSQL ends a session a moment after its client has closed it."""
    for attempt in range(ENDED_ATTEMPTS):
        if attempt:
            await asyncio.sleep(ENDED_POLL_S)
        if await done():
            return True
    return False


async def _check_cluster(wire: Wire, config: CaptureConfig, row: CaptureRow | None, really: bool) -> None:
    found = await wire.value("SELECT system_identifier FROM pg_control_system()")
    if row is not None and row.system_id != found and not really:
        raise InvalidError(
            f"this is not the cluster that was captured: capture={config.name} recorded={row.system_id} found={found}.",
            fix="Give the DSN of the one that was, whose slot keeps WAL; where it is gone for good: --yes-really",
        )


async def _from_postgres(
    wire: Wire, config: CaptureConfig, tables: Sequence[CaptureTableRow], done: TakenBack, *, given: bool
) -> None:
    if await slot_state(wire, config.slot) is not None:
        await _ended(lambda: _inactive(wire, config))  # else PostgreSQL refuses, with the pid
        done.slot = await _try(wire, f"SELECT pg_drop_replication_slot({literal(config.slot)})", done)
    if await _publication_taken_back(wire, config, done, given):
        for table in tables:
            for oid, (relation, before) in table.identities.items():
                await _identity_given_back(wire, oid, relation, before, done)
        await _tell_asked(wire, tables, done)


async def _inactive(wire: Wire, config: CaptureConfig) -> bool:
    slot = await slot_state(wire, config.slot)
    return slot is None or slot.active_pid is None


async def _publication_taken_back(wire: Wire, config: CaptureConfig, done: TakenBack, given: bool) -> bool:
    """Whether it is dropped, or there to stay."""
    statement = f"DROP PUBLICATION {identifier(config.publication)}"
    rows = await wire.query(
        "SELECT pg_has_role(pubowner, 'USAGE'), pg_get_userbyid(pubowner) FROM pg_publication"
        f" WHERE pubname = {literal(config.publication)}"
    )
    if not rows:
        return True
    owned, owner = rows[0][0] == "t", rows[0][1]
    if given or not owned:
        done.publication_left = True
        done.for_administrator[statement] = f"the publication was not made by the capture: owner={owner}"
        return True
    done.publication = await _try(wire, statement, done)
    return done.publication


async def _identity_given_back(wire: Wire, oid: int, relation: str, before: str, done: TakenBack) -> None:
    statement = f"ALTER TABLE {relation} REPLICA IDENTITY {before}"
    try:
        name = await give_back(wire, oid, before, attempts=LOCK_ATTEMPTS)
    except InvalidError as error:  # Needed, no right to, an index that is gone: met again at every try
        done.for_administrator[statement] = error.message
    except TidemillError as error:
        done.left[statement] = error.message
    else:
        if name:
            done.identities[name] = before


async def _tell_asked(wire: Wire, tables: Sequence[CaptureTableRow], done: TakenBack) -> None:
    """Of identities that an administrator was asked to set, the way back."""
    asked = {oid: noted for table in tables for oid, noted in table.identities_asked.items()}
    if not asked:
        return
    oids = ", ".join(str(int(oid)) for oid in asked)
    for (oid,) in await wire.query(f"SELECT oid FROM pg_class WHERE relreplident = 'f' AND oid IN ({oids}) ORDER BY 1"):
        relation, before = asked[int(oid or 0)]
        found = await failing(wire, [(int(oid or 0), before)])
        why = f"an administrator gave it FULL for the capture: relation={relation}"
        if found:
            why += f" needed_by={','.join(sorted({each.publication for each in found}))}"
        done.for_administrator[f"ALTER TABLE {relation} REPLICA IDENTITY {before}"] = why


async def _try(wire: Wire, statement: str, done: TakenBack) -> bool:
    try:
        await wire.query(statement)
    except TidemillError as error:
        done.left[statement] = error.message
        return False
    return True


async def _from_here(
    catalogue: Catalogue, config: CaptureConfig, tables: Sequence[CaptureTableRow], done: TakenBack
) -> None:
    for table in tables:
        if table.topic:
            await delete_topics(catalogue, table.topic)
            done.topics.append(table.topic)
        await catalogue.change_table(config.name, table.table, lambda _: None)
    if await catalogue.get(CaptureRow, config.name) is not None:
        await catalogue.delete(CaptureRow, config.name)
