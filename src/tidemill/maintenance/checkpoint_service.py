"""Work of the leader of domain 0 for the whole cluster: the checkpoint, and the cluster's presence in the bucket.

    while this process leads domain 0:   checkpoint rounds, the cluster manifest, a sign of life at intervals
    before any process serves:           does the bucket belong to this cluster? (`check_bucket`)

Leadership only decides which process tries. Safety comes from the checkpoint's own row and from incarnations. A process
that finds the bucket restored elsewhere ends: its cluster has been replaced.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from tidemill.base.errors import (
    ClosedError,
    CorruptError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.limits import CLUSTER_ALIVE_INTERVAL_S
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus
from tidemill.metastore import cluster_manifest
from tidemill.metastore.backup.checkpoint import Checkpointer
from tidemill.metastore.bucket_claim import check_unclaimed
from tidemill.metastore.cluster import read_before_creation
from tidemill.metastore.cluster_manifest import ClusterManifest, Presence
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.metastore import Metastore
from tidemill.objects.store import ObjectStore

LEADING_WAIT_S = 3600.0
RETRY_PAUSE_S = 1.0
LEAVE_TIMEOUT_S = 2.0

log = structlog.get_logger()


async def check_bucket(consensus: Consensus, objects: ObjectStore) -> None:
    """Check the bucket before anything is created or served.

    Raises InvalidError when consensus is empty and the bucket is not, ClusterReplacedError when they belong to
    different clusters; CorruptError, UnavailableError.
    """
    known = await read_before_creation(consensus, lambda: check_unclaimed(objects))
    if known is None:
        return
    cluster_manifest.check_not_replaced(
        await cluster_manifest.newest_manifest(objects), known[0].uuid, known[0].incarnation
    )


class CheckpointService:
    """Service that runs until cancelled. Raises ClusterReplacedError when the cluster was replaced; transient errors
    are retried."""

    def __init__(
        self,
        metastore: Metastore,
        presence: Presence,
        checkpointer: Checkpointer,
        *,
        alive_interval_s: float = CLUSTER_ALIVE_INTERVAL_S,
    ) -> None:
        self._metastore = metastore
        self._presence = presence
        self._alive_interval_s = alive_interval_s
        self._checkpointer = checkpointer

    def facts(self) -> dict[str, object]:
        """Return plain values for reports."""
        return self._checkpointer.facts()

    async def run(self) -> None:
        while True:
            domains = await self._replicated_domains()  # a failed domain has been replaced by another object
            with contextlib.suppress(UnavailableError):
                await domains[0].wait_until_leading(LEADING_WAIT_S)
                await self._run_while_leading(domains)

    async def _run_while_leading(self, domains: list[Domain]) -> None:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        async with Tasks(fail) as tasks:
            tasks.spawn(self._publish_presence(domains), name="presence")
            tasks.spawn(self._checkpointer.run(), name="checkpoint")
            over = tasks.spawn(domains[0].wait_until_following(), name="following")
            await asyncio.wait([failed, over], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()

    async def withdraw_presence(self) -> None:
        """Withdraw the sign of life at an orderly end, so that a restore need not wait for it to age."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._presence.withdraw()
        except (TidemillError, TimeoutError) as error:
            log.info("the last sign of life stays until it expires", cause=str(error))

    async def _publish_presence(self, domains: list[Domain]) -> None:
        while True:
            pause_s = self._alive_interval_s
            try:
                manifest = await self._cluster_manifest(domains)
                if manifest is not None:
                    await self._presence.publish(manifest)
                else:
                    pause_s = min(pause_s, RETRY_PAUSE_S)
            except (UnavailableError, UnknownOutcomeError, CorruptError, MissingError) as error:
                log.warning("presence not shown in the bucket, trying again", cause=str(error))
                pause_s = min(pause_s, RETRY_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _cluster_manifest(self, domains: list[Domain]) -> ClusterManifest | None:
        """Return the cluster manifest; None while a domain has no name because no process has led it yet."""
        uuids = tuple(domain.domain_uuid for domain in domains)
        if not all(uuids):
            return None
        cluster = await self._metastore.cluster()
        return ClusterManifest(cluster.uuid, cluster.label, cluster.incarnation, uuids, cluster.created_ms)

    async def _replicated_domains(self) -> list[Domain]:
        domains: list[Domain] = []
        for domain in await self._metastore.domains():
            if not isinstance(domain, Domain):
                raise ClosedError("the checkpoint needs replicated domains.")
            domains.append(domain)
        return domains
