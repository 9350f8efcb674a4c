"""Life cycle of the endpoint and its listening sockets.

    start   cache filled, codecs compiled → socket bound → accepting; InvalidError, with the key, if a port is in use
    aclose  no new connections → sessions closed → tasks ended; `topics` completes what was reserved there

The sweep closes connections whose frame is not complete in time, that read no answers, or that are idle. A fault of a
connection ends that connection; the endpoint's own loops are supervised (base.runtime.tasks).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from msgspec.structs import replace

from tidemill.base.address import Address, canonical_host
from tidemill.base.clock import Clock, Rand
from tidemill.base.runtime.memory_budget import MemoryBudget as Memory
from tidemill.base.runtime.tasks import Tasks, error_sentence, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.kafka import handlers
from tidemill.kafka.api.authorizer import RequestAuthorizer
from tidemill.kafka.api.context import Broker, Context, CoordinatorLookup, Nodes
from tidemill.kafka.fetch_sessions.implicit import ImplicitSessions
from tidemill.kafka.fetch_sessions.sessions import FetchSessions
from tidemill.kafka.groups.configs import GroupConfigCache
from tidemill.kafka.groups.coordinator import CoordinatorLimits, GroupCoordinator
from tidemill.kafka.groups.topic_patterns import TopicPatterns
from tidemill.kafka.metadata.topic_cache import TopicCache
from tidemill.kafka.net.connection_limits import ConnectionLimits
from tidemill.kafka.net.framing import BufferPool
from tidemill.kafka.net.listener_security import ConnectionRejectedError, ListenerSecurity
from tidemill.kafka.net.listeners import DEFAULT, AdvertisedListener, Listener
from tidemill.kafka.net.memory_budget import MemoryBudget
from tidemill.kafka.server.client_session import ClientSession, SharedResources
from tidemill.kafka.settings import KafkaSettings
from tidemill.kafka.transactions.completion import TransactionCompletion
from tidemill.kafka.transactions.coordinator import TransactionCoordinator, TransactionLimits
from tidemill.kafka.transactions.group_offsets import CoordinatedOffsets
from tidemill.kafka.transactions.hints import TransactionHints
from tidemill.metastore.catalogue import Catalogue
from tidemill.security.acl_cache import AclCache
from tidemill.security.audit import Audit
from tidemill.security.quotas import QuotaCache
from tidemill.security.tls import ServerCertificates
from tidemill.security.users import Users
from tidemill.topics.api import TopicLog
from tidemill.topics.produce.producer_ids import ProducerIds

log = structlog.get_logger()

_SWEEP_INTERVAL_S = 5.0
_UNAUTHENTICATED_DIVISOR = 4
"""Divisor of the connection limit: the share of connections whose clients have not authenticated yet."""
_RENEW_INTERVAL_S = 5.0
_EXPIRY_INTERVAL_S = 3600.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds of silence before the first probe, seconds between probes, number of probes."""
_STEADY_S = 5.0
"""Time after which a restarted loop counts as recovered."""


@dataclass(frozen=True, kw_only=True)
class BrokerServices:
    """Identity of the node, and the parts of it that the endpoint uses."""

    topics: TopicLog
    catalogue: Catalogue
    consensus: Consensus
    nodes: Nodes | None
    """Live nodes (`topics.membership.Membership`); None = this node alone."""
    clock: Clock
    rand: Rand
    name: str
    """Name of this node in `TopicLog.leader_of` and in the membership."""
    node_id: int = 0
    """Broker id, if the membership does not list this node."""


