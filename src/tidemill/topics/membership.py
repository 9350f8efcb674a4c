"""Membership of the cluster: live nodes hold leases, and partitions are assigned by rendezvous hashing over them.

- Leases are hints: a node's lease shows that it is alive and gives its addresses. It never makes a write safe; fencing
  does.
- Convergence: equal views give equal leaders. Views converge as soon as a joining or leaving node has announced itself,
  or a lease ran out: every node reads the leases again when the next one would expire. Two nodes that disagree fence
  each other. The loser reads again soon, even if it has nothing to write (`leader_check`).
- Unique names: a node name belongs to the process that started last under it; that process releases its predecessor's
  lease.
- Grace after an outage of consensus (`node_lease`): the members stay unchanged for a moment, in which live nodes renew.
  Otherwise a node would see only itself, or no node, and all partitions and groups would move, and move back.

Stored in consensus:

    lease     node/<name>      info = msgpack NodeInfo
    log       cluster/changes  one record for each node that joined or left; waited for, never read, truncated
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
from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, FencedError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.base.runtime.tasks import Tasks, error_sentence, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus, LogHead
from tidemill.consensus.leader_election import LeaseRequest
from tidemill.topics.node_lease import NodeLease

_log = structlog.get_logger()

LEASE_PREFIX = "node/"
NODES_REGISTER = "cluster/nodes"
CHANGES_LOG = "cluster/changes"
EPOCH_BASE_REGISTER = "cluster/epoch-base"
POLL_S = 1.0
CHANGES_WAIT_S = 30.0
ANNOUNCE_TRIES = 5
EAGER_POLL_GAP_S = 0.05
LATE_SHARE = 5 / 12
"""Share of its time to live after which a lease without renewal is late. Its node renews it within a third."""


class NodeInfo(msgspec.Struct, frozen=True):
    """Addresses of a node, and the captures that it may run.

    `listeners`: Kafka addresses in addition to (host, kafka_port), by name.
    """

    host: str = ""
    kafka_port: int = 0
    http_url: str = ""
    listeners: dict[str, tuple[str, int]] = {}
    captures: tuple[str, ...] = ()


class Member(msgspec.Struct, frozen=True):
    """A live node. `node_id` is a small integer, the same for a name forever (Kafka's broker id)."""

    name: str
    host: str
    kafka_port: int
    http_url: str
    node_id: int
    listeners: dict[str, tuple[str, int]] = {}
    captures: tuple[str, ...] = ()


class Assignment(Protocol):
    """Assignment of partitions to nodes, as seen by one node."""

    node: str

    def leader_of(self, topic_id: str, partition: int) -> str:
        """Return the name of the live node that should lead, or "" while none is known."""
        ...

    def epoch(self) -> int: ...

    def lease_lapses(self) -> int:
        """Return a number that changes when this node's lease expires, by its own clock, or is renewed after that.

        Another node may have led this node's partitions since.
        """
        ...

    def request_refresh(self) -> None:
        """Request a fresh view soon, because something contradicts this one."""
        ...

    def on_change(self, callback: Callable[[], None]) -> None: ...


class SingleNodeAssignment:
    """Assignment of a process that leads every partition: a single node without leases, and tests."""

    def __init__(self, node: str = "local", epoch: int = 0) -> None:
        self.node = node
        self._epoch = epoch

    def leader_of(self, topic_id: str, partition: int) -> str:
        return self.node

    def epoch(self) -> int:
        return self._epoch

    def lease_lapses(self) -> int:
        return 0

    def request_refresh(self) -> None: ...

    def on_change(self, callback: Callable[[], None]) -> None: ...


def rendezvous_leader(names: list[str], topic_id: str, partition: int) -> str:
    """Return the node with the highest hash of (node, partition): a node that leaves moves only its own partitions."""
    if not names:
        return ""
    place = f"/{topic_id}/{partition}".encode()
    return max(names, key=lambda name: (hashlib.blake2b(name.encode() + place, digest_size=8).digest(), name))


class Membership:
    """Renews this node's lease and maintains a view of the others.

    Call `start` before use, `leave_cluster` and `aclose` at the end.
    """

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
        tracker: StatusTracker | None = None,
    ) -> None:
        self.node = node
        self._consensus = consensus
        self._info = info
        self._clock = clock
        self._rand = rand
        self._ttl_s = ttl_ms / 1000
        self._poll_s = poll_s
        request = LeaseRequest(LEASE_PREFIX + node, f"{node}-{rand.nonce()}", msgspec.msgpack.encode(info), ttl_ms)
        self._lease = NodeLease(consensus, request, clock)
        self._members: tuple[Member, ...] = ()
        self._ids: dict[str, int] = {}
        self._late_names: tuple[str, ...] = ()
        self._epoch = 0
        self._leaders: dict[tuple[str, int], str] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._runs_out_s = 0.0
        """Time until the next lease expires, as of the last view."""
        self._left = False
        self._tracker = tracker if tracker is not None else StatusTracker()
        self._tasks = Tasks(self._on_task_failed)
        self.superseded: FencedError | None = None
        """Error set once a later process has taken this node's name: this one leads nothing any more and should
        exit."""

    async def start(self, *, join: bool = True) -> None:
        """Register, read the view, and `join`. Raises UnavailableError: call it again."""
        await self._register()
        await self._refresh_view()
        if join:
            await self.join()
        self._run_forever("membership:view", self._keep_view)
        self._run_forever("membership:changes", self._watch_changes)

    async def join(self) -> None:
        """Acquire the lease: from then on this node is assigned partitions, and clients are sent to it.

        Raises UnavailableError: call it again.
        """
        await self._lease.acquire()
        await self._announce()
        await self._refresh_view()
        self._run_forever("membership:lease", self._keep_lease)

    def _run_forever(self, mark: str, body: Callable[[], Awaitable[None]]) -> None:
        """Run a loop that must never stop: without its lease this node is no member, and without a view it leads
        partitions of other nodes."""
        self._tasks.spawn(run_unit(mark, body, tracker=self._tracker, clock=self._clock), name=mark)

    def _on_task_failed(self, mark: str, error: BaseException) -> None:
        self._tracker.fail(mark, error_sentence(error), now_ms=self._clock.now_ms(), parked=True)

    def set_captures(self, captures: tuple[str, ...]) -> None:
        """Set the captures that this node may run.

        Other nodes see them with the next renewal of the lease, within a third of its time to live.
        """
        self._info = replace(self._info, captures=captures)
        self._lease.request = replace(self._lease.request, info=msgspec.msgpack.encode(self._info))

    async def leave_cluster(self) -> None:
        """Release the lease, so that others take over now rather than after its time to live.

        From here on this node leads nothing, and directs clients to the new leaders.
        """
        lease = self._lease.surrender_lease()
        if lease is None or self.superseded is not None:
            return
        self._left = True
        self._set_members(tuple(member for member in self._members if member.name != self.node))
        try:
            await self._consensus.release(lease.name, lease.holder, lease.term)
            await self._announce()
        except TidemillError as error:
            _log.info("lease not released; it will expire", node=self.node, cause=str(error))

    async def aclose(self) -> None:
        """Leave, and stop the tasks."""
        await self.leave_cluster()
        await self._tasks.aclose()

    @property
    def node_id(self) -> int:
        """Id of this node, once it has started; 0 before."""
        return self._ids.get(self.node, 0)

    # the view -------------------------------------------------------------------------------------
    def members(self) -> list[Member]:
        """List the live nodes by node id, including this one while it holds its lease."""
        return list(self._members)

    def late_nodes(self) -> tuple[str, ...]:
        """Return the names of other nodes whose lease is late or expired, as of the last view: dead, frozen or slow.

        Empty while an outage of consensus may have prevented renewals. Excludes nodes that released their lease.
        """
        return self._late_names

    def leader_of(self, topic_id: str, partition: int) -> str:
        key = (topic_id, partition)
        leader = self._leaders.get(key)
        if leader is None:
            leader = rendezvous_leader([member.name for member in self._members], topic_id, partition)
            self._leaders[key] = leader
        return leader

    def epoch(self) -> int:
        """Return the cluster epoch as of this node's start."""
        return self._epoch

    def lease_lapses(self) -> int:
        return self._lease.lapses()

    def request_refresh(self) -> None:
        self._wake.set()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which is called after every change of the set of members."""
        self._callbacks.append(callback)

    # announcements ---------------------------------------------------------------------------------
    async def _announce(self) -> None:
        """Announce that this node joined or leaves, so that the others refresh their views immediately.

        A node that misses it refreshes at its next poll. Raises UnavailableError.
        """
        head = await self._consensus.log_head(CHANGES_LOG)
        for _ in range(ANNOUNCE_TRIES):
            try:
                head = await self._consensus.append(CHANGES_LOG, 0, head.next, [self.node.encode()], self._rand.nonce())
                await self._consensus.truncate(CHANGES_LOG, head.next - 1)
                return
            except ConflictError as other:
                if not isinstance(other.current, LogHead):
                    raise
                head = other.current
            except UnknownOutcomeError:
                return

    async def _watch_changes(self) -> None:
        heard = (await self._consensus.log_head(CHANGES_LOG)).next
        self.request_refresh()
        while True:
            if await self._consensus.wait(CHANGES_LOG, heard, CHANGES_WAIT_S):
                heard = (await self._consensus.log_head(CHANGES_LOG)).next
                self.request_refresh()
            self._tracker.clear_failure("membership:changes")

    # lease and view --------------------------------------------------------------------------------
    async def _register(self) -> None:
        """Register a node id for this name, and begin a new cluster epoch."""
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
            except (ConflictError, UnknownOutcomeError):
                # A lost answer costs an epoch, nothing else: epochs only need to grow.
                continue
            self._ids, self._epoch = ids, version.seq + (int(base.data) if base is not None else 0)
            return

    async def _keep_lease(self) -> None:
        while not self._left:
            await asyncio.sleep(self._ttl_s / 3 * self._rand.uniform(0.8, 1.0))
            if self._left:
                return
            try:
                await self._lease.renew()
                self._tracker.clear_failure("membership:lease")
            except ConflictError as conflict:
                # A later process has this name. Two that took it from each other would serve no client.
                _log.error("another process runs under this node's name; this one stops", node=self.node)
                self._set_members(())
                self.superseded = FencedError(
                    f"another process took this node's name: node={self.node}.",
                    current=conflict.current,
                    fix="Give every node a unique name.",
                )
                self._wake.set()
                return
            except (UnavailableError, UnknownOutcomeError) as error:
                _log.warning("lease not renewed", node=self.node, cause=str(error))

    async def _keep_view(self) -> None:
        while self.superseded is None:
            self._wake.clear()
            try:
                async with asyncio.timeout(max(EAGER_POLL_GAP_S, min(self._poll_s, self._runs_out_s))):
                    await self._wake.wait()
                await asyncio.sleep(EAGER_POLL_GAP_S)
            except TimeoutError:
                pass
            try:
                await self._refresh_view()
                self._tracker.clear_failure("membership:view")
            except (UnavailableError, UnknownOutcomeError) as error:
                _log.warning("members not read", node=self.node, cause=str(error))

    async def _refresh_view(self) -> None:
        leases = await self._consensus.leases(LEASE_PREFIX)
        grace_s = self._lease.grace_after_answer_s()
        kept = {member.name for member in self._members} if grace_s else set()
        live: dict[str, bytes] = {}
        runs_out_s = [self._ttl_s, *([grace_s] if grace_s else [])]
        late: list[str] = []
        for lease in leases:
            name = lease.name.removeprefix(LEASE_PREFIX)
            if lease.holder and name != self.node and lease.ttl_ms - lease.remaining_ms > LATE_SHARE * lease.ttl_ms:
                late.append(name)
            if lease.live:
                runs_out_s.append(lease.remaining_ms / 1000)
            if lease.live or (name in kept and lease.holder):
                live[name] = lease.info
        self._runs_out_s = min(runs_out_s)
        self._late_names = () if grace_s else tuple(late)
        if self._left:
            live.pop(self.node, None)  # It may not have been released yet.
        if not live.keys() <= self._ids.keys():
            found = await self._consensus.head(NODES_REGISTER)
            if found is not None:
                self._ids = msgspec.msgpack.decode(found.data, type=dict[str, int])
        members = []
        for name, info in live.items():
            node = msgspec.msgpack.decode(info, type=NodeInfo)
            members.append(
                Member(
                    name, node.host, node.kafka_port, node.http_url, self._ids.get(name, 0), node.listeners,
                    node.captures,
                )
            )  # fmt: skip
        self._set_members(tuple(sorted(members, key=lambda member: (member.node_id, member.name))))

    def _set_members(self, members: tuple[Member, ...]) -> None:
        if members == self._members or self.superseded is not None:
            return
        self._members = members
        self._leaders.clear()
        for callback in self._callbacks:
            callback()
