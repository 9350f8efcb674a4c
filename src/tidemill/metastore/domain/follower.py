"""A process that does not lead serves reads from the same files and its own replica of the log.

FO1  The database holds a prefix of the log, whole batches, and only grows: reads are stale by a bound, never torn.
FO2  A batch that a manifest trimmed before it was fed is in that manifest's files: the database goes over to the
     manifest first and is fed after, in one step.
FO3  What reads find has all that the replica held when it was opened; and nothing is open while this process leads,
     when nobody feeds it.
"""

from __future__ import annotations

import asyncio

from tidemill.consensus.state_log.state_log import StateLog
from tidemill.metastore.domain.replicated_manifest import ANY_EPOCH, FollowedManifests, read_manifest
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.domain.state import DomainState, PersistedManifest
from tidemill.metastore.lsm.database import Database

FEED_ROWS = 2_000
"""Fed in one step: a few milliseconds. A domain may have a hundred thousand rows in no manifest."""


class Follower:
    """Opened by the first `advance`, again after `release` or when the domain was renamed."""

    def __init__(self, grounds: DomainContext, log: StateLog[DomainState]) -> None:
        self._grounds = grounds
        self._log = log
        self._lock = asyncio.Lock()
        self._domain_uuid = ""
        self._manifest: PersistedManifest | None = None
        self.database: Database | None = None
        """None while it is released, or while the domain has no uuid: then it has no rows either."""

    async def advance(self, *, reopen: bool = True) -> Database | None:
        """Bring the database to what the replica holds; None while the domain has no uuid, and when it was released
        and `reopen` is False. Raises Unavailable, Corrupt, Missing, Invalid.
        """
        async with self._lock:
            state = self._log.state
            if self.database is not None and state.domain_uuid != self._domain_uuid:
                await self._close()
            if not state.domain_uuid or (self.database is None and not reopen):
                return None
            database = self.database or await self._open(state.domain_uuid)
            fed = self._feed(database)
            while not fed:
                await asyncio.sleep(0)
                fed = self._feed(database)
            self.database = database
            return database

    async def refresh(self) -> None:
        """A file was missing: the leader may have collected it. Go over to the newest manifest."""
        await self._log.catch_up()
        # This process may lead by now, and would have released it (FO3).
        await self.advance(reopen=False)

    async def release(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        database, self.database = self.database, None
        if database is not None:
            await database.aclose()

    async def _open(self, domain_uuid: str) -> Database:
        grounds = self._grounds
        database = await Database.open(
            grounds.files(domain_uuid),
            FollowedManifests(self._log, domain_uuid),
            domain_uuid=domain_uuid,
            epoch=0,
            options=grounds.settings.options,
            clock=grounds.clock,
            rand=grounds.rand,
            follower=True,
        )
        self._domain_uuid, self._manifest = domain_uuid, None
        return database

    def _feed(self, database: Database) -> bool:
        """True when nothing is left to feed. Plain: the log may go on under an await."""
        state = self._log.state
        if state.domain_uuid != self._domain_uuid:
            return True
        if state.manifest is not self._manifest:
            manifest = read_manifest(state, self._domain_uuid, ANY_EPOCH)
            if manifest is not None:
                database.refresh_to(manifest)
            self._manifest = state.manifest
        batches, rest = state.next_batches(database.max_applied_seqno, FEED_ROWS)
        for batch in batches:
            database.apply(batch.seqno, batch.keys, batch.values)
        return not rest
