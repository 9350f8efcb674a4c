"""The publication of a capture, and the one way in which a table gets into it.

P1  A table is published and given REPLICA IDENTITY FULL in one transaction: published without an identity, its
    UPDATEs and DELETEs would fail. Where identities are taken as they are (capture.NAME.identity) none is altered, and
    a table is published with one that says its key: looked at under the lock, which keeps it so. On PostgreSQL 18
    stored generated columns are published from the start, and a table with virtual ones is never given here
    (tables.refusal): both would make UPDATEs and DELETEs fail, too. So would other publications
    (foreign_publications.py): where one does not fit a whole identity, the table is not given it.
P2  A lock comes first and waits out writers that began before the table was published: rows of theirs would be in
    neither snapshot nor stream (electric #4773). It is at once the strongest one that is needed, ACCESS EXCLUSIVE where
    an identity is altered, else SHARE: whoever has SHARE and waits for more is in a deadlock with each transaction that
    has read the table and is to write it now, and PostgreSQL ends that one at once, without asking how long we wait. A
    fixed order, and ADD before ALTER, keep two configurators from deadlock.
    Of a table that is published already they are waited out, too, when it is copied (`settle`), without a lock, which a
    role that may only read cannot take: an administrator may have published it just now; and where it is copied again,
    a commit that was decoded and confirmed may not be visible yet, and be in neither the copy nor the replayed stream.
    A copy that is gone on with was settled when it began, and what was confirmed since then is set aside (wal_hold.py,
    J1): whoever writes by now comes in the stream.
P3  Whoever waits for a lock makes all who come later wait behind it, for ACCESS EXCLUSIVE readers, too. So each wait is
    short and far from the next: they are delayed for at most LOCK_TIMEOUT_MS in LOCK_PAUSE_S, 5 % of the time.
P4  One table's failure is that table's: it is told, and the others go on.
P5  What identity a table had is written down before it is altered, so that `capture drop` can give it back whatever
    dies in between. Only FULL is ever taken back: another one has been set by somebody else since.
    It is given back only where no publication makes UPDATE and DELETE fail with it (foreign_publications.py).
P7  The rows of the catalogue under which a table is published are recorded, by oid and xmin, before it is copied.
    Whatever is altered of a publication writes a row anew, be it altered back at once: from then on changes may be
    missing from the stream, and the table is copied again (continuity_check.py).
P6  A capture that is manual alters nothing: what P1 would do to a table is what that table is refused with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from tidemill.base.errors import InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.capture.catalog.foreign_publications import Failing, failing, objections
from tidemill.capture.catalog.table_discovery import GENERATED_PUBLISHED, STATEMENTS, TableInfo, keyless
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire, identifier, literal, qualified
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.setup.blockers import Blocker, table_holder, writers
from tidemill.capture.setup.statements import add_table, creation, statements, target, whole_identity, with_generated

log = structlog.get_logger()

LOCK_TIMEOUT_MS = 50
LOCK_PAUSE_S = 1.0
LOCK_ATTEMPTS = 5
"""For the lock of one table while tables are copied; then that table is refused, and tried again later."""
SETTLE_LOOK_S = 0.1
SETTLE_LOOKS = 4
"""For who writes to a published table, in each of the attempts."""
LOCKED = ("55P03", "40P01")
"""lock_not_available, deadlock_detected"""


class TableLockedError(UnavailableError):
    """The locks of one table could not be had in the time allowed. `held_by`: who has them, for a mark."""

    def __init__(self, table: TableInfo, holder: Blocker | None) -> None:
        super().__init__(
            f"the table is locked by others: table={table.name} {holder or 'pid=gone'}.",
            fix=f"{holder.end if holder else 'End that transaction'}; the table is taken in once the lock is free.",
        )
        self.held_by = holder.name if holder is not None else ""


class SetupRequiredError(InvalidError):
    """What a table is captured for is missing, and the capture is not to see to it (P6), or cannot know better."""

    def __init__(self, table: TableInfo, statements: Sequence[str]) -> None:
        some = statements[:STATEMENTS]
        rest = f" and {len(statements) - len(some)} more, see `tidemill doctor`" if len(some) < len(statements) else ""
        super().__init__(
            f"the table is not prepared for its capture, which does not do that itself: table={table.name}"
            f" statements={len(statements)}.",
            fix=f"Run {'; '.join(some)};{rest}",
        )


class Entry(NamedTuple):
    """A table in the publication: how SQL names it, and the rows that say so (P7)."""

    name: str
    rows: tuple[int, ...] = ()


class IdentityConflictError(InvalidError):
    """A publication makes the table's UPDATE and DELETE fail with the identity that it was to be given."""


