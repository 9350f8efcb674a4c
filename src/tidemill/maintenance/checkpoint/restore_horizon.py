"""The part of a shard's past that no restore can need any more: an object may be deleted only when every restore from
the newest manifest finds its successor.

    log of the shard ─► checkpoint row (version) ─► committed (seqno) ─► manifest in the bucket (last seqno)

A row changes more often than a manifest is written, so the observed versions and their seqnos are remembered until a
manifest covers them. A restore from an older manifest works for as long as collection waits.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tidemill.metastore.cluster import domain_of
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import SHARDS

SEEN_VERSIONS_MAX = 256


class PersistedShard(NamedTuple):
    """State of a shard in the newest manifest."""

    version: int = 0
    since: int = 0
    upper: int = 0


class RestoreHorizon:
    """Queries about what the newest manifests of the bucket contain."""

    def __init__(self, metastore: Metastore) -> None:
        self._metastore = metastore
        self._seen: dict[str, deque[tuple[int, PersistedShard]]] = {}
        """Shard id → observed states of its row with their seqnos, oldest first."""
        self._held: dict[str, PersistedShard] = {}

    async def persisted_shard(self, name: str, shard_id: str) -> PersistedShard:
        """Return the newest state of the shard that is known to be in the bucket's newest manifest; zeros before
        the first."""
        key = SHARDS.key(name)
        found = await self._metastore.get_row(key, fresh=False)
        seen = self._seen.setdefault(shard_id, deque(maxlen=SEEN_VERSIONS_MAX))
        if found is not None and found.value:
            row = SHARDS.decode(key, found.value)
            if row.shard_id == shard_id and (not seen or seen[-1][0] < found.seqno):
                seen.append((found.seqno, PersistedShard(row.version, row.since, row.upper)))
        covered = await self._persisted_seqno(key)
        while seen and seen[0][0] <= covered:
            self._held[shard_id] = seen.popleft()[1]
        return self._held.get(shard_id, PersistedShard())

    async def mentioned_shard_ids(self) -> set[str]:
        """Return the ids of the shards that committed rows mention."""
        return {row.shard_id for row in await self._metastore.rows(SHARDS, fresh=False)}

    async def committed_seqnos(self) -> list[int]:
        """Return, by domain, the seqno up to which rows are known to be committed. They are persisted once
        `is_persisted_up_to` returns True for it."""
        found = []
        for domain in await self._metastore.domains():
            buffered = domain.state.volatile if isinstance(domain, Domain) else ()
            found.append(buffered[-1].seqno if buffered else _last_persisted_seqno(domain))
        return found

    async def is_persisted_up_to(self, horizon: list[int]) -> bool:
        domains = await self._metastore.domains()
        return all(_last_persisted_seqno(domain) >= seqno for domain, seqno in zip(domains, horizon, strict=True))

    async def is_row_persisted(self, key: bytes, seqno: int) -> bool:
        """Return whether the row of `key`, as written at `seqno`, is in the newest manifest of its domain."""
        return await self._persisted_seqno(key) >= seqno

    def forget_shard(self, shard_id: str) -> None:
        self._seen.pop(shard_id, None)
        self._held.pop(shard_id, None)

    async def _persisted_seqno(self, key: bytes) -> int:
        domains = await self._metastore.domains()
        return _last_persisted_seqno(domains[domain_of(key, len(domains))])


def _last_persisted_seqno(domain: object) -> int:
    """Return the last persisted seqno of a domain. Rows outside a replicated domain (in memory) count as durable."""
    if not isinstance(domain, Domain):
        return 1 << 62
    manifest = domain.state.manifest
    return manifest.last_seqno if manifest is not None else 0
