"""The cluster: its identity, its number of domains, and the domain of each key.

    register  metastore/cluster    msgpack map: format 1, uuid, domains, created_ms, label, incarnation, restoring
    register  metastore/secret     random bytes that only processes of the cluster know

    domain of a key = crc32c(entity) mod domains

`entity` is the bytes between a key's tag and the end of its first text (rows/key_encoding), so all rows of one topic
id, group, shard or object are in one domain. The rows of the catalogue itself have the empty entity, whose
crc32c is 0: they are in domain 0, where one batch can change several of them.

Invariant: the number of domains is written once, with the register, by compare-and-set, and never changes. Otherwise
keys would be routed to a domain that does not have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import crc32c
import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, CorruptError, InvalidError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, Versioned
from tidemill.metastore.rows.key_encoding import entity_of

REGISTER = "metastore/cluster"
SECRET_REGISTER = "metastore/secret"
FORMAT = 1
DOMAINS_MAX = 64
RETRY_PAUSE_S = 0.02


class Cluster(msgspec.Struct, frozen=True):
    """
    uuid         permanent name of this cluster; a restored one has its own
    domains      number of domains; fixed when the register was created
    label        uuid of the cluster it was restored from, "" for none
    incarnation  grows with every restore of the same bucket
    restoring    the restore attempt in progress, "" for none: no other process may open the cluster
    """

    uuid: str
    domains: int
    created_ms: int
    label: str = ""
    incarnation: int = 1
    format: int = FORMAT
    restoring: str = ""


def domain_of(key: bytes, domains: int) -> int:
    """Return the index of the domain that holds `key`. Raises CorruptError for bytes that are not a row's key."""
    return int(crc32c.crc32c(entity_of(key))) % domains


def domain_name(index: int) -> str:
    """Return the name of a domain's log and lease (`metastore/<name>`) in consensus. In the bucket its uuid is used."""
    return str(index)


async def read_cluster(consensus: Consensus) -> tuple[Cluster, int] | None:
    """Return the cluster and the version of its register; None before it was created. Raises CorruptError,
    InvalidError."""
    found = await consensus.head(REGISTER)
    return None if found is None else (_decode(found.data), found.seq)


async def read_before_creation(
    consensus: Consensus, before_create: Callable[[], Awaitable[None]] | None
) -> tuple[Cluster, int] | None:
    """Return the cluster as `read_cluster` does, or None after `before_create` has permitted to create it.

    Raises InvalidError as `before_create`, which finds the bucket claimed, unless that was done for this cluster:
    another node may create it after the register was read.
    """
    found = await read_cluster(consensus)
    if found is not None or before_create is None:
        return found
    try:
        await before_create()
    except InvalidError:
        found = await read_cluster(consensus)
        if found is None:
            raise
    return found


async def open_cluster(
    consensus: Consensus,
    clock: Clock,
    rand: Rand,
    domains: int = 0,
    before_create: Callable[[], Awaitable[None]] | None = None,
) -> Cluster:
    """Return the cluster. The first caller creates it, with `domains` (0: one), unless `before_create` raises.

    Raises InvalidError if `domains` is neither 0 nor the number the cluster was created with, or while it is being
    restored.
    """
    if not 0 <= domains <= DOMAINS_MAX:
        raise InvalidError(f"invalid number of domains: metastore.domains={domains}.", fix=f"Use 1 to {DOMAINS_MAX}.")
    found = await read_before_creation(consensus, before_create)
    if found is None:
        fresh = Cluster(rand.uuid(), domains or 1, clock.now_ms())
        cluster = await write_cluster(consensus, rand, fresh, 0)
    else:
        cluster = found[0]
    if cluster.restoring:
        raise InvalidError(
            f"a restore into this consensus has not finished: attempt={cluster.restoring} from={cluster.label}.",
            fix="Run the same `tidemill restore` again: it continues where it stopped.",
        )
    if domains not in (0, cluster.domains):
        raise InvalidError(
            f"the cluster was created with another number of domains: metastore.domains={domains} "
            f"cluster={cluster.domains}.",
            fix=f"Set metastore.domains = {cluster.domains}, or leave it out; it cannot change.",
        )
    return cluster


async def read_secret(consensus: Consensus, rand: Rand) -> bytes:
    """Return the secret of the cluster. The first caller creates it; a restored cluster has its own."""
    found = await consensus.head(SECRET_REGISTER)
    if found is not None:
        return found.data
    return await write_register(consensus, rand, SECRET_REGISTER, rand.nonce().encode(), 0)


async def write_cluster(consensus: Consensus, rand: Rand, cluster: Cluster, expected_seq: int) -> Cluster:
    """Write the register's next version; return the stored one: `cluster`, or the version another writer wrote
    first."""
    data = msgspec.msgpack.encode(cluster)
    stored = await write_register(consensus, rand, REGISTER, data, expected_seq)
    return cluster if stored == data else _decode(stored)


async def write_register(consensus: Consensus, rand: Rand, register: str, data: bytes, expected_seq: int) -> bytes:
    """Write a register's next version; return the stored one: `data`, or the version another writer wrote first."""
    nonce = rand.nonce()
    while True:
        try:
            await consensus.cas(register, expected_seq, data, nonce)
            return data
        except ConflictError as conflict:
            if isinstance(conflict.current, Versioned):
                return conflict.current.data
            raise
        except UnknownOutcomeError:
            # The next attempt resolves it: either it succeeds, or the conflict returns what is stored, maybe this
            # write.
            await asyncio.sleep(RETRY_PAUSE_S)


def _decode(data: bytes) -> Cluster:
    try:
        cluster = msgspec.msgpack.decode(data, type=Cluster)
    except msgspec.DecodeError as error:
        raise CorruptError(f"the cluster register is unreadable: register={REGISTER} cause={error}.") from error
    if cluster.format != FORMAT:
        raise InvalidError(
            f"the cluster register has an unknown format: register={REGISTER} format={cluster.format} known={FORMAT}.",
            fix="Upgrade tidemill: a newer version wrote it.",
        )
    return cluster