class KafkaServer:
    """Kafka endpoint of one node.

    listeners   the default listener first
    rulebook    access rules; None = every client may do everything
    memory      registry of memory limits, to which the endpoint adds its own
    """

    def __init__(
        self,
        services: BrokerServices,
        listeners: Sequence[Listener],
        *,
        rulebook: AclCache | None = None,
        settings: KafkaSettings | None = None,
        tracker: StatusTracker | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._topics = services.topics
        self._catalogue = catalogue = services.catalogue
        self._consensus = services.consensus
        self._nodes = services.nodes
        self._clock = clock = services.clock
        self._rand = rand = services.rand
        self._name = services.name
        self._node_id = services.node_id
        self._listeners = tuple(listeners)
        self._settings = settings or KafkaSettings()
        self._rulebook = rulebook
        self.quotas = QuotaCache(catalogue.metastore, clock)
        self.group_configs = GroupConfigCache(catalogue, self._settings.group_limits)
        self._tracker = tracker if tracker is not None else StatusTracker()
        self._units = Tasks(self._report_supervision_failure)
        self._requests = Tasks(_ignore_request_failure)
        self._sessions: set[ClientSession] = set()
        self._unknown: dict[ClientSession, None] = {}
        """Sessions that have not authenticated yet, oldest first. Authenticated ones are removed lazily."""
        budget = MemoryBudget(self._settings.process_bytes_max, self._settings.answer_bytes_max)
        self._shared = SharedResources(BufferPool(), budget, self._requests)
        self._memory = memory
        self._groups: GroupCoordinator | None = None
        if memory is not None:
            memory.register_share("kafka requests", budget.requests_max, lambda: budget.request_bytes)
            memory.register_share("kafka answers", budget.answers_max, lambda: budget.answer_bytes)
        self.fetch_sessions = sessions = FetchSessions(clock, rand, self._settings)
        if memory is not None:
            memory.register_share("kafka fetch sessions", sessions.bytes_max, lambda: sessions.used_bytes)
        self._door = ConnectionLimits(self._settings)
        self._accepted = 0
        self._bound: dict[str, socket.socket] = {}
        self._transactions: TransactionCoordinator | None = None
        self._hints: TransactionHints | None = None

    @property
    def port(self) -> int:
        """Bound port of the default listener; 0 before `start`."""
        return self.ports.get(DEFAULT, 0)

    @property
    def ports(self) -> dict[str, int]:
        """Bound ports by listener; empty before `start`."""
        return {name: int(bound.getsockname()[1]) for name, bound in self._bound.items()}

    @property
    def connection_count(self) -> int:
        return len(self._sessions)

    async def start(self, node_id: int = 0) -> int:
        """Bind the listeners, start to accept, and return the bound port.

        `node_id` is the broker id where membership does not list it yet. Raises InvalidError if an address cannot be
        bound.
        """
        cache = TopicCache(self._catalogue, self._clock)
        await asyncio.gather(cache.refresh(), asyncio.to_thread(handlers.compile_all))
        self._settings = replace(self._settings, cluster_id=(await self._catalogue.metastore.cluster()).uuid)
        members = self._nodes.members() if self._nodes is not None else ()
        node_id = next((member.node_id for member in members if member.name == self._name), node_id or self._node_id)
        gates = {id(listener.gate): listener.gate for listener in self._listeners}.values()
        certificates = [gate.tls for gate in gates if gate.tls is not None]
        for each in certificates:
            await asyncio.to_thread(each.load)
        tokens = [gate.authenticator.tokens for gate in gates if gate.authenticator is not None]
        for keys in {id(each): each for each in tokens if each is not None}.values():
            await keys.start()
        if self._rulebook is not None:
            await self._rulebook.refresh()
        await self.quotas.refresh()
        await self.group_configs.refresh()
        try:
            for listener in self._listeners:
                self._bound[listener.name] = listener.bind()
        except BaseException:
            self._unbind()
            raise
        advertised = {
            listener.name: Broker(
                node_id,
                self._name,
                listener.advertised_host or listener.host,
                listener.advertised_port or self.ports[listener.name],
            )
            for listener in self._listeners
        }
        audit = Audit(self._clock)
        context = Context(
            topics=self._topics,
            catalogue=self._catalogue,
            cache=cache,
            producer_ids=ProducerIds(self._consensus, self._rand),
            users=Users(self._catalogue.metastore, self._clock),
            access=RequestAuthorizer(self._rulebook, audit),
            quotas=self.quotas,
            group_configs=self.group_configs,
            audit=audit,
            nodes=self._nodes,
            clock=self._clock,
            settings=self._settings,
            own=advertised[DEFAULT],
            listeners=[self._advertised_listener(listener, advertised[listener.name]) for listener in self._listeners],
        )
        context.fetch_sessions, context.repeats = self.fetch_sessions, ImplicitSessions(self.fetch_sessions)
        if self._memory is not None:
            self._memory.register_share("kafka metadata", context.layouts.bytes_max, lambda: context.layouts.used_bytes)
        self._start_groups(context)
        self._supervise("kafka:topics", partial(cache.run, self._settings.topics_refresh_s))
        for listener in self._listeners:
            came_by = context.for_listener(listener.name, advertised[listener.name])
            self._supervise(_accept_stage(listener), partial(self._accept, listener, came_by))
            port, protocol = self.ports[listener.name], listener.gate.protocol
            log.info("kafka.listening", listener=listener.name, host=listener.host, port=port, security=protocol)
        self._supervise("kafka:sweep", self._sweep)
        self._supervise("kafka:quotas", self.quotas.run)
        self._supervise("kafka:group configs", self.group_configs.run)
        if self._rulebook is not None:
            self._supervise("kafka:rules", self._rulebook.run)
        if certificates:
            self._supervise("kafka:certificates", partial(self._renew_certificates, certificates))
        return self.port

    def _advertised_listener(self, listener: Listener, advertised: Broker) -> AdvertisedListener:
        bound = Address(listener.host, self.ports[listener.name])
        return AdvertisedListener(
            listener.name, str(bound), str(Address(advertised.host, advertised.port)), listener.gate.protocol
        )

    def _unbind(self) -> None:
        bound, self._bound = self._bound, {}
        for each in bound.values():
            asyncio.get_running_loop().remove_reader(each.fileno())
            each.close()

    def _start_groups(self, context: Context) -> None:
        """Create the coordinator of consumer groups, whose state is in rows of the metastore."""
        settings, metastore = self._settings, self._catalogue.metastore
        context.owners = owners = CoordinatorLookup(context)
        context.subscribable = patterns = TopicPatterns(context.cache)
        context.groups = self._groups = GroupCoordinator(
            metastore,
            owners.coordinates_group,
            self._clock,
            self._rand,
            node=self._name,
            limits=CoordinatorLimits(self.group_configs.limits, settings.section.groups_max, settings.groups_bytes_max),
            tracker=self._tracker,
        )
        if self._memory is not None:
            self._memory.register_share("kafka groups", settings.groups_bytes_max, lambda: context.groups.used_bytes)
            self._memory.register_share("kafka topic patterns", patterns.bytes_max, lambda: patterns.used_bytes)
        if self._nodes is not None:
            self._nodes.on_change(context.groups.apply_ownership)
        self.group_configs.on_change(context.groups.apply_configs)
        context.groups.apply_ownership()
        self._start_transactions(context, owners, self._groups)

    def _start_transactions(self, context: Context, owners: CoordinatorLookup, groups: GroupCoordinator) -> None:
        """Create the coordinator of transactions, whose state is in registers of consensus.

        It commits offsets through the group's coordinator.
        """
        section = self._settings.section
        limits = TransactionLimits(section.transaction_timeout_max_ms, section.transactional_id_expires_ms)
        offsets = CoordinatedOffsets(groups, lambda group: owners.group_coordinator(group).name, self._clock)
        context.transactions = self._transactions = transactions = TransactionCoordinator(
            self._consensus,
            TransactionCompletion(self._consensus, self._topics, offsets),
            context.producer_ids,
            self._clock,
            self._rand,
            coordinates=owners.coordinates_transaction,
            limits=limits,
        )
        self._hints = hints = TransactionHints(self._consensus, self._rand, self._name, transactions.check)
        transactions.completion.remind = hints.send
        self._topics.set_coordinator(transactions.confirm)
        self._supervise("kafka:transaction-hints", hints.follow)
        moved = asyncio.Event()
        if self._nodes is not None:
            self._nodes.on_change(moved.set)
        self._supervise("kafka:transactions", partial(self._run_transactions, transactions, moved))

    async def _run_transactions(self, transactions: TransactionCoordinator, moved: asyncio.Event) -> None:
        """Take over transactions at start and whenever nodes join or leave, and periodically to remove expired ids."""
        while True:
            moved.clear()
            await transactions.take_over()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXPIRY_INTERVAL_S):
                    await moved.wait()

    async def aclose(self) -> None:
        """Stop accepting, close all sessions and end all tasks. Idempotent."""
        self._unbind()
        for session in list(self._sessions):
            session.close()
        if self._transactions is not None and self._hints is not None:
            await self._transactions.aclose()
            await self._hints.aclose()
        if self._groups is not None:
            await self._groups.aclose()
        await self._units.aclose()
        await self._requests.aclose()

    def _supervise(self, mark: str, body: Callable[[], Awaitable[None]]) -> None:
        """Run one of the endpoint's own loops: its failures are reported under `mark`, and it is restarted."""

        async def steady() -> None:
            healing = asyncio.get_running_loop().call_later(_STEADY_S, self._tracker.clear_failure, mark)
            try:
                await body()
            finally:
                healing.cancel()

        self._units.spawn(run_unit(mark, steady, tracker=self._tracker, clock=self._clock), name=mark)

    def _report_supervision_failure(self, mark: str, error: BaseException) -> None:
        """Report a failure of the supervision itself, which only a restart of the node repairs."""
        self._tracker.fail(mark, error_sentence(error), now_ms=self._clock.now_ms(), parked=True)

    async def _accept(self, listener: Listener, context: Context) -> None:
        """Accept connections of one listener.

        Raises OSError, of which EMFILE deserves a report; the supervisor retries after a pause.
        """
        loop = asyncio.get_running_loop()
        bound = self._bound[listener.name]
        while True:
            try:
                sock, peer = await loop.sock_accept(bound)
            except ConnectionError:
                continue  # the client has disconnected already
            except OSError:
                if not self._bound:
                    return
                raise
            self._tracker.clear_failure(_accept_stage(listener))
            try:
                self._admit(sock, peer, context, listener.gate)
            except Exception as error:
                # Any error here is the fault of this connection only.
                log.error("kafka.connection_broke", peer=peer[0], error=repr(error), exc_info=error)
                sock.close()

    def _admit(self, sock: socket.socket, peer: tuple[str, int], context: Context, gate: ListenerSecurity) -> None:
        address = canonical_host(peer[0])
        if not self._door.admit(address, self._clock.monotonic_s()):
            sock.close()
            return

        def ended(session: ClientSession) -> None:
            if session in self._sessions:
                self._sessions.discard(session)
                self._unknown.pop(session, None)
                self._door.release(address)

        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
            self._accepted += 1
            where = f"{address}:{peer[1]}"
            session = ClientSession(sock, where, context, self._shared, ended, self._accepted, gate)
            self._sessions.add(session)
        except BaseException:
            self._door.release(address)
            raise
        if not session.visitor.known:
            self._limit_unauthenticated(session)

    def _limit_unauthenticated(self, session: ClientSession) -> None:
        """Close the oldest unauthenticated session while these exceed their share of all connections."""
        self._unknown[session] = None
        share = max(1, self._door.connections_max // _UNAUTHENTICATED_DIVISOR)
        while len(self._unknown) > share:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            if not oldest.visitor.known:
                oldest.close(
                    ConnectionRejectedError("too many connections are not authenticated, and this one is the oldest")
                )

    async def _renew_certificates(self, certificates: Sequence[ServerCertificates]) -> None:
        """Reload changed certificates.

        Raises InvalidError while the files cannot be used; the former certificates stay in use.
        """
        while True:
            for each in certificates:
                if await asyncio.to_thread(each.reload_if_changed):
                    log.info("kafka.certificates_renewed")
            self._tracker.clear_failure("kafka:certificates")
            await asyncio.sleep(_RENEW_INTERVAL_S)

    async def _sweep(self) -> None:
        settings = self._settings
        timeouts_s = (settings.frame_timeout_s, settings.idle_timeout_s, settings.authentication_timeout_s)
        while True:
            await asyncio.sleep(min(_SWEEP_INTERVAL_S, *(timeout_s / 2 for timeout_s in timeouts_s)))
            now_s = self._clock.monotonic_s()
            for session in list(self._sessions):
                reason = session.close_reason(now_s)
                if reason:
                    session.close(TimeoutError(reason))


def keep_alive(sock: socket.socket) -> None:
    """Enable keep-alive: detects a silently vanished peer within two minutes, even if it waits for an answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _accept_stage(listener: Listener) -> str:
    """Return the status name of a listener's accept loop."""
    return "kafka:accept" if listener.name == DEFAULT else f"kafka:accept:{listener.name}"


def _ignore_request_failure(name: str, error: BaseException) -> None:
    """Ignore the failure of a request's task: its session handles it (`ClientSession._request_done`)."""
