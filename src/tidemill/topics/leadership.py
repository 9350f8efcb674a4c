"""Who leads which partition: live nodes by lease, partitions by rendezvous hashing over them.

N1  A node's lease says that it is alive and where it is reached; it never makes a write safe. Fencing does.
N2  Equal views give equal leaders; views converge within a poll. Two nodes that disagree fence each other,
    and the loser looks again before it tries anew.
N3  A node name belongs to the process that started last under it: it releases its predecessor's lease.

    lease     node/<name>      info = msgpack NodeInfo
    register  cluster/nodes    msgpack {name: node id}; written at every start, so its sequence grows with every start
    register  cluster/epoch-base    decimal text, written by a restore: the cluster epoch, which names L0 objects, is
                               this (0 if absent) plus the sequence of cluster/nodes
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Conflict, Fenced, TidemillError, Unavailable, Unknown
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.base.marks import Tracker
from tidemill.base.tasks import Tasks, keep, sentence
from tidemill.consensus.api import Consensus, Lease

_log = structlog.get_logger()

LEASE_PREFIX = "node/"
NODES_REGISTER = "cluster/nodes"
EPOCH_BASE_REGISTER = "cluster/epoch-base"
POLL_S = 1.0
EAGER_POLL_GAP_S = 0.05


class NodeInfo(msgspec.Struct, frozen=True):
    host: str = ""
    kafka_port: int = 0
    http_url: str = ""


class Member(msgspec.Struct, frozen=True):
    """A live node. `node_id` is a small integer, the same for a name for ever (Kafka's broker id)."""

    name: str
    host: str
    kafka_port: int
    http_url: str
    node_id: int


class Assignment(Protocol):
    """What a node must know to serve topics."""

    node: str

    def leader_of(self, topic_id: str, partition: int) -> str:
        """Name of the live node that should lead, "" while none is known."""
        ...

    def epoch(self) -> int: ...

    def poke(self) -> None:
        """Something contradicts this view: look again soon."""
        ...

    def on_change(self, callback: Callable[[], None]) -> None: ...


class Alone:
    """The assignment of a process that leads everything: one node without leases, and tests."""

    def __init__(self, node: str = "local", epoch: int = 0) -> None:
        self.node = node
        self._epoch = epoch

    def leader_of(self, topic_id: str, partition: int) -> str:
        return self.node

    def epoch(self) -> int:
        return self._epoch

    def poke(self) -> None: ...

    def on_change(self, callback: Callable[[], None]) -> None: ...


def rendezvous(names: list[str], topic_id: str, partition: int) -> str:
    """The node with the highest hash of (node, partition): a node that leaves moves only its own partitions."""
    if not names:
        return ""
    place = f"/{topic_id}/{partition}".encode()
    return max(names, key=lambda name: (hashlib.blake2b(name.encode() + place, digest_size=8).digest(), name))


class Membership:
    """Keeps this node's lease and a view of the others. `start` before use, `aclose` to leave at once."""

    def __init__(
        self,
        consensus: Consensus,
        node: str,
        info: NodeInfo,
        clock: Clock,
        rand: Rand,
        *,
        ttl_ms: int = LEASE_TTL_MS,
        poll_s: float = POLL_S,
        tracker: Tracker | None = None,
    ) -> None:
        self.node = node
        self._consensus = consensus
        self._info = info
        self._clock = clock
        self._rand = rand
        self._ttl_ms = ttl_ms
        self._poll_s = poll_s
        self._holder = f"{node}-{rand.nonce()}"
        self._lease: Lease | None = None
        self._members: tuple[Member, ...] = ()
        self._ids: dict[str, int] = {}
        self._epoch = 0
        self._leaders: dict[tuple[str, int], str] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._tracker = tracker if tracker is not None else Tracker()
        self._tasks = Tasks(self._unit_broke)
        self.superseded: Fenced | None = None
        """Set once a later process has taken this node's name: this one leads nothing any more and should exit."""

    async def start(self) -> None:
        """Register, take the lease, see the others. Raises Unavailable when consensus does not answer."""
        await self._register()
        await self._acquire()
        await self._look()
        self._keep("membership:lease", self._keep_lease)
        self._keep("membership:view", self._keep_view)

    def _keep(self, mark: str, body: Callable[[], Awaitable[None]]) -> None:
        """Neither may ever stop: without its lease this node is none, without a view it leads what is not its own."""
        self._tasks.spawn(keep(mark, body, tracker=self._tracker, clock=self._clock), name=mark)

    def _unit_broke(self, mark: str, error: BaseException) -> None:
        self._tracker.fail(mark, sentence(error), now_ms=self._clock.now_ms(), parked=True)

    async def aclose(self) -> None:
        """Stop and give the lease up, so that others take over now rather than after its time to live."""
        await self._tasks.aclose()
        if self._lease is not None and self.superseded is None:
            try:
                await self._consensus.release(LEASE_PREFIX + self.node, self._holder, self._lease.term)
            except TidemillError as error:
                _log.info("lease not released; it expires by itself", node=self.node, cause=str(error))
        self._lease = None

    # the view -------------------------------------------------------------------------------------
    def members(self) -> list[Member]:
        """Live nodes by node id, this one included while it holds its lease."""
        return list(self._members)

    def leader_of(self, topic_id: str, partition: int) -> str:
        key = (topic_id, partition)
        leader = self._leaders.get(key)
        if leader is None:
            leader = rendezvous([member.name for member in self._members], topic_id, partition)
            self._leaders[key] = leader
        return leader

    def epoch(self) -> int:
        """The cluster epoch as of this node's start."""
        return self._epoch

    def poke(self) -> None:
        self._wake.set()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change of the set of members."""
        self._callbacks.append(callback)

    # keeping it -----------------------------------------------------------------------------------
    async def _register(self) -> None:
        """A node id for this name, and a new cluster epoch."""
        base = await self._consensus.head(EPOCH_BASE_REGISTER)
        while True:
            found = await self._consensus.head(NODES_REGISTER)
            ids: dict[str, int] = msgspec.msgpack.decode(found.data, type=dict[str, int]) if found else {}
            ids.setdefault(self.node, max(ids.values(), default=0) + 1)
            nonce = self._rand.nonce()
            try:
                version = await self._consensus.cas(
                    NODES_REGISTER, found.seq if found else 0, msgspec.msgpack.encode(ids), nonce
                )
            except (Conflict, Unknown):
                # A lost answer costs an epoch, nothing else: epochs only need to grow.
                continue
            self._ids, self._epoch = ids, version.seq + (int(base.data) if base is not None else 0)
            return

    async def _acquire(self) -> None:
        name, info = LEASE_PREFIX + self.node, msgspec.msgpack.encode(self._info)
        while True:
            try:
                self._lease = await self._consensus.acquire(name, self._holder, self._ttl_ms, info)
                return
            except Conflict as conflict:
                current = conflict.current
                if not isinstance(current, Lease):
                    raise
                _log.info("taking over the lease of an earlier process of this node", node=self.node)
                await self._consensus.release(name, current.holder, current.term)
            except Unknown:
                await asyncio.sleep(EAGER_POLL_GAP_S)

    async def _keep_lease(self) -> None:
        name, info = LEASE_PREFIX + self.node, msgspec.msgpack.encode(self._info)
        while True:
            await asyncio.sleep(self._ttl_ms / 3000 * self._rand.uniform(0.8, 1.0))
            try:
                self._lease = await self._consensus.acquire(name, self._holder, self._ttl_ms, info)
                self._tracker.heal("membership:lease")
            except Conflict as conflict:
                # N3: a later process has this name; two that kept taking it back would serve nobody.
                _log.error("another process runs under this node's name; this one stops", node=self.node)
                self._set_members(())
                self.superseded = Fenced(
                    f"another process took this node's name: node={self.node}.",
                    current=conflict.current,
                    fix="Give every node a name of its own.",
                )
                self._wake.set()
                return
            except (Unavailable, Unknown) as error:
                _log.warning("lease not renewed", node=self.node, cause=str(error))

    async def _keep_view(self) -> None:
        while self.superseded is None:
            self._wake.clear()
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
                await asyncio.sleep(EAGER_POLL_GAP_S)
            except TimeoutError:
                pass
            try:
                await self._look()
                self._tracker.heal("membership:view")
            except (Unavailable, Unknown) as error:
                _log.warning("members not read", node=self.node, cause=str(error))

    async def _look(self) -> None:
        leases = await self._consensus.leases(LEASE_PREFIX)
        live = {lease.name.removeprefix(LEASE_PREFIX): lease.info for lease in leases if lease.live}
        if not live.keys() <= self._ids.keys():
            found = await self._consensus.head(NODES_REGISTER)
            if found is not None:
                self._ids = msgspec.msgpack.decode(found.data, type=dict[str, int])
        members = []
        for name, info in live.items():
            node = msgspec.msgpack.decode(info, type=NodeInfo)
            members.append(Member(name, node.host, node.kafka_port, node.http_url, self._ids.get(name, 0)))
        self._set_members(tuple(sorted(members, key=lambda member: (member.node_id, member.name))))

    def _set_members(self, members: tuple[Member, ...]) -> None:
        if members == self._members or self.superseded is not None:
            return
        self._members = members
        self._leaders.clear()
        for callback in self._callbacks:
            callback()
