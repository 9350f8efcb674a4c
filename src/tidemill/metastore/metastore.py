"""The metastore: typed rows over all domains of a cluster. It opens at first use; its creator closes it.

Invariant (read freshness): a `fresh` read contains everything whose write had returned, in any process, before the read
began. Another read is at most STALE_S older, and never older than this process's own writes.

A domain whose handle fails permanently is reopened in the background until that succeeds. A scan of several domains
merges their sorted scans: keys are unique across domains, since each is routed to one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ClosedError,
    FencedError,
    InvalidError,
    UnavailableError,
    UnknownOutcomeError,
    ends_process,
)
from tidemill.base.runtime.tasks import Backoff, Tasks, error_sentence
from tidemill.consensus.api import Consensus
from tidemill.metastore.api import Chunk, DomainRows, VersionedRow
from tidemill.metastore.cluster import Cluster, domain_of, open_cluster, read_secret
from tidemill.metastore.rows.key_encoding import Part, names_entity
from tidemill.metastore.rows.row_family import Family

_log = structlog.get_logger()

STALE_S = 1.0
"""Maximum staleness of a read that is not `fresh`."""

R = TypeVar("R", bound=msgspec.Struct)
OpenDomain = Callable[[Cluster, int], Awaitable[DomainRows]]


class _OpenDomains:
    """The open domains, and when each was last synced."""

    def __init__(self, cluster: Cluster, domains: list[DomainRows]) -> None:
        self.cluster = cluster
        self.domains = domains
        self.synced_s = [float("-inf")] * len(domains)


class Metastore:
    """Typed reads, scans and commits, routed to domains. Reads may raise UnavailableError (retry), ClosedError,
    CorruptError; the first use also InvalidError (the cluster differs) and ClusterReplacedError (the bucket belongs
    to another cluster)."""

    def __init__(
        self,
        consensus: Consensus,
        open_domain: OpenDomain,
        clock: Clock,
        rand: Rand,
        *,
        domains: int = 0,
        before_create: Callable[[], Awaitable[None]] | None = None,
        claim: Callable[[Cluster], Awaitable[None]] | None = None,
    ) -> None:
        """`domains` 0 = as many as the cluster has; a new cluster gets one domain. `before_create` runs before a new
        cluster is created and raises to prevent it. `claim(cluster)` runs before anything is read or written and
        raises if the bucket belongs to another cluster."""
        self._claim = claim
        self._consensus = consensus
        self._open_domain = open_domain
        self._clock = clock
        self._rand = rand
        self._asked = domains
        self._before_create = before_create
        self._opened: _OpenDomains | None = None
        self._kept: dict[bytes, tuple[object, list[Any]]] = {}
        """First byte of a catalogue family's keys → its stamp and rows at the last read."""
        self._secret = b""
        self._opening = asyncio.Lock()
        self._closed = False
        self._tending = Tasks(self._reopening_failed)
        self._failed = ""

    async def start(self) -> None:
        """Open now instead of at first use."""
        await self._open()

    async def cluster(self) -> Cluster:
        return (await self._open()).cluster

    async def secret(self) -> bytes:
        """Return random bytes that only processes of the cluster know. Raises UnavailableError."""
        if not self._secret:
            await self._open()
            self._secret = await read_secret(self._consensus, self._rand)
        return self._secret

    async def domains(self) -> Sequence[DomainRows]:
        return tuple((await self._open()).domains)

    # reading --------------------------------------------------------------------------------------

    async def get(self, family: Family[R], *key: Part, fresh: bool = True) -> R | None:
        row = await self.get_row(family.key(*key), fresh=fresh)
        return family.decode(family.key(*key), row.value) if row is not None and row.value else None

    async def get_row(self, key: bytes, *, fresh: bool = True) -> VersionedRow | None:
        """Return the row of an encoded key with its seqno. A deleted row may be returned with an empty value."""
        opened = await self._open()
        index = domain_of(key, len(opened.domains))
        await self._sync(opened, [index], fresh)
        return await _await_read(opened.domains[index].get_row(key))

    async def get_rows(self, keys: Sequence[bytes], *, fresh: bool = True) -> Sequence[VersionedRow | None]:
        """Return several rows of one entity, as `get_row` does. They are read in this order after one sync, not as one
        snapshot. Raises InvalidError if the keys belong to several domains, or to none."""
        opened = await self._open()
        indexes = {domain_of(key, len(opened.domains)) for key in keys}
        if len(indexes) != 1:
            raise InvalidError(
                f"a read of several rows must stay within one domain: keys={len(keys)} domains={sorted(indexes)}.",
                fix="Read rows of one entity at a time.",
            )
        [index] = indexes
        await self._sync(opened, [index], fresh)
        return [await _await_read(opened.domains[index].get_row(key)) for key in keys]

    async def rows(self, family: Family[R], *leading: Part, fresh: bool = True) -> list[R]:
        """Return all rows of a family whose key begins with these columns, in key order.

        A whole catalogue family is cached: it is read again only after one of its rows was written, and otherwise the
        identical list is returned, so that callers can detect a change with `is`. Callers must not modify it.
        """
        if not leading and not family.own_entity:
            return await self._cached_family_rows(family, fresh)
        found: list[R] = []
        async for keys, values in self.prefix(family.prefix(*leading), fresh=fresh):
            found += [family.decode(key, value) for key, value in zip(keys, values, strict=True)]
        return found

    async def _cached_family_rows(self, family: Family[R], fresh: bool) -> list[R]:
        opened = await self._open()
        await self._sync(opened, [0], fresh)
        catalogue = opened.domains[0]
        first = family.prefix()[:1]
        # The stamp is read before the rows, so a row written during the scan gets a later stamp and is read next time.
        stamp = await _await_read(catalogue.change_stamp(first))
        kept = self._kept.get(first)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        found: list[R] = []
        async for keys, values in merge_scans([catalogue.prefix(family.prefix())]):
            found += [family.decode(key, value) for key, value in zip(keys, values, strict=True)]
        self._kept[first] = stamp, found
        return found

    async def change_stamp(self, key: bytes, *, fresh: bool = True) -> object:
        """Return a change stamp of the rows of this key's family and domain. While it equals an earlier one, rows read
        after that one are still current. A different stamp need not mean a change."""
        opened = await self._open()
        index = domain_of(key, len(opened.domains))
        await self._sync(opened, [index], fresh)
        return await _await_read(opened.domains[index].change_stamp(key[:1]))

    async def prefix(self, prefix: bytes, *, reverse: bool = False, fresh: bool = True) -> AsyncIterator[Chunk]:
        """Yield live rows of all domains whose key begins with `prefix`, in key order. Rows of one domain are one
        snapshot."""
        opened = await self._open()
        indexes: Iterable[int] = range(len(opened.domains))
        if names_entity(prefix):
            indexes = [domain_of(prefix, len(opened.domains))]
        await self._sync(opened, indexes, fresh)
        scans = [opened.domains[index].prefix(prefix, reverse=reverse) for index in indexes]
        async for chunk in merge_scans(scans, reverse=reverse):
            yield chunk

    async def scan(
        self, lower: bytes, upper: bytes | None, *, reverse: bool = False, fresh: bool = True
    ) -> AsyncIterator[Chunk]:
        """Yield live rows with lower ≤ key < upper, of the entity that `lower` names, in key order, from one
        snapshot."""
        opened = await self._open()
        index = domain_of(lower, len(opened.domains))
        await self._sync(opened, [index], fresh)
        async for chunk in opened.domains[index].scan(lower, upper, reverse=reverse):
            yield chunk

    # writing --------------------------------------------------------------------------------------

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int] = {}) -> int:
        """Commit to one domain, as `DomainRows.commit`. Raises InvalidError if the keys belong to several domains."""
        opened = await self._open()
        indexes = {domain_of(key, len(opened.domains)) for key in (*(key for key, _ in rows), *expects)}
        if len(indexes) != 1:
            raise InvalidError(
                f"a batch must stay within one domain: rows={len(rows)} domains={sorted(indexes)}.",
                fix="Write rows of one entity at a time.",
            )
        [index] = indexes
        opened.synced_s[index] = float("-inf")
        try:
            return await opened.domains[index].commit(rows, expects=expects)
        finally:
            # A read concurrent with the commit may have missed it: it must not count as a recent sync.
            opened.synced_s[index] = float("-inf")

    async def flush(self, timeout_s: float | None = None) -> list[int]:
        """Flush the rows of every domain to the bucket; return the highest seqno stored there, by domain."""
        opened = await self._open()
        return [await domain.flush(timeout_s) for domain in opened.domains]

    def trouble(self) -> str:
        """Return one sentence about what does not work here and now; empty while all domains work. Never waits."""
        domains = self._opened.domains if self._opened is not None else ()
        return next((found for domain in domains if (found := domain.trouble())), self._failed)

    async def aclose(self) -> None:
        """Give up leadership of all domains and close them. Consensus and objects stay open."""
        self._closed = True
        await self._tending.aclose()
        async with self._opening:
            opened, self._opened = self._opened, None
        for domain in opened.domains if opened is not None else ():
            await domain.aclose()

    # ----------------------------------------------------------------------------------------------

    async def _open(self) -> _OpenDomains:
        if self._opened is not None:
            return self._opened
        async with self._opening:
            if self._closed:
                raise ClosedError("the metastore is closed.")
            if self._opened is not None:
                return self._opened
            cluster = await open_cluster(self._consensus, self._clock, self._rand, self._asked, self._before_create)
            if self._claim is not None:
                await self._claim(cluster)
            domains: list[DomainRows] = []
            try:
                for index in range(cluster.domains):
                    domains.append(await self._open_domain(cluster, index))
            except BaseException:
                for domain in domains:
                    await domain.aclose()
                raise
            opened = self._opened = _OpenDomains(cluster, domains)
            for index in range(len(domains)):
                self._tending.spawn(self._reopen_when_failed(opened, index), name=f"domain {index}")
            return opened

    async def _reopen_when_failed(self, opened: _OpenDomains, index: int) -> None:
        """Reopen a domain each time its handle fails permanently. Until that succeeds, calls raise the failure."""
        restarts = Backoff()
        while True:
            opened_s = self._clock.monotonic_s()
            failed = opened.domains[index]
            await failed.wait_until_ended()
            _log.error("reopening a failed domain", index=index, cause=failed.trouble())
            await failed.aclose()
            while opened.domains[index] is failed:
                await asyncio.sleep(restarts.pause_s(self._clock.monotonic_s() - opened_s))
                opened_s = self._clock.monotonic_s()
                try:
                    opened.domains[index] = await self._open_domain(opened.cluster, index)
                except Exception as error:  # of any type: the next attempt may succeed
                    if ends_process(error):
                        raise
                    _log.warning("cannot reopen a domain", index=index, cause=error_sentence(error))
            opened.synced_s[index] = float("-inf")

    def _reopening_failed(self, name: str, error: BaseException) -> None:
        """Record that a domain will not be reopened any more, so that `trouble` reports it and the process is
        replaced."""
        self._failed = f"The metastore does not reopen a domain any more: task={name!r} reason={error!r}."

    async def _sync(self, opened: _OpenDomains, indexes: Iterable[int], fresh: bool) -> None:
        for index in indexes:
            now_s = self._clock.boot_s()
            if not fresh and now_s - opened.synced_s[index] < STALE_S:
                continue
            await _await_read(opened.domains[index].sync())
            # The sync guarantees what had committed when it was requested, not when it returned.
            opened.synced_s[index] = max(opened.synced_s[index], now_s)