class IdentityRequiredError(InvalidError):
    """`publications` make UPDATE or DELETE of a relation fail with the identity that was to be given back to it."""

    def __init__(self, relation: str, before: str, found: Sequence[Failing]) -> None:
        self.publications = {each.publication for each in found}
        super().__init__(
            f"an UPDATE or DELETE would fail with the identity from before: relation={relation} identity={before!r}"
            f" publications={','.join(sorted(self.publications))} cause={found[0].cause!r}.",
            fix=f"Take it out of those publications, then run ALTER TABLE {relation} REPLICA IDENTITY {before};",
        )


class Published(msgspec.Struct, frozen=True):
    """`newly`: oids that were not published before; `failed`: by name, what one table's statements ended with."""

    newly: frozenset[int]
    failed: dict[str, TidemillError]


async def published_tables(wire: Wire, publication: str, *, manual: bool = False) -> dict[int, Entry] | None:
    """By oid, what the publication holds; None when there is no such publication.

    Raises InvalidError when it is one that cannot serve (not all operations, or not through the partition root;
    `manual`: without generated columns, which else are seen to).
    """
    generated = "pubgencols = 's'" if wire.server_version >= GENERATED_PUBLISHED else "true"
    rows = await wire.query(
        f"SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot, puballtables, {generated}"
        f" FROM pg_publication WHERE pubname = {literal(publication)}"
    )
    if not rows:
        return None
    if rows[0][:3] != ("t", "t", "f"):
        raise InvalidError(
            f"a publication of this name exists with other options: publication={publication}.",
            fix=f"Run DROP PUBLICATION {identifier(publication)}; "
            + (f"{creation(publication, wire.server_version)};" if manual else "it is created again as needed."),
        )
    if rows[0][3] != "t":
        # Made by an older version, or before the server was upgraded.
        statement = with_generated(publication)
        if manual:
            raise InvalidError(
                f"the publication lacks generated columns, and its capture is manual: publication={publication}.",
                fix=f"Run {statement};",
            )
        await wire.query(statement)
    tables = await wire.query(
        "SELECT c.oid, n.nspname, c.relname, c.relkind, p.oid, p.xmin, r.oid, r.xmin"
        " FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        " JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE p.pubname = {literal(publication)}"
    )
    return {
        int(oid or 0): Entry(
            ("" if kind == "p" else "ONLY ") + qualified(schema or "", table or ""),
            tuple(int(each or 0) for each in by),
        )
        for oid, schema, table, kind, *by in tables
    }


async def unpublished(wire: Wire, publication: str, oids: Collection[int]) -> set[int]:
    """Of these tables, the ones that exist and that the publication lacks, as of one moment. A table that is dropped
    leaves the database and the publication at once, but may do so between two questions."""
    if not oids:
        return set()
    rows = await wire.query(
        f"SELECT c.oid FROM pg_class c WHERE c.oid IN ({', '.join(str(int(oid)) for oid in oids)}) AND NOT EXISTS ("
        "SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        f" WHERE r.prrelid = c.oid AND p.pubname = {literal(publication)})"
    )
    return {int(oid or 0) for (oid,) in rows}


def not_published(publication: str, version: int) -> InvalidError:
    """There is no publication, and the capture is to make none (P6)."""
    return InvalidError(
        f"there is no publication, and its capture is manual: publication={publication}.",
        fix=f"Run {creation(publication, version)}; and then what `tidemill doctor` prints.",
    )


async def create_publication(wire: Wire, publication: str) -> None:
    """Of no table yet. Raises InvalidError without the right to."""
    statement = creation(publication, wire.server_version)
    try:
        await wire.query(statement)
    except InvalidError as error:
        raise InvalidError(
            f"the publication cannot be created: publication={publication} error={error.message}",
            fix="Grant the role CREATE on the database and let it own the captured tables, or have an administrator run"
            f" what `tidemill doctor` prints, first of all: {statement}.",
        ) from error


