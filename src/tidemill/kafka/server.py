"""The listening socket and the life of the endpoint.

    start   cache filled, codecs compiled → socket bound → accepting; a taken port is Invalid, with the key to change
    aclose  no new connections → sessions closed → tasks ended; what was reserved in `topics` ends there

A connection whose frame does not become whole in time, that takes no answers, or says nothing for long, is closed by
the sweep. A fault of a connection ends that connection; the endpoint's own loops are kept (base.tasks).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Invalid
from tidemill.base.marks import Tracker
from tidemill.base.memory import Budget as Memory
from tidemill.base.tasks import Tasks, keep, sentence
from tidemill.consensus.api import Consensus
from tidemill.kafka import handlers
from tidemill.kafka.budget import Budget
from tidemill.kafka.context import Broker, Context, Nodes
from tidemill.kafka.door import Door
from tidemill.kafka.pool import BufferPool
from tidemill.kafka.session import Session
from tidemill.kafka.settings import KafkaSettings
from tidemill.kafka.topic_cache import TopicCache
from tidemill.metastore.catalogue import Catalogue
from tidemill.topics.front import TopicLog
from tidemill.topics.group_offsets import GroupOffsets
from tidemill.topics.producer_ids import ProducerIds

log = structlog.get_logger()

_BACKLOG = 512
_SWEEP_INTERVAL_S = 5.0
_STEADY_S = 5.0
"""A loop that ran for so long after a failure works again."""


class KafkaServer:
    """One node's Kafka endpoint.

    nodes              who else is there (`topics.leadership.Membership`); None = this node alone
    name               this node, as `TopicLog.leader_of` and membership name it
    node_id            its broker id where membership does not tell one
    advertised_host    what Metadata tells clients; default `host`
    advertised_port    default the bound port
    memory             where what clients make it hold is shown
    """

    def __init__(
        self,
        *,
        topics: TopicLog,
        catalogue: Catalogue,
        consensus: Consensus,
        nodes: Nodes | None,
        clock: Clock,
        rand: Rand,
        name: str,
        node_id: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str = "",
        advertised_port: int = 0,
        settings: KafkaSettings | None = None,
        tracker: Tracker | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._topics = topics
        self._catalogue = catalogue
        self._consensus = consensus
        self._nodes = nodes
        self._clock = clock
        self._rand = rand
        self._name = name
        self._node_id = node_id
        self._host = host
        self._port = port
        self._advertised = (advertised_host or host, advertised_port)
        self._settings = settings or KafkaSettings()
        self._tracker = tracker if tracker is not None else Tracker()
        self._units = Tasks(self._unit_broke)
        self._requests = Tasks(_told_by_its_session)
        self._sessions: set[Session] = set()
        self._pool = BufferPool()
        self._budget = budget = Budget(self._settings.process_bytes_max, self._settings.answer_bytes_max)
        if memory is not None:
            memory.share("kafka requests", budget.requests_max, lambda: budget.request_bytes)
            memory.share("kafka answers", budget.answers_max, lambda: budget.answer_bytes)
        self._door = Door(self._settings)
        self._accepted = 0
        self._listener: socket.socket | None = None

    @property
    def port(self) -> int:
        """The bound port; 0 before `start`."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    @property
    def connection_count(self) -> int:
        return len(self._sessions)

    async def start(self) -> int:
        """Bind and accept; returns the bound port. Raises Invalid when the address cannot be bound."""
        cache = TopicCache(self._catalogue, self._clock)
        await asyncio.gather(cache.refresh(), asyncio.to_thread(handlers.compile_all))
        members = self._nodes.members() if self._nodes is not None else ()
        node_id = next((member.node_id for member in members if member.name == self._name), self._node_id)
        self._listener = listener = self._listen()
        context = Context(
            topics=self._topics,
            catalogue=self._catalogue,
            cache=cache,
            producer_ids=ProducerIds(self._consensus, self._rand),
            group_offsets=GroupOffsets(self._consensus, self._rand),
            nodes=self._nodes,
            clock=self._clock,
            settings=self._settings,
            own=Broker(node_id, self._name, self._advertised[0], self._advertised[1] or self.port),
        )
        self._keep("kafka:topics", partial(cache.run, self._settings.topics_refresh_s))
        self._keep("kafka:accept", partial(self._accept, listener, context))
        self._keep("kafka:sweep", self._sweep)
        log.info("kafka.listening", host=self._host, port=self.port, connections_max=self._door.connections_max)
        return self.port

    async def aclose(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        for session in list(self._sessions):
            session.close()
        await self._units.aclose()
        await self._requests.aclose()

    def _keep(self, mark: str, body: Callable[[], Awaitable[None]]) -> None:
        """Run one of the endpoint's own loops: whatever ends it is told under `mark`, and it begins anew."""

        async def steady() -> None:
            healing = asyncio.get_running_loop().call_later(_STEADY_S, self._tracker.heal, mark)
            try:
                await body()
            finally:
                healing.cancel()

        self._units.spawn(keep(mark, steady, tracker=self._tracker, clock=self._clock), name=mark)

    def _unit_broke(self, mark: str, error: BaseException) -> None:
        """Supervision itself failed: told as the unit's end, which only a restart mends."""
        self._tracker.fail(mark, sentence(error), now_ms=self._clock.now_ms(), parked=True)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind((self._host, self._port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            taken = error.errno == errno.EADDRINUSE
            what = "Kafka port is taken" if taken else "Kafka address cannot be bound"
            raise Invalid(
                f"{what}: host={self._host} port={self._port} error={error.strerror}.",
                fix="Set node.kafka to a free host:port in tidemill.toml, or stop the process that holds it.",
            ) from error
        return listener

    async def _accept(self, listener: socket.socket, context: Context) -> None:
        """Raises OSError, of which EMFILE is worth to be told; the next try comes after a pause."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except ConnectionError:
                continue  # that client is gone already
            except OSError:
                if self._listener is None:
                    return
                raise
            self._tracker.heal("kafka:accept")
            try:
                self._enter(sock, peer, context)
            except Exception as error:
                # The fault of this connection, whatever it is.
                log.error("kafka.connection_broke", peer=peer[0], error=repr(error), exc_info=error)
                sock.close()

    def _enter(self, sock: socket.socket, peer: tuple[str, int], context: Context) -> None:
        address = peer[0]
        if not self._door.enter(address, self._clock.monotonic_s()):
            sock.close()
            return

        def ended(session: Session) -> None:
            if session in self._sessions:
                self._sessions.discard(session)
                self._door.leave(address)

        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accepted += 1
            where = f"{address}:{peer[1]}"
            self._sessions.add(
                Session(sock, where, context, self._pool, self._budget, self._requests, ended, self._accepted)
            )
        except BaseException:
            self._door.leave(address)
            raise

    async def _sweep(self) -> None:
        timeouts_s = (self._settings.frame_timeout_s, self._settings.idle_timeout_s)
        while True:
            await asyncio.sleep(min(_SWEEP_INTERVAL_S, *(timeout_s / 2 for timeout_s in timeouts_s)))
            now_s = self._clock.monotonic_s()
            for session in list(self._sessions):
                reason = session.expired(now_s)
                if reason:
                    session.close(TimeoutError(reason))


def _told_by_its_session(name: str, error: BaseException) -> None:
    """A request's task: the session that began it answers its client, or ends the connection (`Session._done`)."""
