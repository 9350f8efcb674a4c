"""A broker in a thread with its own event loop, so that blocking clients run in the test's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from support.kafka.fake_topics import FakeTopicLog
from support.ports import free_port
from support.waiting import eventually
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.kafka import BrokerServices, KafkaServer, KafkaSettings
from tidemill.kafka.net.listener_security import ListenerSecurity
from tidemill.kafka.net.listeners import DEFAULT, Listener
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.objects.factory import open_objects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import ObjectStore
from tidemill.security.acl_cache import AclCache
from tidemill.security.users import Users
from tidemill.topics.api import TopicLog
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Membership, NodeInfo, SingleNodeAssignment

T = TypeVar("T")
GateOf = ListenerSecurity | Callable[[Users], ListenerSecurity] | None


def _gate(gate: GateOf, users: Users) -> ListenerSecurity:
    return (gate(users) if callable(gate) else gate) or ListenerSecurity()


def rulebook_of(broker: RealBroker | FakeBroker) -> AclCache | None:
    """One broker's, where it authorizes: `super_users` is not None."""
    if broker.super_users is None:
        return None
    return AclCache(broker.metastore, SystemClock(), broker.super_users)


class RealBroker:
    """The endpoint over the real `topics`, on the object store and consensus of two URLs.

    `restart` closes everything and opens it again from what is durable. For `memory:` the objects and the
    consensus state outlive the restart, as a bucket and a database would.
    """

    def __init__(
        self,
        objects_url: str = "memory:",
        consensus_url: str = "memory:",
        settings: KafkaSettings | None = None,
        wrap: Callable[[TopicLog], TopicLog] = lambda topics: topics,
        gate: GateOf = None,
        super_users: tuple[str, ...] | None = None,
        topic_settings: TopicSettings | None = None,
    ) -> None:
        self.super_users = super_users
        self.gate = gate
        self.topic_settings = topic_settings
        self.clock, self.rand = SystemClock(), Rand()
        self.settings = settings or KafkaSettings()
        self.portal = BlockingPortal("kafka-test")
        self._urls = (objects_url, consensus_url)
        self._wrap = wrap
        self._memory_objects: MemoryObjects | None = None
        self._memory_state = MemoryState()
        self.port = 0
        self.portal.call(self._up())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _up(self) -> None:
        objects_url, consensus_url = self._urls
        clock, rand = self.clock, self.rand
        if objects_url == "memory:":
            if self._memory_objects is None:
                self._memory_objects = MemoryObjects(clock)
            else:
                self._memory_objects = self._memory_objects.reopen()
            self.objects: ObjectStore = self._memory_objects
        else:
            self.objects = await open_objects(objects_url, clock, rand)
        if consensus_url == "memory:":
            self.consensus: Consensus = MemoryConsensus(clock, self._memory_state)
        else:
            self.consensus = await open_consensus(consensus_url, clock, rand)
        self.metastore = create_metastore(self.consensus, self.objects, clock, rand)
        self.catalogue = Catalogue(self.metastore, clock, rand)
        self.users = Users(self.metastore, clock)
        self.rulebook = rulebook_of(self)
        self.topics = LocalTopics(
            self.consensus, self.objects, self.catalogue, clock=clock, rand=rand, assignment=SingleNodeAssignment("n1",
            self._epoch()), settings=self.topic_settings, metastore=self.metastore,
        )  # fmt: skip
        await self.topics.start()
        self.server = KafkaServer(
            BrokerServices(
                topics=self._wrap(self.topics),
                catalogue=self.catalogue,
                consensus=self.consensus,
                nodes=None,
                clock=clock,
                rand=rand,
                name="n1",
                node_id=1,
            ),
            [Listener(DEFAULT, "127.0.0.1", self.port, gate=_gate(self.gate, self.users))],
            settings=self.settings,
            rulebook=self.rulebook,
        )
        self.port = await self.server.start()

    def _epoch(self) -> int:
        self._starts = getattr(self, "_starts", 0) + 1
        return self._starts

    async def _down(self) -> None:
        await self.server.aclose()
        await self.topics.aclose()
        await self.metastore.aclose()
        await self.consensus.aclose()
        await self.objects.aclose()

    def restart(self) -> None:
        self.portal.call(self._down())
        self.portal.call(self._up())

    def create_topic(self, name: str, partitions: int = 4, **more: Any) -> TopicRow:
        return self.portal.call(self.catalogue.create_topic(name, partitions, **more))

    def close(self) -> None:
        self.portal.call(self._down())
        self.portal.close()