Identities = dict[int, tuple[str, str]]
"""oid → (how SQL names it, its identity as SQL writes it)"""
Note = Callable[[str, Identities], Awaitable[None]]
"""note(table, the identities of it and its partitions): kept durably (P5). May raise UnknownOutcomeError."""


async def publish(
    wire: Wire,
    config: CaptureConfig,
    tables: Sequence[TableInfo],
    published: Collection[int],
    *,
    attempts: int,
    note: Note,
    settle: Container[int] = (),
    asked: Note | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> Published:
    """Publish each table that is not, with a whole identity (P1 to P5). `settle`: oids of those that are about to be
    copied though they are published already. `asked`: as `note`, of a table that an administrator is to give it (P6).
    `done(n)`: the nth table begins. Raises only when the connection breaks, and what `note` and `asked` raise."""
    newly: set[int] = set()
    failed: dict[str, TidemillError] = {}
    for number, table in enumerate(tables, 1):
        done(number)
        try:
            locked = await _publish_table(wire, config, table, table.oid in published, attempts, note, asked)
            if not locked and table.oid in settle:
                await _settle(wire, table, attempts)
        except UnavailableError as error:
            if not isinstance(error, SqlError | TableLockedError):
                raise
            failed[table.name] = error
        except UnknownOutcomeError:
            raise  # what is written down of it is not known: nothing about PostgreSQL
        except TidemillError as error:
            known = isinstance(error, SetupRequiredError | IdentityConflictError)
            failed[table.name] = error if known else await _refused(wire, config, table, error)
        else:
            newly |= {table.oid} - {*published}
    return Published(frozenset(newly), failed)


async def _refused(wire: Wire, config: CaptureConfig, table: TableInfo, error: TidemillError) -> InvalidError:
    missing = await statements(wire, config, [table])
    run = f"Let the role own {table.name}, or have an administrator run: {'; '.join(missing)};" if missing else ""
    return InvalidError(
        f"the table cannot be published: table={table.name} error={error.message}", fix=run or error.fix
    )


async def unpublish(wire: Wire, config: CaptureConfig, name: str) -> bool:
    """Take a table out (`name` as in Entry); False when its lock could not be had just now."""
    drop = f"ALTER PUBLICATION {identifier(config.publication)} DROP TABLE {name}"
    try:
        await _once(wire, [drop])
    except TidemillError as error:
        if isinstance(error, UnavailableError) and not isinstance(error, SqlError):
            raise
        log.warning("table not taken out of the publication yet", capture=config.name, table=name, cause=str(error))
        return False
    log.info("table is no longer published", capture=config.name, table=name)
    return True


async def _publish_table(
    wire: Wire, config: CaptureConfig, table: TableInfo, published: bool, attempts: int, note: Note, asked: Note | None
) -> bool:
    """True when its lock was had, False when there was nothing to do. Raises SetupRequiredError."""
    name = target(table)
    for attempt in range(1, attempts + 1):
        earlier = await not_full(wire, table.oid) if config.whole else {}
        alter = [whole_identity(name) for name, _ in earlier.values()]
        add = [] if published else [add_table(config.publication, table)]
        if config.manual and (add or alter):
            if earlier and asked is not None:
                await asked(table.name, earlier)
            raise SetupRequiredError(table, await statements(wire, config, [table]) or [*add, *alter])
        if not add and not alter:
            return False
        if earlier:
            await note(table.name, earlier)
        sound = partial(_check_others, wire, config, table) if config.whole else partial(_check_identity, wire, table)
        try:
            mode = "ACCESS EXCLUSIVE" if alter else "SHARE"
            await _once(wire, [f"LOCK TABLE {name} IN {mode} MODE", *add, *alter], sound)
            return True
        except SqlError as error:
            if error.sqlstate not in LOCKED:
                raise
            if attempt == attempts:
                raise TableLockedError(table, await table_holder(wire, table.oid)) from error
            await asyncio.sleep(LOCK_PAUSE_S)
    return False


async def _check_others(wire: Wire, config: CaptureConfig, table: TableInfo) -> None:
    """Under the table's lock (foreign_publications.py, O1). Raises IdentityConflictError."""
    objection = (await objections(wire, config)).get(table.oid)
    if objection is not None and objection.refuses:
        raise IdentityConflictError(objection.reason, fix=objection.fix)


async def _check_identity(wire: Wire, table: TableInfo) -> None:
    """Under the table's lock. Raises SetupRequiredError when an UPDATE or DELETE of it would not say whose row it
    was."""
    missing = (await keyless(wire, [table.oid])).values()
    if missing:
        raise SetupRequiredError(table, [statement for each in missing for statement in each])


async def _settle(wire: Wire, table: TableInfo, attempts: int) -> None:
    """Until nobody who wrote to the table when this began still does (P2). Raises TableLockedError, sooner than a lock
    is given up: nobody waits behind this, and it is tried again as soon as who is named for it is gone (table_adder.py,
    J2)."""
    behind = await writers(wire, table.oid)
    for _ in range(attempts * SETTLE_LOOKS):
        if not behind:
            return
        await asyncio.sleep(SETTLE_LOOK_S)
        behind &= await writers(wire, table.oid)
    if behind:
        raise TableLockedError(table, await table_holder(wire, table.oid))


async def not_full(wire: Wire, oid: int) -> Identities:
    """The table and its partitions that do not log whole old rows (WAL carries the identity of the partition)."""
    rows = await wire.query(
        f"WITH RECURSIVE tree(oid) AS (SELECT {oid}::oid UNION ALL"
        " SELECT i.inhrelid FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent AND p.relkind = 'p'"
        " JOIN tree t ON i.inhparent = t.oid)"
        " SELECT c.oid, n.nspname, c.relname, CASE c.relreplident WHEN 'n' THEN 'NOTHING' WHEN 'i' THEN (SELECT"
        " 'USING INDEX ' || quote_ident(i.relname) FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid"
        " WHERE x.indrelid = c.oid AND x.indisreplident) END"
        " FROM tree JOIN pg_class c USING (oid) JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE c.relreplident <> 'f' ORDER BY 2, 3"
    )
    # An index that is gone leaves the table with what NOTHING says; DEFAULT is the one that works.
    return {
        int(found or 0): (qualified(schema or "", name or ""), before or "DEFAULT")
        for found, schema, name, before in rows
    }


async def give_back(wire: Wire, oid: int, before: str, *, attempts: int) -> str:
    """Set the identity that a table or partition had (P5): how SQL names it now, or "" when there is nothing to give
    back: it is gone, or somebody set another one. Raises IdentityRequiredError, and SqlError when its lock cannot be
    had, or PostgreSQL refuses the identity."""
    for attempt in range(1, attempts + 1):
        rows = await wire.query(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE c.oid = {oid} AND c.relreplident = 'f'"
        )
        if not rows:
            return ""
        name = qualified(rows[0][0] or "", rows[0][1] or "")
        check = partial(_check_needed, wire, oid, name, before)
        await check()  # nobody waits behind this one
        try:
            lock = f"LOCK TABLE ONLY {name} IN ACCESS EXCLUSIVE MODE"
            await _once(wire, [lock, f"ALTER TABLE ONLY {name} REPLICA IDENTITY {before}"], check)
            return name
        except SqlError as error:
            if error.sqlstate not in LOCKED or attempt == attempts:
                raise
            await asyncio.sleep(LOCK_PAUSE_S)
    return ""


async def _check_needed(wire: Wire, oid: int, name: str, before: str) -> None:
    found = await failing(wire, [(oid, before)])
    if found:
        raise IdentityRequiredError(name, before, found)


async def _once(wire: Wire, statements: Sequence[str], sound: Callable[[], Awaitable[None]] | None = None) -> None:
    """One transaction whose every lock is waited for at most LOCK_TIMEOUT_MS (P3). `sound` raises where, after the
    first statement, the others are not to be run."""
    await wire.query("BEGIN")
    try:
        await wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        for number, statement in enumerate(statements):
            if number == 1 and sound is not None:
                await sound()
            await wire.query(statement)
        await wire.query("COMMIT")
    except TidemillError:
        await wire.query("ROLLBACK")
        raise
