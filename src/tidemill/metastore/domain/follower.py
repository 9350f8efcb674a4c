"""Reads of a process that does not lead, from the same files and its own replica of the log.

- Invariant (whole batches): the database holds a prefix of the log in whole batches, and only grows. Reads are stale by
  a bounded time, never torn.
- Invariant (manifest first): a batch that a manifest trimmed before it was applied here is in that manifest's files. So
  the database switches to the manifest first and applies later batches after it, in one step.
- Invariant (no unfed database): reads find everything that the replica held when the database was opened. None is open
  while this process leads, since none would be fed then.
"""

from __future__ import annotations

import asyncio

from tidemill.consensus.state_log.state_log import StateLog
from tidemill.metastore.domain.replicated_manifest import ANY_EPOCH, FollowedManifests, read_manifest
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.domain.state import DomainState, PersistedManifest
from tidemill.metastore.lsm.database import Database, DatabaseContext

APPLY_ROWS = 2_000
"""Rows applied in one step: a few milliseconds. A domain may have a hundred thousand rows that no manifest holds."""


class Follower:
    """The follower's database. Opened by the first `advance`, and again after `release` or when the domain's uuid
    changed."""

    def __init__(self, context: DomainContext, log: StateLog[DomainState]) -> None:
        self._context = context
        self._log = log
        self._lock = asyncio.Lock()
        self._domain_uuid = ""
        self._manifest: PersistedManifest | None = None
        self.database: Database | None = None
        """Closed (None) while released, or while the domain has no uuid and therefore no rows."""

    async def advance(self, *, reopen: bool = True) -> Database | None:
        """Bring the database up to the replica's state; return it. Returns None while the domain has no uuid, or if it
        was released and `reopen` is False. Raises UnavailableError, CorruptError, MissingError, InvalidError.
        """
        async with self._lock:
            state = self._log.state
            if self.database is not None and state.domain_uuid != self._domain_uuid:
                await self._close()
            if not state.domain_uuid or (self.database is None and not reopen):
                return None
            database = self.database or await self._open(state.domain_uuid)
            fed = self._apply_batches(database)
            while not fed:
                await asyncio.sleep(0)
                fed = self._apply_batches(database)
            self.database = database
            return database

    async def refresh(self) -> None:
        """Switch to the newest manifest, after a file was missing: the leader may have deleted it."""
        await self._log.catch_up()
        # This process may lead by now; then the database was released and must stay closed.
        await self.advance(reopen=False)

    async def release(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        database, self.database = self.database, None
        if database is not None:
            await database.aclose()

    async def _open(self, domain_uuid: str) -> Database:
        context = self._context
        database = await Database.open(
            context.files(domain_uuid),
            FollowedManifests(self._log, domain_uuid),
            DatabaseContext(
                domain_uuid=domain_uuid,
                epoch=0,
                options=context.settings.options,
                clock=context.clock,
                rand=context.rand,
                follower=True,
            ),
        )
        self._domain_uuid, self._manifest = domain_uuid, None
        return database

    def _apply_batches(self, database: Database) -> bool:
        """Apply the next batches; return True if none is left. Synchronous: the log may advance during an await."""
        state = self._log.state
        if state.domain_uuid != self._domain_uuid:
            return True
        if state.manifest is not self._manifest:
            manifest = read_manifest(state, self._domain_uuid, ANY_EPOCH)
            if manifest is not None:
                database.refresh_to(manifest)
            self._manifest = state.manifest
        batches, rest = state.next_batches(database.max_applied_seqno, APPLY_ROWS)
        for batch in batches:
            database.apply(batch.seqno, batch.keys, batch.values)
        return not rest
