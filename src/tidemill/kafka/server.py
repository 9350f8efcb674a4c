"""The listening socket and the life of the endpoint.

    start   cache filled → socket bound → accepting; a taken port is Invalid, with the key to change
    aclose  no new connections → sessions closed → tasks ended; what was reserved in `topics` ends there

A connection that stops in the middle of a frame, or says nothing for long, is closed by the sweep.
"""

from __future__ import annotations

import asyncio
import errno
import socket

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Invalid
from tidemill.base.tasks import Tasks
from tidemill.consensus.api import Consensus
from tidemill.kafka.context import Broker, Context, Nodes
from tidemill.kafka.group_offsets import GroupOffsets
from tidemill.kafka.pool import BufferPool
from tidemill.kafka.session import Budget, Session
from tidemill.kafka.settings import KafkaSettings
from tidemill.kafka.topic_cache import TopicCache
from tidemill.metastore.catalogue import Catalogue
from tidemill.topics.front import TopicLog
from tidemill.topics.producer_ids import ProducerIds

log = structlog.get_logger()

_BACKLOG = 512
_SWEEP_INTERVAL_S = 5.0


class KafkaServer:
    """One node's Kafka endpoint.

    nodes              who else is there (`topics.leadership.Membership`); None = this node alone
    name               this node, as `TopicLog.leader_of` and membership name it
    node_id            its broker id where membership does not tell one
    advertised_host    what Metadata tells clients; default `host`
    advertised_port    default the bound port
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
        self._tasks = Tasks(self._task_failed)
        self._sessions: set[Session] = set()
        self._pool = BufferPool()
        self._budget = Budget(self._settings.process_bytes_max)
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
        await cache.refresh()
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
        self._tasks.spawn(cache.run(self._settings.topics_refresh_s), name="kafka.topics_refresh")
        self._tasks.spawn(self._accept(listener, context), name="kafka.accept")
        self._tasks.spawn(self._sweep(), name="kafka.sweep")
        log.info("kafka.listening", host=self._host, port=self.port)
        return self.port

    async def aclose(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        for session in list(self._sessions):
            session.close()
        await self._tasks.aclose()

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
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:
                if self._listener is None:
                    return
                log.warning("kafka.accept_failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            where = f"{peer[0]}:{peer[1]}"
            self._sessions.add(
                Session(sock, where, context, self._pool, self._budget, self._tasks, self._sessions.discard)
            )

    async def _sweep(self) -> None:
        timeouts_s = (self._settings.frame_timeout_s, self._settings.idle_timeout_s)
        while True:
            await asyncio.sleep(min(_SWEEP_INTERVAL_S, *(timeout_s / 2 for timeout_s in timeouts_s)))
            now_s = self._clock.monotonic_s()
            for session in list(self._sessions):
                reason = session.expired(now_s)
                if reason:
                    session.close(TimeoutError(reason))

    def _task_failed(self, name: str, error: BaseException) -> None:
        if name in ("kafka.topics_refresh", "kafka.accept", "kafka.sweep"):
            log.error("kafka.task_failed", task=name, error=repr(error), exc_info=error)