class Node:
    """One node of a `Cluster`: membership, topics and endpoint over the shared bucket and consensus."""

    def __init__(
        self,
        name: str,
        state: MemoryState,
        objects: MemoryObjects,
        settings: KafkaSettings | None,
        listeners: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._settings = settings
        self.ports = {listener: free_port() for listener in listeners}
        self._state = state
        self._objects = objects
        self.port = free_port()

    async def start(self) -> None:
        clock, rand = SystemClock(), Rand()
        self.consensus = MemoryConsensus(clock, self._state)
        holder = f"{self.name}/{rand.nonce()[:8]}"
        self.metastore = create_metastore(self.consensus, self._objects, clock, rand, settings=NODE, holder=holder)
        self.catalogue = Catalogue(self.metastore, clock, rand)
        info = NodeInfo("127.0.0.1", self.port, "", {name: ("localhost", port) for name, port in self.ports.items()})
        self.membership = Membership(self.consensus, self.name, info, clock, rand, poll_s=0.1)
        await self.membership.start()
        self.topics = LocalTopics(
            self.consensus, self._objects, self.catalogue, clock=clock, rand=rand, assignment=self.membership
        )
        await self.topics.start()
        self.server = KafkaServer(
            BrokerServices(
                topics=self.topics,
                catalogue=self.catalogue,
                consensus=self.consensus,
                nodes=self.membership,
                clock=clock,
                rand=rand,
                name=self.name,
            ),
            [
                Listener(DEFAULT, "127.0.0.1", self.port),
                *[Listener(name, "127.0.0.1", port, "localhost") for name, port in self.ports.items()],
            ],
            settings=self._settings,
        )
        await self.server.start()

    async def stop(self) -> None:
        await self.server.aclose()
        await self.topics.aclose()
        await self.metastore.aclose()
        await self.membership.aclose()
        await self.consensus.aclose()


class Cluster:
    """Nodes that share one bucket and one consensus, all in one loop."""

    def __init__(
        self,
        *names: str,
        settings: KafkaSettings | None = None,
        listeners: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`listeners`: more of them, by node."""
        self.portal = BlockingPortal("kafka-cluster")
        state, objects = MemoryState(), MemoryObjects(SystemClock())
        self.nodes = [Node(name, state, objects, settings, (listeners or {}).get(name, ())) for name in names]
        self._running: list[Node] = []
        for node in self.nodes:
            self.portal.call(node.start())
            self._running.append(node)
        eventually(lambda: all(len(node.membership.members()) == len(names) for node in self.nodes))

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def stop(self, node: Node) -> None:
        self._running.remove(node)
        self.portal.call(node.stop())

    def start(self, node: Node) -> None:
        self.portal.call(node.start())
        self._running.append(node)

    def close(self) -> None:
        for node in list(self._running):
            self.stop(node)
        self.portal.close()


class Outages(MemoryConsensus):
    """A consensus that rejects every call as without effect while it is `down`."""

    down = False

    async def _submit(self, op: Any) -> Any:
        if self.down:
            raise UnavailableError("consensus is down.")
        return await super()._submit(op)


class FakeBroker:
    """The endpoint over `FakeTopicLog` and in-memory consensus."""

    def __init__(
        self,
        settings: KafkaSettings | None = None,
        delay_s: float = 0.0,
        gate: GateOf = None,
        super_users: tuple[str, ...] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.super_users = super_users
        self.host = host
        self.settings = settings or KafkaSettings()
        self.gate = gate
        self.tracker = StatusTracker()
        self.portal = BlockingPortal("kafka-test")
        self.topics = self.portal.call(self._make_topics(delay_s))
        self.consensus = Outages(SystemClock())
        self.metastore = create_metastore(self.consensus, MemoryObjects(SystemClock()), SystemClock(), Rand())
        self.catalogue = Catalogue(self.metastore, SystemClock(), Rand())
        self.users = Users(self.metastore, SystemClock())
        self.rulebook = rulebook_of(self)
        self.server: KafkaServer | None = None
        self.port = 0
        self.start()

    async def _make_topics(self, delay_s: float) -> FakeTopicLog:
        return FakeTopicLog(delay_s=delay_s)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the broker. After `stop` it gets the same port again."""
        self.server = KafkaServer(
            BrokerServices(
                topics=self.topics,
                catalogue=self.catalogue,
                consensus=self.consensus,
                nodes=None,
                clock=SystemClock(),
                rand=Rand(),
                name="n1",
                node_id=1,
            ),
            [Listener(DEFAULT, self.host, self.port, gate=_gate(self.gate, self.users))],
            settings=self.settings,
            rulebook=self.rulebook,
            tracker=self.tracker,
        )
        self.port = self.portal.call(self.server.start())

    def stop(self) -> None:
        if self.server is not None:
            self.portal.call(self.server.aclose())
            self.server = None

    def create_topic(self, name: str, partitions: int = 4, **more: Any) -> TopicRow:
        return self.portal.call(self.catalogue.create_topic(name, partitions, **more))

    def close(self) -> None:
        self.stop()
        self.portal.call(self.metastore.aclose())
        self.portal.close()