T = TypeVar("T")


async def _await_read(reading: Awaitable[T]) -> T:
    """Await a read and turn a change of leadership into UnavailableError: the read had no effect and can be retried."""
    try:
        return await reading
    except (FencedError, UnknownOutcomeError) as error:
        raise UnavailableError(
            f"the metastore's leader changed during a read: cause={error.message!r}.", fix="Retry."
        ) from error


async def merge_scans(scans: Sequence[AsyncIterator[Chunk]], *, reverse: bool = False) -> AsyncIterator[Chunk]:
    """Yield chunks of (keys, values) in key order, descending if `reverse` (the scans must be descending then).

    In every step the scan whose current chunk ends first is drained, and the others up to that key: rows are never
    compared one by one.
    """
    if len(scans) == 1:
        async for chunk in scans[0]:
            yield chunk
        return
    heads: dict[int, list[tuple[bytes, bytes]]] = {}
    for index, scan in enumerate(scans):
        await _refill(heads, index, scan)
    while heads:
        first = max if reverse else min
        bound = first(rows[-1][0] for rows in heads.values())
        found: list[tuple[bytes, bytes]] = []
        for index, rows in list(heads.items()):
            count = sum(1 for key, _ in rows if (key >= bound if reverse else key <= bound))
            found += rows[:count]
            del rows[:count]
            if not rows:
                await _refill(heads, index, scans[index])
        found.sort(reverse=reverse)
        yield [key for key, _ in found], [value for _, value in found]


async def _refill(heads: dict[int, list[tuple[bytes, bytes]]], index: int, scan: AsyncIterator[Chunk]) -> None:
    async for keys, values in scan:
        if keys:
            heads[index] = list(zip(keys, values, strict=True))
            return
    heads.pop(index, None)
